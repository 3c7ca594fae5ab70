"""Memory as rows that a reader can add up. Pure: sizes in, bytes out; no device is touched."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatrain.base.config import Config, StreamOptions
from megatrain.base.errors import UserError
from megatrain.base.units import GB
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


def memory_rows(plans: list[HomePlan], trainable: set[int], options: StreamOptions) -> list[Row]:
    """What is allocated before activations.

    Args:
        plans: the homes.
        trainable: ids of the parameters that train (the keys of `HomePlan.parameters`).
    """
    fields = [field for plan in plans for field in plan.fields]
    trained = [(plan, field) for plan in plans for key, field in plan.parameters.items() if key in trainable]
    gradient_bytes = sum(plan.grad_dtype.itemsize * field.numel for plan, field in trained)
    rows = [
        Row(tier="ram", name="compute weights (cross the link)", num_bytes=sum(field.wire_bytes for field in fields)),
        Row(tier="ram", name="low halves of fp32 masters", num_bytes=sum(2 * f.numel for f in fields if f.is_split)),
        Row(tier="ram", name="moments, fp32", num_bytes=8 * sum(field.numel for _, field in trained)),
        Row(tier="ram", name="gradients, kept for the exact norm", num_bytes=gradient_bytes),
        Row(tier="hbm", name="slots", num_bytes=_slot_bytes(plans, options)),
        Row(tier="hbm", name="gradient sums and drains", num_bytes=_gradient_bytes(plans, options)),
        Row(tier="hbm", name="resident weights", num_bytes=sum(wire_bytes(p.fields) for p in plans if not p.layers)),
    ]
    return [row for row in rows if row.num_bytes]


def host_bytes(plans: list[HomePlan], trainable: set[int]) -> int:
    """Host memory that training needs: weights, moments, gradients."""
    rows = memory_rows(plans, trainable, StreamOptions())
    return sum(row.num_bytes for row in rows if row.tier == "ram")


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


def activation_bytes(plans: list[HomePlan], device_bytes: int | None, options: StreamOptions) -> int:
    """Boundary activations that may stay on the device; what is left is for the layer at work and the loss.

    Args:
        device_bytes: device memory that may be used in all; None is without bound (the host is the device).
    """
    if options.activation_bytes is not None:
        return options.activation_bytes
    if device_bytes is None:
        return UNBOUNDED
    fixed_bytes = _slot_bytes(plans, options) + _gradient_bytes(plans, options)
    return max(0, int(BOUNDARY_SHARE * (device_bytes - fixed_bytes)))


def _slot_bytes(plans: list[HomePlan], options: StreamOptions) -> int:
    block_bytes = max(wire_bytes(plan.fields) for plan in plans if any(layer.kind == "block" for layer in plan.layers))
    largest_bytes = max(wire_bytes(plan.fields) for plan in plans if plan.layers)
    return options.num_slots * block_bytes + (largest_bytes if largest_bytes > block_bytes else 0)


def _gradient_bytes(plans: list[HomePlan], options: StreamOptions) -> int:
    """fp32 sums of the layer at work, and packets on their way."""
    sizes = [(sum(field.numel for field in plan.fields), plan.grad_dtype.itemsize) for plan in plans if plan.layers]
    packets = sorted((numel * itemsize for numel, itemsize in sizes), reverse=True)
    return 4 * max(numel for numel, _ in sizes) + sum(packets[: options.max_drains])
