"""Seeded initialisation by a model's own `_init_weights`, a streamed layer at a time.

A unit's parameters are made for real, all others stay on the meta device; `_init_weights` of the unit's modules and of
those around them runs as transformers runs it, inner modules first. What it does to parameters on meta does nothing.
Every call draws from a generator seeded by (seed, module, unit), and large tensors in pieces on all cores
(`load/fills.py`): values depend neither on the order in which layers are asked for nor on threads. Parameters that
`_init_weights` never writes have the value of their constructor.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from megatrain.base.errors import UserError
from megatrain.load.fills import ParallelFills
from megatrain.load.units import PATCHING, Units, lent_parameters, names_of, parameters_on_meta

_FLAG = "_is_hf_initialized"
"""transformers' mark of a tensor that its initialisation leaves alone."""

_OVERWRITES = {"normal_", "uniform_", "fill_", "zero_", "copy_", "exponential_", "log_normal_", "random_", "bernoulli_"}
"""Operations after which a tensor holds nothing of what it held."""


class Initialiser:
    """Makes the values of parameters that no checkpoint has.

    Args:
        model: parameters on the meta device, buffers for real, weights tied.
        names: of the parameters to make.
    """

    def __init__(self, model: PreTrainedModel, names: set[str], seed: int) -> None:
        self._model = model
        self._seed = seed
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        self._places: dict[str, list[str]] = {}
        for aliases in names_of(model).values():
            if names.isdisjoint(aliases):
                continue
            # What is tied is initialised as its source is, whatever stands in the other place.
            sources = [name for name in aliases if name not in tied] or aliases
            self._places[sources[0]] = sources
        units = Units(model)
        self._unit_of = {name: units.of(name) for name in self._places}
        left_alone = _left_alone(model, self._places)
        self._constructed = _constructed(model, left_alone, seed) if left_alone else {}

    def unit_of(self, name: str) -> str | None:
        return self._unit_of.get(name)

    def make(self, unit: str, following: str | None = None) -> dict[str, torch.Tensor]:
        """Raises UserError for a parameter that gets no values."""
        names = [name for name, its_unit in self._unit_of.items() if its_unit == unit]
        places = {place: name for name in names for place in self._places[name]}
        values = {name: self._blank(name) for name in names}
        with lent_parameters(self._model, list(places)) as lent:
            for place, name in places.items():
                lent[place][place.rpartition(".")[2]] = values[name]
            _initialise(self._model, set(places), (self._seed, unit))
            values = {name: lent[name][name.rpartition(".")[2]].data for name in names}
        for name, value in values.items():
            if value.sum(dtype=torch.float32).isnan():
                raise UserError(
                    f"{type(self._model).__name__}: neither its constructor nor its _init_weights gives {name} a "
                    "value; initialise it there, or load a checkpoint that has it"
                )
        return values

    def _blank(self, name: str) -> nn.Parameter:
        if name in self._constructed:
            return nn.Parameter(self._constructed.pop(name))
        empty = self._model.get_parameter(name)
        return nn.Parameter(torch.full(empty.shape, torch.nan, dtype=empty.dtype))


def _initialise(model: PreTrainedModel, names: set[str], seed: tuple[Any, ...] | None) -> None:
    """`_init_weights` of every module in whose subtree one of `names` lies. Buffers keep their values."""
    paths = {""} | {path for name in names for path in _paths(name)}
    guards = _buffers_left_alone(model), guard_torch_init_functions(), torch.no_grad(), ParallelFills()
    with torch.random.fork_rng(devices=[]), contextlib.ExitStack() as stack:
        for guard in guards:
            stack.enter_context(guard)
        for path, module, owner in _visits(model, "", model):
            if path not in paths or (model.is_custom_code() and _has_nothing_left(module)):
                continue
            if seed is not None:
                torch.default_generator.manual_seed(_hash(*seed, path))
            owner._init_weights(module)


def _has_nothing_left(module: nn.Module) -> bool:
    """Of its own to initialise: transformers leaves such a module of a class from outside of it alone."""
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return all(getattr(tensor, _FLAG, False) for tensor in own)


def _visits(module: nn.Module, path: str, owner: PreTrainedModel) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Modules in the order of transformers' initialisation, each with the (sub-)model whose `_init_weights` it gets."""
    for name, child in module.named_children():
        inside = child if isinstance(child, PreTrainedModel) else owner
        yield from _visits(child, f"{path}.{name}" if path else name, inside)
    yield path, module, owner


def _paths(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _hash(*parts: Any) -> int:
    digest = hashlib.sha256("\0".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextlib.contextmanager
def _buffers_left_alone(model: nn.Module) -> Iterator[None]:
    """They have their values; a second initialisation could draw others."""
    free = [buffer for buffer in model.buffers() if not getattr(buffer, _FLAG, False)]
    for buffer in free:
        setattr(buffer, _FLAG, True)
    try:
        yield
    finally:
        for buffer in free:
            delattr(buffer, _FLAG)


class _Overwritten(TorchDispatchMode):
    """Collects the storages that are overwritten whole. `.data` has the storage of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _OVERWRITES and isinstance(args[0], torch.Tensor):
            self.seen.add((args[0].untyped_storage()._cdata, args[0].numel()))
        return func(*args, **(kwargs or {}))


def _left_alone(model: PreTrainedModel, places: dict[str, list[str]]) -> set[str]:
    """Which of the parameters `_init_weights` does not overwrite. It is tried on the meta device."""
    every = [place for places_of_one in places.values() for place in places_of_one]
    with lent_parameters(model, every) as lent, _Overwritten() as overwritten:
        _initialise(model, set(every), None)
        after = {name: lent[name][name.rpartition(".")[2]] for name in places}
    before = {name: model.get_parameter(name) for name in places}
    return {
        name
        for name, parameter in before.items()
        if after[name] is parameter
        and (parameter.untyped_storage()._cdata, parameter.numel()) not in overwritten.seen
        and parameter.numel() > 0
    }


def _constructed(model: PreTrainedModel, names: set[str], seed: int) -> dict[str, torch.Tensor]:
    """The values that the constructors give to `names`; no other parameter is made."""

    def build() -> PreTrainedModel:
        return type(model)._from_config(copy.deepcopy(model.config), dtype=model.dtype)

    with torch.random.fork_rng(devices=[]), _no_initialisation():
        with parameters_on_meta() as places:
            paths = {id(module): path for path, module in build().named_modules()}
        order = [f"{paths.get(id(module), '')}.{attribute}".lstrip(".") for module, attribute in places]
        torch.default_generator.manual_seed(_hash(seed, "constructors"))
        with parameters_on_meta(keep=lambda index: order[index] in names):
            built = dict(build().named_parameters(remove_duplicate=False))
    return {name: built[name].data for name in names if name in built and built[name].device.type != "meta"}


@contextlib.contextmanager
def _no_initialisation() -> Iterator[None]:
    """Constructors alone: transformers' own initialisation at their end is left out."""
    with PATCHING:
        initialise = PreTrainedModel.init_weights
        PreTrainedModel.init_weights = lambda self: None
        try:
            yield
        finally:
            PreTrainedModel.init_weights = initialise
