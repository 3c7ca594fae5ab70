"""A forward that leaves a model and all random numbers as they were, and tells what it would have changed.

Rule: what a forward sets is undone, whether or not it succeeds: attributes, parameters, buffers, submodules and
hooks of every module, by identity, what is in its dictionaries, and the content of its buffers.
Gives up: what lies deeper inside of an attribute (a list that grows), and what is no part of the model.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from megatrain.execute.context import RngState

PLAIN = (bool, int, float, str)
"""Types whose values are compared; others by identity."""


@dataclass(frozen=True)
class Randomness:
    """State of what a forward on a device may draw from: torch's generators of CPU and device, Python's and NumPy's."""

    of_torch: RngState
    of_python: tuple[Any, ...]
    of_numpy: dict[str, Any]

    @classmethod
    def get(cls, device: torch.device) -> Randomness:
        return cls(RngState.get(device), random.getstate(), np.random.get_state(legacy=False))

    def equals(self, other: Randomness) -> bool:
        if self.of_python != other.of_python or not self.of_torch.equals(other.of_torch):
            return False
        return pickle.dumps(self.of_numpy) == pickle.dumps(other.of_numpy)

    def set(self, device: torch.device) -> None:
        self.of_torch.set(device)
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)


@contextmanager
def untouched(model: nn.Module) -> Iterator[list[str]]:
    """Undoes at its end what was changed within. The list names what that was then, with random numbers left out."""
    places = [
        (f"{name}." if name else "", place, dict(place))
        for name, module in model.named_modules()
        for place in (vars(module), *(value for value in vars(module).values() if isinstance(value, dict)))
    ]
    buffers = [(name, buffer, buffer._version, buffer.cpu().clone()) for name, buffer in model.named_buffers()]
    device = next(model.parameters()).device
    randomness = Randomness.get(device)
    changed: list[str] = []
    try:
        yield changed
    finally:
        randomness.set(device)
        changed += [name for place in places for name in _restored(*place)]
        changed += [name for buffer in buffers for name in _refilled(*buffer)]


def _restored(prefix: str, place: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Names of attributes that were changed, and are as `before` now."""
    names = _changed(before, place)
    if names:
        place.clear()
        place.update(before)
    return [f"{prefix}{name}" for name in names]


def _refilled(name: str, buffer: torch.Tensor, version: int, content: torch.Tensor) -> list[str]:
    """The name of a buffer whose content was changed, and is as before now."""
    if buffer._version == version:
        return []
    with torch.no_grad():
        buffer.copy_(content)
    return [name]


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names that were set, replaced or deleted."""
    names = [name for name in (*before, *after) if name not in before or name not in after]
    return names + [name for name in before if name in after and not _is_same(before[name], after[name])]


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, PLAIN) and one == other)
