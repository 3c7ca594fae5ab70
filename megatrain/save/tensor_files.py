"""Safetensors files that are written as their tensors come, and read without being loaded.

`safetensors` writes a file out of tensors that are all in memory. Here names and shapes are known before and tensors
come group by group (a layer each), so that a checkpoint takes the memory of a layer. The layout is the one of
https://github.com/huggingface/safetensors: the length of a JSON header, the header, the bytes in its order.

Rule: a file is written once, from front to back, so its checksum is taken on the way and nothing is read again. The
disk gets it in pieces, not at the end: dirty pages of a whole model would fill the memory that training lives in.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain.base.errors import UserError
from megatrain.base.units import MIB
from megatrain.save.checkpoints import Written

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
_CHUNK_BYTES = 32 * MIB
_SYNC_BYTES = 256 * MIB


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
        check: called between pieces; what it raises ends the writing.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], check: Callable[[], None]) -> None:
        self._left = list(reversed(entries))
        self._check = check
        self._digest = hashlib.sha256()
        self._num_bytes = self._unsynced_bytes = 0
        # Checksum and disk go on side by side with the writing, one piece behind.
        self._hashing, self._syncing = (ThreadPoolExecutor(1, thread_name_prefix="megatrain-save") for _ in range(2))
        self._sync: Future[None] | None = None
        self._file = path.open("wb", buffering=0)
        self._put(memoryview(_header(entries)))

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """tensor: as its entry says, on the CPU."""
        entry = self._left.pop()
        assert (name, tensor.dtype, tuple(tensor.shape)) == (entry.name, entry.dtype, entry.shape), entry
        if tensor.numel():
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            self._put(memoryview(flat.numpy()))

    def close(self) -> Written:
        """The file is complete, and on the disk."""
        assert not self._left, f"{self._left[-1].name} was not written"
        self._wait_for_sync()
        os.fsync(self._file.fileno())
        self.abandon()
        return Written(num_bytes=self._num_bytes, checksum=self._digest.hexdigest())

    def abandon(self) -> None:
        """Nothing more is written."""
        self._hashing.shutdown()
        self._syncing.shutdown()
        self._file.close()

    def _put(self, data: memoryview) -> None:
        for start in range(0, len(data), _CHUNK_BYTES):
            self._check()
            piece = data[start : start + _CHUNK_BYTES]
            hashed = self._hashing.submit(self._digest.update, piece)
            try:
                self._write_piece(piece)
            finally:
                hashed.result()  # its memory is the caller's
            self._num_bytes += len(piece)
            self._unsynced_bytes += len(piece)
            if self._unsynced_bytes >= _SYNC_BYTES:
                self._wait_for_sync()
                self._sync = self._syncing.submit(self._give_to_disk, self._num_bytes)
                self._unsynced_bytes = 0

    def _write_piece(self, piece: memoryview) -> None:
        while len(piece):
            piece = piece[self._file.write(piece) :]

    def _wait_for_sync(self) -> None:
        if self._sync is not None:
            self._sync.result()

    def _give_to_disk(self, num_bytes: int) -> None:
        os.fdatasync(self._file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, num_bytes, os.POSIX_FADV_DONTNEED)


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
        if self._file is None:
            entries = [entry for index in self._files[number] for entry in self._groups[index] or ()]
            self._file = TensorFile(self._folder / self._name(number), entries, self._check)
        for entry in group:
            self._file.write(entry.name, tensors[entry.name])
        self._next += 1
        if self._next == self._files[number].stop:
            file, self._file = self._file, None
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
    for index, group in enumerate(groups):
        group_bytes = shard_bytes if group is None else sum(entry.num_bytes for entry in group)
        if size and group_bytes and size + group_bytes > shard_bytes:
            files.append(range(start, index))
            start, size = index, 0
        size += group_bytes
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

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def tensor_files(folder: Path, stem: str) -> list[Path]:
    """`STEM.safetensors`, or the shards that its index names; none where neither is there."""
    index = folder / f"{stem}{SUFFIX}.index.json"
    if (folder / f"{stem}{SUFFIX}").is_file():
        return [folder / f"{stem}{SUFFIX}"]
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / name for name in sorted(names)]
    return []
