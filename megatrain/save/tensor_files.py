"""Safetensors files that are written as their tensors come, and read without being loaded.

`safetensors` writes a file out of tensors that are all in memory. Here names and shapes are known before and tensors
come group by group (a layer each), so that a checkpoint takes the memory of a layer. The layout is the one of
https://github.com/huggingface/safetensors: the length of a JSON header, the header, the bytes in its order.

    tensors -> blocks (page-aligned, used again) -> threads: check sum of the block, write past the page cache

Rule: a file is written once, from front to back, and nothing is read again. It goes past the page cache where the file
system can do that: dirty pages of a whole model would fill the memory that training lives in, and copying into them
takes longer than the disk.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain.base.cgroup import usable_cores
from megatrain.base.errors import UserError
from megatrain.save.checkpoints import PIECE_BYTES, Written, checksum_of_piece, checksum_of_pieces
from megatrain.save.failed_writes import writing
from megatrain.store.disk_calls import DiskCalls
from megatrain.store.tier import PAGE_BYTES, round_up

SUFFIX = ".safetensors"
WEIGHTS_STEM = "model"
SHARD_BYTES = 5 * 10**9
"""Of a file, unless a single layer has more."""

_DTYPE_NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    **{torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64"},
}
_MOST_THREADS = 8
"""Each takes the check sum of a block (1.4 GB/s, measured) and then writes it: with four of them a disk of 2 GB/s waits
for a third of the time (estimated)."""
DISK_CALLS = DiskCalls()


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Entry:
        """tensor: one of that dtype and shape, on whatever device."""
        return cls(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))


class TensorFile:
    """One file. Raises OSError as writing does.

    Args:
        entries: what will be written, in order.
        check: called between blocks; what it raises ends the writing.
        calls: to the operating system.
    """

    def __init__(
        self, path: Path, entries: Sequence[Entry], check: Callable[[], None], calls: DiskCalls = DISK_CALLS
    ) -> None:
        header = _header(entries)
        self._left = list(reversed(entries))
        self._check, self._calls, self._path = check, calls, path
        self._fd = _open(path, calls)
        num_threads = max(2, min(_MOST_THREADS, usable_cores() // 2))
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="megatrain-save")
        self._free = [_Block() for _ in range(num_threads + 1)]
        self._block = self._free.pop()
        self._under_way: deque[tuple[_Block, Future[bytes]]] = deque()
        self._digests: list[bytes] = []
        self._num_bytes = 0
        self._filled_bytes = 0
        self._put(torch.frombuffer(bytearray(header), dtype=torch.uint8))

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """tensor: as its entry says, on the CPU."""
        entry = self._left.pop()
        assert (name, tensor.dtype, tuple(tensor.shape)) == (entry.name, entry.dtype, entry.shape), entry
        if tensor.numel():
            self._put(tensor.detach().contiguous().view(-1).view(torch.uint8))

    def close(self) -> Written:
        """The file is complete, and on the disk."""
        assert not self._left, f"{self._left[-1].name} was not written"
        if self._filled_bytes or not self._num_bytes:
            self._send()
        while self._under_way:
            self._wait_for_one()
        with writing(self._path):
            os.ftruncate(self._fd, self._num_bytes)  # the last block is written in whole pages
            os.fsync(self._fd)
        self.abandon()
        return Written(num_bytes=self._num_bytes, checksum=checksum_of_pieces(self._digests))

    def abandon(self) -> None:
        """Nothing more is written."""
        self._pool.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _put(self, data: torch.Tensor) -> None:
        start = 0
        while start < data.numel():
            size = min(data.numel() - start, PIECE_BYTES - self._filled_bytes)
            self._block.tensor[self._filled_bytes : self._filled_bytes + size].copy_(data[start : start + size])
            self._filled_bytes += size
            start += size
            if self._filled_bytes == PIECE_BYTES:
                self._send()

    def _send(self) -> None:
        """The block is full, or the last one."""
        self._check()
        self._under_way.append(
            (self._block, self._pool.submit(self._write_block, self._block, self._filled_bytes, self._num_bytes))
        )
        self._num_bytes += self._filled_bytes
        self._filled_bytes = 0
        if not self._free:
            self._wait_for_one()
        self._block = self._free.pop()

    def _wait_for_one(self) -> None:
        block, written = self._under_way.popleft()
        self._digests.append(written.result())
        self._free.append(block)

    def _write_block(self, block: _Block, num_bytes: int, offset: int) -> bytes:
        """Returns its checksum."""
        digest = checksum_of_piece(block.view[:num_bytes])
        view = block.view[: round_up(num_bytes, PAGE_BYTES)]
        with writing(self._path):
            while len(view):
                written_bytes = self._write_some(view, offset)
                view, offset = view[written_bytes:], offset + written_bytes
        return digest

    def _write_some(self, view: memoryview, offset: int) -> int:
        """Returns how many bytes; 0 where it is to be tried again."""
        try:
            return self._calls.write(self._fd, view, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not _end_direct(self._fd):
                raise
            return 0


class _Block:
    """A piece of a file in memory."""

    def __init__(self) -> None:
        self.view = memoryview(mmap.mmap(-1, PIECE_BYTES))
        self.tensor = torch.frombuffer(self.view, dtype=torch.uint8)


def _open(path: Path, calls: DiskCalls) -> int:
    """Past the page cache, where the file system can do that."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return calls.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    return calls.open(path, flags)


def _end_direct(fd: int) -> bool:
    """Write through the page cache from now on; False where that was so. Where a part of a page can be written alone
    (behind a short write, below a limit of file sizes), the kernel says EINVAL past the page cache, and through it goes
    on, or says what is wrong."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return bool(flags & os.O_DIRECT)


class Shards:
    """Tensors by groups in one file, `STEM.safetensors`, or in several with an index, as transformers names them.

    Args:
        groups: what will be written, group by group. A file holds whole groups. None: a group whose sizes are known
            when it is written, in a file of its own.
        metadata: for the index, beside the total size.
        check: see `TensorFile`.
    """

    def __init__(
        self,
        folder: Path,
        stem: str,
        groups: Sequence[Sequence[Entry] | None],
        *,
        metadata: Mapping[str, Any] | None = None,
        shard_bytes: int = SHARD_BYTES,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder, self._stem, self._check, self._metadata = folder, stem, check, dict(metadata or {})
        self._groups = [None if group is None else _in_order(group) for group in groups]
        self._files = _files(self._groups, shard_bytes)
        self._next = 0
        self._file: TensorFile | None = None
        self.written: dict[str, Written] = {}
        """By name, the files that are complete."""

    def write_group(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The next group, all of it."""
        number = next(i for i, groups in enumerate(self._files) if self._next in groups)
        group = self._groups[self._next]
        if group is None:
            group = self._groups[self._next] = _in_order([Entry.of(name, tensor) for name, tensor in tensors.items()])
        is_last = self._next + 1 == self._files[number].stop
        if self._file is None and (group or is_last):
            # Groups without tensors may come before the one whose sizes are known now.
            entries = [entry for index in self._files[number] for entry in self._groups[index] or ()]
            self._file = TensorFile(self._folder / self._name(number), entries, self._check)
        file = self._file
        for entry in group if file is not None else ():
            file.write(entry.name, tensors[entry.name])
        self._next += 1
        if is_last and file is not None:
            self._file = None
            self.written[self._name(number)] = file.close()

    def close(self) -> None:
        """All groups are written: so is the index, if there are several files."""
        assert self._next == len(self._groups), f"{len(self._groups) - self._next} groups were not written"
        if len(self._files) > 1:
            written = [
                (entry, self._name(number))
                for number, groups in enumerate(self._files)
                for index in groups
                for entry in self._groups[index] or ()
            ]
            places = {entry.name: name for entry, name in written}
            metadata = {**self._metadata, "total_size": sum(entry.num_bytes for entry, _ in written)}
            text = json.dumps({"metadata": metadata, "weight_map": dict(sorted(places.items()))}, indent=2)
            (self._folder / f"{self._stem}{SUFFIX}.index.json").write_text(text + "\n", encoding="utf-8")

    def abandon(self) -> None:
        """Nothing more is written."""
        if self._file is not None:
            self._file.abandon()

    def _name(self, number: int) -> str:
        if len(self._files) == 1:
            return f"{self._stem}{SUFFIX}"
        return f"{self._stem}-{number + 1:05}-of-{len(self._files):05}{SUFFIX}"


def _in_order(group: Sequence[Entry]) -> list[Entry]:
    """Wide numbers first, so that each lies at a multiple of its size."""
    return sorted(group, key=lambda entry: -entry.dtype.itemsize)


def _files(groups: Sequence[Sequence[Entry] | None], shard_bytes: int) -> list[range]:
    """Numbers of the groups of each file."""
    files: list[range] = []
    start = size = 0
    has_tensors = is_closed = False
    for index, group in enumerate(groups):
        group_bytes = sum(entry.num_bytes for entry in group or ())
        is_over = size > 0 and group_bytes > 0 and size + group_bytes > shard_bytes
        if (has_tensors and group is None) or (is_closed and group != []) or is_over:
            files.append(range(start, index))
            start, size, has_tensors, is_closed = index, 0, False, False
        size += group_bytes
        has_tensors |= group != []
        is_closed |= group is None
    return [*files, range(start, len(groups))] if groups else []


def _header(entries: Sequence[Entry]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        if entry.dtype not in _DTYPE_NAMES:
            raise UserError(f"{entry.name}: safetensors files cannot hold {entry.dtype}")
        stop = offset + entry.num_bytes
        header[entry.name] = {
            "dtype": _DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class MappedTensors(Mapping[str, torch.Tensor]):
    """The tensors of `STEM.safetensors`, or of its shards, by name: each is mapped when it is asked for, none is read.
    Empty where there are no such files. Raises UserError, naming the file, for one that cannot be read."""

    def __init__(self, folder: Path, stem: str) -> None:
        from safetensors import SafetensorError, safe_open

        self._files: dict[str, Any] = {}
        for path in tensor_files(folder, stem):
            try:
                file = safe_open(path, framework="pt")
                self._files |= dict.fromkeys(file.keys(), file)
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} cannot be read ({error}): it is damaged, or incomplete") from error

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files[name].get_tensor(name)

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Its dtype, as safetensors names it, and its shape."""
        of = self._files[name].get_slice(name)
        return of.get_dtype(), tuple(of.get_shape())

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def tensor_files(folder: Path, stem: str) -> list[Path]:
    """`STEM.safetensors`, or the shards that its index names; none where neither is there. Raises UserError for an
    index that cannot be read."""
    index = folder / f"{stem}{SUFFIX}.index.json"
    if (folder / f"{stem}{SUFFIX}").is_file():
        return [folder / f"{stem}{SUFFIX}"]
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{index} cannot be read ({error}): it is damaged, or incomplete") from error
        return [folder / name for name in sorted(names)]
    return []
