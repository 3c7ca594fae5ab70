"""The moving average of the weights: in their place for a while, and the memory that it takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from megatrain.execute.engine import Engine
from megatrain.execute.parameters import HomeParameter
from megatrain.optim.states import EMA, State
from megatrain.plan.placement import HBM_TIER
from megatrain.plan.rows import host_bytes
from megatrain.store.home import Home


def require(engine: Engine, parameters: Iterable[HomeParameter]) -> None:
    """Raises UserError when averages of `parameters` do not fit beside all that the plan counted, averages apart."""
    memory, placement = engine.memory, engine.placement
    average_bytes = 4 * sum(parameter.numel() for parameter in parameters if parameter._home.place.moments != HBM_TIER)
    missing_bytes = host_bytes(placement) + average_bytes - memory.ram_bytes
    memory.require(max(0, missing_bytes), "training with an average of the weights (ema_decay)")


@contextlib.contextmanager
def in_place_of_weights(
    engine: Engine,
    members: Mapping[Home, Sequence[tuple[HomeParameter, int]]],
    own_states: Mapping[HomeParameter, State],
) -> Iterator[None]:
    """Within the block homes hold the averages; after it what they held before. Blocks nest."""
    engine.wait()
    kept = {home: (home.wire.clone(), home.low.clone()) for home in members}
    engine.num_averages += 1
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
        engine.num_averages -= 1
