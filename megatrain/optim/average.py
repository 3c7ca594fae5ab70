"""The moving average of the weights: in their place for a while, and the memory that it takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from megatrain.execute.parameters import HomeParameter
from megatrain.optim.rules import Rule
from megatrain.optim.states import EMA, State
from megatrain.plan.placement import HBM
from megatrain.plan.rows import Placement, host_bytes, lossless_bytes
from megatrain.store.home import Home
from megatrain.store.memory import HostMemory


def require(memory: HostMemory, placement: Placement, by_home: Mapping[Home, Mapping[HomeParameter, Rule]]) -> None:
    """Raises UserError when averages do not fit beside all that the plan counted, which averages it did not."""
    still_planned_bytes = host_bytes(placement) - lossless_bytes(placement) - memory.ram_bytes - memory.disk_bytes
    average_bytes = 4 * sum(
        parameter.numel() for home, rules in by_home.items() if home.place != HBM for parameter in rules
    )
    memory.require(max(0, still_planned_bytes) + average_bytes, "training with an average of the weights (ema_decay)")


@contextlib.contextmanager
def in_place_of_weights(
    members: Mapping[Home, Sequence[tuple[HomeParameter, int]]], own_states: Mapping[HomeParameter, State]
) -> Iterator[None]:
    """Within the block homes hold the averages; after it what they held before. No update may run meanwhile."""
    kept = {home: (home.wire.clone(), home.low.clone()) for home in members}
    try:
        for home, of_home in members.items():
            for parameter, _ in of_home:
                home.write(parameter._field, own_states[parameter][EMA])
        yield
    finally:
        for home, (wire, low) in kept.items():
            home.wire.copy_(wire)
            home.low.copy_(low)
            home.version += 1
