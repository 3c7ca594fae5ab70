"""Runs updates on the CPU: lists of segments, over threads, by the C kernel or by the formula in PyTorch.

Rule: no result depends on the number of threads, on how the work is split, or on which path runs it. (A measure may
differ between kernel and PyTorch in its last bits: sums in another order.)

What it gives up: a run cannot be stopped half way. One that raised can be finished with its marks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.base.cgroup import usable_cores
from megatrain.base.errors import UserError
from megatrain.optim.kernel import Kernel, load_kernel
from megatrain.optim.marks import Marks
from megatrain.optim.segment import Segment
from megatrain.optim.torch_update import TorchPool
from megatrain.plan.threads import divide_cores


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
    """Applies update rules to segments on several threads. `run` may be called from several threads at once.

    With the C kernel a run is one foreign call: its threads live in C and hold no lock of Python's, so the thread that
    launches GPU kernels runs on undisturbed.
    """

    def __init__(self, num_threads: int | None = None, kernel: str = "auto") -> None:
        """num_threads: of one run; None: what `plan/threads.py` gives it without disk and data loading. (Not
        OMP_NUM_THREADS: launchers set it to 1.) kernel: "auto" (the C kernel, or PyTorch where there is none), "torch",
        or a variant of the C kernel ("baseline", "avx2", "avx512").

        Raises UserError when num_threads < 1 or the named variant cannot run here.
        """
        is_count = isinstance(num_threads, int) and not isinstance(num_threads, bool) and num_threads >= 1
        if num_threads is not None and not is_count:
            raise UserError(
                f"num_threads must be a whole number of 1 or more, got {num_threads!r}; leave it out for a good number"
            )
        self.num_threads = num_threads or divide_cores(usable_cores()).update
        self._kernel = _find_kernel(kernel)
        self._pool: TorchPool | None = None
        self._closed = False

    @property
    def path(self) -> str:
        """What runs the updates: a variant of the kernel, or "torch"."""
        return "torch" if self._kernel is None else self._kernel.variant

    def run(
        self,
        segments: Sequence[Segment],
        measure: bool = False,
        num_threads: int | None = None,
        marks: Marks | None = None,
    ) -> list[Measure | None]:
        """Update every segment and return when all are done: for each its Measure, or None without `measure`.

        num_threads: for this run alone. marks: of a run that raised, to finish it.

        Raises MemoryError when there is no memory to organise the work; where `is_atomic`, nothing was updated then.
        """
        if self._closed:
            raise RuntimeError("this CpuUpdater is closed: make another one")
        marks = marks or Marks()
        kernel = self._kernel
        if kernel is not None and self.is_atomic(segments):
            sums = marks.once("kernel", lambda: kernel.update(segments, num_threads or self.num_threads, measure))
        else:
            sums = self._torch_pool().update(segments, measure, marks)
        return [None] * len(segments) if sums is None else [Measure(*pair) for pair in sums]

    def is_atomic(self, segments: Sequence[Segment]) -> bool:
        """A run of them does all or nothing: the kernel allocates before it begins, and cannot fail afterwards."""
        return self._kernel is not None and all(map(self._kernel.knows, segments))

    def _torch_pool(self) -> TorchPool:
        if self._pool is None:
            self._pool = TorchPool(self.num_threads)
        return self._pool

    def close(self) -> None:
        """Refuse further runs: `run` raises RuntimeError from now on."""
        self._closed = True
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> CpuUpdater:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
