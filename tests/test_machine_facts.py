"""What `megatrain doctor` knows of machines: made-up ones are read, judged and become profiles."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from megatrain.base.cgroup import CgroupMemory, cpu_quota, memory_limit
from megatrain.base.errors import UserError
from megatrain.base.mounts import file_system, read_mounts
from megatrain.base.paths import machine_profile_path
from megatrain.base.units import GIB
from megatrain.plan.machine import Machine
from megatrain.probe import measure
from megatrain.probe.facts import (
    Facts,
    FolderFacts,
    GpuFacts,
    HostFacts,
    NumaNode,
    Rate,
    SoftwareFacts,
)
from megatrain.probe.gpu import driver_version
from megatrain.probe.host import parse_list, read_host
from megatrain.probe.judge import Finding, findings

# Reading a made-up /proc and /sys

V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNTS = (
    "35 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "36 31 0:33 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/slurm/job"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slurm/job/step\n",
            "proc/self/mountinfo": V2_MOUNT,
            f"{group}/step/memory.max": "max\n",
            f"{group}/step/cpu.max": "max 100000\n",
            f"{group}/memory.max": f"{128 * GIB}\n",
            f"{group}/memory.current": f"{9 * GIB}\n",
            f"{group}/memory.stat": f"anon {GIB}\nfile {11 * GIB}\nshmem {3 * GIB}\n",
            f"{group}/cpu.max": "350000 100000\n",
            "sys/fs/cgroup/slurm/memory.max": f"{512 * GIB}\n",
            "sys/fs/cgroup/slurm/cpu.max": "1600000 100000\n",
        },
    )
    expected = CgroupMemory(limit_bytes=128 * GIB, used_bytes=9 * GIB, cache_bytes=8 * GIB, group="job")
    assert memory_limit(root) == expected
    assert cpu_quota(root) == 3.5
    (root / group / "memory.high").write_text(f"{64 * GIB}")
    limit = memory_limit(root)
    assert limit is not None and limit.limit_bytes == 64 * GIB


CONTAINER = "/" + "docker/abc"


@pytest.mark.parametrize("top", ["/", CONTAINER])
def test_groups_of_version_1_in_a_container_and_outside(tmp_path: Path, top: str) -> None:
    """Inside a container the mount shows the container's own group as the whole tree."""
    inside = "" if top == CONTAINER else "docker/abc/"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": f"9:name=systemd:/\n4:memory:{CONTAINER}\n2:cpu,cpuacct:{CONTAINER}\n0::/\n",
            "proc/self/mountinfo": V1_MOUNTS.format(top=top),
            f"sys/fs/cgroup/memory/{inside}memory.limit_in_bytes": f"{8 * GIB}\n",
            f"sys/fs/cgroup/memory/{inside}memory.usage_in_bytes": f"{3 * GIB}\n",
            f"sys/fs/cgroup/memory/{inside}memory.stat": f"cache 1\ntotal_cache {2 * GIB}\n",
            f"sys/fs/cgroup/cpu,cpuacct/{inside}cpu.cfs_quota_us": "200000\n",
            f"sys/fs/cgroup/cpu,cpuacct/{inside}cpu.cfs_period_us": "100000\n",
        },
    )
    limit = memory_limit(root)
    assert limit is not None
    assert (limit.limit_bytes, limit.used_bytes, limit.cache_bytes) == (8 * GIB, 3 * GIB, 2 * GIB)
    assert cpu_quota(root) == 2.0


def test_no_limit_is_none(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n2:cpu,cpuacct:/\n",
            "proc/self/mountinfo": V1_MOUNTS.format(top="/"),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    assert memory_limit(root) is None
    assert cpu_quota(root) is None
    assert memory_limit(tmp_path / "empty") is None


def test_the_host_is_read(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/cpuinfo": "".join(
                f"processor\t: {i}\nmodel name\t: Fast CPU\nflags\t\t: fpu avx2 hypervisor\n\n" for i in range(4)
            ),
            "proc/meminfo": "MemTotal:  1000 kB\nMemAvailable: 600 kB\nSwapTotal: 80 kB\nSwapFree: 30 kB\nHugePages: 0",
            "proc/loadavg": "2.50 1.00 0.50 1/200 4242\n",
            "proc/sys/kernel/osrelease": "5.15.153.1-microsoft-standard-WSL2\n",
            "proc/self/status": "Name:\tpython\nMems_allowed:\t3\nMems_allowed_list:\t0-1\n",
            "sys/devices/system/node/online": "0-1\n",
            "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:   700 kB\n",
            "sys/devices/system/node/node0/cpulist": "0-1\n",
            "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:   300 kB\n",
            "sys/devices/system/node/node1/cpulist": "2,3\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force\n",
            "sys/class/dmi/id/sys_vendor": "QEMU\n",
            "run/.containerenv": "",
        },
    )
    host = read_host(root)
    assert (host.cpu_name, host.num_cores_present, host.has_avx2) == ("Fast CPU", 4, True)
    assert (host.ram_bytes, host.available_bytes) == (1000 * 1024, 600 * 1024)
    assert (host.swap_bytes, host.swap_used_bytes, host.load_average) == (80 * 1024, 50 * 1024, 2.5)
    assert host.is_wsl and host.virtualisation == "container in a virtual machine (QEMU)"
    assert (host.huge_pages, host.shared_huge_pages) == ("madvise", "never")
    assert host.usable_nodes == {0, 1}
    assert host.numa_nodes == (
        NumaNode(number=0, ram_bytes=700 * 1024, cores=frozenset({0, 1})),
        NumaNode(number=1, ram_bytes=300 * 1024, cores=frozenset({2, 3})),
    )


def test_a_host_that_tells_nothing_is_read(tmp_path: Path) -> None:
    host = read_host(tmp_path)
    assert host.ram_bytes > 0 and host.num_cores_present >= 1
    assert (host.numa_nodes, host.huge_pages, host.cgroup) == ((), "", None)


def test_lists_mounts_and_the_driver(tmp_path: Path) -> None:
    assert parse_list("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}
    assert parse_list("\n") == set()
    lines = (
        "27 1 254:0 / / rw - ext4 /dev/vda rw",
        "28 27 0:24 / /tmp rw shared:1 master:2 - nfs4 server:/x rw",
        "29 28 0:25 / /tmp/my\\040disk rw - xfs /dev/nvme0n1 rw",
        "30 28 0:26 / /tmp/my\\040disk rw - tmpfs tmpfs rw",
    )
    driver = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
    root = tree(tmp_path, {"proc/self/mountinfo": "\n".join(lines), "proc/driver/nvidia/version": driver})
    mounts = read_mounts(root)
    assert file_system(Path("/home"), mounts) == "ext4"
    assert file_system(Path("/tmp/a"), mounts) == "nfs4"
    assert file_system(Path("/tmp2"), mounts) == "ext4"
    assert file_system(Path("/tmp/my disk/x"), mounts) == "tmpfs"
    assert driver_version(root) == "580.95.05"


# Judging made-up machines

HOST = HostFacts(
    cpu_name="Fast CPU",
    has_avx2=True,
    kernel_release="6.8.0",
    num_cores_present=16,
    usable_cores=frozenset(range(16)),
    cpu_quota_cores=None,
    load_average=0.3,
    ram_bytes=256 * GIB,
    available_bytes=250 * GIB,
    swap_bytes=0,
    swap_used_bytes=0,
    cgroup=None,
    locked_limit_bytes=64 * 1024,
    numa_nodes=(NumaNode(number=0, ram_bytes=256 * GIB, cores=frozenset(range(16))),),
    usable_nodes=frozenset({0}),
    huge_pages="madvise",
    shared_huge_pages="advise",
    virtualisation="",
)
SOFTWARE = SoftwareFacts(
    torch_version="2.13.0",
    cuda_version="13.0",
    driver_version="580.95.05",
    cpu_capability="AVX512",
    update_kernel="avx512",
    compilers=("gcc",),
    num_torch_threads=2,
    has_gds=True,
)
GPU = GpuFacts(
    name="H200",
    capability=(9, 0),
    total_bytes=140 * GIB,
    free_bytes=139 * GIB,
    num_other_processes=0,
    pcie_generation=5,
    pcie_width=16,
    max_pcie_generation=5,
    max_pcie_width=16,
)
FOLDER = FolderFacts(path="fast", file_system="xfs", free_bytes=900 * GIB, disk=1, is_direct=True)
RATES = {
    "h2d": 55e9,
    "d2h": 54e9,
    "both_ways": 100e9,
    "pageable_h2d": 8e9,
    "pageable_d2h": 7e9,
    "ram": 200e9,
    "hbm": 4e12,
    "matmul.bf16": 760e12,
    "matmul.fp32": 50e12,
    "update.fp32": 0.25,
    "update.8bit": 0.3,
    "disk_read:fast": 6e9,
    "disk_write:fast": 4e9,
}
NODES = tuple(NumaNode(number=i, ram_bytes=128 * GIB, cores=frozenset(range(8 * i, 8 * i + 8))) for i in range(2))


def facts(**changes: Any) -> Facts:
    """A machine without fault, but for the changes: of Facts, or dicts of changes to its parts."""
    rates = {**RATES, **changes.pop("rates", {})}
    values: dict[str, Any] = {"host": HOST, "software": SOFTWARE, "gpu": GPU, "folders": (FOLDER,)}
    for name, change in changes.items():
        values[name] = dataclasses.replace(values[name], **change) if isinstance(change, dict) else change
    values.setdefault("can_page_lock", True)
    units = tuple(Rate(key=key, label=key, unit="", value=value) for key, value in rates.items())
    return Facts(**values, rates=units)


def found(**changes: Any) -> list[Finding]:
    return findings(facts(**changes))


def test_a_machine_without_fault_has_no_findings() -> None:
    assert found() == []


GROUP = CgroupMemory(limit_bytes=128 * GIB, used_bytes=9 * GIB, cache_bytes=8 * GIB, group="job")
HALF = frozenset(range(8))
CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "page-locking",
        {"can_page_lock": False, "rates": {"h2d": None, "d2h": None}},
        ["ulimit -l", "64.0 KiB", "8 GB/s"],
    ),
    ("page-locking", {"can_page_lock": False, "host": {"locked_limit_bytes": None}}, ["No limit of locked memory"]),
    ("gpu-shared", {"gpu": {"num_other_processes": 2}}, ["2 other processes", "nvidia-smi"]),
    ("gpu-shared", {"gpu": {"num_other_processes": None, "free_bytes": 100 * GIB}}, ["40.0 GiB of its 140.0 GiB"]),
    ("pcie-width", {"gpu": {"pcie_width": 4}, "rates": {"h2d": 13e9}}, ["4 of its 16 PCIe lanes", "25%", "slot"]),
    ("pcie-generation", {"gpu": {"pcie_generation": 3}}, ["generation 3", "5 is possible"]),
    ("link", {"rates": {"h2d": 12e9}}, ["12 GB/s only", "63 GB/s"]),
    ("link", {"gpu": {"pcie_width": None, "pcie_generation": None}, "rates": {"h2d": 6e9}}, ["6 GB/s only"]),
    ("duplex", {"rates": {"both_ways": 56e9}}, ["56 GB/s", "55 GB/s"]),
    ("bf16", {"gpu": {"capability": (7, 5)}}, ["bf16 is emulated"]),
    ("update-kernel", {"software": {"update_kernel": "torch", "compilers": ()}}, ["no C compiler", "Install gcc"]),
    ("update-kernel", {"software": {"update_kernel": "torch"}}, ["could not be compiled"]),
    ("update-kernel", {"software": {"update_kernel": "baseline", "cpu_capability": "DEFAULT"}}, ["without AVX2"]),
    ("memory-limit", {"host": {"cgroup": GROUP}}, ["128.0 GiB", "256.0 GiB", "1.0 GiB of it in use", "--memory"]),
    ("swap", {"host": {"swap_used_bytes": 20 * GIB}}, ["20.0 GiB are in swap"]),
    ("cores", {"host": {"usable_cores": HALF}}, ["8 of 16 cores", "taskset"]),
    ("cores", {"host": {"cpu_quota_cores": 3.5}}, ["3 of 16 cores", "quota", "docker run --cpus"]),
    ("torch-threads", {"software": {"num_torch_threads": 32}}, ["32 threads", "16 cores", "OMP_NUM_THREADS=16"]),
    ("busy", {"host": {"load_average": 7.0}}, ["7.0 of 16 cores"]),
    ("numa", {"host": {"numa_nodes": NODES, "usable_nodes": {0, 1}}}, ["2 NUMA nodes", "numactl --interleave=all"]),
    ("numa-memory", {"host": {"numa_nodes": NODES, "usable_nodes": {1}}}, ["1 of 2 NUMA nodes", "128.0 GiB"]),
    ("huge-pages", {"host": {"shared_huge_pages": "never"}}, ["4 KiB", "shmem_enabled"]),
    ("wsl", {"host": {"kernel_release": "5.15-microsoft-WSL2"}}, ["WSL2", ".wslconfig"]),
    ("offload-folder", {"folders": (dataclasses.replace(FOLDER, error="no"),)}, ["fast cannot be used", "no"]),
    (
        "bad-home",
        {"folders": (dataclasses.replace(FOLDER, file_system="tmpfs", is_direct=False),)},
        ["which is memory"],
    ),
    ("bad-home", {"folders": (dataclasses.replace(FOLDER, file_system="overlay"),)}, ["container"]),
    ("bad-home", {"folders": (dataclasses.replace(FOLDER, file_system="fuse.sshfs"),)}, ["network"]),
    ("direct", {"folders": (dataclasses.replace(FOLDER, is_direct=False),)}, ["refuses O_DIRECT"]),
    ("slow-disk", {"rates": {"disk_read:fast": 0.2e9}}, ["0.2 GB/s", "60 s"]),
]


@pytest.mark.parametrize(("topic", "changes", "words"), CASES)
def test_each_fault_is_found_alone_and_said(topic: str, changes: dict[str, Any], words: list[str]) -> None:
    (finding,) = found(**changes)
    assert finding.topic == topic
    for word in words:
        assert word in f"{finding.text} {finding.remedy}"


def test_no_gpu_and_a_gpu_that_pytorch_cannot_use() -> None:
    cpu_only = {"gpu": None, "can_page_lock": None, "no_gpu_reason": "it is a CPU build"}
    (finding,) = found(**cpu_only, software={"driver_version": None})
    assert finding.is_note and "it is a CPU build" in finding.text
    (finding,) = found(**cpu_only)
    assert not finding.is_note and "install a PyTorch that is built for CUDA" in finding.remedy


def test_cores_of_one_node_and_notes_last() -> None:
    host = {"numa_nodes": NODES, "usable_nodes": {0, 1}, "usable_cores": HALF, "shared_huge_pages": "never"}
    topics = [finding.topic for finding in found(host=host)]
    assert topics == ["cores", "numa-cores", "huge-pages"]


# The profile


def test_the_machine_comes_from_the_facts() -> None:
    second = dataclasses.replace(FOLDER, path="second", free_bytes=50 * GIB)
    other = dataclasses.replace(FOLDER, path="other", free_bytes=30 * GIB, disk=2)
    broken = dataclasses.replace(FOLDER, path="broken", free_bytes=1, disk=3, error="no")
    machine = measure.machine_of(facts(host={"cgroup": GROUP}), date="today")
    assert (machine.ram_bytes, machine.hbm_bytes, machine.num_cores) == (128 * GIB, 139 * GIB, 16)
    assert (machine.disk_bytes, machine.disk_read_bytes_per_second) == (900 * GIB, 6e9)
    assert machine.update_ns_per_parameter == {"fp32": 0.25, "8bit": 0.3}
    rates = {f"disk_read:{measure.ALL_FOLDERS}": 9e9}
    machine = measure.machine_of(facts(folders=(FOLDER, second, other, broken), rates=rates), date="today")
    assert (machine.disk_bytes, machine.disk_read_bytes_per_second) == (930 * GIB, 9e9)
    # What cannot be page-locked moves as pageable memory does.
    machine = measure.machine_of(facts(rates={"h2d": None, "d2h": None}), date="today")
    assert (machine.h2d_bytes_per_second, machine.d2h_bytes_per_second) == (8e9, 7e9)
    assert Machine.from_json(machine.to_json()) == machine


def test_no_profile_without_what_predicts_time() -> None:
    with pytest.raises(UserError, match="matmul.bf16"):
        measure.machine_of(facts(rates={"matmul.bf16": None}), date="today")
    measure.machine_of(facts(rates={"update.8bit": None}), date="today")


def test_a_profile_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = measure.machine_of(facts(), date="today")
    file = tmp_path / "new" / "machine.json"
    measure.save_machine(machine, file)
    before = file.read_text()
    assert Machine.from_json(before) == machine

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(UserError, match="No space left"):
        measure.save_machine(dataclasses.replace(machine, name="other"), file)
    assert file.read_text() == before and [path.name for path in file.parent.iterdir()] == ["machine.json"]


def test_where_the_profile_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path))
    assert machine_profile_path() == tmp_path / "machine.json"
    monkeypatch.delenv("MEGATRAIN_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert machine_profile_path() == tmp_path / ".cache" / "megatrain" / "machine.json"
