"""Attributes that a layer's forward sets on its modules (`self.aux_loss = ...`), which the model may read later.

Rule: a recomputation sees the values that the forward saw and leaves none of its own, and a micro-batch sees no tensors
of another.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

Place = tuple[nn.Module, str]
Attributes = dict[Place, Any]
"""Value of each (module, name), or `MISSING`."""

MISSING = object()
BUFFERS = operator.attrgetter("_buffers")
"""Where a module's buffers are; other attributes are in its `vars`."""


def get_attributes(places: Iterable[Place], space: Callable[[nn.Module], dict[str, Any]] = vars) -> Attributes:
    return {(module, name): space(module).get(name, MISSING) for module, name in places}


def set_attributes(attributes: Attributes, space: Callable[[nn.Module], dict[str, Any]] = vars) -> None:
    for (module, name), value in attributes.items():
        if value is MISSING:
            space(module).pop(name, None)
        else:
            space(module)[name] = value


@contextlib.contextmanager
def setting_attributes(modules: list[nn.Module]) -> Iterator[Attributes]:
    """What the block sets or deletes on `modules` is in the yielded dict afterwards, and undone."""
    changed: Attributes = {}
    before = [vars(module).copy() for module in modules]
    try:
        yield changed
    finally:
        for module, old in zip(modules, before, strict=True):
            now = vars(module)
            if now.keys() == old.keys() and all(map(operator.is_, now.values(), map(old.__getitem__, now))):
                continue
            changed |= {(module, name): MISSING for name in old if name not in now}
            for name in [name for name, value in now.items() if name not in old or old[name] is not value]:
                changed[module, name] = now.pop(name)
            now.update(old)


class OwnAttributes:
    """Attributes with tensors of one micro-batch's graph: on the modules while it runs, aside while others do.

    Plain values (a count of calls) are nobody's own: they stay on the modules, for all micro-batches to see.
    """

    def __init__(self) -> None:
        self._own: Attributes = {}
        self._outside: Attributes = {}

    def add(self, attributes: Attributes) -> None:
        """These are about to be set by the running micro-batch."""
        places = [place for place, value in attributes.items() if _is_differentiable(value)]
        self._outside |= get_attributes(place for place in places if place not in self._outside)
        self._own |= dict.fromkeys(places)

    def enter(self) -> None:
        self._outside = get_attributes(self._own)
        set_attributes(self._own)

    def leave(self) -> None:
        self._own = get_attributes(self._own)
        set_attributes(self._outside)


def _is_differentiable(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_differentiable, value))
    if isinstance(value, dict):
        return any(map(_is_differentiable, value.values()))
    return isinstance(value, torch.Tensor) and value.requires_grad
