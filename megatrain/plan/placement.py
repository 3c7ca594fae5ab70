"""Which parts of a home live in which tier, and where it is updated. Pure.

Tiers: `hbm` (device memory), `ram` (host memory), `disk` (files in offload_dir). A home has four parts: the weights
that cross the link, the low halves of split masters, the moments, the gradients. Shorthands for all of them at once:

    cpu     all in host memory, updated there by the CPU
    stream  all in host memory; the whole state streams through the device for the update
    hbm     all in device memory; updated there, crosses no link
    disk    gradients in host memory, all else on disk; updated by the CPU, piece by piece

Rule: no result depends on the place, in fp32 and with split masters bit for bit (and in every other format too).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass

from megatrain.base.config import Config, StreamOptions
from megatrain.base.errors import UserError
from megatrain.base.units import GB
from megatrain.spec.formats import most_moment_bytes
from megatrain.spec.homes import HomePlan
from megatrain.spec.layout import padded, wire_bytes

RAM, HBM_TIER, DISK_TIER = "ram", "hbm", "disk"
TIERS = (HBM_TIER, RAM, DISK_TIER)
UPDATES = ("cpu", "device")


@dataclass(frozen=True, kw_only=True)
class Place:
    """The tier of each part of a home, and which of "cpu" and "device" updates it.

    Raises UserError for what cannot be: the CPU does not update what lies on the device, nor the device what lies on
    disk.
    """

    weights: str = RAM
    low: str = RAM
    moments: str = RAM
    gradients: str = RAM
    update: str = "cpu"

    def __post_init__(self) -> None:
        for name, tier in self.tiers.items():
            if tier not in TIERS:
                raise UserError(f"places: {name}={tier!r} is not known: use one of {TIERS}")
        if self.update not in UPDATES:
            raise UserError(f"places: update={self.update!r} is not known: use one of {UPDATES}")
        if self.update == "cpu" and HBM_TIER in self.tiers.values():
            raise UserError('places: what lies in "hbm" is updated there: say update="device"')
        if self.update == "device" and DISK_TIER in self.tiers.values():
            raise UserError('places: what lies on "disk" is updated by the CPU: say update="cpu"')

    @functools.cached_property
    def tiers(self) -> Mapping[str, str]:
        """Part -> tier. Made once: a search asks millions of times."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def is_resident(self) -> bool:
        """The weights live on the device: they take no slot and cross no link."""
        return self.weights == HBM_TIER

    @property
    def is_staged(self) -> bool:
        """Parts of it stream through the device for its update, and are page-locked."""
        return self.update == "device" and RAM in self.tiers.values()

    def is_apart(self, part: str, other: Place) -> bool:
        """Whether a home that lives so has to copy the part for it to live as in `other`: to another tier, or, if it is
        to stream through the device from now on, to memory that is page-locked. (Weights and gradients are anyway.)"""
        if self.tiers[part] != other.tiers[part]:
            return True
        return part in ("low", "moments") and self.tiers[part] == RAM and other.is_staged and not self.is_staged

    def __str__(self) -> str:
        """The shorthand, or the parts that are not in host memory."""
        for name, place in PLACES.items():
            if self == place:
                return name
        parts = ", ".join(f"{name} {tier}" for name, tier in self.tiers.items() if tier != RAM)
        return f"{parts or 'ram'}, updated by the {self.update}"


PARTS = ("weights", "low", "moments", "gradients")
"""Of a home, in the order in which they are read from memory or disk in a step: often first."""

CPU = Place()
STREAM = Place(update="device")
HBM = Place(weights=HBM_TIER, low=HBM_TIER, moments=HBM_TIER, gradients=HBM_TIER, update="device")
DISK = Place(weights=DISK_TIER, low=DISK_TIER, moments=DISK_TIER)
PLACES = {"cpu": CPU, "stream": STREAM, "hbm": HBM, "disk": DISK}


@functools.cache
def with_part_on_disk(place: Place, part: str) -> Place:
    """The place with one part moved to the disk; one object for all homes that live so."""
    return dataclasses.replace(place, **{part: DISK_TIER})


HBM_SHARE = 0.2
"""Of the device memory beside slots and gradient sums, for homes; the rest is for activations and the layer at work."""

STAGING_BYTES = 128 << 20
"""Of each of the two sets of device memory through which states stream for their update, at most. Then every copy of a
piece is long enough for the link's full speed."""

NUM_MOMENTS = 2
"""As AdamW keeps them. Other rules keep fewer, which is not known before there is an optimizer."""


def part_bytes(plan: HomePlan, trainable: set[int], moments: str, *, keeps_gradients: bool = True) -> dict[str, int]:
    """Part -> bytes that a home holds of it."""
    trained = [field for key, field in plan.parameters.items() if key in trainable]
    gradient_bytes = plan.grad_dtype.itemsize * sum(padded(field.numel) for field in trained)
    return {
        "weights": wire_bytes(plan.fields),
        "low": sum(2 * padded(field.numel) for field in plan.fields if field.is_split),
        "moments": NUM_MOMENTS * sum(most_moment_bytes(moments, field.numel) for field in trained),
        "gradients": gradient_bytes if keeps_gradients else 0,
    }


def state_bytes(plan: HomePlan, trainable: set[int], moments: str, *, keeps_gradients: bool = True) -> int:
    """Bytes of everything that a home holds: weights, low halves, moments and gradients."""
    return sum(part_bytes(plan, trainable, moments, keeps_gradients=keeps_gradients).values())


def place_homes(
    plans: list[HomePlan],
    trainable: set[int],
    config: Config,
    options: StreamOptions,
    *,
    spare_hbm_bytes: int | None,
    ram_bytes: int | None,
) -> dict[HomePlan, Place]:
    """A place for each home.

    Args:
        spare_hbm_bytes: device memory beside the stream. None: the host is the device, and all homes live there.
        ram_bytes: host memory that homes may take; what is over goes to disk. None: there is no disk to go to.

    Left to itself it takes homes to the device in the order of the forward, as the budget allows: the update of the
    first ones has the least time before their next visit, and the CPU gets to the others meanwhile.
    Raises UserError for places that cannot be.
    """
    if options.places is not None:
        places = _named_places(plans, config, options.places)
    else:
        places = _with_homes_on_device(plans, trainable, config, spare_hbm_bytes)
    return places if ram_bytes is None else _with_parts_on_disk(plans, trainable, config, places, ram_bytes)


def _with_homes_on_device(
    plans: list[HomePlan], trainable: set[int], config: Config, spare_bytes: int | None
) -> dict[HomePlan, Place]:
    places = dict.fromkeys(plans, CPU)
    if spare_bytes is None or config.moments == "lossless":
        return places
    budget = int(HBM_SHARE * spare_bytes) if config.hbm_home_bytes is None else config.hbm_home_bytes
    if budget > spare_bytes:
        raise UserError(
            f"hbm_home_gb={config.hbm_home_gb:g} is more than the {spare_bytes / GB:.3g} GB of device memory that "
            "slots and gradient sums leave: give less, or leave it out"
        )
    for plan in plans:
        num_bytes = state_bytes(plan, trainable, config.moments)
        if plan.layers and num_bytes <= budget:
            places[plan] = HBM
            budget -= num_bytes
    return places


def _with_parts_on_disk(
    plans: list[HomePlan], trainable: set[int], config: Config, places: dict[HomePlan, Place], ram_bytes: int
) -> dict[HomePlan, Place]:
    """The places with as much on disk as is over `ram_bytes`.

    Moments go first, which are read and written once a step; then low halves; then weights, which every visit reads;
    gradients last, which the backward waits for. Of each in `spill_order`.
    """
    keeps = config.clip == "global"
    sizes = {plan: part_bytes(plan, trainable, config.moments, keeps_gradients=keeps) for plan in plans}
    over_bytes = -ram_bytes + sum(
        sizes[plan][part] for plan in plans for part, tier in places[plan].tiers.items() if tier == RAM
    )
    places = dict(places)
    for part in ("moments", "low", "weights", "gradients"):
        for plan in (plans[index] for index in spill_order(len(plans), config.clip)):
            place = places[plan]
            may_go = place.update == "cpu" and place.tiers[part] == RAM and (plan.layers or part == "moments")
            if over_bytes > 0 and may_go and sizes[plan][part]:
                places[plan] = with_part_on_disk(place, part)
                over_bytes -= sizes[plan][part]
    return places


def spill_order(num_homes: int, clip: str) -> list[int]:
    """In which order homes (their numbers in the order of the forward) give parts to the disk.

    clip="global": the last ones first, whose update, beside the next forward, has the most time. clip="layer": updates
    run in the backward, one after the other, so those that wait for the disk are spread over it: however many there
    are, they lie about evenly (their numbers in binary, read backwards: van der Corput's sequence).
    """
    if clip == "global":
        return list(reversed(range(num_homes)))
    width = max(1, (num_homes - 1).bit_length())
    return sorted(range(num_homes), key=lambda number: f"{number:0{width}b}"[::-1])


def _named_places(
    plans: list[HomePlan], config: Config, wanted: Mapping[str, str | Place] | str | Place
) -> dict[HomePlan, Place]:
    is_for_all = isinstance(wanted, str | Place)
    by_name = {plan.name: wanted for plan in plans if plan.layers} if is_for_all else dict(wanted)
    known = {plan.name for plan in plans}
    for name, place in by_name.items():
        if name not in known:
            raise UserError(f"places: there is no home {name!r}; there are {', '.join(sorted(known))}")
        if not isinstance(place, Place) and place not in PLACES:
            raise UserError(f"places: {place!r} of {name} is not known: use one of {(*PLACES,)}, or a Place")
    found = {plan: _place_of(by_name.get(plan.name, CPU)) for plan in plans}
    for plan, place in found.items():
        if place.update == "device" and config.moments == "lossless":
            raise UserError(
                f'places: {plan.name} in {str(place)!r}, but "lossless" moments are coded on the CPU: use "cpu"'
            )
        if not plan.layers and DISK_TIER in (place.weights, place.low):
            raise UserError(f"places: {plan.name} is used outside of layers at any time: its weights cannot be on disk")
    return found


def _place_of(wanted: str | Place) -> Place:
    return wanted if isinstance(wanted, Place) else PLACES[wanted]
