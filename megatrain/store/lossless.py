"""Moments in fewer bytes with every bit kept: fp32 optimizer state, entropy-coded.

A moment is cut into pieces of PIECE numbers, each coded on its own (`store/planes.py`): an update decodes one, changes
it and codes it again, while other threads do the same elsewhere. The fp32 moment never stands whole.

Bit-exact moments take 25 to 27 bits a number (`benchmarks/compression.py`). The mantissas alone are 22.8 bits of noise,
so formats of a few bits (`store/codecs.py`) cannot be exact.

Rule: a piece has a fixed place in one mapping and is rewritten there; pages beyond its end are given back. As objects
on the heap, of another size each step, pieces came to take 1.3 to 1.7 times their bytes after 30 steps [measured].

What it gives up: an interrupted `encode_` leaves its piece undefined; a forked process sees what its parent writes, as
in `store/memory.py`.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
import zlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from megatrain.base.errors import UserError
from megatrain.store import planes
from megatrain.store.planes import PIECE
from megatrain.store.tier import PAGE_BYTES, round_up

HEADER_BYTES = 36
"""Of a piece, next to its content, which is never larger than its fp32 numbers."""

_SURPLUS_BYTES = 2 * PAGE_BYTES  # what a piece may hold beyond its end: giving back a page costs more than filling it

_ENTRY = struct.Struct("<B5B2x5III")  # a header and the checksum of the content
_PACK_HEAD = struct.Struct("<8sQII")
_MAGIC = b"MTLOSS01"


class LosslessMoment:
    """One moment, (numel,) fp32, held in fewer bytes. Different pieces may be read and written by different threads.

    A start is a multiple of PIECE; a stop too, or `numel`.
    """

    def __init__(self, numel: int, memory: Tensor | None = None) -> None:
        """All zeros, which takes HEADER_BYTES a piece. Address space is reserved for `numel` fp32 numbers.

        memory: flat uint8 of 4 * numel bytes or more to lie in, a file's for example. None: memory of its own, of which
            it gives back what it does not need.
        """
        self.numel = numel
        self._headers = [planes.Header(planes.CONSTANT)] * -(-numel // PIECE)
        self._held_bytes = [0] * len(self._headers)
        self._mapping: mmap.mmap | None = None
        if memory is not None:
            self._memory = memory.numpy()
            return
        self._mapping = mmap.mmap(-1, max(PAGE_BYTES, round_up(4 * numel, PAGE_BYTES)))
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            _advise(self._mapping, mmap.MADV_NOHUGEPAGE, 0, len(self._mapping))
        self._memory = np.frombuffer(self._mapping, dtype=np.uint8)

    @property
    def num_bytes(self) -> int:
        """Bytes held now, whole pages counted."""
        return sum(self._held_bytes) + HEADER_BYTES * len(self._headers)

    @property
    def num_coded_bytes(self) -> int:
        """Bytes of the code itself; `pack` adds a few to it."""
        return sum(header.num_bytes for header in self._headers) + HEADER_BYTES * len(self._headers)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of each piece, in order."""
        for start in range(0, self.numel, PIECE):
            yield start, min(start + PIECE, self.numel)

    def decode(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """The numbers [start, stop): fp32, flat. out: (stop - start,) fp32 on the CPU to write into, and returned."""
        self._check_range(start, stop)
        out = torch.empty(stop - start, dtype=torch.float32) if out is None else out
        bits = _bits_of(out, stop - start)
        for first in range(start, stop, PIECE):
            number, last = first // PIECE, min(first + PIECE, stop)
            planes.decode(self._headers[number], self._piece_memory(number), bits[first - start : last - start])
        return out

    def encode_(self, start: int, values: Tensor) -> None:
        """Store `values` ((n,) fp32 on the CPU) as the numbers from `start` on."""
        stop = start + values.numel()
        self._check_range(start, stop)
        bits = _bits_of(values, values.numel())
        for first in range(start, stop, PIECE):
            self._store(first // PIECE, *planes.encode(bits[first - start : first - start + PIECE]))

    @contextlib.contextmanager
    def undone_on_fault(self, start: int) -> Iterator[None]:
        """Where the block raises, the piece from `start` on is again what it was."""
        number = start // PIECE
        header = self._headers[number]
        content = self._piece_memory(number)[: header.num_bytes].copy()
        try:
            yield
        except BaseException:
            self._store(number, header, [content])
            raise

    def to_tensor(self) -> Tensor:
        """The whole moment: (numel,) fp32. For tests and conversion; an update goes by pieces."""
        return self.decode(0, self.numel)

    def copy_(self, values: Tensor) -> None:
        """Store all of `values`: (numel,) fp32, on any device."""
        if values.numel() != self.numel:
            raise ValueError(f"a moment of {self.numel} numbers cannot take {values.numel()}")
        for start, stop in self.pieces():
            self.encode_(start, values[start:stop].detach().cpu())

    def zero_(self) -> None:
        """All zeros again."""
        for number in range(len(self._headers)):
            self._store(number, planes.Header(planes.CONSTANT), [])

    def pack(self) -> Tensor:
        """The moment as one flat uint8 tensor, for a checkpoint."""
        contents = [self._piece_memory(i)[: header.num_bytes] for i, header in enumerate(self._headers)]
        table = b"".join(
            _ENTRY.pack(header.code, *header.section_codes, *header.section_bytes, header.constant, zlib.crc32(content))
            for header, content in zip(self._headers, contents, strict=True)
        )
        head = _PACK_HEAD.pack(_MAGIC, self.numel, PIECE, zlib.crc32(table, self.numel & 0xFFFFFFFF))
        parts = [np.frombuffer(head + table, dtype=np.uint8), *contents]
        return torch.from_numpy(np.concatenate(parts))

    @classmethod
    def unpack(cls, packed: Tensor) -> LosslessMoment:
        """A moment out of what `pack` returned. Raises UserError, naming the fault, where that is cut or damaged."""
        data = packed.detach().cpu().contiguous().numpy().view(np.uint8).reshape(-1)
        numel, entries = _read_table(data)
        moment = cls(numel)
        offset = len(data) - sum(header.num_bytes for header, _ in entries)
        for number, (header, checksum) in enumerate(entries):
            content = data[offset : offset + header.num_bytes]
            if zlib.crc32(content) != checksum:
                raise _damaged(f"the checksum of piece {number} of {len(entries)} differs")
            moment._store(number, header, [content])
            offset += header.num_bytes
        return moment

    def _piece_memory(self, number: int) -> planes.Bytes:
        return self._memory[4 * PIECE * number : 4 * PIECE * (number + 1)]

    def _store(self, number: int, header: planes.Header, contents: list[planes.Bytes]) -> None:
        """Write a piece to its place, and give back the pages that it no longer needs."""
        memory, offset = self._piece_memory(number), 0
        for content in contents:
            memory[offset : offset + len(content)] = content
            offset += len(content)
        self._headers[number] = header
        used_bytes, held_bytes = round_up(offset, PAGE_BYTES), self._held_bytes[number]
        has_surplus = held_bytes - used_bytes > _SURPLUS_BYTES
        if self._mapping is not None and has_surplus and hasattr(mmap, "MADV_REMOVE"):
            start = 4 * PIECE * number + used_bytes
            if _advise(self._mapping, mmap.MADV_REMOVE, start, held_bytes - used_bytes):
                held_bytes = used_bytes
        self._held_bytes[number] = max(used_bytes, held_bytes)

    def _check_range(self, start: int, stop: int) -> None:
        is_whole = start % PIECE == 0 and (stop % PIECE == 0 or stop == self.numel)
        if not (is_whole and 0 <= start <= stop <= self.numel):
            raise ValueError(f"[{start}, {stop}) are not whole pieces of {PIECE} of a moment of {self.numel} numbers")


def _advise(mapping: mmap.mmap, advice: int, start: int, num_bytes: int) -> bool:
    """False where this system does not know the advice."""
    try:
        mapping.madvise(advice, start, num_bytes)
    except OSError:
        return False
    return True


def _bits_of(tensor: Tensor, numel: int) -> np.ndarray:
    """The bits of a flat fp32 tensor, as a view: (numel,) uint32."""
    if tensor.dtype != torch.float32 or tensor.shape != (numel,) or tensor.device.type != "cpu":
        raise ValueError(
            f"a moment's numbers are ({numel},) float32 on the CPU, not {tuple(tensor.shape)} {tensor.dtype} "
            f"on {tensor.device}"
        )
    if not tensor.is_contiguous():
        raise ValueError("a moment's numbers must be contiguous: pass tensor.contiguous()")
    return tensor.detach().numpy().view(np.uint32)


def _read_table(data: planes.Bytes) -> tuple[int, list[tuple[planes.Header, int]]]:
    """Of a packed moment: how many numbers it has, and each piece's header and checksum. Raises UserError."""
    if len(data) < _PACK_HEAD.size:
        raise _damaged(f"it has {len(data)} bytes, less than its head")
    magic, numel, piece, checksum = _PACK_HEAD.unpack_from(data)
    if magic != _MAGIC or piece != PIECE:
        raise _damaged(f"it begins with {magic!r}, pieces of {piece}, in place of {_MAGIC!r}, pieces of {PIECE}")
    content_start = _PACK_HEAD.size + -(-numel // PIECE) * _ENTRY.size
    if len(data) < content_start:
        raise _damaged(f"it has {len(data)} bytes, less than the table of its {numel} numbers")
    table = data[_PACK_HEAD.size : content_start]
    if zlib.crc32(table, numel & 0xFFFFFFFF) != checksum:
        raise _damaged("the checksum of its table differs")
    entries = [
        (planes.Header(code, tuple(fields[:5]), tuple(fields[5:10]), fields[10]), fields[11])
        for code, *fields in _ENTRY.iter_unpack(table)
    ]
    expected_bytes = content_start + sum(header.num_bytes for header, _ in entries)
    if len(data) != expected_bytes:
        raise _damaged(f"it has {len(data)} bytes in place of {expected_bytes}")
    return numel, entries


def _damaged(fault: str) -> UserError:
    return UserError(f"packed moment: {fault}. It is truncated, damaged or of another version: use another checkpoint")
