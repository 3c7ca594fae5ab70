"""Between two steps homes move from host memory to the device, or back: weights, low halves, optimizer states.

Rule: no bit of a result changes. A home moves only when nothing is under way, no gradient is held and nothing of any
home or state is lent; it keeps its bits and its version, and all who use it find it in its new place: what they hold is
the home and not its memory. One home moves at a time: beside all that was there, its copy is all that is taken.

What it gives up: what lies on disk stays there, and nothing goes there. Losslessly coded moments stay, which only the
CPU updates. A moved home keeps memory of its own for its gradients, outside of the room that was planned for others.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from megatrain.base.cgroup import free_host_bytes
from megatrain.base.errors import UserError
from megatrain.base.units import format_bytes
from megatrain.plan.placement import DISK_TIER, HBM_TIER, PARTS, RAM, Place
from megatrain.store.home import Home
from megatrain.transport.hops import working_on

if TYPE_CHECKING:
    from megatrain.execute.engine import Engine


class Keeper(Protocol):
    """Of optimizer states that lie beside homes (`optim/movable.py`)."""

    @property
    def is_lending(self) -> bool:
        """Somebody holds one of the states."""

    @property
    def has_lent_on_device(self) -> bool:
        """Somebody may hold an alias of a state on the device, which nobody can count."""

    def num_bytes_of(self, home: Home) -> int:
        """Of a home's states."""

    def prepare_move(self, home: Home, place: Place) -> Callable[[], None]:
        """As `Home.prepare_move`."""


class HomeMover:
    def __init__(self, engine: Engine) -> None:
        self.keepers: weakref.WeakSet[Keeper] = weakref.WeakSet()
        self._engine = engine

    @property
    def places(self) -> tuple[Place, ...]:
        """Of the engine's homes, in their order."""
        return tuple(home.place for home in self._engine.homes)

    def is_free(self) -> bool:
        """Nothing is held or lent that a move would take from its holder. If so, waits for drains and updates."""
        engine = self._engine
        if engine.set_aside.is_open or engine.is_collecting or engine.passes.is_held or not engine.transport.is_idle:
            return False
        is_any_held = any(keeper.is_lending for keeper in self.keepers)
        for home in engine.homes:
            is_any_held |= not home.captured.is_recorded  # a checkpoint is to read it
            # Gradients that nobody keeps are gone when their update is over.
            is_any_held |= home.is_lent or home.grads.is_lent or (home.grads.is_kept and home.grads.is_holding())
        if is_any_held:
            return False
        engine.wait()
        return not any(home.grads.is_holding() or home.due for home in engine.homes)

    def may_move(self, home: Home) -> bool:
        """Whether the home can live elsewhere at all."""
        on_disk = DISK_TIER in home.place.tiers.values()
        is_layer = home is not self._engine.fetcher.resident
        return is_layer and not on_disk and self._engine.config.moments != "lossless"

    def resize_slots(self, num_slots: int) -> None:
        """So many slots for blocks from now on. While `is_free`. Raises torch.OutOfMemoryError."""
        placement = self._engine.placement
        if num_slots == placement.options.num_slots:
            return
        self._engine.transport.quiesce()
        self._engine.transport.resize_slots(num_slots)
        options = dataclasses.replace(placement.options, num_slots=num_slots)
        self._engine.placement = dataclasses.replace(placement, options=options)

    def move(self, places: Sequence[Place]) -> None:
        """Each home to its place, those that leave the device first. While `is_free`.

        Raises UserError or torch.OutOfMemoryError where there is no room; homes before that one have moved then.
        """
        homes = [(home, place) for home, place in zip(self._engine.homes, places, strict=True) if home.place != place]
        for home, place in sorted(homes, key=lambda of: of[1].is_resident):
            self._move(home, place)

    def _move(self, home: Home, place: Place) -> None:
        engine = self._engine
        assert self.may_move(home) and DISK_TIER not in place.tiers.values(), f"{home.name} cannot live in {place}"
        home.check_process()
        self._require_host_memory(home, place)
        leaves = home.place.moments == HBM_TIER != place.moments
        if leaves and any(keeper.has_lent_on_device for keeper in self.keepers):
            raise UserError(f"{home.name} cannot leave the device: somebody may hold a view of optimizer states there")
        engine.transport.quiesce()
        hops = engine.transport.hops
        copy = functools.partial(hops.move, what=f"weights of {home.name} on their way to another tier")
        with torch.inference_mode(False), torch.no_grad(), working_on(hops, home):
            engine.transport.prepare_move(home, place)
            # The home comes last: the others look where it is.
            parts = [*(keeper.prepare_move(home, place) for keeper in self.keepers), home.prepare_move(place, copy)]
        engine.transport.quiesce()
        try:
            _take_over(parts)
        except KeyboardInterrupt:
            _take_over(parts)  # all or nothing
            raise
        placement = engine.placement
        plan = placement.plans[engine.homes.index(home)]
        engine.placement = dataclasses.replace(placement, places={**placement.places, plan: place})

    def _require_host_memory(self, home: Home, place: Place) -> None:
        sizes = self.part_bytes(home)
        num_bytes = sum(sizes[part] for part in PARTS if place.tiers[part] == RAM and home.place.is_apart(part, place))
        # What left it may still be there, for as long as processes live that were forked before (data loaders).
        free_bytes = min(self._engine.memory.free_bytes(), free_host_bytes()) if num_bytes else 0
        if num_bytes > free_bytes:
            raise UserError(
                f"{home.name} needs {format_bytes(num_bytes)} of host memory, and {format_bytes(free_bytes)} are free"
            )

    def part_bytes(self, home: Home) -> dict[str, int]:
        """Bytes of the home by part, as they are: with the moments that its optimizer keeps, and averages."""
        gradients = home.gradient_layout().numel * home.grad_dtype.itemsize
        return {
            "weights": home.wire.nbytes,
            "low": home.low.nbytes,
            "moments": sum(keeper.num_bytes_of(home) for keeper in self.keepers),
            "gradients": gradients if home.grads.is_kept else 0,
        }

    def device_bytes(self, home: Home) -> int:
        """Device memory that the home would take more than now if it lived there whole."""
        return sum(size for part, size in self.part_bytes(home).items() if home.place.tiers[part] != HBM_TIER)


def _take_over(parts: Sequence[Callable[[], None]]) -> None:
    for take_over in parts:
        take_over()
