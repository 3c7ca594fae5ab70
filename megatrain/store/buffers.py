"""Host buffers of varied sizes that are used again and again, such as those of activations.

What was needed most at one time is kept, in chunks of which buffers are cut. At first a chunk is made for each buffer.
Sizes that vary do not fit between what is in use, though there were room in all: that takes more chunks. When those
come to a quarter of all, one chunk takes the place of all, as large as what was needed most; but not before none is in
use, so between two steps. From then on only what needs more than ever before takes memory, which costs 0.05-0.1 s/GiB
where it is page-locked.
Rule: free chunks make room for new ones, so that beside what is needed most the pool holds only the gaps between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatrain.store.memory import HostMemory
from megatrain.store.tier import PAGE_BYTES, round_up

MAX_GAP_SHARE = 0.25


@dataclass(eq=False)
class _Chunk:
    memory: torch.Tensor
    free: list[tuple[int, int]]
    """Ranges (start, stop) in order; none touches another."""

    is_lost: bool = False
    """A buffer of it was discarded: nothing more is cut of it."""

    @property
    def is_free(self) -> bool:
        return self.free == [(0, self.memory.numel())]

    def give_back(self, start: int, stop: int) -> None:
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self.free, (start, stop)]):
            if merged and merged[-1][1] == first:
                first, _ = merged.pop()
            merged.append((first, last))
        self.free = merged


class BufferPool:
    """Page-locked buffers out of `memory`, which accounts for them."""

    def __init__(self, memory: HostMemory) -> None:
        self.used_bytes = 0
        self.peak_bytes = 0
        self.memory = memory
        self._chunks: list[_Chunk] = []
        self._taken: dict[int, tuple[_Chunk, int, int]] = {}
        """Address of a buffer -> its chunk, start and stop."""
        self._gap_bytes = 0
        """Of chunks that were made while others had room, since there was one chunk."""

    @property
    def total_bytes(self) -> int:
        return sum(chunk.memory.numel() for chunk in self._chunks)

    def take(self, num_bytes: int) -> torch.Tensor:
        """A flat uint8 buffer of `num_bytes` (1 or more) in whole pages, with any content.

        Raises UserError when more memory is needed and there is none.
        """
        num_bytes = round_up(num_bytes, PAGE_BYTES)
        if self.used_bytes == 0 and self._gap_bytes >= self.peak_bytes * MAX_GAP_SHARE:
            self._unite(num_bytes)
        chunk, start = self._find(num_bytes) or (self._grow(num_bytes), 0)
        stop = start + num_bytes
        index = next(index for index, (first, _) in enumerate(chunk.free) if first == start)
        last = chunk.free[index][1]
        chunk.free[index : index + 1] = [(stop, last)] if stop < last else []
        buffer = chunk.memory[start:stop]
        self._taken[buffer.data_ptr()] = chunk, start, stop
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """A buffer from `take` that nothing reads or writes any more."""
        chunk, start, stop = self._forget(buffer)
        chunk.give_back(start, stop)

    def discard(self, buffer: torch.Tensor) -> None:
        """A buffer from `take` that must not be used again."""
        chunk, _, _ = self._forget(buffer)
        chunk.is_lost = True
        self._chunks = [other for other in self._chunks if other is not chunk]

    def _forget(self, buffer: torch.Tensor) -> tuple[_Chunk, int, int]:
        chunk, start, stop = self._taken.pop(buffer.data_ptr())
        self.used_bytes -= stop - start
        return chunk, start, stop

    def _find(self, num_bytes: int) -> tuple[_Chunk, int] | None:
        """Where the smallest free range begins that is large enough."""
        ranges = [
            (last - first, number, first)
            for number, chunk in enumerate(self._chunks)
            for first, last in chunk.free
            if last - first >= num_bytes
        ]
        if not ranges:
            return None
        _, number, start = min(ranges)
        return self._chunks[number], start

    def _grow(self, num_bytes: int) -> _Chunk:
        """A new chunk, in place of free ones that are too small as far as the pool would hold more than ever."""
        most_bytes = max(self.peak_bytes, self.used_bytes + num_bytes)
        if self.total_bytes > self.used_bytes:
            self._gap_bytes += num_bytes
        while self.total_bytes + num_bytes > most_bytes and any(chunk.is_free for chunk in self._chunks):
            # No name here may hold it: its memory goes before there is more.
            del self._chunks[next(index for index, chunk in enumerate(self._chunks) if chunk.is_free)]
        return self._add(num_bytes)

    def _unite(self, num_bytes: int) -> None:
        """One chunk instead of all, of which nothing is in use."""
        self._chunks.clear()
        self._gap_bytes = 0
        self._add(max(self.peak_bytes, num_bytes))

    def _add(self, num_bytes: int) -> _Chunk:
        chunk = _Chunk(self.memory.empty(num_bytes, pinned=True), [(0, num_bytes)])
        self._chunks.append(chunk)
        return chunk
