"""The moving average of the weights: how it moves without an update, stands in their place, and the memory it takes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence

import torch

from megatrain.execute.engine import Engine
from megatrain.execute.parameters import HomeParameter
from megatrain.optim.formula import ema_
from megatrain.optim.marks import Marks, undone_on_fault
from megatrain.optim.states import EMA, State
from megatrain.plan.placement import HBM_TIER
from megatrain.plan.rows import host_bytes
from megatrain.store.home import Home
from megatrain.store.masters import join

PIECE = 1 << 18
"""Parameters that `move` works on at a time, with about 3 MB of temporaries."""


def require(engine: Engine, parameters: Iterable[HomeParameter]) -> None:
    """Raises UserError when averages of `parameters` do not fit beside all that the plan counted, averages apart."""
    memory, placement = engine.memory, engine.placement
    average_bytes = 4 * sum(parameter.numel() for parameter in parameters if parameter._home.place.moments != HBM_TIER)
    missing_bytes = host_bytes(placement) + average_bytes - memory.ram_bytes
    memory.require(max(0, missing_bytes), "training with an average of the weights (ema_decay)")


def move(
    home: Home,
    parameters: Sequence[HomeParameter],
    own_states: Mapping[HomeParameter, State],
    decay: float,
    marks: Marks,
) -> None:
    """One step of the averages of parameters that had no gradient in it: their weights stay, the averages follow."""
    home.tiers[home.place.moments].expose()
    with torch.no_grad():
        for parameter in parameters:
            field, average = parameter._field, own_states[parameter][EMA].view(-1)
            weights, low = home.flat(field)
            for start in range(0, field.numel, PIECE):
                cut = slice(start, start + PIECE)
                low_part = None if low is None else low[cut]
                piece = functools.partial(_move, average[cut], weights[cut], low_part, decay)
                marks.once((field, start), piece)


def _move(average: torch.Tensor, weights: torch.Tensor, low: torch.Tensor | None, decay: float) -> None:
    now = weights.to(average.device)
    now = now.float() if low is None else join(now, low.to(average.device))
    with undone_on_fault([average]):
        ema_(average, now, decay)


def in_place_of_weights(
    engine: Engine,
    members: Mapping[Home, Sequence[tuple[HomeParameter, int]]],
    own_states: Mapping[HomeParameter, State],
) -> contextlib.AbstractContextManager[None]:
    """Within the block homes hold the averages; after it what they held before. Blocks nest, in any order."""
    engine.wait()

    def write(home: Home) -> None:
        for parameter, _ in members[home]:
            home.write(parameter._field, own_states[parameter][EMA])

    return engine.set_aside.holding({home: functools.partial(write, home) for home in members})
