"""Lanes at work: when each piece of a step starts and ends. Pure.

A lane does one thing at a time, in the order in which its work was handed to it; a piece starts when its lane is free
and all that it waits for is over. So less work or fewer waits never make a step longer. The lanes of `transport/` also
let work that is ready pass work that waits, which is not simulated: with it that rule would not hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

COMPUTE, H2D, D2H, CPU_LANE, UPDATE, DISK = ("compute", "h2d", "d2h", "cpu", "update", "disk")
LANES = (COMPUTE, H2D, D2H, CPU_LANE, UPDATE, DISK)
"""`cpu` updates in host memory, `update` on the device. Reads and writes of a disk share its rate: measured, both at
once were as fast as one after the other."""


class Task(NamedTuple):
    """A piece of work for a lane."""

    lane: str
    what: str
    """`forward`, `backward`, `fetch`, `drain`, `update`, ..., the first word of what a trace shows."""
    name: str
    """Of the layer or home."""
    seconds: float
    after: tuple[int, ...]
    """Indices of earlier tasks that must be over."""


class Span(NamedTuple):
    """When a task ran."""

    start: float
    end: float


class Stall(NamedTuple):
    """The compute lane waits."""

    start: float
    end: float
    cause: str
    """Kind of the work that is to blame."""
    behind: int
    """Index of the task that it waits for."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Some steps, of which the last is as all that follow."""

    tasks: Sequence[Task]
    spans: Sequence[Span]
    step_start: float
    step_end: float
    """Of the last step."""

    @property
    def step_seconds(self) -> float:
        return self.step_end - self.step_start

    def busy_seconds(self) -> dict[str, float]:
        """Lane -> seconds of the last step in which it works; lanes without work are left out."""
        busy: dict[str, float] = defaultdict(float)
        for task, span in zip(self.tasks, self.spans, strict=True):
            seconds = min(span.end, self.step_end) - max(span.start, self.step_start)
            if seconds > 0:
                busy[task.lane] += seconds
        return {lane: busy[lane] for lane in LANES if lane in busy}

    def stall_seconds(self) -> dict[str, float]:
        """What the compute lane waited for in the last step -> seconds."""
        stalls: dict[str, float] = defaultdict(float)
        for stall in self.stalls():
            seconds = min(stall.end, self.step_end) - max(stall.start, self.step_start)
            if seconds > 1e-9:
                stalls[stall.cause] += seconds
        return dict(stalls)

    def stalls(self) -> Iterator[Stall]:
        """Of the compute lane, in all steps."""
        free = 0.0
        for task, span in zip(self.tasks, self.spans, strict=True):
            if task.lane != COMPUTE:
                continue
            if span.start - free > 1e-9:
                last = max(task.after, key=lambda index: self.spans[index].end)
                yield Stall(free, span.start, self._cause(last), last)
            free = span.end

    def _cause(self, index: int) -> str:
        """A transfer that itself waited for an update, or for the disk, is not to blame: with clip="layer" a drain
        waits for the slab of an earlier one, which that one's update frees."""
        task, span = self.tasks[index], self.spans[index]
        if task.lane in (COMPUTE, DISK):
            return task.what
        for other in task.after:
            was_late = self.spans[other].end > span.start - 1e-9
            if was_late and self.tasks[other].lane not in (COMPUTE, D2H):
                return self._cause(other)
        return task.what


def run(tasks: Sequence[Task]) -> list[Span]:
    """Start and end of each task; tasks name only earlier ones in `after`."""
    free: dict[str, float] = dict.fromkeys(LANES, 0.0)
    spans: list[Span] = []
    for task in tasks:
        start = free[task.lane]
        for index in task.after:
            end = spans[index].end
            if end > start:
                start = end
        free[task.lane] = start + task.seconds
        spans.append(Span(start, start + task.seconds))
    return spans
