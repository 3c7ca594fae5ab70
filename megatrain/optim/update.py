"""Runs updates on the CPU: flat tensors, cut into ranges, over threads, by the C kernel or by the formula in PyTorch.

Rule: no result depends on the number of threads, on how the work is split, or on which path runs it. A range has a
fixed size, so the sums of a measure are added in one order too.

What it gives up: it checks dtypes and sizes, not whether two segments overlap; those of one run must not.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.base.errors import UserError
from megatrain.optim.formula import AdamWScalars, adamw_
from megatrain.optim.kernel import Kernel, load_kernel
from megatrain.store import masters

# Parameters of one task: about 2 ms of a thread where 16 threads share the memory, so that Python's share is small.
RANGE = 1 << 19
# Parameters that the PyTorch path works on at a time: the most for which PyTorch starts no threads of its own, with
# about 1 MB of temporaries.
PIECE = 1 << 15


@dataclass(frozen=True)
class Segment:
    """Parameters that are updated with the same scalars. All tensors: (n,), contiguous, on the CPU."""

    weights: Tensor
    """fp32 masters, or the bf16 upper halves of split masters."""
    low: Tensor | None
    """int16 lower halves of split masters; None with fp32 masters."""
    grad: Tensor
    """fp32 or bf16, before clipping. Left as it is."""
    m: Tensor
    """fp32 first moments."""
    v: Tensor
    """fp32 second moments."""
    scalars: AdamWScalars

    def __post_init__(self) -> None:
        split = self.low is not None
        _check("weights", self.weights, (torch.bfloat16,) if split else (torch.float32,), self.grad)
        _check("grad", self.grad, (torch.float32, torch.bfloat16), self.grad)
        _check("m", self.m, (torch.float32,), self.grad)
        _check("v", self.v, (torch.float32,), self.grad)
        if self.low is not None:
            _check("low", self.low, (torch.int16,), self.grad)

    def part(self, start: int, stop: int) -> Segment:
        """The parameters [start, stop), as views."""
        low = None if self.low is None else self.low[start:stop]
        rest = (tensor[start:stop] for tensor in (self.grad, self.m, self.v))
        return Segment(self.weights[start:stop], low, *rest, self.scalars)


@dataclass(frozen=True)
class Measure:
    """How far an update moved the weights of one segment."""

    change_squares: float
    """Sum of (new weight - old weight)^2."""
    weight_squares: float
    """Sum of (old weight)^2."""

    @property
    def ratio(self) -> float:
        """|change| / |weights|; infinite when weights that were all zero moved."""
        if self.weight_squares == 0.0:
            return math.inf if self.change_squares > 0.0 else 0.0
        return math.sqrt(self.change_squares / self.weight_squares)


class CpuUpdater:
    """A pool of threads that applies AdamW to segments. `run` may be called from several threads at once."""

    def __init__(self, num_threads: int | None = None, kernel: str = "auto") -> None:
        """num_threads: None for all cores that this process may use. kernel: "auto" (the C kernel, or PyTorch where
        there is none), "torch", or a variant of the C kernel ("baseline", "avx2", "avx512").

        Raises UserError when num_threads < 1 or the named variant cannot run here.
        """
        if num_threads is not None and num_threads < 1:
            raise UserError(f"num_threads must be 1 or more, got {num_threads}; leave it out to use every core")
        self.num_threads = num_threads or _num_usable_cores()
        self._kernel = _find_kernel(kernel)
        self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="megatrain-update")

    @property
    def path(self) -> str:
        """What runs the updates: a variant of the kernel, or "torch"."""
        return "torch" if self._kernel is None else self._kernel.variant

    def run(self, segments: Sequence[Segment], measure: bool = False) -> list[Measure | None]:
        """Update every segment and return when all are done: for each its Measure, or None without `measure`.

        An exception in a worker is raised here, once no worker is running any more.
        """
        tasks = list(_tasks([segment.grad.numel() for segment in segments]))
        futures = [self._pool.submit(self._run_task, segments, task, measure) for task in tasks]
        _wait_or_raise(futures)
        if not measure:
            return [None] * len(segments)
        sums = [(0.0, 0.0)] * len(segments)
        for task, future in zip(tasks, futures, strict=True):
            for (index, _, _), (change, weight) in zip(task, future.result(), strict=True):
                sums[index] = (sums[index][0] + change, sums[index][1] + weight)
        return [Measure(*pair) for pair in sums]

    def close(self) -> None:
        """End the threads. `run` raises RuntimeError from now on."""
        self._pool.shutdown()

    def __enter__(self) -> CpuUpdater:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_task(self, segments: Sequence[Segment], task: Task, measure: bool) -> list[tuple[float, float]]:
        """Update the ranges of one task, on a worker. Returns a pair of sums for each range, or nothing."""
        sums = []
        with torch.no_grad():
            for index, start, stop in task:
                pair = self._update(segments[index].part(start, stop), measure)
                if pair is not None:
                    sums.append(pair)
        return sums

    def _update(self, part: Segment, measure: bool) -> tuple[float, float] | None:
        if self._kernel is None:
            return _update_in_torch(part, measure)
        return self._kernel.adamw(part.weights, part.low, part.grad, part.m, part.v, part.scalars, measure)


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


def _update_in_torch(part: Segment, measure: bool) -> tuple[float, float] | None:
    """`Kernel.adamw` in plain PyTorch: pieces of a split master are joined, updated by the formula and split again."""
    change = weight = 0.0
    for start in range(0, part.grad.numel(), PIECE):
        piece = part.part(start, start + PIECE)
        w = piece.weights if piece.low is None else masters.join(piece.weights, piece.low)
        old = w.clone() if measure else None
        adamw_(w, piece.grad.float(), piece.m, piece.v, piece.scalars)
        if piece.low is not None:
            masters.split_(w, piece.weights, piece.low)
        if old is not None:
            change += (w - old).double().square_().sum().item()
            weight += old.double().square_().sum().item()
    return (change, weight) if measure else None


def _wait_or_raise(futures: Sequence[Future]) -> None:
    """Wait for all. After a first failure start no more, wait for those that run, and raise it."""
    _, pending = wait(futures, return_when=FIRST_EXCEPTION)
    for future in pending:
        future.cancel()
    wait(futures)
    for future in futures:
        if not future.cancelled():
            future.result()


def _find_kernel(name: str) -> Kernel | None:
    """The kernel for CpuUpdater's argument; None stands for PyTorch."""
    if name == "torch":
        return None
    try:
        kernel = load_kernel(None if name == "auto" else name)
    except ValueError as error:
        raise UserError(str(error)) from error
    if kernel is None and name != "auto":
        raise UserError(f'CPU kernel {name!r} was asked for but cannot be compiled here; install gcc, or use "auto"')
    return kernel


def _num_usable_cores() -> int:
    """Cores that this process may run on. (Not OMP_NUM_THREADS: launchers set it to 1.)"""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], like: Tensor) -> None:
    """Raise ValueError unless the tensor is what a Segment says."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"Segment.{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.device.type != "cpu" or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"Segment.{name} must be a flat contiguous CPU tensor, got {tuple(tensor.shape)} on {tensor.device}"
        )
    if tensor.numel() != like.numel():
        raise ValueError(f"Segment.{name} has {tensor.numel()} elements, grad has {like.numel()}")
