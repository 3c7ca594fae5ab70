"""Fence: what one lane records and another waits for. Nothing else synchronises.

A fence is recorded once. On a CUDA lane it carries the event of the enqueued work, so another stream waits for it
without the host; on a host lane the work is over when the fence is recorded. A lane that fails records its exception:
whoever waits gets it, so a dead worker ends the run with its own error. A fence that failed may be opened again, for
work that is done again.
Whoever must not wait is told instead: `when_recorded`.
Rule: recording never blocks, whatever became of those who wait. threading.Event is not enough: an interrupt (Ctrl-C) in
the middle of its `wait` can leave its inner lock held, and the lane that sets it hangs.
"""

from __future__ import annotations

import copy
import threading
import traceback
from collections.abc import Callable

import torch

from megatrain.base.errors import CorruptionError, DiskError, RefusedError, UserError

GATE_SECONDS = 0.5


def bare(error: BaseException) -> BaseException:
    """A copy of `error` that holds no frames, to keep in one thread and to raise in another.

    An error that is kept and raised again collects the frames that it passes, and with them model and tensors of a run
    that is long over. What no message of ours explains tells in a note where it came from (Python 3.11 and later).
    """
    try:
        other = copy.copy(error)
    except Exception:  # whatever the constructor of somebody's exception needs
        other = RuntimeError(f"{type(error).__name__}: {error}")
    other.__traceback__ = other.__context__ = other.__cause__ = None
    if not isinstance(error, UserError | DiskError | RefusedError | CorruptionError) and hasattr(other, "add_note"):
        if error.__traceback__ is not None and not getattr(error, "__notes__", None):
            other.add_note("in another thread:\n" + "".join(traceback.format_exception(error)).rstrip())
    return other


class Fence:
    """One-shot. `record` or `fail` exactly once (anew after `reopen`); wait as often as needed."""

    __slots__ = ("_error", "_event", "_gate", "_is_recorded", "_listeners")

    def __init__(self) -> None:
        self._is_recorded = False
        self._gate = threading.Lock()
        self._gate.acquire()  # whoever waits stands before it until the fence is recorded
        self._event: torch.cuda.Event | None = None
        self._error: BaseException | None = None
        self._listeners: list[Callable[[], None]] = []

    @classmethod
    def done(cls) -> Fence:
        """A fence that was passed long ago."""
        fence = cls()
        fence.record()
        return fence

    @classmethod
    def on_current_stream(cls, device: torch.device) -> Fence:
        """A fence behind everything enqueued so far on the caller's stream of `device` (or on the host)."""
        return cls.on_stream(torch.cuda.current_stream(device) if device.type == "cuda" else None)

    @classmethod
    def on_stream(cls, stream: torch.cuda.Stream | None) -> Fence:
        """A fence behind everything enqueued so far on `stream`; without one, on the host."""
        fence = cls()
        event = None
        if stream is not None:
            event = torch.cuda.Event()
            event.record(stream)
        fence.record(event)
        return fence

    def record(self, event: torch.cuda.Event | None = None) -> None:
        self._open(event, None)

    def fail(self, error: BaseException) -> None:
        self._open(None, error)

    def _open(self, event: torch.cuda.Event | None, error: BaseException | None) -> None:
        assert not self._is_recorded, "a fence is recorded once"
        self._event, self._error = event, None if error is None else bare(error)
        self._is_recorded = True
        self._gate.release()
        self._tell()

    def reopen(self) -> None:
        """Of a fence that failed: its work is about to be done again, and whoever waits from now on waits for that."""
        assert self._error is not None, "only what failed is done again"
        gate = threading.Lock()
        gate.acquire()
        self._gate = gate
        self._is_recorded = False
        self._error = None

    @property
    def is_recorded(self) -> bool:
        return self._is_recorded

    @property
    def is_over(self) -> bool:
        """The work behind the fence has ended, or failed. Does not wait."""
        return self._is_recorded and (self._event is None or self._event.query())

    @property
    def error(self) -> BaseException | None:
        """Of a fence that is recorded: why it failed."""
        return self._error

    def when_recorded(self, call: Callable[[], None]) -> None:
        """Call it once, in the thread that records the fence (or fails it); now, if that is over. It must neither block
        nor raise."""
        self._listeners.append(call)
        if self._is_recorded:
            self._tell()

    def _tell(self) -> None:
        # Two threads may be here at once. Taking one out of a list is a single step, so each is called by one of them.
        while self._listeners:
            try:
                call = self._listeners.pop()
            except IndexError:
                return
            call()

    def wait(self) -> None:
        """Block the host until the work behind the fence is over; raise the lane's error if it failed."""
        self._wait_recorded()
        if self._event is not None:
            self._event.synchronize()

    def order(self, stream: torch.cuda.Stream | None) -> None:
        """Let work enqueued on `stream` from now on run after the fence. Without a stream the host waits."""
        self._wait_recorded()
        if self._event is None:
            return
        if stream is None:
            self._event.synchronize()
        else:
            stream.wait_event(self._event)

    def _wait_recorded(self) -> None:
        # One at a time goes through the gate; the timeout is for those behind one that an interrupt caught in it.
        while True:
            gate = self._gate
            while not self._is_recorded:
                if gate.acquire(timeout=GATE_SECONDS):
                    gate.release()
                    gate = self._gate
            error = self._error
            if error is not None:
                raise bare(error)
            if self._is_recorded:  # else it was opened again in between
                return
