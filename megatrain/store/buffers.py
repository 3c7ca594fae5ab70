"""Room in memory, of the host or of the device, that is used again and again: for inputs of layers that wait for the
backward, and for gradients that wait for their update.

The two share it. Over a forward inputs pile up and gradients of the step before are used up; over the backward it is
the other way round. Both do so like a stack, the last in first out, and grow from the two ends of one chunk: so there
are no gaps, and the chunk need be no larger than the most that both ever take together.

What is planned is the first chunk. Beyond it a chunk is made for each buffer. Sizes that vary do not fit between what
is in use, though there were room in all: that takes more chunks. The first time, and later when those come to a quarter
of all, one chunk takes the place of all, as large as what was needed most; but not before none is in use. From then on
only what needs more than ever before takes memory, which costs 0.05-0.1 s/GiB where it is page-locked.

Rules: free chunks make room for new ones, so that beside what is needed most the pool holds only the gaps between. A
buffer is cut again only behind whatever used it; where that is what is lacking, whoever takes one waits for it. What is
taken is noted in one place; all else follows from it, and is made anew after an interrupt.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.base.fence import Fence
from megatrain.base.units import format_bytes
from megatrain.store.memory import DeviceMemory, HostMemory
from megatrain.store.tier import PAGE_BYTES, round_up

logger = logging.getLogger("megatrain")

MAX_GAP_SHARE = 0.25


@dataclass(eq=False)
class _Chunk:
    memory: torch.Tensor
    free: list[tuple[int, int]]
    """Ranges (start, stop) in order; none touches another."""

    @property
    def is_free(self) -> bool:
        return self.free == [(0, self.memory.numel())]

    def cut(self, start: int, stop: int) -> None:
        """Out of one free range."""
        index = next(index for index, (first, last) in enumerate(self.free) if first <= start and stop <= last)
        first, last = self.free[index]
        self.free[index : index + 1] = [(a, b) for a, b in ((first, start), (stop, last)) if a < b]

    def give_back(self, start: int, stop: int) -> None:
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self.free, (start, stop)]):
            if merged and merged[-1][1] == first:
                first, _ = merged.pop()
            merged.append((first, last))
        self.free = merged


@dataclass(frozen=True, eq=False)
class _Cut:
    """Of a chunk: what a buffer is."""

    chunk: _Chunk
    start: int
    stop: int

    @property
    def address(self) -> int:
        return self.chunk.memory.data_ptr() + self.start


@dataclass(frozen=True, kw_only=True, eq=False)
class _Returned:
    """A buffer on its way back."""

    cut: _Cut
    behind: Fence
    needs: Fence | None
    is_held: Callable[[], bool] | None
    keeps: Any
    """Whatever must live as long as the buffer is in use."""

    def can_be_waited_for(self, on_lane: bool) -> bool:
        is_free = not on_lane or self.needs is None or self.needs.is_recorded
        return is_free and not self._is_held

    @property
    def is_over(self) -> bool:
        return self.behind.is_over and not self._is_held

    @property
    def _is_held(self) -> bool:
        return self.is_held is not None and self.is_held()


class BufferPool:
    """Buffers out of `memory`, page-locked where it is the host's. Any thread may take and give back.

    On a device, too, a buffer is cut again only when the host knows that what used it is over: so whoever takes it may
    use it on any stream.

    Args:
        first_bytes: of the first chunk, if there is as much memory.
        is_planned: more than that was not planned for, and a warning says so.
        poison: fill what comes back with NaN, so that a stale read shows.
    """

    def __init__(
        self, memory: HostMemory | DeviceMemory, *, first_bytes: int = 0, is_planned: bool = False, poison: bool = False
    ) -> None:
        self.peak_bytes = 0
        self.memory = memory
        self._first_bytes = round_up(first_bytes, PAGE_BYTES)
        self._warns = is_planned
        self._poison = poison
        self._used_bytes = 0
        self._chunks: list[_Chunk] = []
        self._taken: dict[int, _Cut] = {}
        """By address."""
        # Outside the lock: the garbage collector may give back in the middle of anything.
        self._inbox: deque[_Returned] = deque()
        self._returned: list[_Returned] = []
        self._gap_bytes = 0
        """Of chunks that were made while others had room, since there was one chunk."""
        self._gap_share = 0.0
        self._lock = threading.Lock()
        self._is_whole = True
        """Not in the middle of a change; where the lock is free, no interrupt left one undone."""

    @property
    def used_bytes(self) -> int:
        """Those on their way back, which something still uses, count."""
        with self._changing():
            self._collect()
            return self._used_bytes

    @property
    def total_bytes(self) -> int:
        return sum(chunk.memory.numel() for chunk in self._chunks)

    def reserve(self) -> None:
        """Take the first chunk now."""
        with self._changing():
            if not self._chunks:
                self._grow(self._first_bytes)

    def shrink(self) -> None:
        """Give up what nobody uses, and what was planned: from now on the room takes what is asked for."""
        with self._changing():
            self._collect()
            self._chunks = [chunk for chunk in self._chunks if not chunk.is_free]
            self._first_bytes, self._warns = 0, False
            self.peak_bytes = self._used_bytes

    def take_if_there(self, num_bytes: int) -> torch.Tensor | None:
        """As `take`, but None where that would take more memory."""
        num_bytes = round_up(num_bytes, PAGE_BYTES)
        return self._take(num_bytes, at_end=False, may_grow=False)

    def take(self, num_bytes: int, *, at_end: bool = False) -> torch.Tensor:
        """A flat uint8 buffer of `num_bytes` (1 or more) in whole pages, with any content.

        Args:
            at_end: cut it from the upper end of the room: for gradients, which come when the others go, and may be
                taken on the lane that drains them.

        Raises UserError (of a device: torch.OutOfMemoryError) when more memory is needed and there is none.
        """
        buffer = self._take(round_up(num_bytes, PAGE_BYTES), at_end=at_end, may_grow=True)
        assert buffer is not None
        return buffer

    def _take(self, num_bytes: int, *, at_end: bool, may_grow: bool) -> torch.Tensor | None:
        while True:
            with self._changing():
                buffer, awaited = self._try_to_take(num_bytes, at_end, may_grow)
            if buffer is not None or awaited is None:
                return buffer
            with contextlib.suppress(Exception):  # is told to whoever needs what it was for
                awaited.wait()

    def give_back(
        self,
        buffer: torch.Tensor,
        behind: Fence | None = None,
        *,
        needs: Fence | None = None,
        is_held: Callable[[], bool] | None = None,
        keeps: Any = None,
    ) -> None:
        """A buffer from `take`.

        Args:
            behind: what reads or writes it last; None: nothing does any more.
            needs: what `behind` waits for in the lane that drains gradients, which must not wait for itself.
            is_held: whether somebody still holds a view of it, for as long as they like.
            keeps: whatever must live until then.
        """
        cut = self._taken[buffer.data_ptr()]
        self._inbox.append(_Returned(cut=cut, behind=behind or Fence.done(), needs=needs, is_held=is_held, keeps=keeps))

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            if not self._is_whole:
                self._mend()
            self._is_whole = False
            yield
            self._is_whole = True

    def _mend(self) -> None:
        for chunk in self._chunks:
            chunk.free = [(0, chunk.memory.numel())]
        for cut in self._taken.values():
            cut.chunk.cut(cut.start, cut.stop)
        self._used_bytes = sum(cut.stop - cut.start for cut in self._taken.values())

    def _try_to_take(self, num_bytes: int, at_end: bool, may_grow: bool) -> tuple[torch.Tensor | None, Fence | None]:
        """A buffer, or what to wait for before the next try, or neither."""
        self._collect()
        awaited = next((one.behind for one in self._returned if one.can_be_waited_for(on_lane=at_end)), None)
        if self._gap_bytes > self.peak_bytes * self._gap_share:
            if self._used_bytes == 0:
                self._unite(num_bytes)
            elif awaited is not None and len(self._returned) == len(self._taken):
                return None, awaited
        place = self._find(num_bytes, at_end)
        if place is None and (awaited is not None or not may_grow):
            return None, awaited
        chunk, first, last = place or self._grow(num_bytes)
        start = last - num_bytes if at_end else first
        cut = _Cut(chunk, start, start + num_bytes)
        self._taken[cut.address] = cut
        chunk.cut(cut.start, cut.stop)
        self._used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._used_bytes)
        return chunk.memory[cut.start : cut.stop], None

    def _collect(self) -> None:
        while self._inbox:
            self._returned.append(self._inbox.popleft())
        waiting = []
        for one in self._returned:
            if not one.is_over:
                waiting.append(one)
            elif self._taken.get(one.cut.address) is one.cut:  # else an interrupt came right after the next line
                self._free(one)
        self._returned = waiting

    def _free(self, one: _Returned) -> None:
        chunk, start, stop = one.cut.chunk, one.cut.start, one.cut.stop
        if one.behind.error is not None:
            _let_copies_end()
        if self._poison:
            chunk.memory[start:stop].fill_(0xFF)
            _let_copies_end()  # also of the poison
        del self._taken[one.cut.address]
        chunk.give_back(start, stop)
        self._used_bytes -= stop - start

    def _find(self, num_bytes: int, at_end: bool) -> tuple[_Chunk, int, int] | None:
        """The lowest free range that is large enough, or the uppermost."""
        for chunk in self._chunks:
            for first, last in reversed(chunk.free) if at_end else chunk.free:
                if last - first >= num_bytes:
                    return chunk, first, last
        return None

    def _grow(self, num_bytes: int) -> tuple[_Chunk, int, int]:
        """A new chunk, in place of free ones that are too small as far as the pool would hold more than ever."""
        if not self._chunks:
            # Without that much memory what is over goes elsewhere, buffer by buffer.
            first_bytes = min(self._first_bytes, self.memory.free_bytes() // PAGE_BYTES * PAGE_BYTES)
            return self._add(max(num_bytes, first_bytes))
        most_bytes = max(self._first_bytes, self.peak_bytes, self._used_bytes + num_bytes)
        if self.total_bytes > self._used_bytes:
            self._gap_bytes += num_bytes
        if self._warns:
            self._warns = False
            logger.warning(
                "inputs of layers and gradients need more than the %s of %s memory that were planned for them: "
                "batches are longer than the workload says, or gradients are kept beyond their step (call "
                "optimizer.zero_grad() between step() and the next forward)",
                format_bytes(self._first_bytes),
                "host" if self.memory.device.type == "cpu" else "device",
            )
        while self.total_bytes + num_bytes > most_bytes and any(chunk.is_free for chunk in self._chunks):
            # No name here may hold it: its memory goes before there is more.
            del self._chunks[next(index for index, chunk in enumerate(self._chunks) if chunk.is_free)]
        return self._add(num_bytes)

    def _unite(self, num_bytes: int) -> None:
        """One chunk instead of all, of which nothing is in use."""
        self._chunks.clear()
        self._gap_bytes, self._gap_share = 0, MAX_GAP_SHARE
        self._add(max(self._first_bytes, self.peak_bytes, num_bytes))

    def _add(self, num_bytes: int) -> tuple[_Chunk, int, int]:
        chunk = _Chunk(self.memory.empty(num_bytes, pinned=True), [(0, num_bytes)])
        self._chunks.append(chunk)
        return chunk, 0, num_bytes


def _let_copies_end() -> None:
    """A failed fence says nothing of a copy that was enqueued before the failure."""
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
