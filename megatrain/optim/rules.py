"""The update rules as values: a function of `formula.py`, the states that it keeps, and its scalars.

A rule is added here and in `formula.py`; without a line of C it runs in PyTorch, in every format and place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatrain.optim import formula


@dataclass(frozen=True)
class State:
    """One moment that a rule keeps."""

    name: str
    """As in the state_dict of PyTorch's optimizer of that name."""
    is_signed: bool
    """A second moment is not."""


@dataclass(frozen=True)
class Rule:
    """`step(w, g, *states, scalars)` changes w and the states in place."""

    name: str
    step: Callable[..., None]
    scalars: type
    states: tuple[State, ...]

    @property
    def reference(self) -> int | None:
        """Which state is the second moment beside a first one (`store/codecs.py`)."""
        return next((i for i, state in enumerate(self.states) if not state.is_signed), None)

    def order(self) -> list[int]:
        """In which states are encoded: what refers to another comes after it."""
        return sorted(range(len(self.states)), key=lambda i: self.states[i].is_signed)


_FIRST, _SECOND = State("exp_avg", is_signed=True), State("exp_avg_sq", is_signed=False)
_MOMENTUM = State("momentum_buffer", is_signed=True)

ADAMW = Rule("adamw", formula.adamw_, formula.AdamWScalars, (_FIRST, _SECOND))
ADAM = Rule("adam", formula.adam_, formula.AdamScalars, (_FIRST, _SECOND))
MOMENTUM = Rule("momentum", formula.momentum_, formula.MomentumScalars, (_MOMENTUM,))
SGD = Rule("sgd", formula.sgd_, formula.SGDScalars, ())
LION = Rule("lion", formula.lion_, formula.LionScalars, (_FIRST,))
# Two halves of one step, with an orthogonalisation between them (`optim/muon.py`). The first one's `w` is a direction.
MUON = Rule("muon", formula.muon_direction_, formula.MuonDirectionScalars, (_MOMENTUM,))
MUON_STEP = Rule("muon_step", formula.muon_step_, formula.MuonStepScalars, ())

Scalars = Any
"""An instance of a rule's `scalars`."""
