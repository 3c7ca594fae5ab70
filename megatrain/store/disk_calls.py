"""What the disk tier asks of the operating system, in one place, so that a test can put faults there.

Linux only: O_DIRECT, O_TMPFILE, fallocate. All calls release the interpreter lock.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Sequence
from typing import Any

_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, linux/falloc.h
_SYNC_RANGE = 0x1 | 0x2 | 0x4  # wait before, write, wait after: SYNC_FILE_RANGE_*, linux/fs.h
_PROT_NONE = 0x0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000  # asm-generic/mman.h; x86 and ARM


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, offset = ctypes.c_size_t, ctypes.c_int64
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, offset]
    libc.munmap.argtypes = [ctypes.c_void_p, size]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, offset, offset]
    libc.sync_file_range.argtypes = [ctypes.c_int, offset, offset, ctypes.c_uint]
    return libc


def _checked(result: Any, failure: Any = -1) -> Any:
    if result == failure:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


class DiskCalls:
    """Offsets and sizes in bytes. Every call raises OSError."""

    def open(self, path: str | os.PathLike[str], flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        """Bytes that were read into `view`, perhaps fewer than it holds."""
        return os.preadv(fd, [view], offset)

    def write(self, fd: int, view: memoryview, offset: int) -> int:
        """Bytes of `view` that were written, perhaps fewer than it holds."""
        return os.pwritev(fd, [view], offset)

    def reserve(self, fd: int, offset: int, num_bytes: int) -> None:
        """Blocks of the disk for this range, which reads as zeros."""
        os.posix_fallocate(fd, offset, num_bytes)

    def punch(self, fd: int, offset: int, num_bytes: int) -> None:
        """Give the blocks of this range back."""
        _checked(_libc().fallocate(fd, _PUNCH_HOLE, offset, num_bytes))

    def sync(self, fd: int, offset: int, num_bytes: int) -> None:
        """Return when this range has gone from the page cache to the disk; raise what the disk said."""
        try:
            # Not fdatasync at once: that waits for what other threads write too, and for the journal.
            _checked(_libc().sync_file_range(fd, offset, num_bytes, _SYNC_RANGE))
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
                raise
            os.fdatasync(fd)

    def drop_cache(self, fd: int, offset: int, num_bytes: int) -> None:
        """Take this range out of the page cache; only pages that are on the disk go."""
        os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def map(self, ranges: Sequence[tuple[int, int, int]]) -> int:
        """Address at which ranges of files (fd, offset, bytes) lie one behind the other, shared with the files."""
        num_bytes = sum(size for _, _, size in ranges)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        failed = ctypes.c_void_p(-1).value
        start = _checked(_libc().mmap(None, num_bytes, _PROT_NONE, flags, -1, 0), failed)
        address = start
        try:
            for fd, offset, size in ranges:
                protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
                _checked(_libc().mmap(address, size, protection, flags, fd, offset), failed)
                address += size
        except BaseException:
            self.unmap(start, num_bytes)
            raise
        return start

    def unmap(self, address: int, num_bytes: int) -> None:
        _checked(_libc().munmap(address, num_bytes))
