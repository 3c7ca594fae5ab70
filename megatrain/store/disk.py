"""The disk tier: space in one or several folders, read and written by threads past the page cache.

    store = DiskStore(["/fast1/homes", "/fast2/homes"])
    extent = store.allocate(num_bytes)      # reserved now, zeros
    extent.write(0, slot).wait()            # slot: flat uint8 tensor that starts on a page
    extent.read(0, slot).wait()
    extent.mapped()                         # the same bytes as one tensor, for whoever needs them in place

An extent is cut in as many contiguous parts as there are folders, so its I/O keeps all disks busy. The files have no
names: nothing is left behind, not even after a kill. Space is reserved when it is allocated, so that a full disk is an
error then and not hours later; it goes back when the extent and the tensors that map it are gone.
Rule: operations on the same bytes are ordered by fences alone; a buffer is the store's until its fence ends.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain.base.errors import DiskError, UserError
from megatrain.base.fence import Fence
from megatrain.base.paths import user_path
from megatrain.base.units import MIB
from megatrain.store.disk_calls import DiskCalls
from megatrain.store.disk_file import DiskFile
from megatrain.store.disk_sums import BlockGuard, DiskChecks, PageSums
from megatrain.store.disk_threads import Block, IoThreads, Meter, Transfer
from megatrain.store.tier import PAGE_BYTES, OwnProcess, round_up

_stores: weakref.WeakSet[DiskStore] = weakref.WeakSet()


def _close_all() -> None:
    """What was asked is done before the interpreter goes, and with it the buffers that threads are at."""
    for store in list(_stores):
        store.close()


atexit.register(_close_all)


class Disk:
    """A folder's file and threads."""

    def __init__(self, file: DiskFile, num_threads: int, meters: Meters) -> None:
        self.file = file
        self.threads = IoThreads(file.folder.name, num_threads, functools.partial(_move, file, meters))


class Meters:
    """Of all folders of a store together."""

    def __init__(self) -> None:
        self.read, self.write, self.both = Meter(), Meter(), Meter()


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of an extent that lie in one folder. `start` counts in the extent, `offset` in the file."""

    disk: Disk
    start: int
    offset: int
    num_bytes: int


class DiskStore:
    """
    Args:
        folders: one or several, each on a disk of its own for speed; made when they are not there. No other process
            can use them for as long as this one lives.
        num_threads: of each folder.
        block_bytes: of one read or write, a multiple of 4096.
        calls: the operating system.

    Raises UserError that names the folder and what to do.
    """

    def __init__(
        self,
        folders: Sequence[str | os.PathLike[str]],
        *,
        num_threads: int = 4,
        block_bytes: int = 8 * MIB,
        calls: DiskCalls | None = None,
    ) -> None:
        assert num_threads > 0 and block_bytes > 0 and block_bytes % PAGE_BYTES == 0
        if sys.platform != "linux":
            raise UserError("homes on disk need Linux: leave out offload_dir")
        self.block_bytes = block_bytes
        self.checks: DiskChecks | None = None
        """Of what extents write from now on, where that was asked for."""
        self._calls = calls or DiskCalls()
        self._owner = OwnProcess()
        self._lock = threading.Lock()
        self._meters = Meters()
        files = _open_files([user_path(folder, "offload_dir") for folder in folders], self._calls)
        self._disks = [Disk(file, num_threads, self._meters) for file in files]
        # The threads hold no store: one that is dropped without `close` ends them.
        weakref.finalize(self, _end, self._disks, self._owner).atexit = False
        _stores.add(self)

    # What it measured

    @property
    def is_direct(self) -> tuple[bool, ...]:
        """For each folder, whether its I/O goes past the page cache."""
        return tuple(disk.file.is_direct for disk in self._disks)

    @property
    def num_retries(self) -> int:
        """Calls that failed and were tried again."""
        return sum(disk.file.num_retries for disk in self._disks)

    @property
    def read_bytes(self) -> int:
        return self._meters.read.num_bytes

    @property
    def written_bytes(self) -> int:
        return self._meters.write.num_bytes

    @property
    def read_seconds(self) -> float:
        """In which at least one block was being read."""
        return self._meters.read.seconds

    @property
    def write_seconds(self) -> float:
        """In which at least one block was being written."""
        return self._meters.write.seconds

    @property
    def busy_seconds(self) -> float:
        """In which at least one block was being read or written."""
        return self._meters.both.seconds

    # What it does

    def allocate(self, num_bytes: int, owner: str = "") -> Extent:
        """Space for `num_bytes` of zeros. Raises UserError that names the folder which has too little.

        owner: whose bytes they will be, for messages.
        """
        self.check_process()
        with self._lock:
            return Extent(self, num_bytes, Space(self._reserve(round_up(num_bytes, PAGE_BYTES))), owner)

    def _reserve(self, num_bytes: int) -> list[Part]:
        parts: list[Part] = []
        start = 0
        file_ends = [disk.file.end for disk in self._disks]
        try:
            for number, disk in enumerate(self._disks, start=1):
                end = num_bytes * number // len(self._disks) // PAGE_BYTES * PAGE_BYTES
                if end > start:
                    parts.append(Part(disk, start, disk.file.extend(end - start), end - start))
                start = end
        except BaseException:
            for disk, file_end in zip(self._disks, file_ends, strict=True):
                disk.file.shrink(file_end)
            raise
        return parts

    def check_process(self) -> None:
        """Raise RefusedError in a forked process, which has none of the threads."""
        self._owner.check()

    def close(self) -> None:
        """End the threads when all that was asked is done. Extents cannot be used any more; mapped tensors can."""
        if not self._owner.is_this:
            return  # there are no threads to end, and the files are its parent's
        for disk in self._disks:
            disk.threads.close()
        for disk in self._disks:
            disk.file.close()


class Space:
    """Parts of files; given back when nothing reads or maps them any more."""

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        weakref.finalize(self, _release, parts, OwnProcess()).atexit = False


class Extent:
    """`num_bytes` of a store, whole pages on the disk."""

    def __init__(self, store: DiskStore, num_bytes: int, space: Space, owner: str = "") -> None:
        self.num_bytes = num_bytes
        self.owner = owner
        self._sums: PageSums | None = None
        self._store = store
        self._space = space

    def read(self, offset: int, tensor: torch.Tensor) -> Fence:
        """Fill `tensor` with the bytes from `offset`; returns at once.

        Args:
            offset: a multiple of 4096.
            tensor: flat uint8 on the CPU, its first byte on a page boundary. Its size is a multiple of 4096 (the
                last page can be asked for whole), or ends with the extent.

        Raises what ended the store's threads. The fence fails with DiskError.
        """
        return self._transfer(offset, tensor, is_write=False)

    def write(self, offset: int, tensor: torch.Tensor) -> Fence:
        """Put the bytes of `tensor` at `offset`; returns at once. Arguments and errors as for `read`."""
        return self._transfer(offset, tensor, is_write=True)

    def mapped(self, on_unmap: Callable[[], None] | None = None) -> torch.Tensor:
        """The bytes as one flat uint8 tensor, shared with the files, which lives as long as it is held.

        Linux keeps mappings and direct I/O of local file systems coherent: what is written here is read by `read`, and
        the other way round once the fence of `write` is passed. on_unmap: called when nobody holds it any more.
        Raises DiskError where files cannot be mapped.
        """
        if self.num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        calls = self._store._calls
        ranges = [(part.disk.file.fd, part.offset, part.num_bytes) for part in self._space.parts]
        try:
            address = calls.map(ranges)
        except OSError as error:
            folders = ", ".join(str(part.disk.file.folder) for part in self._space.parts)
            raise DiskError(
                f"{folders}: cannot map files ({error.strerror}): use another file system, or where memory for it is "
                "said to lack, raise vm.max_map_count (sysctl)"
            ) from error
        mapped_bytes = sum(part.num_bytes for part in self._space.parts)
        mapping = (ctypes.c_uint8 * mapped_bytes).from_address(address)
        weakref.finalize(mapping, _unmap, calls, address, mapped_bytes, self._space, on_unmap).atexit = False
        return torch.frombuffer(mapping, dtype=torch.uint8)[: self.num_bytes]

    def _transfer(self, offset: int, tensor: torch.Tensor, *, is_write: bool) -> Fence:
        self._store.check_process()
        self._check(offset, tensor)
        if tensor.numel() == 0:
            return Fence.done()
        checks = self._store.checks
        if is_write and checks is not None and self._sums is None:
            self._sums = checks.sums_of(self.num_bytes)
        transfer = Transfer(self)
        view = memoryview(tensor.numpy())
        queues = [(part.disk, self._blocks(part, transfer, offset, view, is_write)) for part in self._space.parts]
        transfer.num_left = sum(len(blocks) for _, blocks in queues)
        try:
            for disk, blocks in queues:
                if blocks:
                    disk.threads.put(blocks)
        except BaseException as error:  # an interrupt too: nobody will wait for the fence, and the buffer is used again
            transfer.cancel(error)
            raise
        return transfer.fence

    def _blocks(self, part: Part, transfer: Transfer, offset: int, view: memoryview, is_write: bool) -> list[Block]:
        """Those of the transfer's blocks that lie in `part`."""
        first, last = max(offset, part.start), min(offset + len(view), part.start + part.num_bytes)
        size = self._store.block_bytes
        owner, checks, sums = self.owner, self._store.checks, self._sums
        return [
            Block(
                transfer,
                view[at - offset : min(at + size, last) - offset],
                part.offset + at - part.start,
                is_write,
                BlockGuard(owner, at, checks, sums),
            )
            for at in range(first, last, size)
        ]

    def _check(self, offset: int, tensor: torch.Tensor) -> None:
        assert tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous() and not tensor.is_cuda
        assert tensor.data_ptr() % PAGE_BYTES == 0 or tensor.numel() == 0, "the buffer starts on a page boundary"
        end = offset + tensor.numel()
        assert offset >= 0 and offset % PAGE_BYTES == 0 and end <= round_up(self.num_bytes, PAGE_BYTES)
        assert end == self.num_bytes or end % PAGE_BYTES == 0, "only the end of the extent may lie within a page"


def _open_files(folders: Sequence[Path], calls: DiskCalls) -> list[DiskFile]:
    if not folders:
        raise UserError("offload_dir names no folder: give it one, or leave it out")
    files: list[DiskFile] = []
    try:
        for folder in folders:
            files.append(DiskFile(folder, calls))
            if any(os.path.samefile(folder, other.folder) for other in files[:-1]):
                raise UserError(f"offload_dir names {folder} twice: give one folder for each disk")
    except BaseException:
        for file in files:
            file.close()
        raise
    return files


def _move(file: DiskFile, meters: Meters, block: Block) -> None:
    running = (meters.both, meters.write if block.is_write else meters.read)
    for meter in running:
        meter.begin()
    num_bytes = 0
    try:
        move = functools.partial(
            file.transfer, block.view, block.offset, is_write=block.is_write, owner=block.guard.owner
        )
        if block.is_write:
            block.guard.write(move, block.view)
        else:
            block.guard.read(move, block.view, f"{file.folder}, offset {block.offset}")
        num_bytes = len(block.view)
    finally:
        for meter in running:
            meter.end(num_bytes)


def _end(disks: Sequence[Disk], owner: OwnProcess) -> None:
    if owner.is_this:
        for disk in disks:
            disk.threads.end()


def _release(parts: Sequence[Part], owner: OwnProcess) -> None:
    """A forked process drops its copies of extents whose files are its parent's."""
    if owner.is_this:
        for part in parts:
            part.disk.file.release(part.offset, part.num_bytes)


def _unmap(calls: DiskCalls, address: int, num_bytes: int, space: Space, on_unmap: Callable[[], None] | None) -> None:
    """`space` is held until here."""
    del space
    # First: from `unmap` on, another mapping may have the address.
    if on_unmap is not None:
        on_unmap()
    calls.unmap(address, num_bytes)
