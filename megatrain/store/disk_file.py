"""One nameless file in one folder: past the page cache where the file system allows it, through it where not.

Rule: offsets are multiples of PAGE_BYTES, and so are the addresses of buffers. What a short call leaves is fetched by
further ones; a call that fails is tried again, since disks and network file systems recover.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import resource
import secrets
import threading
import time
from pathlib import Path

import psutil

from megatrain.base.errors import DiskError, UserError
from megatrain.base.folder_lock import hold_folder
from megatrain.base.mounts import file_system_of
from megatrain.base.paths import dead_link
from megatrain.base.units import format_bytes
from megatrain.store.disk_calls import DiskCalls
from megatrain.store.tier import PAGE_BYTES

logger = logging.getLogger("megatrain")

FILE_PREFIX = ".megatrain-"
NUM_RETRIES = 5
FIRST_PAUSE_SECONDS = 0.02
"""Before the first retry of a call; each further pause is twice as long."""
_FULL = {errno.ENOSPC, errno.EDQUOT}
_PERMANENT = {*_FULL, errno.EFBIG}
_NOT_SUPPORTED = {errno.EINVAL, errno.EOPNOTSUPP}
_NO_NAMELESS_FILES = {*_NOT_SUPPORTED, errno.EISDIR, errno.ENOENT}


class DiskFile:
    """
    Args:
        folder: made when it is not there. Held for this process (`hold_folder`).

    Raises UserError when the folder cannot be written or is in use by another process.
    """

    def __init__(self, folder: Path, calls: DiskCalls) -> None:
        self.folder = folder
        self.num_retries = 0
        self.end = 0
        """Bytes of the file so far."""
        self._calls = calls
        self._process_id = os.getpid()
        # Re-entrant: the garbage collector may call `release` at any place of the thread that holds it.
        self._lock = threading.RLock()
        self._fd = -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            hold_folder(folder, "give offload_dir another one")
            self._name_leftovers()
            self._fd, self.is_direct = self._open()
            self._name_memory()
        except OSError as error:
            link = dead_link(folder)
            remedy = _too_large(error) or "give offload_dir a folder that can be written and has space"
            raise UserError(
                f"{folder} cannot be used for files of homes ({link or error.strerror}): {remedy}"
            ) from error

    @property
    def fd(self) -> int:
        """Raises RuntimeError once closed: its number may belong to another file by then."""
        if self._fd < 0:
            raise RuntimeError("the disk store is closed")
        return self._fd

    def close(self) -> None:
        """The space goes back to the disk once mappings of the file are gone too."""
        if os.getpid() != self._process_id:
            return  # forked: a thread that is not here may hold the lock, and the descriptor goes with the process
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def __del__(self) -> None:
        self.close()

    # Space

    def extend(self, num_bytes: int) -> int:
        """Reserve `num_bytes` more; returns their offset.

        Raises UserError when the disk is full.
        """
        offset = self.end
        try:
            self._calls.reserve(self.fd, offset, num_bytes)
        except OSError as error:
            self.shrink(offset)  # a full disk has reserved what there was, and would report nothing free
            what = f"{self.folder}: cannot reserve {format_bytes(num_bytes)} ({error.strerror})"
            if remedy := _too_large(error):
                raise UserError(f"{what}: {remedy}") from error
            free_bytes = psutil.disk_usage(str(self.folder)).free
            raise UserError(
                f"{what}, {format_bytes(free_bytes)} are free: make room there, or give offload_dir a folder on a "
                "larger disk"
            ) from error
        self.end = offset + num_bytes
        return offset

    def shrink(self, end: int) -> None:
        """Give back all space from `end` on."""
        self.end = end
        with contextlib.suppress(OSError):
            os.ftruncate(self.fd, end)

    def release(self, offset: int, num_bytes: int) -> None:
        """Give the space of a range back, where the file system can; elsewhere it comes back with `close`."""
        with self._lock, contextlib.suppress(OSError):
            if self._fd >= 0:
                self._calls.punch(self._fd, offset, num_bytes)

    # Bytes

    def transfer(self, view: memoryview, offset: int, *, is_write: bool, owner: str = "") -> None:
        """Read or write all of `view`. A page that it fills in part goes through a buffer, and is padded with zeros.

        owner: whose bytes they are, for messages.

        Raises DiskError.
        """
        whole = len(view) - len(view) % PAGE_BYTES
        self._transfer(view[:whole], offset, is_write, owner)
        rest = view[whole:]
        if not rest:
            return
        page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        if is_write:
            page[: len(rest)] = rest
        self._transfer(page, offset + whole, is_write, owner)
        if not is_write:
            rest[:] = page[: len(rest)]

    def _transfer(self, view: memoryview, offset: int, is_write: bool, owner: str) -> None:
        done, num_failures = 0, 0
        while done < len(view):
            moved, error = self._call(view[done:], offset + done, is_write)
            done += moved
            num_failures = 0 if moved else num_failures + 1
            if num_failures > NUM_RETRIES or (error is not None and error.errno in _PERMANENT):
                raise self._failure(error, offset + done, len(view) - done, is_write, owner) from error
            if num_failures:
                self.num_retries += 1
                self._warn(error, offset + done, is_write, owner)
                time.sleep(FIRST_PAUSE_SECONDS * 2 ** (num_failures - 1))
        if not self.is_direct and done:
            # Host memory is for homes that live there; a cache that cannot be dropped yields when memory is short.
            with contextlib.suppress(OSError):
                self._calls.drop_cache(self.fd, offset, done)

    def _call(self, view: memoryview, offset: int, is_write: bool) -> tuple[int, OSError | None]:
        """Bytes from which the next call can go on, and what went wrong."""
        call = self._calls.write if is_write else self._calls.read
        try:
            moved = call(self.fd, view, offset)
            if is_write and not self.is_direct:
                self._calls.sync(self.fd, offset, moved)  # else nobody hears that the disk failed
        except OSError as error:
            return 0, error
        return moved - moved % PAGE_BYTES, None

    def _warn(self, error: OSError | None, offset: int, is_write: bool, owner: str) -> None:
        what, of = "write" if is_write else "read", f" of {owner}" if owner else ""
        logger.warning("%s: could not %s%s at offset %d (%s): tried again", self.folder, what, of, offset, _code(error))

    def _failure(self, error: OSError | None, offset: int, num_bytes: int, is_write: bool, owner: str) -> DiskError:
        what, code = "write" if is_write else "read", _code(error)
        of = f" of {owner}" if owner else ""
        if error is not None and error.errno in _FULL:
            way_out = "this file system does not keep what it reserved (copy on write, or a quota): make room"
        elif error is not None and error.errno == errno.EFBIG:
            way_out = _too_large(error)
        else:
            way_out = "look into the kernel's log and replace the disk, or give offload_dir another folder"
        failed = f"could not {what} {num_bytes} bytes{of} at offset {offset}"
        return DiskError(f"{self.folder}: {failed} ({code}): {way_out}")

    # Opening

    def _open(self) -> tuple[int, bool]:
        """Descriptor, and whether it goes past the page cache, which only a write and a read can tell."""
        fd = -1
        try:
            fd = self._open_nameless(os.O_DIRECT)
            self._try_page(fd)
            return fd, True
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if error.errno not in _NOT_SUPPORTED:
                raise
        logger.warning(
            "%s (%s) refuses direct I/O: its reads and writes go through the page cache, which costs a copy of every "
            "byte on the CPU and host memory in passing. A folder on a local ext4 or xfs has no such cost.",
            self.folder,
            file_system_of(self.folder),
        )
        return self._open_nameless(0), False

    def _open_nameless(self, flags: int) -> int:
        flags |= os.O_RDWR
        try:
            return self._calls.open(self.folder, flags | os.O_TMPFILE)
        except OSError as error:
            if error.errno not in _NO_NAMELESS_FILES:
                raise
        path = self.folder / f"{FILE_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            return self._calls.open(path, flags | os.O_CREAT | os.O_EXCL)
        finally:
            # Some kernels leave the file there when they refuse O_DIRECT.
            path.unlink(missing_ok=True)

    def _try_page(self, fd: int) -> None:
        written, read = (memoryview(mmap.mmap(-1, PAGE_BYTES)) for _ in range(2))
        written[:] = secrets.token_bytes(PAGE_BYTES)
        self._calls.reserve(fd, 0, PAGE_BYTES)
        self._calls.write(fd, written, 0)
        self._calls.read(fd, read, 0)
        os.ftruncate(fd, 0)
        if written != read:
            raise OSError(errno.EINVAL, "what was written past the page cache was not read back")

    def _name_leftovers(self) -> None:
        """No other process uses the folder: files of that name were left by a run killed in the middle of opening."""
        names = sorted(name for name in os.listdir(self.folder) if name.startswith(FILE_PREFIX))
        if names:
            logger.warning("%s has files that a killed run left, delete them: %s", self.folder, ", ".join(names))

    def _name_memory(self) -> None:
        kind = file_system_of(self.folder)
        if kind in ("tmpfs", "ramfs"):
            logger.warning(
                "%s (%s) lies in host memory: homes there save none. Give offload_dir a folder on a disk.",
                self.folder,
                kind,
            )


def _code(error: OSError | None) -> str:
    return "the file ends there" if error is None else f"errno {error.errno}, {error.strerror}"


def _too_large(error: OSError) -> str:
    """What to do about a file that may not be as large as it would have to be; empty for another error."""
    if error.errno != errno.EFBIG:
        return ""
    largest_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest_bytes == resource.RLIM_INFINITY:
        return "its file system has no larger files: give offload_dir another folder, or several on several disks"
    return f"files of this process may have {format_bytes(largest_bytes)} at most: raise it, `ulimit -f unlimited`"
