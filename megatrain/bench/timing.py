"""How steps are timed, the same in every row: warm-up until they settle, then steps end to end.

Rule: nothing waits for the device between two timed steps but the step itself, which ends when its loss is on the host.
What a step leaves running then (the update of its last layers) goes on under the next step, and is timed there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatrain.bench.work import Tell

WARMING_UP = "warming up"
"""The phase."""
LEAST_WARM_UP, MOST_WARM_UP = 2, 10
SETTLED = 0.05
"""Two steps that differ by less have settled."""


@dataclass(kw_only=True)
class Timing:
    """Of one row."""

    warm_up_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Of every step, the warm-up's first."""
    has_settled: bool = False

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.step_seconds)

    def data(self) -> dict[str, Any]:
        return {
            "warm_up_seconds": self.warm_up_seconds,
            "step_seconds": self.step_seconds,
            "median_seconds": self.median_seconds,
            "has_settled": self.has_settled,
            "losses": self.losses,
        }


def warm_up(step: Callable[[], float], device: torch.device, tell: Tell, least: int = LEAST_WARM_UP) -> Timing:
    """Steps until two in a row take the same time, `least` at least. Peaks of device memory count from here on.

    step: makes one and returns its loss when that is known.
    """
    tell({"phase": WARMING_UP})
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    timing, seconds = Timing(), []
    while not timing.has_settled and len(seconds) < max(least, MOST_WARM_UP):
        _time_step(step, timing, seconds, tell)
        last = sorted(seconds[-2:])
        timing.has_settled = len(seconds) >= max(2, least) and last[1] - last[0] <= SETTLED * last[0]
    timing.warm_up_seconds = seconds
    return timing


def measure(step: Callable[[], float], timing: Timing, num_steps: int, tell: Tell) -> None:
    """As many steps behind the warm-up, end to end."""
    tell({"phase": "measuring"})
    started = time.perf_counter()
    for _ in range(num_steps):
        started = _time_step(step, timing, timing.step_seconds, tell, started)


def _time_step(
    step: Callable[[], float], timing: Timing, seconds: list[float], tell: Tell, started: float | None = None
) -> float:
    """started: the end of the step before. Returns the end of this one."""
    started = time.perf_counter() if started is None else started
    timing.losses.append(step())
    ended = time.perf_counter()
    seconds.append(ended - started)
    tell({"step": len(seconds), "seconds": seconds[-1]})
    return ended


def peak_device_bytes(device: torch.device) -> int:
    """What PyTorch's allocator reserved at most since the warm-up began; without the CUDA context. 0 on the CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


def peak_host_bytes() -> int:
    """The most that this process has had resident: page-locked memory too."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not tell the peak of a process's memory (VmHWM)")
