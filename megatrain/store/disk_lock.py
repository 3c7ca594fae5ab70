"""One run a folder: `.megatrain.lock` is held by the process that uses it, for as long as it lives.

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
from pathlib import Path
from typing import Any

import psutil

from megatrain.base.errors import UserError

LOCK_NAME = ".megatrain.lock"
CLOCK_SECONDS = 5.0
"""Two readings of a process's start differ by less."""
_NO_FLOCK = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}

_held: dict[tuple[int, int], tuple[int, Path]] = {}
"""Device and inode of a folder -> descriptor and path of its lock file."""
_guard = threading.Lock()


def hold_folder(folder: Path) -> None:
    """Hold `folder` for this process from now on; further calls of this process change nothing.

    Raises UserError that names the process which uses the folder, OSError when the lock file cannot be made.
    """
    with _guard:
        status = os.stat(folder)
        key = (status.st_dev, status.st_ino)
        if key in _held and _is_at(*_held[key]):
            return
        # A folder that was deleted and made again may have the old one's inode, but not its lock file.
        stale = _held.pop(key, None)
        if stale is not None:
            os.close(stale[0])
        path = folder / LOCK_NAME
        _held[key] = (_lock(path), path)


def _lock(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _acquire(fd, path)
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


def _acquire(fd: int, path: Path) -> None:
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
            f"{path.parent} is in use by {who}: two runs cannot share a folder; give offload_dir another one{way_out}"
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
    """At the end of the process: the file is removed while it is still held, so that nobody loses a lock by it."""
    for fd, path in _held.values():
        with contextlib.suppress(OSError):
            if _is_at(fd, path):
                os.unlink(path)
            os.close(fd)
    _held.clear()


def _forget() -> None:
    """In a forked process: a lock that it held as well would outlive its parent."""
    global _guard
    _guard = threading.Lock()
    for fd, _ in _held.values():
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


atexit.register(_give_back)
os.register_at_fork(after_in_child=_forget)
