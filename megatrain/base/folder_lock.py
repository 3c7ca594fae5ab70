"""One run a folder: `.megatrain.lock` is held by the process that uses it, and never longer than that lives.

    hold_folder        files of homes: until the process ends
    holding_folder     the output folder of a run: for a block

One process may do both, and blocks in blocks.

The kernel gives an flock back however the process ends, so a lock file that nobody holds is taken over silently. Its
text (process id, host, start time) is for messages, and for file systems without flock, where it is all there is.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatrain.base.errors import UserError

LOCK_NAME = ".megatrain.lock"
CLOCK_SECONDS = 5.0
"""Two readings of a process's start differ by less."""
_NO_FLOCK = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


@dataclass(eq=False)
class _Lock:
    fd: int
    path: Path
    num_holders: int = 0
    """Blocks, and one for whoever holds it until the process ends."""


_held: dict[tuple[int, int], _Lock] = {}
"""By device and inode of the folder."""
_guard = threading.Lock()


def hold_folder(folder: Path, remedy: str) -> None:
    """Hold `folder` for this process from now on; further calls of this process change nothing.

    remedy: what to tell whoever cannot have it.

    Raises UserError that names the process which uses the folder, OSError when the lock file cannot be made.
    """
    _take(folder, remedy)


@contextlib.contextmanager
def holding_folder(folder: Path, remedy: str) -> Iterator[None]:
    """Hold `folder` for this process in the block. Arguments and errors as for `hold_folder`."""
    lock = _take(folder, remedy)
    try:
        yield
    finally:
        _let_go(lock)


def is_held_elsewhere(folder: Path) -> bool:
    """Whether another process uses it, as far as this one may look."""
    with _guard:
        if any(_is_at(lock.fd, folder / LOCK_NAME) for lock in _held.values()):
            return False
        try:
            fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            _acquire(fd, folder / LOCK_NAME, "")
        except (UserError, OSError):
            return True
        finally:
            os.close(fd)
        return False


def _take(folder: Path, remedy: str) -> _Lock:
    with _guard:
        status = os.stat(folder)
        key = (status.st_dev, status.st_ino)
        lock = _held.get(key)
        # A folder that was deleted and made again may have the old one's inode, but not its lock file.
        if lock is not None and not _is_at(lock.fd, lock.path):
            del _held[key]
            os.close(lock.fd)
            lock = None
        if lock is None:
            path = folder / LOCK_NAME
            lock = _held[key] = _Lock(_lock(path, remedy), path)
        lock.num_holders += 1
        return lock


def _let_go(lock: _Lock) -> None:
    with _guard:
        lock.num_holders -= 1
        for key in [key for key, held in _held.items() if held is lock and not lock.num_holders]:
            del _held[key]
            _remove(lock)


def _remove(lock: _Lock) -> None:
    """The file is removed while it is still held, so that nobody loses a lock by it."""
    with contextlib.suppress(OSError):
        if _is_at(lock.fd, lock.path):
            os.unlink(lock.path)
    with contextlib.suppress(OSError):
        os.close(lock.fd)


def _lock(path: Path, remedy: str) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _acquire(fd, path, remedy)
            # Its holder may have removed the file between the two calls: then the lock guards nothing.
            if _is_at(fd, path):
                text = {"pid": os.getpid(), "host": socket.gethostname(), "start_time": psutil.Process().create_time()}
                os.ftruncate(fd, 0)
                os.pwrite(fd, json.dumps(text).encode(), 0)
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _acquire(fd: int, path: Path, remedy: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _read_holder(fd)
        if error.errno in _NO_FLOCK and not _may_live(holder):
            return
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, *_NO_FLOCK):
            raise
        who = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
        way_out = f"; or delete {path} when that process is over" if error.errno in _NO_FLOCK else ""
        raise UserError(
            f"{path.parent} is in use by {who}: two runs cannot share a folder; {remedy}{way_out}"
        ) from error


def _read_holder(fd: int) -> dict[str, Any] | None:
    """None for a file that is empty or is no lock file."""
    try:
        holder = json.loads(os.pread(fd, 4096, 0))
    except ValueError:
        return None
    types = {"pid": int, "host": str, "start_time": float}
    is_whole = isinstance(holder, dict) and all(isinstance(holder.get(name), types[name]) for name in types)
    return holder if is_whole else None


def _may_live(holder: dict[str, Any] | None) -> bool:
    if holder is None:
        return False
    if holder["host"] != socket.gethostname():
        return True  # there is no telling from here
    try:
        start_time = psutil.Process(holder["pid"]).create_time()
    except psutil.Error:
        return False
    # The kernel gives numbers of dead processes to new ones, which started later. It counts from the time of its boot,
    # which moves when the clock is set.
    return abs(start_time - holder["start_time"]) < CLOCK_SECONDS


def _is_at(fd: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)


def _give_back() -> None:
    """At the end of the process."""
    for lock in _held.values():
        _remove(lock)
    _held.clear()


def _forget() -> None:
    """In a forked process: a lock that it held as well would outlive its parent."""
    global _guard
    _guard = threading.Lock()
    for lock in _held.values():
        with contextlib.suppress(OSError):
            os.close(lock.fd)
    _held.clear()


atexit.register(_give_back)
os.register_at_fork(after_in_child=_forget)
