"""The table of mounted file systems: which one a folder lies on. Reads /proc/self/mountinfo (proc(5))."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo."""

    top: str
    """Which folder of the file system is mounted: "/" for all of it."""
    point: str
    type: str
    options: tuple[str, ...]
    """Of the file system; a control group of version 1 names its controllers there."""


def read_text(root: Path, name: str) -> str:
    """A file below `root` ("/", but in tests); empty where there is none or it cannot be read."""
    try:
        return (root / name.lstrip("/")).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_mounts(root: Path = Path("/")) -> list[Mount]:
    mounts = []
    for line in read_text(root, "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, last = before.split(" "), after.split(" ")
        if len(fields) >= 5 and last[0]:
            options = tuple(last[2].split(",")) if len(last) > 2 else ()
            mounts.append(Mount(_plain(fields[3]), _plain(fields[4]), last[0], options))
    return mounts


def file_system(folder: Path, mounts: list[Mount]) -> str:
    """Type of the file system that `folder` (absolute, links followed) lies on; empty where unknown."""
    found = ""
    length = -1
    for mount in mounts:
        # The later of two on the same point hides the earlier.
        if folder.is_relative_to(mount.point) and len(mount.point) >= length:
            found, length = mount.type, len(mount.point)
    return found


def file_system_of(folder: Path) -> str:
    """Type of the file system that `folder` is on now: `ext4`, `tmpfs`."""
    return file_system(Path(os.path.realpath(folder)), read_mounts()) or "unknown file system"


def _plain(text: str) -> str:
    r"""Spaces stand there as \040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
