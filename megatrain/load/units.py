"""A model without values, and the units in which values are made for it: one a streamed layer.

`WeightSource` is what `mt.stream(model, initialize=...)` asks, parameter by parameter. A unit is made when the first of
its parameters is asked for and held until the last one is: never more than a layer, wherever the homes lie.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from megatrain.spec.discover import find_layers

RESIDENT = "resident"

PATCHING = threading.RLock()
"""Held while a function of torch or transformers has a stand-in: two threads must not put back each other's."""


class Units:
    """Names of parameters -> the streamed layer that holds them."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = {layer.name for layer in find_layers(model)}

    def of(self, name: str) -> str:
        """Name of the layer that holds the parameter `name`, or `RESIDENT`."""
        path = name
        while path := path.rpartition(".")[0]:
            if path in self._layers:
                return path
        return RESIDENT


class Maker(Protocol):
    """Makes the values of some of a model's parameters."""

    def unit_of(self, name: str) -> str | None:
        """The unit that `name` is made with; None if it is not made here."""

    def make(self, unit: str, following: str | None = None) -> dict[str, torch.Tensor]:
        """Values of all parameters of a unit, by name. following: the unit that is most likely asked for next."""


class WeightSource:
    """(name, shape, dtype) -> value of a parameter of `model`, by the first of `makers` that has one of its names.

    Args:
        model: on the meta device, its weights tied.
    """

    def __init__(self, model: nn.Module, makers: list[Maker]) -> None:
        self.done: Callable[[], Any] = lambda: None
        """Called whenever a unit was made for the first time."""
        self._canonical: dict[str, str] = {}
        self._origin: dict[str, tuple[Maker, str]] = {}
        self._ready: dict[str, torch.Tensor] = {}
        for canonical, aliases in names_of(model).items():
            found = [(maker, alias) for maker in makers for alias in aliases if maker.unit_of(alias) is not None]
            # Every parameter is either in the checkpoint or missing from it.
            self._origin[canonical] = found[0]
            self._canonical[found[0][1]] = canonical
        self._order = dict.fromkeys(self.unit_of(name) for name in self._origin)
        """Units that have not been made, in the order of the model."""
        self._told: set[tuple[int, str | None]] = set()
        """Units of which `done` heard."""

    @property
    def num_units(self) -> int:
        """How many units there are to make."""
        return len({self.unit_of(name) for name in self._origin})

    def unit_of(self, name: str) -> tuple[int, str | None]:
        """What is made together with `name`."""
        maker, alias = self._origin[name]
        return id(maker), maker.unit_of(alias)

    def _following(self, name: str) -> str | None:
        """The unit of the same maker that comes after that of `name` in the model. Forgets the unit of `name`."""
        unit = self.unit_of(name)
        self._order.pop(unit, None)
        return next((key for maker, key in self._order if maker == unit[0]), None)

    def __call__(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        if name not in self._ready:
            maker, alias = self._origin[name]
            _give_back_freed()
            made = maker.make(maker.unit_of(alias), self._following(name))
            self._ready |= {self._canonical[key]: value for key, value in made.items() if key in self._canonical}
            if self.unit_of(name) not in self._told:
                self._told.add(self.unit_of(name))
                self.done()
        return self._ready.pop(name)

    def restart(self, names: Iterable[str]) -> None:
        """Whoever asked has failed, and will ask for all of `names` anew."""
        self._ready.clear()
        wanted = {self.unit_of(name) for name in names}
        self._order = {unit: None for unit in map(self.unit_of, self._origin) if unit in wanted}


def _give_back_freed() -> None:
    """To the system, what malloc keeps of layers before: several threads made them, and it keeps some for each."""
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


def names_of(model: nn.Module) -> dict[str, list[str]]:
    """First name of each parameter -> all its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {aliases[0]: aliases for aliases in names.values()}


@contextlib.contextmanager
def lent_parameters(model: nn.Module, names: list[str]) -> Iterator[dict[str, dict[str, nn.Parameter | None]]]:
    """While values are made, these places hold real parameters; afterwards what they held before.

    Yields name -> the dict of its module that holds it, under the last part of the name.
    """
    places = {name: model.get_submodule(name.rpartition(".")[0])._parameters for name in names}
    held = {name: place[name.rpartition(".")[2]] for name, place in places.items()}
    try:
        yield places
    finally:
        for name, place in places.items():
            place[name.rpartition(".")[2]] = held[name]


@contextlib.contextmanager
def parameters_on_meta(keep: Callable[[int], bool] = lambda index: False) -> Iterator[list[tuple[nn.Module, str]]]:
    """Modules that this thread builds inside have their parameters on the meta device and their buffers for real.

    Args:
        keep: which parameters keep their values, by their number in the order in which they are registered.

    Yields the places in that order: (module, attribute).
    """
    places: list[tuple[nn.Module, str]] = []
    thread = threading.get_ident()

    def register_without_values(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is None or threading.get_ident() != thread:
            return
        places.append((module, name))
        # What is on meta already was tied: it stays the same object.
        if parameter.device.type != "meta" and not keep(len(places) - 1):
            empty = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            empty.__dict__.update(parameter.__dict__)
            module._parameters[name] = empty

    with PATCHING:
        register = nn.Module.register_parameter
        nn.Module.register_parameter = register_without_values
        try:
            yield places
        finally:
            nn.Module.register_parameter = register
