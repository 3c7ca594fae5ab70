"""Limits of the control groups that the process is in, versions 1 and 2, nested.

Rule: a group's limit holds for all groups inside it, so every folder from the process's own up to the mount is read,
and the tightest limit counts. Inside a container the upper ones cannot be seen; the container's own can.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from megatrain.base.mounts import Mount, read_mounts, read_text

NO_LIMIT_BYTES = 1 << 60
"""Version 1 writes "no limit" as a number as large as this or larger."""


@dataclass(frozen=True, kw_only=True)
class CgroupMemory:
    """The tightest memory limit of the control groups that the process is in."""

    limit_bytes: int
    used_bytes: int
    """By all processes of that group, with the page cache that counts as theirs."""
    cache_bytes: int
    """Of these, page cache of files: it is given back when memory is needed. Shared memory is not."""
    group: str
    """Name of the group that sets the limit."""

    @property
    def free_bytes(self) -> int:
        """What may still be taken."""
        return max(0, self.limit_bytes - self.used_bytes + self.cache_bytes)


def free_host_bytes() -> int:
    """Host memory that this process can still take: of the machine, and of the control groups that it is in."""
    return min([psutil.virtual_memory().available, *(group.free_bytes for group in _memory_limits(Path("/")))])


def memory_limit(root: Path = Path("/")) -> CgroupMemory | None:
    """The tightest memory limit, or None where there is none."""
    return min(_memory_limits(root), key=lambda group: group.limit_bytes, default=None)


def _memory_limits(root: Path) -> list[CgroupMemory]:
    found: list[CgroupMemory] = []
    for version, folder in _folders(root, "memory"):
        names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
        limits = [limit for name in names if (limit := _number(folder / name)) is not None]
        if not limits or min(limits) >= NO_LIMIT_BYTES:
            continue
        used = _number(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        statistics, prefix = _statistics(folder), "" if version == 2 else "total_"
        cache = statistics.get("file" if version == 2 else "total_cache", 0) - statistics.get(f"{prefix}shmem", 0)
        found.append(
            CgroupMemory(limit_bytes=min(limits), used_bytes=used or 0, cache_bytes=cache, group=folder.name or "/")
        )
    return found


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The tightest limit of processor time, in cores, or None where there is none."""
    found = []
    for version, folder in _folders(root, "cpu"):
        if version == 2:
            quota, _, period = read_text(folder, "cpu.max").strip().partition(" ")
        else:
            quota, period = (read_text(folder, f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may run on, of which a container may have a share."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return whole_cores(num_cores, cpu_quota(root))


def whole_cores(num_cores: int, quota: float | None) -> int:
    """Of a quota the whole ones: a group that has used its time up stands still, with all of its threads."""
    return num_cores if quota is None else max(1, min(num_cores, int(quota)))


def _folders(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """(version, folder) of every group that the process is in, with this controller or (version 2) with any."""
    lines = [line.split(":", 2) for line in read_text(root, "proc/self/cgroup").splitlines()]
    groups = {name: path for _, names, path in lines for name in names.split(",")}
    for mount in read_mounts(root):
        if mount.type == "cgroup2":
            version, group = 2, groups.get("")
        elif mount.type == "cgroup" and controller in mount.options:
            version, group = 1, groups.get(controller)
        else:
            continue
        if group is not None:
            yield from ((version, folder) for folder in _chain(root, mount, group))


def _chain(root: Path, mount: Mount, group: str) -> Iterator[Path]:
    """The group's folder and those above it, up to the mount."""
    top = root / mount.point.lstrip("/")
    path, shown = PurePosixPath(group), PurePosixPath(mount.top)
    # A container may see only its own part of the tree, mounted as the whole, with the path as the host sees it.
    inside = path.relative_to(shown) if path.is_relative_to(shown) else PurePosixPath(".")
    folder = top / inside
    if ".." in inside.parts or not folder.is_dir():
        folder = top
    while folder != top:
        yield folder
        folder = folder.parent
    yield top


def _number(file: Path) -> int | None:
    """None where there is no such file, and for "max"."""
    text = read_text(file.parent, file.name).strip()
    return int(text) if text.isdigit() else None


def _statistics(folder: Path) -> dict[str, int]:
    pairs = (line.split() for line in read_text(folder, "memory.stat").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
