"""Offload folders: what they lie on, and how fast threads read and write them past the page cache.

Rule: the file has no name from the moment it is open, so nothing is left behind, not even after a kill. It takes at
most a quarter of what is free.

What it gives up: with a file system that refuses O_DIRECT the page cache is in the figures, and the row says so.
"""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatrain.base.mounts import file_system, read_mounts
from megatrain.base.paths import existing_parent
from megatrain.base.units import MIB, format_bytes
from megatrain.probe.facts import BYTES_PER_SECOND, FolderFacts, Rate
from megatrain.probe.timing import Effort

FREE_SHARE = 4
"""The file takes at most this part of what is free."""
NUM_PASSES = 3
NUM_FILLERS = 4
LARGEST_BLOCK = 8 * MIB
MANY = 1_000_000
"""Rounds over a file: more than there is time for."""
SMALLEST_BYTES = 64 * MIB
"""Less says nothing about a disk."""


def read_folder(folder: Path, root: Path = Path("/")) -> FolderFacts:
    """What the folder lies on; it is not made."""
    try:
        existing = existing_parent(folder)
        error = "" if os.access(existing, os.W_OK | os.X_OK) else "it cannot be written"
        return FolderFacts(
            path=str(folder),
            file_system=file_system(existing, read_mounts(root)),
            free_bytes=psutil.disk_usage(str(existing)).free,
            disk=existing.stat().st_dev,
            error=error if existing.is_dir() else f"{existing} is no folder",
        )
    except (OSError, ValueError) as error:  # ValueError: what can be no path
        reason = getattr(error, "strerror", None) or str(error)
        return FolderFacts(path=str(folder), file_system="", free_bytes=0, disk=0, error=reason)


@dataclass(frozen=True)
class Target:
    """An open file without a name."""

    descriptor: int
    num_bytes: int
    is_direct: bool


@contextmanager
def open_target(folder: Path, num_bytes: int) -> Iterator[Target]:
    """A file of that size in the folder, its space reserved; past the page cache where the file system allows it.

    Raises OSError.
    """
    path = existing_parent(folder) / f".megatrain-doctor-{secrets.token_hex(8)}"
    flags = os.O_RDWR | os.O_CREAT
    is_direct = hasattr(os, "O_DIRECT")
    try:
        try:
            descriptor = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
        except OSError:
            # O_DSYNC: else a pass would end long before what it wrote is on the disk.
            descriptor, is_direct = os.open(path, flags | os.O_DSYNC, 0o600), False
    finally:
        path.unlink(missing_ok=True)  # a refused O_DIRECT may have made it, too
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        yield Target(descriptor, num_bytes, is_direct)
    finally:
        os.close(descriptor)


def measure_folders(
    folders: Sequence[Path], effort: Effort, label: str, seconds: float
) -> tuple[list[Rate], bool | None]:
    """Rows for reading and writing all of `folders` at once, and whether all of them took O_DIRECT.

    label: of the folders, for people. Keys are "disk_read:LABEL" and "disk_write:LABEL". seconds: for all of it.
    """
    best: dict[str, tuple[float, str]] = {"read": (0.0, ""), "write": (0.0, "")}
    try:
        with ExitStack() as stack:
            targets = [stack.enter_context(open_target(folder, _file_bytes(folder, effort))) for folder in folders]
            is_direct = all(target.is_direct for target in targets)
            num_bytes = _fill(targets, seconds / 4)
            each = 0.75 * seconds / len(effort.disk_blocks) / len(best)
            for name, (block_bytes, num_threads) in itertools.product(best, effort.disk_blocks):
                rate = _rate(targets, num_bytes, block_bytes, num_threads, each, is_write=name == "write")
                note = f"{block_bytes // MIB} MiB blocks, {num_threads} threads"
                best[name] = max(best[name], (rate, note if is_direct else f"{note}, through the page cache"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return [_row(name, label, None, reason) for name in best], None
    return [_row(name, label, rate, note) for name, (rate, note) in best.items()], is_direct


def _row(name: str, label: str, rate: float | None, note: str) -> Rate:
    return Rate(key=f"disk_{name}:{label}", label=f"disk {name}, {label}", unit=BYTES_PER_SECOND, value=rate, note=note)


def _file_bytes(folder: Path, effort: Effort) -> int:
    free_bytes = psutil.disk_usage(str(existing_parent(folder))).free
    num_bytes = min(effort.disk_bytes, free_bytes // FREE_SHARE) // LARGEST_BLOCK * LARGEST_BLOCK
    if num_bytes < SMALLEST_BYTES:
        raise ValueError(f"only {format_bytes(free_bytes)} are free: too little to measure")
    return num_bytes


def _fill(targets: list[Target], seconds: float) -> int:
    """Write the files once, as far as the time goes. Returns the bytes written, whole blocks of the largest size."""
    num_blocks = sum(target.num_bytes for target in targets) // LARGEST_BLOCK
    with ThreadPoolExecutor(NUM_FILLERS) as pool:
        buffers = _buffers(LARGEST_BLOCK, NUM_FILLERS)
        return LARGEST_BLOCK * _pass(pool, targets, buffers, range(num_blocks), seconds, is_write=True)[1]


def _rate(
    targets: list[Target], num_bytes: int, block_bytes: int, num_threads: int, seconds: float, *, is_write: bool
) -> float:
    """Bytes a second: the median of a few passes over what was filled."""
    num_blocks = num_bytes // len(targets) // block_bytes * len(targets)
    # Round and round until the time is over; but what was read through the page cache is in it then.
    num_rounds = MANY if is_write or all(target.is_direct for target in targets) else 1
    numbers = range(num_blocks)
    buffers = _buffers(block_bytes, num_threads)
    rates = []
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(NUM_PASSES):
            _forget(targets)
            around = itertools.chain.from_iterable(itertools.repeat(numbers, num_rounds))
            taken, count = _pass(pool, targets, buffers, around, seconds / NUM_PASSES, is_write=is_write)
            rates.append(count * block_bytes / taken)
    return statistics.median(rates)


def _buffers(num_bytes: int, count: int) -> list[mmap.mmap]:
    """Page-aligned, of random bytes: some disks and file systems store zeros and repetitions without writing."""
    buffers = [mmap.mmap(-1, num_bytes) for _ in range(count)]
    for buffer in buffers:
        buffer[:] = os.urandom(num_bytes)
    return buffers


def _pass(
    pool: ThreadPoolExecutor,
    targets: list[Target],
    buffers: list[mmap.mmap],
    numbers: Iterable[int],
    seconds: float,
    *,
    is_write: bool,
) -> tuple[float, int]:
    """(seconds, blocks). A thread for each buffer takes number after number until there are no more, or no time."""
    left, lock = iter(numbers), threading.Lock()
    end = time.perf_counter() + seconds

    def work(buffer: mmap.mmap) -> int:
        count = 0
        while count == 0 or time.perf_counter() < end:
            with lock:
                number = next(left, None)
            if number is None:
                break
            _move(targets, number, buffer, is_write)
            count += 1
        return count

    start = time.perf_counter()
    count = sum(pool.map(work, buffers))
    for target in targets if is_write else ():
        os.fdatasync(target.descriptor)
    return time.perf_counter() - start, count


def _move(targets: list[Target], number: int, buffer: mmap.mmap, is_write: bool) -> None:
    """Block `number` of those that go over the files in turn."""
    target = targets[number % len(targets)]
    offset = number // len(targets) * len(buffer)
    done = (os.pwritev if is_write else os.preadv)(target.descriptor, [buffer], offset)
    if done != len(buffer):
        raise OSError(f"{done} of {len(buffer)} bytes were {'written' if is_write else 'read'}")


def _forget(targets: list[Target]) -> None:
    """Out of the page cache with what was not moved past it."""
    for target in targets:
        if not target.is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(target.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
