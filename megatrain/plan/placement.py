"""Which homes live where, and where they are updated. Pure.

    cpu     lives in host memory, updated there by the CPU
    stream  lives in host memory; its whole state streams through the device for the update
    hbm     lives in device memory whole: weights, low halves, moments and gradients; updated there, crosses no link

Rule: no result depends on the place, in fp32 and with split masters bit for bit (and in every other format too).
"""

from __future__ import annotations

from collections.abc import Mapping

from megatrain.base.config import Config, StreamOptions
from megatrain.base.errors import UserError
from megatrain.base.units import GB
from megatrain.spec.formats import most_moment_bytes
from megatrain.spec.homes import HomePlan
from megatrain.spec.layout import padded, wire_bytes

CPU, STREAM, HBM = "cpu", "stream", "hbm"
PLACES = (CPU, STREAM, HBM)

HBM_SHARE = 0.2
"""Of the device memory beside slots and gradient sums, for homes; the rest is for activations and the layer at work."""

STAGING_BYTES = 128 << 20
"""Of each of the two sets of device memory through which states stream for their update, at most. Then every copy of a
piece is long enough for the link's full speed."""

NUM_MOMENTS = 2
"""As AdamW keeps them. Other rules keep fewer, which is not known before there is an optimizer."""


def state_bytes(plan: HomePlan, trainable: set[int], moments: str, *, keeps_gradients: bool = True) -> int:
    """Bytes of everything that a home holds: weights, low halves, moments and gradients."""
    trained = [field for key, field in plan.parameters.items() if key in trainable]
    low_bytes = sum(2 * padded(field.numel) for field in plan.fields if field.is_split)
    moment_bytes = NUM_MOMENTS * sum(most_moment_bytes(moments, field.numel) for field in trained)
    gradient_bytes = plan.grad_dtype.itemsize * sum(padded(field.numel) for field in trained) if keeps_gradients else 0
    return wire_bytes(plan.fields) + low_bytes + moment_bytes + gradient_bytes


def place_homes(
    plans: list[HomePlan], trainable: set[int], config: Config, options: StreamOptions, spare_bytes: int | None
) -> dict[HomePlan, str]:
    """A place for each home.

    Args:
        spare_bytes: device memory beside the stream. None: the host is the device, and all homes live there.

    Left to itself it takes homes to the device in the order of the forward, as the budget allows: the update of the
    first ones has the least time before their next visit, and the CPU gets to the others meanwhile.
    Raises UserError for places that cannot be.
    """
    if options.places is not None:
        return _named_places(plans, config, options.places)
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


def _named_places(plans: list[HomePlan], config: Config, wanted: Mapping[str, str] | str) -> dict[HomePlan, str]:
    by_name = {plan.name: wanted for plan in plans if plan.layers} if isinstance(wanted, str) else dict(wanted)
    known = {plan.name for plan in plans}
    for name, place in by_name.items():
        if name not in known:
            raise UserError(f"places: there is no home {name!r}; there are {', '.join(sorted(known))}")
        if place not in PLACES:
            raise UserError(f"places: {place!r} of {name} is not known: use one of {PLACES}")
        if place != CPU and config.moments == "lossless":
            raise UserError(f'places: {name} in {place!r}, but "lossless" moments are coded on the CPU: use "cpu"')
    return {plan: by_name.get(plan.name, CPU) for plan in plans}
