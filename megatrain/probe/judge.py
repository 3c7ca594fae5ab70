"""What is slow on a machine, why, and what to do about it. Pure: facts in, findings out.

Rule: a finding says what was seen, why it matters, and a remedy that a user can carry out. A share below which a rate
is called slow stands with its reason at the head of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megatrain.base.units import GB, format_bytes, format_number
from megatrain.probe.facts import Facts, FolderFacts

LANE_BYTES_PER_SECOND = {1: 0.25 * GB, 2: 0.5 * GB, 3: 0.985 * GB, 4: 1.969 * GB, 5: 3.938 * GB, 6: 7.563 * GB}
"""Of one PCIe lane, one way, by generation; packet headers leave 80-90 % of it."""
SLOW_LINK_SHARE = 0.6
"""A link below this share of its lanes is held back by something."""
SLOW_LINK_BYTES_PER_SECOND = 10 * GB
"""Where the lanes are not known: less than 16 lanes of generation 3 carry."""
DUPLEX_SHARE = 1.3
"""Both ways at once over the faster way alone; a free link comes near 2."""
SLOW_DISK_BYTES_PER_SECOND = 1 * GB
"""Less than any NVMe disk; homes on it are waited for."""
USED_SHARE = 0.1
"""Of the GPU's memory, in use by others (or lost) before this program starts."""
BUSY_SHARE = 0.25
"""Of the cores, wanted by others just before."""
STATE_BYTES = 12
"""Of one parameter with fp32 moments: what a disk home holds."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that costs speed or room."""

    topic: str
    """Stable, for programs: "page-locking"."""
    text: str
    """What was seen and why it matters."""
    remedy: str
    is_note: bool = False
    """Good to know, but nothing that is wrong."""


def findings(facts: Facts) -> list[Finding]:
    """All that apply; what costs most comes first, notes come last."""
    found = [finding for judge in JUDGES for finding in judge(facts)]
    return sorted(found, key=lambda finding: finding.is_note)


def _no_gpu(facts: Facts) -> Iterable[Finding]:
    if facts.gpu is not None:
        return
    has_driver = facts.software.driver_version is not None
    yield Finding(
        topic="gpu",
        text=f"No GPU can be used ({facts.no_gpu_reason}): everything computes on the CPU.",
        remedy=f"NVIDIA's driver {facts.software.driver_version} is here: install a PyTorch that is built for CUDA and "
        "for this driver, and look at CUDA_VISIBLE_DEVICES."
        if has_driver
        else "That is right for trying things out. For training, use a machine with an NVIDIA GPU and its driver; a "
        "container must be started with it (docker run --gpus all).",
        is_note=not has_driver,
    )


def _page_locking(facts: Facts) -> Iterable[Finding]:
    if facts.can_page_lock is not False:
        return
    limit = facts.host.locked_limit_bytes
    pageable = facts.rate("pageable_h2d")
    cost = "" if pageable is None else f": they run at {_rate(pageable)}, the speed of pageable memory"
    if facts.host.is_wsl:
        remedy = "WSL2 page-locks only part of Windows' memory: raise memory= in .wslconfig, or use Linux."
    elif limit is not None:
        remedy = (
            f"Raise the limit of locked memory, which is {format_bytes(limit)}: `ulimit -l unlimited`, memlock in "
            "limits.conf, or `docker run --ulimit memlock=-1`."
        )
    else:
        remedy = "No limit of locked memory stops it: look for a memory limit of the container, and in dmesg."
    text = f"Host memory cannot be page-locked, so transfers to and from the GPU are slow{cost}."
    yield Finding(topic="page-locking", text=text, remedy=remedy)


def _gpu_shared(facts: Facts) -> Iterable[Finding]:
    gpu = facts.gpu
    if gpu is None:
        return
    used_bytes = gpu.total_bytes - gpu.free_bytes
    if not gpu.num_other_processes and used_bytes < USED_SHARE * gpu.total_bytes:
        return
    who = "something else"
    if gpu.num_other_processes:
        who = f"{gpu.num_other_processes} other process{'es' if gpu.num_other_processes > 1 else ''}"
    yield Finding(
        topic="gpu-shared",
        text=f"The GPU is also used by {who}; {format_bytes(used_bytes)} of its {format_bytes(gpu.total_bytes)} are "
        "taken. The rates here, and plans made from them, are what was left.",
        remedy="See who it is with nvidia-smi and end it, then measure again; if it stays, give max_vram_gb.",
    )


def _pcie(facts: Facts) -> Iterable[Finding]:
    gpu = facts.gpu
    if gpu is None:
        return
    h2d, d2h, both = facts.rate("h2d"), facts.rate("d2h"), facts.rate("both_ways")
    width, generation = gpu.pcie_width, gpu.pcie_generation
    if width and gpu.max_pcie_width and width < gpu.max_pcie_width:
        yield Finding(
            topic="pcie-width",
            text=f"The GPU is connected by {width} of its {gpu.max_pcie_width} PCIe lanes, so transfers run at "
            f"{width / gpu.max_pcie_width:.0%} of what they could.",
            remedy="Put the card into the slot with all lanes, without a riser; see in the BIOS whether a disk shares "
            "them. A rented machine: ask for another.",
        )
    if generation and gpu.max_pcie_generation and generation < gpu.max_pcie_generation and h2d is not None:
        yield Finding(
            topic="pcie-generation",
            text=f"The link ran as PCIe generation {generation} right after the transfers, though "
            f"{gpu.max_pcie_generation} is possible.",
            remedy="Set the slot's generation to the highest (or automatic) in the BIOS; try without a riser.",
        )
    lanes = LANE_BYTES_PER_SECOND.get(generation or 0, 0.0) * (width or 0)
    if h2d is not None and h2d < (SLOW_LINK_SHARE * lanes or SLOW_LINK_BYTES_PER_SECOND):
        could = f", where its {width} lanes of generation {generation} carry {_rate(lanes)}" if lanes else ""
        yield Finding(
            topic="link",
            text=f"Page-locked transfers to the GPU run at {_rate(h2d)} only{could}. Weights and gradients cross this "
            "link each step.",
            remedy="Measure again with nothing else running. If it stays: bind the process to the GPU's NUMA node "
            "(numactl), and see whether virtualisation (IOMMU) or a switch shared with other cards is in the way.",
        )
    if h2d and d2h and both and both < DUPLEX_SHARE * max(h2d, d2h):
        yield Finding(
            topic="duplex",
            text=f"Both ways at once carry {_rate(both)}, hardly more than one way alone ({_rate(max(h2d, d2h))}): "
            "gradients that leave hold up the weights that come.",
            remedy="This is usual for some cards and virtual machines. Longer steps (more tokens) hide it.",
            is_note=True,
        )


def _memory_limit(facts: Facts) -> Iterable[Finding]:
    host = facts.host
    group = host.cgroup
    if group is not None and group.limit_bytes < host.ram_bytes:
        own_bytes = group.used_bytes - group.cache_bytes
        yield Finding(
            topic="memory-limit",
            text=f"A control group ({group.group}) allows {format_bytes(group.limit_bytes)} of the machine's "
            f"{format_bytes(host.ram_bytes)} of memory, {format_bytes(own_bytes)} of it in use. Beyond it the process "
            "is killed, so plans stay below.",
            remedy="If the rest is yours, raise it: docker run --memory, resources.limits.memory in Kubernetes, "
            "--mem in Slurm, MemoryMax in systemd.",
        )
    if host.swap_used_bytes > host.ram_bytes // 100:
        yield Finding(
            topic="swap",
            text=f"{format_bytes(host.swap_used_bytes)} are in swap: memory is or was short, and what lies there comes "
            "back at the disk's speed.",
            remedy="End what needs the memory; in place of swap give max_ram_gb and offload_dir, made for this.",
        )


def _cores(facts: Facts) -> Iterable[Finding]:
    host = facts.host
    if host.num_cores < host.num_cores_present:
        by_quota = host.cpu_quota_cores is not None and host.cpu_quota_cores < len(host.usable_cores)
        remedy = (
            "Raise the quota: docker run --cpus, resources.limits.cpu in Kubernetes."
            if by_quota
            else "If the rest is yours: start without taskset or numactl, or ask for more (docker run --cpuset-cpus, "
            "--cpus-per-task in Slurm)."
        )
        yield Finding(
            topic="cores",
            text=f"This process may use {host.num_cores} of {host.num_cores_present} cores"
            f"{' (a quota of processor time)' if by_quota else ''}. The update on the CPU runs on all it can use.",
            remedy=remedy,
        )
    num_threads = facts.software.num_torch_threads
    if num_threads > host.num_cores:
        yield Finding(
            topic="torch-threads",
            text=f"PyTorch computes on the host with {num_threads} threads, and this process has "
            f"{format_number(host.num_cores, 'core')}: they wait for each other, and so do copies and the update.",
            remedy=f"Start with OMP_NUM_THREADS={host.num_cores}. The update on the CPU has threads of its own.",
        )
    if host.load_average > max(1.0, BUSY_SHARE * host.num_cores_present):
        yield Finding(
            topic="busy",
            text=f"Other work wanted {host.load_average:.1f} of {host.num_cores_present} cores in the minute before: "
            "if it went on, rates of memory, update and disk are what it left.",
            remedy="Measure again when the machine is idle, if training will have it alone.",
        )


def _numa(facts: Facts) -> Iterable[Finding]:
    host = facts.host
    if len(host.numa_nodes) < 2:
        return
    with_memory = {node.number for node in host.numa_nodes if node.ram_bytes}
    with_cores = {node.number for node in host.numa_nodes if node.cores & host.usable_cores}
    usable = host.usable_nodes & with_memory
    if usable and usable < with_memory:
        num_bytes = sum(node.ram_bytes for node in host.numa_nodes if node.number in usable)
        yield Finding(
            topic="numa-memory",
            text=f"Memory of {len(usable)} of {len(with_memory)} NUMA nodes can be used, {format_bytes(num_bytes)}: "
            "room and bandwidth of the others are lost.",
            remedy="Start without a bound set of memory nodes (cpuset.mems, docker run --cpuset-mems).",
        )
    elif len(with_cores) == 1 and len(with_memory) > 1:
        yield Finding(
            topic="numa-cores",
            text=f"All usable cores are on one of {len(with_memory)} NUMA nodes: the update has that node's memory "
            "bandwidth, and less for what lies on others.",
            remedy="Give the process cores of every node, unless the model fits into this node's memory.",
        )
    elif len(with_memory) > 1:
        gpu = facts.gpu
        at = f" The GPU hangs on node {gpu.numa_node}." if gpu is not None and gpu.numa_node is not None else ""
        yield Finding(
            topic="numa",
            text=f"Memory is spread over {len(with_memory)} NUMA nodes; what fills one first is slower for the cores "
            f"of the others.{at}",
            remedy="Run `numactl --interleave=all megatrain doctor` and compare host memory and update; train with "
            "what is faster.",
            is_note=True,
        )


def _update(facts: Facts) -> Iterable[Finding]:
    software, host = facts.software, facts.host
    if software.update_kernel == "torch":
        has_compiler = bool(software.compilers)
        yield Finding(
            topic="update-kernel",
            text="The update on the CPU runs in PyTorch, with the same results but 20 to 200 times slower: its kernel "
            + ("could not be compiled." if has_compiler else "has to be compiled once, and there is no C compiler."),
            remedy="Run `megatrain train` once and read the compiler's message in its warning."
            if has_compiler
            else "Install gcc or clang (apt-get install gcc).",
        )
    elif software.update_kernel == "baseline" and host.has_avx2:
        yield Finding(
            topic="update-kernel",
            text=f"The update runs without AVX2, which this processor has: PyTorch says {software.cpu_capability}.",
            remedy="Unset ATEN_CPU_CAPABILITY.",
        )


def _huge_pages(facts: Facts) -> Iterable[Finding]:
    if facts.host.shared_huge_pages in ("never", "deny"):
        yield Finding(
            topic="huge-pages",
            text="Homes of weights lie in shared memory, which gets pages of 4 KiB only on this system: touching it "
            "for the first time takes longer, and page-locking has more pages to do.",
            remedy="As root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
            is_note=True,
        )


def _wsl(facts: Facts) -> Iterable[Finding]:
    if facts.host.is_wsl:
        yield Finding(
            topic="wsl",
            text="This is WSL2: it has half of Windows' memory unless told otherwise, page-locks part of that at most, "
            "and Windows' own drives are slow.",
            remedy="Set memory= in .wslconfig; keep offload_dir inside the Linux disk; use Linux for large models.",
        )


def _old_gpu(facts: Facts) -> Iterable[Finding]:
    if facts.gpu is not None and facts.gpu.capability < (8, 0):
        yield Finding(
            topic="bf16",
            text=f"{facts.gpu.name} has no bf16 arithmetic of its own (it is older than Ampere): bf16 is emulated.",
            remedy="Compare the two matrix rates in the table; where fp32 is faster, train in fp32.",
        )


def _folders(facts: Facts) -> Iterable[Finding]:
    for folder in facts.folders:
        if folder.error:
            yield Finding(
                topic="offload-folder",
                text=f"{folder.path} cannot be used for offloading: {folder.error}.",
                remedy="Correct the path or its permissions.",
            )
            continue
        yield from _bad_home(folder)
        if folder.is_direct is False and folder.file_system not in ("tmpfs", "ramfs"):
            yield Finding(
                topic="direct",
                text=f"{folder.path} ({folder.file_system or 'unknown file system'}) refuses O_DIRECT: what is read "
                "and written passes through the page cache, takes memory from homes, and the figures contain it.",
                remedy="Choose a folder on a local disk with ext4 or xfs.",
            )
        read = facts.rate(f"disk_read:{folder.path}")
        if read and read < SLOW_DISK_BYTES_PER_SECOND:
            seconds = STATE_BYTES * 1e9 / read
            yield Finding(
                topic="slow-disk",
                text=f"{folder.path} reads at {_rate(read)}: the states of a billion parameters "
                f"({STATE_BYTES} GB with fp32 moments) take {seconds:.0f} s to read, each step.",
                remedy="Use a local NVMe disk, or several with one --offload-dir each; keep as much as possible in "
                'memory (optimizer_compression="8bit").',
            )


def _bad_home(folder: FolderFacts) -> Iterable[Finding]:
    reasons = {
        **dict.fromkeys(("tmpfs", "ramfs"), "which is memory: what is offloaded there saves none"),
        "overlay": "the layer of a container: slower than the disk below it, and gone with the container",
        **dict.fromkeys(
            ("nfs", "nfs4", "cifs", "smb3", "9p", "drvfs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs"),
            "which is reached over a network or another system: its speed is shared, and may change while training",
        ),
    }
    kind = folder.file_system
    reason = reasons.get(kind) or (reasons["nfs"] if kind.startswith("fuse.") else None)
    if reason is not None:
        yield Finding(
            topic="bad-home",
            text=f"{folder.path} lies on {kind}, {reason}.",
            remedy="Choose a folder on a local NVMe disk (in a container: one that is mounted into it).",
        )


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / GB:.3g} GB/s"


JUDGES: tuple[Callable[[Facts], Iterable[Finding]], ...] = (
    _no_gpu,
    _page_locking,
    _gpu_shared,
    _pcie,
    _update,
    _memory_limit,
    _cores,
    _numa,
    _wsl,
    _old_gpu,
    _folders,
    _huge_pages,
)
