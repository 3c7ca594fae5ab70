"""Memory as rows that a reader can add up. Pure: sizes in, bytes out; no device is touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatrain.base.config import Config, StreamOptions
from megatrain.base.errors import UserError
from megatrain.base.units import GB
from megatrain.plan.placement import DISK_TIER, HBM_TIER, PARTS, RAM, STAGING_BYTES, Place, part_bytes, place_homes
from megatrain.spec.homes import HomePlan
from megatrain.spec.layout import wire_bytes

UNBOUNDED = 2**62
BOUNDARY_SHARE = 0.4
"""Of the device memory beside slots and gradients: boundary activations. The rest is the working set of one layer and
one micro-batch's loss, which is not known before a batch is seen."""

NUM_UPDATE_SLOTS = 6
UPDATE_SLOT_BYTES = 32 << 20
"""Host slots for states of homes on disk, at least so many: one is updated, the others are on their way in or out. More
hold what is read ahead while no update runs, over the forward and backward."""
SPARE_SHARE = 0.5
"""Of the host memory that is left, for more of them; the rest is for inputs of layers."""
SLACK_BYTES = 4 * 4096
"""For a field's part on disk, which may begin and end within pages."""
NUM_WEIGHT_SLOTS = 2
"""Host slots for weights on their way from disk to the device, each as large as the largest of them."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the plan."""

    tier: str
    """`hbm`, `ram` or `disk`."""

    name: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where everything lives, and in which formats: what memory is counted from."""

    plans: list[HomePlan]
    trainable: set[int]
    """ids of the parameters that train (keys of `HomePlan.parameters`)."""
    places: dict[HomePlan, Place]
    config: Config
    options: StreamOptions
    num_update_slots: int = NUM_UPDATE_SLOTS

    @property
    def streamed(self) -> list[HomePlan]:
        """Homes whose weights cross the link."""
        return [plan for plan in self.plans if not self.places[plan].is_resident]

    @property
    def on_device(self) -> list[HomePlan]:
        """Homes whose gradients live on the device."""
        return [plan for plan in self.plans if self.places[plan].gradients == HBM_TIER]

    @property
    def has_disk(self) -> bool:
        return any(DISK_TIER in place.tiers.values() for place in self.places.values())

    @property
    def update_slot_bytes(self) -> int:
        """Of one host slot for states on disk."""
        return update_slot_bytes((plan, self.places[plan], self._sizes(plan)) for plan in self.plans)

    @property
    def disk_weight_bytes(self) -> int:
        """Of the largest home whose weights come from disk."""
        on_disk = [wire_bytes(plan.fields) for plan, place in self.places.items() if place.weights == DISK_TIER]
        return max(on_disk, default=0)

    def part_bytes(self, part: str, tier: str) -> int:
        """Bytes of one part of all homes in one tier."""
        return sum(self._sizes(plan)[part] for plan, place in self.places.items() if place.tiers[part] == tier)

    @property
    def room_bytes(self) -> int:
        """Host memory that inputs of layers and kept gradients share, as far as it is known before a batch is seen."""
        known = self.options.room_bytes
        return self.part_bytes("gradients", RAM) if known is None else known

    @property
    def update_bytes(self) -> int:
        """Device memory for updates there: gradients on their way where none is kept, staging of streamed states."""
        ring_bytes = self.ring_bytes(self.on_device) if self.config.clip == "layer" else 0
        is_staged = any(place.is_staged for place in self.places.values())
        return ring_bytes + (2 * STAGING_BYTES if is_staged else 0)

    def ring_bytes(self, plans: list[HomePlan]) -> int:
        """Gradients that are on their way to their update, where none is kept."""
        most = max((self._gradient_bytes(plan) for plan in plans), default=0)
        return (self.options.max_drains + 1) * most

    def host_slot_bytes(self) -> int:
        """Host memory through which the disk is read and written."""
        return NUM_WEIGHT_SLOTS * self.disk_weight_bytes + self.num_update_slots * self.update_slot_bytes

    def _gradient_bytes(self, plan: HomePlan) -> int:
        numel = sum(field.numel for key, field in plan.parameters.items() if key in self.trainable)
        return plan.grad_dtype.itemsize * numel

    def _sizes(self, plan: HomePlan) -> dict[str, int]:
        keeps = self.config.clip == "global"
        return part_bytes(plan, self.trainable, self.config.moments, keeps_gradients=keeps)


def update_slot_bytes(homes: Iterable[tuple[HomePlan, Place, Mapping[str, int]]]) -> int:
    """Of one host slot for states on disk: no more than the largest home needs, each of its tensors in whole pages.

    homes: each with its place and its bytes by part.
    """
    most = 0
    for plan, place, sizes in homes:
        on_disk = [part for part, tier in place.tiers.items() if tier == DISK_TIER]
        most = max(most, sum(sizes[part] + SLACK_BYTES * len(plan.fields) for part in on_disk))
    return min(UPDATE_SLOT_BYTES, most)


def host_slot_bytes(weight_bytes: int, update_slot_bytes: int) -> int:
    """weight_bytes: of the largest home whose weights come from disk."""
    return NUM_WEIGHT_SLOTS * weight_bytes + NUM_UPDATE_SLOTS * update_slot_bytes


def plan_placement(
    plans: list[HomePlan],
    trainable: set[int],
    config: Config,
    options: StreamOptions,
    device_bytes: int | None,
    ram_bytes: int | None = None,
) -> Placement:
    """
    Args:
        device_bytes: device memory that may be used in all; None where the host is the device.
        ram_bytes: host memory that may be used in all; what is over goes to disk. None: there is no disk to go to.
    """
    fixed_bytes = _slot_bytes(plans, options) + _gradient_bytes(plans, options)
    spare_bytes = None if device_bytes is None else max(0, device_bytes - fixed_bytes)

    def placed(homes_bytes: int | None) -> Placement:
        places = place_homes(plans, trainable, config, options, spare_hbm_bytes=spare_bytes, ram_bytes=homes_bytes)
        return Placement(plans=plans, trainable=trainable, places=places, config=config, options=options)

    placement = placed(ram_bytes)
    if ram_bytes is None or not placement.has_disk:
        return placement
    # What is read from disk passes through host memory too.
    rest_bytes = host_bytes(placement) - sum(placement.part_bytes(part, RAM) for part in PARTS)
    placement = placed(max(0, ram_bytes - rest_bytes - placement.disk_weight_bytes))
    slot_bytes = max(1, placement.update_slot_bytes)
    num_slots = options.num_update_slots
    if num_slots is None:
        num_slots = int(SPARE_SHARE * (ram_bytes - host_bytes(placement)) / slot_bytes)
    most = -(-sum(placement.part_bytes(part, DISK_TIER) for part in ("moments", "low")) // slot_bytes)
    return dataclasses.replace(placement, num_update_slots=max(NUM_UPDATE_SLOTS, min(num_slots, most)))


def memory_rows(placement: Placement) -> list[Row]:
    """What is allocated before activations."""
    plans, options, config = placement.plans, placement.options, placement.config
    names = {
        "weights": "compute weights (cross the link)",
        "low": "low halves of fp32 masters",
        "moments": f"moments, {config.moments}",
        "gradients": "gradients, kept for the exact norm",
    }
    rows = [
        Row(tier=tier, name=name, num_bytes=placement.part_bytes(part, tier))
        for tier in (RAM, DISK_TIER)
        for part, name in names.items()
    ]
    home_bytes = sum(placement.part_bytes(part, HBM_TIER) for part in PARTS)
    if config.clip == "layer":
        streamed = [plan for plan in plans if plan not in placement.on_device]
        rows.append(Row(tier=RAM, name="gradients on their way", num_bytes=placement.ring_bytes(streamed)))
    rows += [
        Row(tier=RAM, name="host slots of the disk", num_bytes=placement.host_slot_bytes()),
        Row(tier=HBM_TIER, name="layers that live on the device", num_bytes=home_bytes),
        Row(tier=HBM_TIER, name="updates on the device", num_bytes=placement.update_bytes),
        Row(tier=HBM_TIER, name="slots", num_bytes=_slot_bytes(placement.streamed, options)),
        Row(tier=HBM_TIER, name="gradient sums and drains", num_bytes=_gradient_bytes(plans, options)),
        Row(tier=HBM_TIER, name="resident weights", num_bytes=sum(wire_bytes(p.fields) for p in plans if not p.layers)),
    ]
    return [row for row in rows if row.num_bytes]


def host_bytes(placement: Placement) -> int:
    """Host memory that training needs: weights, moments, gradients."""
    return _tier_bytes(placement, RAM)


def disk_bytes(placement: Placement) -> int:
    """Of files in offload_dir."""
    return _tier_bytes(placement, DISK_TIER)


def _tier_bytes(placement: Placement, tier: str) -> int:
    return sum(row.num_bytes for row in memory_rows(placement) if row.tier == tier)


def check_device_memory(plans: list[HomePlan], config: Config, options: StreamOptions) -> StreamOptions:
    """The options with as many slots as `max_vram_gb` allows.

    Raises UserError when not even one layer at a time fits, with the number needed.
    """
    if config.max_vram_bytes is None:
        return options
    needed_bytes = 0
    for num_slots in range(options.num_slots, 0, -1):
        fewer = dataclasses.replace(options, num_slots=num_slots)
        needed_bytes = _slot_bytes(plans, fewer) + _gradient_bytes(plans, fewer)
        if needed_bytes <= config.max_vram_bytes:
            return fewer
    largest = max(plans, key=lambda plan: wire_bytes(plan.fields))
    raise UserError(
        f"max_vram_gb={config.max_vram_gb:g} is too small for one layer: {largest.name!r} and its gradients need "
        f"{needed_bytes / GB:.3g} GB (plus activations)"
    )


def activation_bytes(placement: Placement, device_bytes: int | None) -> int:
    """Boundary activations that may stay on the device; what is left is for the layer at work and the loss.

    Args:
        device_bytes: device memory that may be used in all; None is without bound (the host is the device).
    """
    if placement.options.activation_bytes is not None:
        return placement.options.activation_bytes
    if device_bytes is None:
        return UNBOUNDED
    return int(BOUNDARY_SHARE * _left_bytes(placement, device_bytes))


def working_room_bytes(placement: Placement, device_bytes: int) -> int:
    """The layer at work and the loss may take: the device memory that slots, gradients, homes and inputs leave."""
    return int((1 - BOUNDARY_SHARE) * _left_bytes(placement, device_bytes))


def _left_bytes(placement: Placement, device_bytes: int) -> int:
    options = placement.options
    slot_bytes = _slot_bytes(placement.streamed, options)
    home_bytes = sum(placement.part_bytes(part, HBM_TIER) for part in PARTS) + placement.update_bytes
    fixed_bytes = slot_bytes + _gradient_bytes(placement.plans, options) + home_bytes
    return max(0, device_bytes - fixed_bytes)


def _slot_bytes(plans: list[HomePlan], options: StreamOptions) -> int:
    blocks = (plan for plan in plans if any(layer.kind == "block" for layer in plan.layers))
    block_bytes = max((wire_bytes(plan.fields) for plan in blocks), default=0)
    largest_bytes = max((wire_bytes(plan.fields) for plan in plans if plan.layers), default=0)
    return options.num_slots * block_bytes + (largest_bytes if largest_bytes > block_bytes else 0)


def _gradient_bytes(plans: list[HomePlan], options: StreamOptions) -> int:
    """fp32 sums of the layer at work, and packets on their way."""
    sizes = [(sum(field.numel for field in plan.fields), plan.grad_dtype.itemsize) for plan in plans if plan.layers]
    packets = sorted((numel * itemsize for numel, itemsize in sizes), reverse=True)
    return 4 * max(numel for numel, _ in sizes) + sum(packets[: options.max_drains])
