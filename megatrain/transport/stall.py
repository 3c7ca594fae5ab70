"""Measures how long a lane waits, or works. On a GPU that happens on the device, so it is measured there."""

from __future__ import annotations

import threading
import time

import torch

from megatrain.base.fence import Fence
from megatrain.transport.recorder import Moment, Recorder


class StallClock:
    """A context around each wait, or piece of work, in one thread. `seconds()`, in any thread, gives the sum so far; on
    CUDA what is still ahead of the device is not in it.

    Args:
        cause: of the waits, "weights" or "drain"; or the lane that works.
    """

    def __init__(self, device: torch.device, cause: str) -> None:
        self.cause = cause
        self.recorder: Recorder | None = None
        """Is told of each wait."""
        self.behind: Fence | None = None
        """What the next wait waits for, if that is one fence."""
        self._device = device
        self._total_seconds = 0.0
        self._started = 0.0
        self._before: torch.cuda.Event | None = None
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._started = time.perf_counter()
        if self._device.type == "cuda":
            self._before = self._event()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        behind, self.behind = self.behind, None
        ended, after = time.perf_counter(), None
        if self._before is None:
            self._total_seconds += ended - self._started
        elif kind is not None:
            return  # a device that failed takes no event, and its own error is the one to be told
        else:
            after = self._event()
            self._pending.append((self._before, after))
        if self.recorder is not None:
            self.recorder.stall(self.cause, Moment(self._started, self._before), Moment(ended, after), behind)
        if len(self._pending) > 256:
            self._collect()

    def seconds(self) -> float:
        self._collect()
        return self._total_seconds

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _collect(self) -> None:
        with self._lock:
            while self._pending and self._pending[0][1].query():
                before, after = self._pending.pop(0)
                self._total_seconds += before.elapsed_time(after) / 1000
