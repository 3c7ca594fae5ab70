"""The update in PyTorch over threads, for machines without a C compiler: the kernel's results bit for bit, slower.

Rule: no result depends on the number of threads. A range has a fixed size, so the sums of a measure are added in one
order too.

What it gives up: speed, and its threads take Python's lock for every range.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

import torch

from megatrain.optim.definition import update_
from megatrain.optim.marks import Marks, undone_on_fault
from megatrain.optim.segment import Segment
from megatrain.optim.tensors import written

RANGE = 1 << 19  # parameters of one task
# Parameters that a thread works on at a time: the most for which PyTorch starts no threads of its own, with about 1 MB
# of temporaries. Both are multiples of a block of moments.
PIECE = 1 << 15


class TorchPool:
    """A pool of threads that applies the definition to segments."""

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="megatrain-update")

    def update(
        self, segments: Sequence[Segment], measure: bool = False, marks: Marks | None = None
    ) -> list[tuple[float, float]] | None:
        """One step in place, of all pieces that are not marked; returns what `Kernel.update` returns.

        An exception in a worker is raised here, once no worker is running any more.
        """
        marks = marks or Marks()
        tasks = list(_tasks([segment.numel for segment in segments]))
        futures = [self._pool.submit(_run_task, segments, task, measure, marks) for task in tasks]
        wait_or_raise(futures)
        if not measure:
            return None
        sums = [(0.0, 0.0)] * len(segments)
        for task, future in zip(tasks, futures, strict=True):
            for (index, _, _), (change, weight) in zip(task, future.result(), strict=True):
                sums[index] = (sums[index][0] + change, sums[index][1] + weight)
        return sums

    def close(self) -> None:
        """End the threads, once they have done what was asked of them."""
        self._pool.shutdown()


Task = list[tuple[int, int, int]]
"""Ranges for one worker call: (index of the segment, start, stop)."""


def _tasks(sizes: Sequence[int]) -> Iterator[Task]:
    """Cut segments of these sizes into ranges of at most RANGE, and gather small ones into tasks of about RANGE."""
    task: Task = []
    num_gathered = 0
    for index, size in enumerate(sizes):
        for start in range(0, size, RANGE):
            stop = min(start + RANGE, size)
            task.append((index, start, stop))
            num_gathered += stop - start
            if num_gathered >= RANGE:
                yield task
                task, num_gathered = [], 0
    if task:
        yield task


def _run_task(segments: Sequence[Segment], task: Task, measure: bool, marks: Marks) -> list[tuple[float, float]]:
    """Update the ranges of one task, on a worker. Returns a pair of sums for each range, or nothing."""
    with torch.no_grad():
        sums = [
            _update(segments[index].part(start, stop), measure, marks.within((index, start)))
            for index, start, stop in task
        ]
    return [pair for pair in sums if pair is not None]


def _update(part: Segment, measure: bool, marks: Marks) -> tuple[float, float] | None:
    change = weight = 0.0
    for start in range(0, part.numel, PIECE):
        sums = marks.once(start, functools.partial(update_or_undo, part.part(start, start + PIECE), measure))
        if sums is not None:
            change, weight = change + sums[0], weight + sums[1]
    return (change, weight) if measure else None


def update_or_undo(piece: Segment, measure: bool) -> tuple[float, float] | None:
    """As the definition; where it raises, the piece is as it was."""
    with undone_on_fault(written(piece)):
        return update_(piece, measure)


def wait_or_raise(futures: Sequence[Future]) -> None:
    """Wait for all. After a first failure start no more, wait for those that run, and raise it."""
    _, pending = wait(futures, return_when=FIRST_EXCEPTION)
    for future in pending:
        future.cancel()
    wait(futures)
    for future in futures:
        if not future.cancelled():
            future.result()
