"""What lies on disk on its way through host memory: states to their update and back, weights to the device.

    DiskWindow     pieces of states in host slots: read ahead of their update, written back behind it
    WeightReader   weights of a whole home in a host slot, from which the h2d lane copies

Both go past the page cache. Invariants: a slot is filled again only when its last write is over; bytes are read only
when no write of them is under way; what was read ahead is dropped when somebody else may have changed it since the
last update was queued (`DiskMemory.expose`). So no result depends on the number of slots or on what was predicted.
A piece is known by its extents, never by addresses: memory that was given back is taken again by another optimizer.
A read that fails is raised by `open`, and nothing is written then; a write that fails tears its home (`Home.tear`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatrain.base.errors import CorruptionError, DiskError
from megatrain.base.fence import Fence
from megatrain.store.disk import Extent
from megatrain.store.disk_memory import DiskMemory
from megatrain.store.home import Home
from megatrain.store.memory import HostMemory
from megatrain.store.tier import PAGE_BYTES, round_up
from megatrain.transport.lane import Lane
from megatrain.transport.predictor import Predictor
from megatrain.transport.recorder import Recorder
from megatrain.transport.ring import Loan, SlabRing


@dataclass(frozen=True)
class _Range:
    """Whole pages of an extent that a tensor lies in. It keeps no extent alive; one that is gone equals no other."""

    reference: weakref.ref[Extent]
    start: int
    stop: int

    @property
    def is_there(self) -> bool:
        return self.reference() is not None

    @property
    def extent(self) -> Extent:
        extent = self.reference()
        assert extent is not None, "whoever opens a piece holds its tensors, and they the extent"
        return extent

    def overlaps(self, other: _Range) -> bool:
        return self.reference == other.reference and self.start < other.stop and other.start < self.stop


Key = tuple[_Range, ...]
"""Of a piece: where its tensors on disk lie, but for what is fresh."""


@dataclass(eq=False)
class _Slot:
    memory: torch.Tensor
    ranges: list[_Range] = field(default_factory=list)
    reads: list[Fence] = field(default_factory=list)
    """Into `memory`, under way."""
    writes: list[tuple[Fence, Home]] = field(default_factory=list)
    """Out of `memory`, under way, and whose."""
    num_written: int = 0
    """How many of the ranges are written back."""
    num_exposures: int = -1
    """Of the disk, when the reads began."""
    is_open: bool = False
    is_ahead: bool = False
    """Filled for a piece that has not been opened yet."""

    @property
    def is_idle(self) -> bool:
        return all(fence.is_recorded for fence in (*self.reads, *(write for write, _ in self.writes)))

    @property
    def is_busy(self) -> bool:
        """What it holds is about to be changed, or written."""
        return self.is_ahead or self.is_open or not self.is_idle

    def wait(self) -> None:
        """Until nothing is under way. What went wrong in a write tears its home; what was not read is read again."""
        while self.writes:
            write, home = self.writes.pop()
            _judge(weakref.ref(home), write)
        while self.reads:
            with contextlib.suppress(Exception):
                self.reads.pop().wait()

    def arrive(self) -> None:
        """Until all is read. Raises what went wrong."""
        while self.reads:
            self.reads.pop().wait()

    def forget(self) -> None:
        """What it holds, or was to hold."""
        self.is_open = False
        self.ranges, self.num_written = [], 0

    def parts(self) -> list[torch.Tensor]:
        """The slot's memory for each range."""
        sizes = [of.stop - of.start for of in self.ranges]
        stops = list(itertools.accumulate(sizes))
        return [self.memory[stop - size : stop] for stop, size in zip(stops, sizes, strict=True)]

    def overlaps(self, ranges: Sequence[_Range]) -> bool:
        return any(own.overlaps(other) for own in self.ranges for other in ranges)


class DiskWindow:
    """Used by one thread at a time.

    Args:
        memory: of the host, for the slots.
        num_slots: of `slot_bytes` each; three or more keep a disk busy both ways.
    """

    def __init__(self, disk: DiskMemory, memory: HostMemory, *, num_slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.predictor: Predictor[Key] = Predictor()
        self.recorder: Recorder | None = None
        self.wait_seconds = 0.0
        """For which whoever opened a piece waited for the disk."""
        self._disk = disk
        self._slots = [_Slot(memory.empty(slot_bytes)) for _ in range(num_slots)]
        self._ahead: dict[Key, _Slot] = {}
        self._open: _Slot | None = None
        self._owner: Home | None = None
        self._names: dict[Key, str] = {}
        """Of the home of each piece that was opened."""
        self._num_given_back = disk.num_given_back

    def open(self, home: Home, tensors: Sequence[torch.Tensor], fresh: torch.Tensor) -> list[torch.Tensor]:
        """The tensors, those on disk as views of a slot with what is there. They end with `close` or `abandon`.

        home: whose they are. fresh: one of them, which others write between two updates and an update only reads: it is
        not read ahead. All that is on disk, each tensor in whole pages, fits in a slot.

        Raises DiskError; nothing is open then.
        """
        ranges: dict[int, _Range] = {}
        for number, tensor in enumerate(tensors):
            where = self._disk.locate(tensor)
            if where is not None:
                ranges[number] = _pages(tensor, *where)
        if not ranges:
            return list(tensors)
        self._forget_given_back()
        last = {number: of for number, of in ranges.items() if tensors[number] is fresh}
        first = {number: of for number, of in ranges.items() if number not in last}
        key = tuple(first.values())
        self._names[key] = home.name
        self.predictor.observe(key)
        was_ahead = key in self._ahead
        try:
            slot = self._arrived(home, key, list(last.values()))
        except (DiskError, CorruptionError):
            if not was_ahead:
                raise
            slot = self._arrived(home, key, list(last.values()))
        parts = dict(zip((*first, *last), slot.parts(), strict=True))
        return [
            _view(parts[number], tensor, tensor.data_ptr() % PAGE_BYTES) if number in parts else tensor
            for number, tensor in enumerate(tensors)
        ]

    def _arrived(self, home: Home, key: Key, last: list[_Range]) -> _Slot:
        """The open slot, with all that is read into it."""
        slot = self._open = self._take(key)
        self._owner, slot.is_open = home, True
        try:
            self._read(slot, last, home.name)
            self._read_ahead()
            started = time.perf_counter()
            slot.arrive()
            self.wait_seconds += time.perf_counter() - started
        except BaseException:
            self.abandon()
            raise
        return slot

    def close(self) -> None:
        """Begin to write back what `open` returned, but for what is fresh."""
        slot, self._open = self._open, None
        if slot is None:
            return
        slot.is_open = False
        home = self._owner
        assert home is not None
        try:
            for of, memory in zip(slot.ranges[: slot.num_written], slot.parts(), strict=False):
                write = of.extent.write(of.start, memory)
                slot.writes.append((write, home))
                if self.recorder is not None:
                    self.recorder.watch("disk", ("write states", home.name), memory.nbytes, write)
                judge = functools.partial(_judge, weakref.ref(home), write)
                self._disk.wait_for(write, judge)
                write.when_recorded(judge)
        except BaseException as error:
            home.tear(error)
            raise

    def abandon(self) -> None:
        """Forget what `open` returned: the disk keeps what it has."""
        slot, self._open = self._open, None
        if slot is not None:
            slot.forget()
            slot.wait()

    def end_exposures(self) -> None:
        """What others changed until now is what the next update reads. (For the thread that queues updates.)"""
        self._disk.end_exposures()

    def end_step(self) -> None:
        """All updates of a step are queued. (For the thread that queues updates.)"""
        self._disk.end_step()

    def rest(self) -> None:
        """No piece is opened for a while: wait until all is written, and read ahead into the slots."""
        self.flush()
        self._read_ahead()

    def flush(self) -> None:
        """Wait until all is written. A home of which something could not be is torn then."""
        for slot in self._slots:
            if not slot.is_ahead:
                slot.wait()

    def _forget_given_back(self) -> None:
        """Pieces of extents that nobody holds any more."""
        if self._disk.num_given_back == self._num_given_back:
            return
        self._num_given_back = self._disk.num_given_back
        gone = {key for key in self._names if not _is_there(key)}
        for key in gone:
            del self._names[key]
            if key in self._ahead:
                self._drop(key)
        self.predictor.forget_items(gone)

    def _take(self, key: Key) -> _Slot:
        """A slot into which the ranges are read, or were."""
        slot = self._drop(key) if key in self._ahead else None
        # What shares pages with this piece, which is about to change, was read too early.
        for other in [other for other, ahead in self._ahead.items() if ahead.overlaps(key)]:
            self._drop(other)
        if slot is not None and slot.num_exposures == self._disk.num_exposures:
            return slot
        # Where all are full of what was read ahead, the last of it gives way.
        slot = slot or self._free() or self._drop(next(reversed(self._ahead)))
        self._empty(slot)
        for other in self._slots:
            if other is not slot and not other.is_ahead and other.overlaps(key):
                other.wait()
        self._read(slot, key, self._names[key])
        slot.num_written = len(key)
        return slot

    def _read_ahead(self) -> None:
        for key in self.predictor.predict(len(self._slots) - 1):
            if key in self._ahead:
                continue
            if not _is_there(key):
                return  # given back since the last piece was opened
            slot = self._free()
            if slot is None or not slot.is_idle or any(other.overlaps(key) for other in self._slots if other.is_busy):
                return
            self._empty(slot)
            self._read(slot, key, self._names[key])
            slot.num_written, slot.is_ahead = len(key), True
            self._ahead[key] = slot

    def _drop(self, key: Key) -> _Slot:
        """The slot of what was read ahead, which is so no more."""
        slot = self._ahead.pop(key)
        slot.is_ahead = False
        return slot

    def _free(self) -> _Slot | None:
        """A slot that may be filled once its writes are over, one where they are if there is one."""
        free = [slot for slot in self._slots if not (slot.is_open or slot.is_ahead)]
        return next((slot for slot in free if slot.is_idle), free[0] if free else None)

    def _empty(self, slot: _Slot) -> None:
        slot.wait()
        slot.ranges, slot.num_exposures = [], self._disk.num_exposures

    def _read(self, slot: _Slot, ranges: Sequence[_Range], name: str) -> None:
        """Also read these into the slot. name: of their home."""
        num_before = len(slot.ranges)
        slot.ranges = [*slot.ranges, *ranges]
        for of, memory in zip(ranges, slot.parts()[num_before:], strict=True):
            read = of.extent.read(of.start, memory)
            slot.reads.append(read)
            if self.recorder is not None:
                self.recorder.watch("disk", ("read states", name), memory.nbytes, read)


class WeightReader:
    """
    Args:
        homes: those whose weights are on disk.
        memory: of the host, for the slots, each as large as the weights of the largest home.
    """

    def __init__(
        self, homes: list[Home], disk: DiskMemory, memory: HostMemory, *, num_slots: int, delay_seconds: float
    ) -> None:
        self.lane = Lane("disk", torch.device("cpu"), delay_seconds=delay_seconds)
        slot_bytes = max(round_up(home.wire.numel(), PAGE_BYTES) for home in homes)
        self.slots = SlabRing([memory.empty(slot_bytes, pinned=True) for _ in range(num_slots)])
        self._disk = disk

    def read(self, home: Home) -> tuple[Loan, Fence]:
        """Begin to read a home's weights behind its update: the slot where they will be, and when they are there.

        The caller gives the slot back at once, behind what reads it. (`slots.take_back`)
        """
        where = self._disk.locate(home.wire)
        assert where is not None, f"the weights of {home.name} are not on disk"
        extent, offset = where
        num_bytes = round_up(home.wire.numel(), PAGE_BYTES)
        loan = self.slots.lend(home)
        arrived = self.lane.submit(
            lambda: extent.read(offset, self.slots.take(loan, None)[:num_bytes]),
            after=(home.updated, loan.turn),
            label=("read weights", home.name),
        )
        return loan, arrived


def _judge(home_ref: weakref.ref[Home], write: Fence) -> None:
    """Once a write is over. The disk keeps this for those that failed, and must not keep a model alive."""
    try:
        write.wait()
    except Exception as error:
        home = home_ref()
        if home is not None:
            home.tear(error)


def _is_there(key: Key) -> bool:
    return all(of.is_there for of in key)


def _pages(tensor: torch.Tensor, extent: Extent, offset: int) -> _Range:
    start = offset - offset % PAGE_BYTES
    return _Range(weakref.ref(extent), start, round_up(offset + tensor.nbytes, PAGE_BYTES))


def _view(memory: torch.Tensor, tensor: torch.Tensor, start: int) -> torch.Tensor:
    """`memory` (flat uint8) from `start` on, with the dtype and shape of `tensor`."""
    return memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
