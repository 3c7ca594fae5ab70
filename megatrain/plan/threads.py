"""How the cores of the host are divided, so that the update on the CPU starves nobody: neither the thread that launches
kernels, nor copies, the disk, or processes that load data. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FEW_CORES = 8
"""On fewer, a core less costs the update more than taking turns costs the others, which mostly wait; not so processes
that load data."""


@dataclass(frozen=True, kw_only=True)
class Threads:
    """Cores by what they are for."""

    num_cores: int
    update: int
    """Threads of one update on the CPU."""
    disk: int
    """For what reads, writes and sums blocks of the disk. It mostly waits."""
    loading: int
    """Processes that load data."""

    def describe(self) -> str:
        if self.update == self.num_cores:
            cores = f"all {self.num_cores} cores" if self.num_cores > 1 else "the core"
            return f"the update on the CPU has {cores}, and takes turns with what else runs"
        others = ["the calling thread", "copies"] if self.num_cores >= FEW_CORES else []
        others += ["the disk"] if self.disk and self.num_cores >= FEW_CORES else []
        if self.loading:
            others.append("a process that loads data" if self.loading == 1 else f"{self.loading} that load data")
        return f"{self.update} of {self.num_cores} cores for the update on the CPU, the others for {', '.join(others)}"


def divide_cores(num_cores: int, *, has_disk: bool = False, num_loading: int = 0) -> Threads:
    """
    Args:
        num_cores: that the process can use.
        has_disk: parts of homes live there.
        num_loading: processes that load data (`dataloader_num_workers`).

    The update keeps half of the cores in any case.
    """
    disk = int(has_disk)
    others = num_loading + (2 + disk if num_cores >= FEW_CORES else 0)
    update = max(math.ceil(num_cores / 2), num_cores - others)
    return Threads(num_cores=num_cores, update=update, disk=disk, loading=num_loading)
