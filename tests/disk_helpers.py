"""Buffers that the disk tier takes, faults that an operating system can have, other processes."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatrain.store.disk import DiskStore
from megatrain.store.disk_calls import DiskCalls
from megatrain.store.tier import PAGE_BYTES, round_up


def page_buffer(num_bytes: int) -> torch.Tensor:
    """Flat uint8 zeros that start on a page."""
    return torch.frombuffer(mmap.mmap(-1, max(PAGE_BYTES, num_bytes)), dtype=torch.uint8)[:num_bytes]


def random_buffer(num_bytes: int) -> torch.Tensor:
    return page_buffer(num_bytes).random_(0, 256)


def read_back(extent, num_bytes: int | None = None) -> torch.Tensor:
    """Through direct I/O."""
    buffer = page_buffer(extent.num_bytes if num_bytes is None else num_bytes)
    extent.read(0, buffer).wait()
    return buffer


def reserved_bytes(store: DiskStore) -> list[int]:
    """Blocks of the disk that each file of the store has."""
    return [os.fstat(disk.file.fd).st_blocks * 512 for disk in store._disks]


def failure(code: int) -> OSError:
    return OSError(code, os.strerror(code))


class Faults(DiskCalls):
    """The operating system, with faults. Set `on_read`, `on_write` and the like once the store is open.

    A hook gets the offset and the size, and raises, or returns how many bytes the call may move (None: all).
    """

    def __init__(self, refuse_direct: str = "", refuse_nameless: bool = False) -> None:
        self.on_read: Callable[[int, int], int | None] | None = None
        self.on_write: Callable[[int, int], int | None] | None = None
        self.on_sync: Callable[[], None] | None = None
        self.on_reserve: Callable[[int], None] | None = None
        self.opened: list[str] = []
        self.num_running = 0
        self._refuse_direct = refuse_direct
        self._refuse_nameless = refuse_nameless
        self._lock = threading.Lock()

    def open(self, path, flags):
        is_nameless = flags & os.O_TMPFILE == os.O_TMPFILE
        if is_nameless and self._refuse_nameless:
            raise failure(errno.EOPNOTSUPP)
        fd = super().open(path, flags)
        if not is_nameless:
            self.opened.append(Path(path).name)
        if flags & os.O_DIRECT and self._refuse_direct == "open":
            os.close(fd)  # as kernels do: the file is there all the same
            raise failure(errno.EINVAL)
        return fd

    def read(self, fd, view, offset):
        return self._move(super().read, self.on_read, fd, view, offset)

    def write(self, fd, view, offset):
        if self._refuse_direct == "write" and _is_direct(fd):
            raise failure(errno.EINVAL)
        return self._move(super().write, self.on_write, fd, view, offset)

    def sync(self, fd, offset, num_bytes):
        if self.on_sync is not None:
            self.on_sync()
        super().sync(fd, offset, num_bytes)

    def reserve(self, fd, offset, num_bytes):
        if self.on_reserve is not None:
            self.on_reserve(num_bytes)
        super().reserve(fd, offset, num_bytes)

    def _move(self, call, hook, fd, view, offset):
        self._count(1)
        try:
            num_bytes = None if hook is None else hook(offset, len(view))
            # What a short call moves need not be whole pages, which the file itself would refuse.
            whole = len(view) if num_bytes is None else round_up(num_bytes, PAGE_BYTES)
            moved = call(fd, view[:whole], offset) if whole else 0
            return moved if num_bytes is None else min(moved, num_bytes)
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._lock:
            self.num_running += change


def _is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


class Times:
    """A hook that fails the first `num_times` calls (all: -1)."""

    def __init__(self, code: int, num_times: int) -> None:
        self.num_calls = 0
        self._error = failure(code)
        self._num_times = num_times
        self._lock = threading.Lock()

    def __call__(self, *_: int) -> None:
        with self._lock:
            self.num_calls += 1
            if self._num_times < 0 or self.num_calls <= self._num_times:
                raise self._error


def start_python(code: str, *arguments: str | os.PathLike[str]) -> subprocess.Popen[str]:
    command: Sequence[str | os.PathLike[str]] = [sys.executable, "-c", code, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Fail if it does not come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)
