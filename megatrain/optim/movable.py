"""An optimizer's half of a home that moves to another tier between two steps (`execute/mover.py`): its states go too.

Rule: the dicts of states stay, and the tensors in them are the storage that updates use; only where that lies changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from megatrain.execute.parameters import HomeParameter
from megatrain.optim.states import State, copied_states, num_state_bytes
from megatrain.plan.placement import Place
from megatrain.store.codecs import Stored
from megatrain.store.home import Home
from megatrain.store.lending import Lending


class Movable:
    """For HomeOptimizer."""

    _states: dict[HomeParameter, State]
    _stored: dict[HomeParameter, tuple[Stored, ...]]
    _members: dict[Home, list[tuple[HomeParameter, int]]]
    _lending: Lending

    @property
    def is_lending(self) -> bool:
        """Somebody holds one of the states."""
        return self._lending.is_any_out

    @property
    def has_lent_on_device(self) -> bool:
        """Somebody may hold an alias of a state on the device, which nobody can count."""
        return self._lending.has_lent_on_device

    def num_bytes_of(self, home: Home) -> int:
        """Of a home's states."""
        return sum(num_state_bytes(self._states[parameter]) for parameter, _ in self._members.get(home, ()))

    def prepare_move(self, home: Home, place: Place) -> Callable[[], None]:
        """Copies the home's states to where `place` has its moments. What is returned takes the copies over, and may be
        called again after an interrupt. As `Home.prepare_move` otherwise, and to be called before that is taken over.
        """
        members = [parameter for parameter, _ in self._members.get(home, ())]
        if not (members and home.place.is_apart("moments", place)):
            return _stay
        own = {parameter: self._states[parameter] for parameter in members}
        return functools.partial(self._take_over, copied_states(home, own, place))

    def _take_over(self, copies: dict[HomeParameter, State]) -> None:
        for parameter, state in copies.items():
            self._stored.pop(parameter, None)
            self._states[parameter].update(state)


def _stay() -> None:
    """No state moves."""
