"""How long something takes: warm-up, then the median, within a budget of seconds. And how much each probe works on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from megatrain.base.units import GIB, MIB

MAX_ROUNDS = 50


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Of one run. Work that is larger than a cache, and long against what starting it costs."""

    seconds: float
    """For each rate. One that needs longer for a single round takes that."""
    link_bytes: int
    ram_bytes: int
    num_parameters: int
    matmul_size: int
    """Rows of square matrices on a GPU, at most."""
    cpu_matmul_size: int
    """On the CPU, at most."""
    attention_tokens: tuple[tuple[int, int], ...]
    """(rows, length) of attention on a GPU."""
    cpu_attention_tokens: tuple[tuple[int, int], ...]
    disk_seconds: float
    """For all folders together."""
    disk_bytes: int
    """File in each offload folder, at most."""
    disk_blocks: tuple[tuple[int, int], ...]
    """(bytes of a block, threads), each tried in turn, the best one counts."""
    has_gds: bool
    """Try GPUDirect storage, which needs a process of its own."""


FULL = Effort(
    seconds=1.0,
    link_bytes=512 * MIB,
    ram_bytes=GIB,
    num_parameters=64_000_000,
    matmul_size=8192,
    cpu_matmul_size=2048,
    attention_tokens=((16, 1024), (1, 8192)),
    cpu_attention_tokens=((1, 512),),
    disk_seconds=9.0,
    disk_bytes=4 * GIB,
    disk_blocks=((MIB, 8), (4 * MIB, 8), (8 * MIB, 8)),
    has_gds=True,
)
QUICK = Effort(
    seconds=0.2,
    link_bytes=128 * MIB,
    ram_bytes=256 * MIB,
    num_parameters=8_000_000,
    matmul_size=4096,
    cpu_matmul_size=512,
    attention_tokens=((16, 1024), (1, 8192)),
    cpu_attention_tokens=((1, 128),),
    disk_seconds=1.5,
    disk_bytes=512 * MIB,
    disk_blocks=((4 * MIB, 8),),
    has_gds=False,
)


def median_seconds(work: Callable[[], object], seconds: float) -> float:
    """Of one call, out of at least one and at most MAX_ROUNDS within about `seconds`; one call before warms up."""
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or (len(times) < MAX_ROUNDS and time.perf_counter() < end):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
