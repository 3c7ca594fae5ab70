"""Slot: a flat device buffer that holds one home's weights while its layer runs.

FREE -> FILLING -> READY -> IN_USE -> READY (kept for the next visit) -> FREE. Every change is asserted: bookkeeping
only, no copies are made here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatrain.base.fence import Fence
from megatrain.store.home import Home


class State(enum.Enum):
    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    IN_USE = "in use"


@dataclass(eq=False)
class Slot:
    """`buffer`: flat uint8 on the device."""

    buffer: torch.Tensor
    state: State = State.FREE
    home: Home | None = None
    version: int = -1
    """Version of the home's weights that the slot holds."""

    filled: Fence = field(default_factory=Fence.done)
    """The copy into the slot."""

    used: Fence = field(default_factory=Fence.done)
    """The last compute that read the slot."""

    last_use: int = 0
    num_claims: int = 0

    def claim(self) -> Callable[[], bool]:
        """To be called before a fill is queued. What it returns tells, when the fill's turn has come, whether it is
        still wanted: a later claim calls it off, so that it never comes behind the later one's."""
        self.num_claims += 1
        claim = self.num_claims
        return lambda: self.num_claims == claim

    def fill(self, home: Home, filled: Fence) -> None:
        """`filled` stands behind the copy of the home's present weights, which was just queued."""
        assert self.state is State.FREE, f"slot of {self.home and self.home.name} is {self.state.value}, not free"
        assert self.buffer.numel() >= home.wire.numel(), f"{home.name} does not fit its slot"
        self.state, self.home, self.version, self.filled = State.FILLING, home, home.version, filled

    def ready(self) -> None:
        """The compute lane is ordered behind `filled`."""
        assert self.state in (State.FILLING, State.READY)
        self.state = State.READY

    def use(self, clock: int) -> torch.Tensor:
        """The weights (flat uint8)."""
        assert self.state is State.READY and self.home is not None
        self.state, self.last_use = State.IN_USE, clock
        return self.buffer[: self.home.wire.numel()]

    def release(self, used: Fence) -> None:
        assert self.state is State.IN_USE
        self.used, self.state = used, State.READY

    def free(self) -> None:
        assert self.state in (State.FILLING, State.READY)
        self.state, self.home = State.FREE, None

    def holds(self, home: Home) -> bool:
        """True when the slot holds (or is being filled with) the home's present weights."""
        return self.home is home and self.version == home.version and self.state is not State.FREE


class SlotPool:
    """All slots of a device: `num_slots` sized for the largest block, one sized for the largest home of all.

    Args:
        block_bytes, largest_bytes: wire sizes. The large slot is left out when no home is larger than a block.
    """

    def __init__(self, *, device: torch.device, num_slots: int, block_bytes: int, largest_bytes: int) -> None:
        sizes = slot_sizes(num_slots=num_slots, block_bytes=block_bytes, largest_bytes=largest_bytes)
        self.block_bytes = block_bytes
        self._device = device
        self.slots = [self._make(size) for size in sizes]
        self._num_large = len(sizes) - num_slots

    @property
    def total_bytes(self) -> int:
        return sum(slot.buffer.numel() for slot in self.slots)

    def resize(self, num_slots: int) -> None:
        """So many slots for blocks from now on. None is in use, and no copy on its way.

        Raises torch.OutOfMemoryError.
        """
        assert all(slot.state is not State.IN_USE for slot in self.slots)
        large = self.slots[len(self.slots) - self._num_large :]
        blocks = self.slots[: len(self.slots) - self._num_large][:num_slots]
        while len(blocks) < num_slots:
            blocks.append(self._make(self.block_bytes))
        self.slots = [*blocks, *large]

    def fits(self, home: Home) -> bool:
        """Whether there is a slot for it."""
        return any(slot.buffer.numel() >= home.wire.numel() for slot in self.slots)

    def _make(self, num_bytes: int) -> Slot:
        return Slot(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))

    def find(self, home: Home) -> Slot | None:
        return next((slot for slot in self.slots if slot.holds(home)), None)

    def candidate(self, home: Home, keep: list[Home]) -> Slot | None:
        """A slot that may be filled with `home`, or None.

        The smallest that fits, so that blocks leave the large slot to the large homes; a free one before one to be
        evicted, and of those the longest unused. Slots that hold a home of `keep` are not evicted.
        """
        possible = [
            slot
            for slot in self.slots
            if slot.buffer.numel() >= home.wire.numel()
            and slot.state is not State.IN_USE
            and not any(slot.holds(other) for other in keep)
        ]
        return min(
            possible,
            key=lambda slot: (slot.buffer.numel(), slot.state is not State.FREE, slot.last_use),
            default=None,
        )


def slot_sizes(*, num_slots: int, block_bytes: int, largest_bytes: int) -> list[int]:
    """Bytes of each slot."""
    large = [largest_bytes] if largest_bytes > block_bytes else []
    return [block_bytes] * num_slots + large
