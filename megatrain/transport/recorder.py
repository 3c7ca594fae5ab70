"""Recorder: when each piece of the lanes' work began and ended, what it waited for, and what Python did meanwhile.

On a CUDA lane the time of a piece is that of the device: an event before it and one behind it, compared with one base
event when all is over. On other lanes it is the host's clock, and the base event ties the two together.
Rule: nothing waits for a recorder. Without one, a piece costs the look whether there is one.

What it gives up: begun in the middle of a run, it does not know pieces that were under way then.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatrain.base.fence import Fence

COMPUTE, HOST, STEPS = "compute", "host thread", "steps"

Label = tuple[str, str]
"""What a piece does, and with what: ("fetch", "model.layers.0")."""


class Moment(NamedTuple):
    host_seconds: float
    event: torch.cuda.Event | None = None


class Record:
    """A piece of work."""

    __slots__ = ("after", "begin", "end", "label", "lane", "micro_batch", "num_bytes")

    def __init__(self, lane: str, label: Label, begin: Moment, after: Sequence[Fence | Record] = ()) -> None:
        self.lane, self.label, self.begin, self.after = lane, label, begin, after
        self.end: Moment | None = None
        """None: it is under way."""
        self.micro_batch: int | None = None
        self.num_bytes = 0


class Recorder:
    """Of one model. Several threads may tell it things at once: each tells a record of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.records: list[Record] = []
        self._of_fence: dict[Fence, Record] = {}
        self._last_compute: Record | None = None
        stream = self._compute_stream()
        event = None if stream is None else self._event(stream)
        if event is not None:
            event.synchronize()
        self.base = Moment(time.perf_counter(), event)
        self._step_began = self.base
        self._num_steps = 0

    # What lanes do.

    def begin(
        self, lane: str, label: Label, stream: torch.cuda.Stream | None = None, after: Sequence[Fence] = ()
    ) -> Record:
        """A piece begins, behind what `stream` was ordered behind. after: fences of what it waited for."""
        record = Record(lane, label, self._now(stream), after)
        if lane == COMPUTE:
            self._last_compute = record
        self.records.append(record)
        return record

    def end(self, record: Record, stream: torch.cuda.Stream | None = None, fence: Fence | None = None) -> None:
        """It is over, or enqueued. fence: behind it, not recorded yet."""
        record.end = self._now(stream)
        if fence is not None:
            self._of_fence[fence] = record

    def watch(self, lane: str, label: Label, num_bytes: int, fence: Fence) -> None:
        """A piece has begun that others do: it is over when the fence is recorded."""
        record = self.begin(lane, label)
        record.num_bytes = num_bytes
        self.watch_end(record, fence, fence)

    def watch_end(self, record: Record, over: Fence, fence: Fence) -> None:
        """It is over when others record `over`. fence: behind it."""
        self._of_fence[fence] = record
        over.when_recorded(functools.partial(self.end, record))

    def behind_compute(self, fence: Fence) -> Fence:
        """The fence, which stands behind what the compute lane did so far."""
        if self._last_compute is not None and self._last_compute.end is not None:
            self._of_fence[fence] = self._last_compute
        return fence

    # What the caller does.

    def computing(self, what: str, name: str, micro_batch: int | None = None) -> Around:
        """Around what is enqueued on the compute lane."""
        return Around(self, COMPUTE, (what, name), micro_batch, self._compute_stream())

    def on_host(self, what: str, name: str, micro_batch: int | None = None) -> Around:
        """Around what Python does."""
        return Around(self, HOST, (what, name), micro_batch, None)

    def stall(self, cause: str, begin: Moment, end: Moment, behind: Fence | None) -> None:
        """The compute lane waited, for `behind` if that is known; and the caller, until it could enqueue that."""
        record = Record(COMPUTE, ("stall", cause), begin, () if behind is None else (behind,))
        waited = Record(HOST, ("wait", cause), Moment(begin.host_seconds))
        record.end, waited.end = end, Moment(end.host_seconds)
        self.records += (record, waited)

    def end_step(self) -> None:
        """All updates of a step are queued."""
        record = Record(STEPS, ("step", str(self._num_steps)), self._step_began)
        record.end = self._step_began = self._now(None)
        self.records.append(record)
        self._num_steps += 1

    # When all is over.

    def seconds(self, moment: Moment) -> float:
        """Since the recorder began. On CUDA, what was enqueued before has passed."""
        if moment.event is None or self.base.event is None:
            return moment.host_seconds - self.base.host_seconds
        return self.base.event.elapsed_time(moment.event) / 1000

    def waited_for(self, record: Record) -> list[Record]:
        """The records of what it waited for, as far as they are known."""
        found = [other if isinstance(other, Record) else self._of_fence.get(other) for other in record.after]
        return [other for other in dict.fromkeys(found) if other is not None and other is not record]

    def _now(self, stream: torch.cuda.Stream | None) -> Moment:
        return Moment(time.perf_counter(), None if stream is None else self._event(stream))

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def _compute_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None


class Around:
    """A context around a piece that the caller does. (A generator takes longer than most of what is recorded, and its
    time would count as that of the piece around it.)"""

    __slots__ = ("_begin", "_micro_batch", "_record", "_recorder", "_stream")

    def __init__(
        self, recorder: Recorder, lane: str, label: Label, micro_batch: int | None, stream: torch.cuda.Stream | None
    ) -> None:
        self._recorder, self._begin = recorder, (lane, label, stream)
        self._micro_batch, self._stream = micro_batch, stream

    def __enter__(self) -> None:
        self._record = self._recorder.begin(*self._begin)
        self._record.micro_batch = self._micro_batch

    def __exit__(self, *_: object) -> None:
        self._recorder.end(self._record, self._stream)


def on_host(
    recorder: Recorder | None, what: str, name: str, micro_batch: int | None = None
) -> contextlib.AbstractContextManager[None]:
    """Around what Python does, if anybody wants to know."""
    return _NOBODY if recorder is None else recorder.on_host(what, name, micro_batch)


def computing(recorder: Recorder | None, what: str, name: str) -> contextlib.AbstractContextManager[None]:
    """Around what is enqueued on the compute lane, if anybody wants to know."""
    return _NOBODY if recorder is None else recorder.computing(what, name)


_NOBODY = contextlib.nullcontext()
