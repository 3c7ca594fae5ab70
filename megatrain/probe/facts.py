"""What is known of a machine: what it says of itself, and the rates that were measured.

Rule: plain values. What judges them (`judge.py`) reads no file and no clock, so it is tested with made-up facts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatrain.base.cgroup import CgroupMemory, whole_cores

BYTES_PER_SECOND = "bytes/s"
FLOPS_PER_SECOND = "flop/s"
NS_PER_PARAMETER = "ns/parameter"


@dataclass(frozen=True, kw_only=True)
class Rate:
    """One measured figure."""

    key: str
    """Stable, for programs: "h2d", "update.8bit"."""
    label: str
    """For people."""
    unit: str
    value: float | None
    """None where it could not be measured; `note` says why."""
    note: str = ""


def attempt(key: str, label: str, unit: str, measure: Callable[[], float], note: str = "") -> Rate:
    """The rate that `measure` returns, or the row that says why there is none: one probe must not end the others."""
    try:
        return Rate(key=key, label=label, unit=unit, value=measure(), note=note)
    except Exception as error:
        return Rate(key=key, label=label, unit=unit, value=None, note=first_line(error))


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    """Cores and memory next to each other."""

    number: int
    ram_bytes: int
    cores: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """The host, as Linux tells it. Elsewhere most of it is unknown: None or empty."""

    cpu_name: str
    has_avx2: bool
    kernel_release: str
    num_cores_present: int
    usable_cores: frozenset[int]
    """On which the process may run."""
    cpu_quota_cores: float | None
    """Processor time that the control group allows, in cores. None: no limit."""
    load_average: float
    """Processes that wanted a core, over the minute before."""
    ram_bytes: int
    available_bytes: int
    swap_bytes: int
    swap_used_bytes: int
    cgroup: CgroupMemory | None
    """None: no limit."""
    locked_limit_bytes: int | None
    """`ulimit -l`. None: no limit."""
    numa_nodes: tuple[NumaNode, ...]
    usable_nodes: frozenset[int]
    """NUMA nodes whose memory the process may use."""
    huge_pages: str
    """Setting for private memory: "always", "madvise", "never"; empty where unknown."""
    shared_huge_pages: str
    """Setting for shared memory, which homes are: "never" on most systems."""
    virtualisation: str
    """What the machine seems to run in: "KVM", "container in a virtual machine"; empty for none that is seen."""

    @property
    def is_wsl(self) -> bool:
        return "microsoft" in self.kernel_release.lower()

    @property
    def num_cores(self) -> int:
        """Cores' worth of processor time that this process can use."""
        return whole_cores(len(self.usable_cores), self.cpu_quota_cores)

    @property
    def usable_ram_bytes(self) -> int:
        """Of the machine, or of the control group if that is less."""
        return self.ram_bytes if self.cgroup is None else min(self.ram_bytes, self.cgroup.limit_bytes)


@dataclass(frozen=True, kw_only=True)
class SoftwareFacts:
    """Versions, and what the update runs on."""

    torch_version: str
    cuda_version: str | None
    """That PyTorch was built for; None for a CPU build."""
    driver_version: str | None
    """Of NVIDIA's driver; None where none is seen."""
    cpu_capability: str
    """What PyTorch uses of the processor: "AVX512", "AVX2", "DEFAULT"."""
    update_kernel: str
    """A variant of the C kernel, or "torch"."""
    compilers: tuple[str, ...]
    num_torch_threads: int
    """With which PyTorch computes on the host."""
    has_gds: bool
    """PyTorch has GPUDirect storage (`torch.cuda.gds`). Whether it works is another matter."""


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """The compute device. What needs nvidia-ml-py is None without it."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    """Before anything was measured, with this process's own context."""
    num_other_processes: int | None = None
    pcie_generation: int | None = None
    """Of the link while it was at work: an idle one saves power."""
    pcie_width: int | None = None
    max_pcie_generation: int | None = None
    max_pcie_width: int | None = None
    numa_node: int | None = None


@dataclass(frozen=True, kw_only=True)
class FolderFacts:
    """One offload folder."""

    path: str
    file_system: str
    """Type, as Linux names it: "ext4", "tmpfs"; empty where unknown."""
    free_bytes: int
    disk: int
    """Number of its device: folders with the same one share its speed."""
    is_direct: bool | None = None
    """O_DIRECT was taken. None where nothing was measured."""
    error: str = ""
    """Why it cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All of it."""

    host: HostFacts
    software: SoftwareFacts
    gpu: GpuFacts | None
    no_gpu_reason: str = ""
    can_page_lock: bool | None = None
    """None without a GPU."""
    folders: tuple[FolderFacts, ...] = ()
    rates: tuple[Rate, ...] = ()

    def rate(self, key: str) -> float | None:
        """What was measured under that key; None where nothing was."""
        return next((rate.value for rate in self.rates if rate.key == key), None)
