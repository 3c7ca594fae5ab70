"""Lane: a queue of work with a thread of its own, and a CUDA stream where the work is for a GPU.

A lane does one piece of work at a time: the first, in the order of submission, whose fences are all recorded. So a
late fence holds back what waits for it, and nothing else.
Rule: only fences order work, in one lane as across lanes: of two pieces that must keep their order, the second names
the fence of the first. What fails in a lane is raised by whoever waits for its fence, and by `submit`; the lane does
nothing more then. Only where the update of a home failed (UpdateError), or what waits for that, the lane goes on with
the others: their homes are what they should be.

What it gives up: a piece that has begun holds the lane, unless others go on with it (`submit`). And a CUDA stream works
in order: a fence of a GPU is recorded when its work is enqueued, perhaps long before that is over, and what the lane
enqueues behind it waits with it. Fences of one stream pass in the order in which they were recorded, so those of the
compute lane hold back nothing that could have gone before; only behind an update on the device may a copy stand that
had no need to.
"""

from __future__ import annotations

import atexit
import functools
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from megatrain.base.errors import UpdateError
from megatrain.base.fence import Fence, bare
from megatrain.store.tier import OwnProcess
from megatrain.transport.recorder import Label, Record, Recorder
from megatrain.transport.stall import StallClock

_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


def _close_all() -> None:
    """A thread that is still inside PyTorch when the interpreter goes would abort the process."""
    for lane in list(_lanes):
        lane.close()


atexit.register(_close_all)


class _Piece(NamedTuple):
    """Of a lane's work."""

    fence: Fence
    after: Sequence[Fence]
    work: Callable[[], object]
    is_last: bool
    """Of those submitted so far."""
    label: Label | None
    """For a recorder; what has none is not recorded."""

    def is_ready(self, is_alone: bool) -> bool:
        """is_alone: nothing that came before is left."""
        return is_alone if self.is_last else all(fence.is_recorded for fence in self.after)


_Inbox = queue.SimpleQueue["_Piece | bool"]
"""Of a lane's thread: work; True to look again for what is ready; False to end when all is done."""


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
        self.recorder: Recorder | None = None
        """Is told of what has a label."""
        self._busy = StallClock(device, name)
        self._delay_seconds = delay_seconds
        self._random = random.Random(name)
        self._inbox: _Inbox = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._owner = OwnProcess()
        self._under_way: list[Fence] = []
        # The thread holds the lane weakly: a model that is dropped without `close` ends its lanes too.
        self._thread = threading.Thread(
            target=_work, args=(weakref.ref(self), self._inbox), name=f"megatrain-{name}", daemon=True
        )
        self._thread.start()
        _lanes.add(self)
        weakref.finalize(self, self._inbox.put, False).atexit = False

    def submit(
        self,
        work: Callable[[], object],
        *,
        after: Sequence[Fence] = (),
        fence: Fence | None = None,
        label: Label | None = None,
    ) -> Fence:
        """Queue `work` to run once all fences in `after` are passed; returns its own fence, which may be given.

        Where it returns a fence (on the CPU), others go on with it: it is over when that is recorded, and the lane is
        free at once.
        """
        return self._put(after, work, is_last=False, fence=fence, label=label)

    def submit_last(self, work: Callable[[], object], label: Label | None = None) -> Fence:
        """Queue `work` to run once all that was submitted before is over; what comes later does not wait for it."""
        return self._put((), work, is_last=True, label=label)

    def flush(self) -> None:
        """Wait until all that was submitted before is over; raise what failed."""
        self.submit_last(_do_nothing).wait()

    def _put(
        self,
        after: Sequence[Fence],
        work: Callable[[], object],
        *,
        is_last: bool,
        fence: Fence | None = None,
        label: Label | None = None,
    ) -> Fence:
        self._owner.check()  # the thread is not in a forked process
        if self._error is not None:
            raise bare(self._error)
        fence = fence or Fence()
        self._inbox.put(_Piece(fence, after, work, is_last, label))
        return fence

    def close(self) -> None:
        """End the thread when all is done."""
        self._inbox.put(False)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        # Work that is submitted from now on would never run.
        self._error = self._error or RuntimeError(f"the {self.name} lane is closed: its model cannot be used any more")

    @property
    def busy_seconds(self) -> float:
        """In which it worked so far: its thread, or where it has a CUDA stream, that (work still ahead of the device
        is not in it). Waits for fences are not work, nor what others go on with."""
        return self._busy.seconds()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    @property
    def is_under_way(self) -> bool:
        """Others go on with work that was begun here. (For the lane's thread.)"""
        self._under_way = [fence for fence in self._under_way if not fence.is_recorded]
        return bool(self._under_way)

    def run(self, piece: _Piece) -> None:
        """On the lane's thread, which waits for what of `after` is not over."""
        try:
            if self._error is not None:
                raise bare(self._error)
            for other in piece.after:
                other.order(self.stream)
            if self._delay_seconds:
                time.sleep(self._random.random() * self._delay_seconds)
            recorder, record = self._begin_record(piece)
            outcome = self._run_on_stream(piece.work)
            if recorder is not None and record is not None and not isinstance(outcome, Fence):
                recorder.end(record, self.stream, piece.fence)
        except BaseException as error:  # noqa: BLE001 - whatever it was, the waiting lane has to see it
            self._fail(piece, error)
        else:
            if isinstance(outcome, Fence):
                self._under_way.append(piece.fence)
                if recorder is not None and record is not None:
                    recorder.watch_end(record, outcome, piece.fence)
                outcome.when_recorded(functools.partial(self._end, piece, outcome))
            else:
                piece.fence.record(outcome)

    def _begin_record(self, piece: _Piece) -> tuple[Recorder | None, Record | None]:
        recorder = self.recorder
        if recorder is None or piece.label is None:
            return None, None
        return recorder, recorder.begin(self.name, piece.label, self.stream, piece.after)

    def _end(self, piece: _Piece, outcome: Fence) -> None:
        """On the thread that went on with the piece."""
        if outcome.error is None:
            piece.fence.record()
        else:
            self._fail(piece, outcome.error)
        self._inbox.put(True)

    def _fail(self, piece: _Piece, error: BaseException) -> None:
        if not isinstance(error, UpdateError):
            self._error = bare(error)
        piece.fence.fail(error)

    def _run_on_stream(self, work: Callable[[], object]) -> Fence | torch.cuda.Event | None:
        if self.stream is None:
            with self._busy:
                outcome = work()
            return outcome if isinstance(outcome, Fence) else None
        with torch.cuda.stream(self.stream):
            with self._busy:
                work()
            event = torch.cuda.Event()
            event.record(self.stream)
        return event


def _work(lane_ref: weakref.ref[Lane], inbox: _Inbox) -> None:
    torch.set_grad_enabled(False)  # of this thread: lanes move bytes
    waiting: list[_Piece] = []
    is_open = True
    while is_open or waiting:
        # In functions of their own: a thread that waits keeps neither the lane nor the buffers of its last work alive.
        if not _run_next(lane_ref, waiting):
            is_open = _receive(inbox, waiting) and is_open


def _run_next(lane_ref: weakref.ref[Lane], waiting: list[_Piece]) -> bool:
    """Whether there was anything to do."""
    lane = lane_ref()
    # After a failure nothing has to be waited for: what is to come fails too, at once.
    is_over = lane is None or lane.has_failed
    index = next(
        (
            index
            for index, piece in enumerate(waiting)
            if is_over or piece.is_ready(is_alone=index == 0 and not lane.is_under_way)
        ),
        None,
    )
    if index is None:
        return False
    piece = waiting.pop(index)
    if lane is None:
        piece.fence.fail(RuntimeError("the model of this lane is gone"))
    else:
        lane.run(piece)
    return True


def _receive(inbox: _Inbox, waiting: list[_Piece]) -> bool:
    """Wait for a word; whether the lane is still open."""
    word = inbox.get()
    if isinstance(word, bool):
        return word
    waiting.append(word)
    for fence in word.after:
        if not fence.is_recorded:
            fence.when_recorded(functools.partial(inbox.put, True))
    return True


def _do_nothing() -> None:
    """Work that is over when all before it is."""
