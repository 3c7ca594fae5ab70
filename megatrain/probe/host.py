"""What the host says of itself, out of /proc and /sys. What is not there is left unknown."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import psutil

from megatrain.base.cgroup import cpu_quota, memory_limit
from megatrain.base.mounts import read_text
from megatrain.probe.facts import HostFacts, NumaNode

NODES = "sys/devices/system/node"


def read_host(root: Path = Path("/")) -> HostFacts:
    """root: "/", or a made-up tree in tests; cores and `ulimit -l` are always the process's own."""
    info = read_text(root, "proc/cpuinfo")
    memory = _memory(root)
    num_cores = len(re.findall(r"^processor\s*:", info, flags=re.MULTILINE)) or os.cpu_count() or 1
    load = read_text(root, "proc/loadavg").split()
    return HostFacts(
        cpu_name=_after_colon(info, "model name") or platform.processor() or platform.machine(),
        has_avx2="avx2" in _after_colon(info, "flags").split(),
        kernel_release=read_text(root, "proc/sys/kernel/osrelease").strip() or platform.release(),
        num_cores_present=num_cores,
        usable_cores=_usable_cores(),
        cpu_quota_cores=cpu_quota(root),
        load_average=float(load[0]) if load else 0.0,
        ram_bytes=memory.get("MemTotal") or psutil.virtual_memory().total,
        available_bytes=memory.get("MemAvailable") or psutil.virtual_memory().available,
        swap_bytes=memory.get("SwapTotal", 0),
        swap_used_bytes=memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
        cgroup=memory_limit(root),
        locked_limit_bytes=_locked_limit_bytes(),
        numa_nodes=_numa_nodes(root),
        usable_nodes=parse_list(_after_colon(read_text(root, "proc/self/status"), "Mems_allowed_list")),
        huge_pages=_chosen(read_text(root, "sys/kernel/mm/transparent_hugepage/enabled")),
        shared_huge_pages=_chosen(read_text(root, "sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        virtualisation=_virtualisation(root, info),
    )


def parse_list(text: str) -> frozenset[int]:
    """`0-3,8,10-11`, as Linux lists cores and nodes."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            numbers |= set(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def _memory(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    lines = read_text(root, "proc/meminfo").splitlines()
    return {name: 1024 * int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines) if value}


def _numa_nodes(root: Path) -> tuple[NumaNode, ...]:
    nodes = []
    for number in sorted(parse_list(read_text(root, f"{NODES}/online"))):
        total = re.search(r"MemTotal:\s*(\d+) kB", read_text(root, f"{NODES}/node{number}/meminfo"))
        cores = parse_list(read_text(root, f"{NODES}/node{number}/cpulist"))
        nodes.append(NumaNode(number=number, ram_bytes=1024 * int(total[1]) if total else 0, cores=cores))
    return tuple(nodes)


def _after_colon(text: str, name: str) -> str:
    """The first `name : value`."""
    found = re.search(rf"^{re.escape(name)}\s*:[ \t]*(.*)$", text, flags=re.MULTILINE)
    return found[1].strip() if found else ""


def _chosen(text: str) -> str:
    """`always [madvise] never` -> `madvise`."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else ""


def _usable_cores() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _locked_limit_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _virtualisation(root: Path, info: str) -> str:
    groups = read_text(root, "proc/self/cgroup")
    is_container = (
        (root / ".dockerenv").exists()
        or (root / "run/.containerenv").exists()
        or re.search(r"docker|kubepods|containerd|libpod|lxc", groups) is not None
    )
    vendor = " ".join(
        text for name in ("sys_vendor", "product_name") if (text := read_text(root, f"sys/class/dmi/id/{name}").strip())
    )
    is_guest = "hypervisor" in _after_colon(info, "flags").split()
    guest = f"virtual machine ({vendor})" if vendor else "virtual machine"
    return " in a ".join([*(["container"] if is_container else []), *([guest] if is_guest else [])])
