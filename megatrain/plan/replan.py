"""What a run may change of itself between two steps, and whether it pays by simulated time. Pure.

Tried are: how many more of the first homes live on the device, whether the others that the CPU updates stream through
the device for it instead, and more slots for blocks, all within device memory that measured steps left free. Rows and
what stays of layer inputs are not changed: results, or the room that was taken, depend on them. The simulation has no
say on threads of the CPU update, nor on host slots of the disk, so these stay.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatrain.plan.choice import Choice
from megatrain.plan.placement import CPU, HBM, STAGING_BYTES, STREAM, Place
from megatrain.plan.planner import SLOTS, Planner

WORTH_A_CHANGE = 0.05
"""Of a step's time: what a change has to bring by prediction."""
CLOSE = 0.01
"""A change that brings as much but for this share of a step, and takes less memory, is made instead."""
MAX_COUNTS = 12
"""Numbers of homes that are tried, so that a search takes a second."""


@dataclass(frozen=True, kw_only=True)
class Spare:
    """What there is to change with.

    num_bytes: device memory that is free at the peak of a step. home_bytes: what each home would take of it that it
    does not take now; None for homes that cannot move. slot_bytes: of one more slot; 0 if there are none to be had.
    """

    num_bytes: int
    home_bytes: Sequence[int | None]
    slot_bytes: int


@dataclass(frozen=True, kw_only=True)
class Change:
    """A choice that a run takes in place of another."""

    choice: Choice
    seconds: tuple[float, float]
    """Of a step as predicted: without the change, and with it."""


def better_choice(planner: Planner, running: Choice, spare: Spare) -> Change | None:
    """The choice of the shortest simulated step that `running` can become within `spare`, or one that is `CLOSE` to it
    with less memory. None where it is not worth it."""
    now = planner.simulate(running).step_seconds
    tried = [
        (planner.simulate(choice).step_seconds, num_bytes, choice)
        for num_bytes, choice in _candidates(planner, running, spare)
    ]
    least = min((seconds for seconds, _, _ in tried), default=now)
    if least > (1 - WORTH_A_CHANGE) * now:
        return None
    limit = max(least, min((1 - WORTH_A_CHANGE) * now, least + CLOSE * now))
    seconds, _, choice = min((of for of in tried if of[0] <= limit), key=lambda of: (of[1], of[0]))
    return Change(choice=choice, seconds=(now, seconds))


def _candidates(planner: Planner, running: Choice, spare: Spare) -> Iterator[tuple[int, Choice]]:
    """(device memory that it takes, choice)."""
    most_slots = max(running.num_slots, *SLOTS) if spare.slot_bytes else running.num_slots
    movable = [
        index
        for index, num_bytes in enumerate(spare.home_bytes)
        if num_bytes is not None and running.places[index] in (CPU, STREAM)
    ]
    slots = range(running.num_slots, most_slots + 1)
    for num_slots, others, count in itertools.product(slots, (None, STREAM), _counts(planner, movable, spare)):
        places = _placed(running.places, movable, count, others)
        num_bytes = (num_slots - running.num_slots) * spare.slot_bytes
        num_bytes += sum(spare.home_bytes[index] or 0 for index in movable[:count])
        num_bytes += _staging_bytes(places) - _staging_bytes(running.places)
        choice = dataclasses.replace(running, num_slots=num_slots, places=places)
        if choice != running and num_bytes <= spare.num_bytes:
            yield num_bytes, choice


def _counts(planner: Planner, movable: Sequence[int], spare: Spare) -> list[int]:
    """How many of the movable homes go to the device, the first of the forward. None where the config said how much."""
    if planner.config.hbm_home_gb is not None:
        return [0]
    most, num_bytes = 0, 0
    for index in movable:
        num_bytes += spare.home_bytes[index] or 0
        if num_bytes > spare.num_bytes:
            break
        most += 1
    stride = max(1, -(-most // MAX_COUNTS))
    return sorted({*range(0, most + 1, stride), most})


def _placed(places: Sequence[Place], movable: Sequence[int], count: int, others: Place | None) -> tuple[Place, ...]:
    placed = list(places)
    for number, index in enumerate(movable):
        if number < count:
            placed[index] = HBM
        elif others is not None:
            placed[index] = others
    return tuple(placed)


def _staging_bytes(places: Sequence[Place]) -> int:
    return 2 * STAGING_BYTES if any(place.is_staged for place in places) else 0
