"""Memory as rows that a reader can add up. Pure: sizes in, bytes out; no device is touched."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatrain.base.config import Config, StreamOptions
from megatrain.base.errors import UserError
from megatrain.base.units import GB
from megatrain.plan.placement import HBM, NUM_MOMENTS, STAGING_BYTES, STREAM, place_homes, state_bytes
from megatrain.spec.formats import most_moment_bytes
from megatrain.spec.homes import HomePlan
from megatrain.spec.layout import wire_bytes

UNBOUNDED = 2**62
BOUNDARY_SHARE = 0.4
"""Of the device memory beside slots and gradients: boundary activations. The rest is the working set of one layer and
one micro-batch's loss, which is not known before a batch is seen."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the plan."""

    tier: str
    """`ram` or `hbm`."""

    name: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where everything lives, and in which formats: what memory is counted from."""

    plans: list[HomePlan]
    trainable: set[int]
    """ids of the parameters that train (keys of `HomePlan.parameters`)."""
    places: dict[HomePlan, str]
    config: Config
    options: StreamOptions

    @property
    def in_ram(self) -> list[HomePlan]:
        return [plan for plan in self.plans if self.places[plan] != HBM]

    @property
    def in_hbm(self) -> list[HomePlan]:
        return [plan for plan in self.plans if self.places[plan] == HBM]

    @property
    def hbm_home_bytes(self) -> int:
        keeps = self.config.clip == "global"
        moments = self.config.moments
        return sum(state_bytes(p, self.trainable, moments, keeps_gradients=keeps) for p in self.in_hbm)

    @property
    def moment_bytes(self) -> int:
        """Moments in host memory, at most."""
        trained = [field for plan in self.in_ram for key, field in plan.parameters.items() if key in self.trainable]
        return NUM_MOMENTS * sum(most_moment_bytes(self.config.moments, field.numel) for field in trained)

    @property
    def update_bytes(self) -> int:
        """Device memory for updates there: gradients on their way where none is kept, staging of streamed states."""
        ring_bytes = self.ring_bytes(self.in_hbm) if self.config.clip == "layer" else 0
        return ring_bytes + (2 * STAGING_BYTES if STREAM in self.places.values() else 0)

    def ring_bytes(self, plans: list[HomePlan]) -> int:
        """Gradients that are on their way to their update, where none is kept."""
        most = max((self._gradient_bytes(plan) for plan in plans), default=0)
        return (self.options.max_drains + 1) * most

    def kept_gradient_bytes(self, plans: list[HomePlan]) -> int:
        return sum(map(self._gradient_bytes, plans))

    def _gradient_bytes(self, plan: HomePlan) -> int:
        numel = sum(field.numel for key, field in plan.parameters.items() if key in self.trainable)
        return plan.grad_dtype.itemsize * numel


def plan_placement(
    plans: list[HomePlan], trainable: set[int], config: Config, options: StreamOptions, device_bytes: int | None
) -> Placement:
    """device_bytes: device memory that may be used in all; None where the host is the device."""
    fixed_bytes = _slot_bytes(plans, options) + _gradient_bytes(plans, options)
    spare_bytes = None if device_bytes is None else max(0, device_bytes - fixed_bytes)
    places = place_homes(plans, trainable, config, options, spare_bytes)
    return Placement(plans=plans, trainable=trainable, places=places, config=config, options=options)


def memory_rows(placement: Placement) -> list[Row]:
    """What is allocated before activations."""
    plans, options, config = placement.plans, placement.options, placement.config
    fields = [field for plan in placement.in_ram for field in plan.fields]
    if config.clip == "global":
        gradients = Row(
            tier="ram",
            name="gradients, kept for the exact norm",
            num_bytes=placement.kept_gradient_bytes(placement.in_ram),
        )
    else:
        gradients = Row(tier="ram", name="gradients on their way", num_bytes=placement.ring_bytes(placement.in_ram))
    rows = [
        Row(tier="ram", name="compute weights (cross the link)", num_bytes=sum(field.wire_bytes for field in fields)),
        Row(tier="ram", name="low halves of fp32 masters", num_bytes=sum(2 * f.numel for f in fields if f.is_split)),
        Row(tier="ram", name=f"moments, {config.moments}", num_bytes=placement.moment_bytes),
        gradients,
        Row(tier="hbm", name="layers that live on the device", num_bytes=placement.hbm_home_bytes),
        Row(tier="hbm", name="updates on the device", num_bytes=placement.update_bytes),
        Row(tier="hbm", name="slots", num_bytes=_slot_bytes(placement.in_ram, options)),
        Row(tier="hbm", name="gradient sums and drains", num_bytes=_gradient_bytes(plans, options)),
        Row(tier="hbm", name="resident weights", num_bytes=sum(wire_bytes(p.fields) for p in plans if not p.layers)),
    ]
    return [row for row in rows if row.num_bytes]


def lossless_bytes(placement: Placement) -> int:
    """Moments of varying size, at most. They lie in memory whatever else goes to disk."""
    return placement.moment_bytes if placement.config.moments == "lossless" else 0


def host_bytes(placement: Placement) -> int:
    """Host memory that training needs: weights, moments, gradients."""
    return sum(row.num_bytes for row in memory_rows(placement) if row.tier == "ram")


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
    options = placement.options
    if options.activation_bytes is not None:
        return options.activation_bytes
    if device_bytes is None:
        return UNBOUNDED
    slot_bytes = _slot_bytes(placement.in_ram, options)
    home_bytes = placement.hbm_home_bytes + placement.update_bytes
    fixed_bytes = slot_bytes + _gradient_bytes(placement.plans, options) + home_bytes
    return max(0, int(BOUNDARY_SHARE * (device_bytes - fixed_bytes)))


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
