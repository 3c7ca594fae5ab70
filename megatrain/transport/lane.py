"""Lane: an ordered queue of work with a thread of its own, and a CUDA stream where the work is for a GPU.

Rule: work of one lane runs in the order of submission; across lanes only fences order it. A lane never touches another
lane's buffers without a fence. What fails in a lane is raised by whoever waits for its fence, and by `submit`.
"""

from __future__ import annotations

import atexit
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch

from megatrain.base.fence import Fence

_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


def _close_all() -> None:
    """A thread that is still inside PyTorch when the interpreter goes would abort the process."""
    for lane in list(_lanes):
        lane.close()


atexit.register(_close_all)


class Lane:
    """
    Args:
        name: `h2d`, `d2h`, `cpu`: for messages and statistics.
        device: the compute device; a CUDA device gives the lane a stream of its own.
        delay_seconds: upper bound of a random pause before each piece of work (tests provoke races with it).
    """

    def __init__(self, name: str, device: torch.device, *, delay_seconds: float = 0.0) -> None:
        self.name = name
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.busy_seconds = 0.0
        self._delay_seconds = delay_seconds
        self._random = random.Random(name)
        self._queue: queue.SimpleQueue[tuple[Fence, Sequence[Fence], Callable[[], None]] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        # The thread holds the lane weakly: a model that is dropped without `close` ends its lanes too.
        self._thread = threading.Thread(
            target=_work, args=(weakref.ref(self), self._queue), name=f"megatrain-{name}", daemon=True
        )
        self._thread.start()
        _lanes.add(self)
        weakref.finalize(self, self._queue.put, None).atexit = False

    def submit(self, work: Callable[[], None], *, after: Sequence[Fence] = ()) -> Fence:
        """Queue `work` to run once all fences in `after` are passed; returns its own fence."""
        if self._error is not None:
            raise self._error
        fence = Fence()
        self._queue.put((fence, after, work))
        return fence

    def close(self) -> None:
        """End the thread when the queue is empty."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        # Work that is submitted from now on would never run.
        self._error = self._error or RuntimeError(f"the {self.name} lane is closed: its model cannot be used any more")

    def _run(self, fence: Fence, after: Sequence[Fence], work: Callable[[], None]) -> None:
        try:
            if self._error is not None:
                raise self._error
            for other in after:
                other.order(self.stream)
            if self._delay_seconds:
                time.sleep(self._random.random() * self._delay_seconds)
            started = time.perf_counter()
            event = self._run_on_stream(work)
            self.busy_seconds += time.perf_counter() - started
        except BaseException as error:  # noqa: BLE001 - whatever it was, the waiting lane has to see it
            self._error = error
            fence.fail(error)
        else:
            fence.record(event)

    def _run_on_stream(self, work: Callable[[], None]) -> torch.cuda.Event | None:
        if self.stream is None:
            work()
            return None
        with torch.cuda.stream(self.stream):
            work()
            event = torch.cuda.Event()
            event.record(self.stream)
        return event


def _work(lane_ref: weakref.ref[Lane], work_queue: queue.SimpleQueue) -> None:
    torch.set_grad_enabled(False)  # of this thread: lanes move bytes
    while (item := work_queue.get()) is not None:
        lane = lane_ref()
        if lane is None:
            item[0].fail(RuntimeError("the model of this lane is gone"))
            continue
        lane._run(*item)
        # Keep neither the lane nor the buffers of the last work alive while waiting.
        del item, lane
