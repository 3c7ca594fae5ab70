"""What a checkpoint holds of each layer: names and shapes before anything is read, then one home after the other.

Weights get the names and shapes that transformers' own `save_pretrained` gives them (fused experts are taken apart
again): its conversion runs on tensors without bytes to learn them, and on those of one home at a time to write them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megatrain.execute.engine import Engine
from megatrain.execute.model import StreamedModel
from megatrain.execute.parameters import HomeParameter
from megatrain.optim.base import HomeOptimizer
from megatrain.optim.saved import MASTER, MASTER_LOW_HALF, SEPARATOR, states_of
from megatrain.optim.updaters import update_order
from megatrain.plan.placement import DISK_TIER
from megatrain.save.adapters import saves_adapters
from megatrain.save.tensor_files import Entry
from megatrain.spec.layout import Field
from megatrain.store.home import Home, on_host
from megatrain.store.lossless import LosslessMoment

LOW_HALF = f"{SEPARATOR}{MASTER_LOW_HALF}"
WHOLE = f"{SEPARATOR}{MASTER}"
LOW_HALF_BYTES, WHOLE_BYTES = 2, 4

Tensors = dict[str, torch.Tensor]


class SavedLayers:
    """
    Args:
        optimizer: its states are saved, and the low halves of masters. None: weights alone.
        has_weights: False where somebody else saves them (`can_save_by_layer`).
    """

    def __init__(
        self, model: nn.Module, engine: Engine, optimizer: HomeOptimizer | None, *, has_weights: bool = True
    ) -> None:
        self._model, self._engine, self._optimizer = model, engine, optimizer
        self.homes = _in_order_of_updates(engine)
        self._weights, self._others = _weights_of(model) if has_weights else ({}, {})
        is_cut = optimizer is not None and not saves_adapters(model)
        self._cut = {home: [f for f in home.fields if is_cut and lacks_bits(f)] for home in self.homes}

    # Names and shapes.

    def weight_groups(self) -> list[list[Entry]]:
        """Of each home in order, and what belongs to none."""
        homes = [_entries(_converted(self._model, _hollow(self._weights.get(home, {})))) for home in self.homes]
        return [*homes, _entries(self._others)] if self._weights or self._others else []

    def state_groups(self) -> list[list[Entry] | None]:
        """Of each home in order. None: not known before it is captured."""
        return [] if self._optimizer is None else [self._state_entries(home) for home in self.homes]

    def num_bytes(self, home: Home) -> int:
        """That `capture` takes at most, where everything is copied."""
        weights = sum(field.numel * field.saved_dtype.itemsize for field in self._weights.get(home, {}).values())
        halves = sum(lacking_bytes(field) for field in self._cut[home])
        states = states_of(self._optimizer, home).values() if self._optimizer else ()
        sizes = (one.num_coded_bytes if isinstance(one, LosslessMoment) else one.nbytes for one in states)
        return weights + halves + sum(sizes)

    # Bytes. The home's last update must be over, and nobody may change it meanwhile.

    @property
    def others(self) -> Tensors:
        """What belongs to no home (buffers), as it was at first."""
        return self._others

    def capture(self, home: Home, *, copies: bool) -> tuple[Tensors, Tensors, bool]:
        """Weights and states of a home on the CPU, and whether any of them views it, which `copies` rules out."""
        if DISK_TIER in home.place.tiers.values() and self._engine.memory.disk is not None:
            self._engine.memory.disk.settle()
        fields = self._weights.get(home, {})
        weights = _converted(self._model, {name: home.as_saved(field) for name, field in fields.items()})
        states = {}
        for field in self._cut[home]:
            is_half = _lacks_half(field)
            part = on_host(home.low_half(field)) if is_half else home.captured_master(field)
            states[f"{field.name}{LOW_HALF if is_half else WHOLE}"] = part
        named = states_of(self._optimizer, home) if self._optimizer else {}
        for name, value in named.items():
            states[name] = value.pack() if isinstance(value, LosslessMoment) else on_host(value)
        lent = {_storage(part) for part in (home.wire, home.low, *named.values()) if isinstance(part, torch.Tensor)}
        views = False
        for tensors in (weights, states):
            for name, tensor in tensors.items():
                if tensor.numel() and _storage(tensor) in lent:
                    views |= not copies
                    tensors[name] = tensor.clone() if copies else tensor
        return weights, states, views

    def _state_entries(self, home: Home) -> list[Entry] | None:
        assert self._optimizer is not None
        entries = [
            Entry(name=f"{field.name}{LOW_HALF}", dtype=torch.int16, shape=(field.numel,))
            if _lacks_half(field)
            else Entry(name=f"{field.name}{WHOLE}", dtype=torch.float32, shape=field.shape)
            for field in self._cut[home]
        ]
        for name, value in states_of(self._optimizer, home).items():
            if isinstance(value, LosslessMoment):
                return None
            entries.append(Entry.of(name, value))
        return entries


def can_save_by_layer(model: nn.Module) -> bool:
    """Whether the weights of `model` can be saved home by home: its files are as transformers makes them, and none of
    their tensors is made out of several homes."""
    if saves_adapters(model):
        return False
    if hasattr(model, "save_pretrained"):
        from transformers import PreTrainedModel

        plain = next(cls for cls in type(model).__mro__ if not issubclass(cls, StreamedModel))
        is_own = getattr(plain, "save_pretrained", None) is not PreTrainedModel.save_pretrained
        if is_own or getattr(model, "hf_quantizer", None) is not None:
            return False
    if not all(isinstance(value, torch.Tensor) for value in model.state_dict(keep_vars=True).values()):
        return False
    by_home, others = _weights_of(model)
    whole = {name: tensor for fields in by_home.values() for name, tensor in _hollow(fields).items()}
    parts = [_entries(_converted(model, _hollow(fields))) for fields in by_home.values()]
    together = _entries(_converted(model, {**whole, **others}))
    apart = [*(entry for part in parts for entry in part), *_entries(others)]
    return sorted(together, key=lambda entry: entry.name) == sorted(apart, key=lambda entry: entry.name)


def lacks_bits(field: Field) -> bool:
    """Its weights are saved in fewer bits than its master has."""
    is_fp32 = field.is_split or field.dtype == torch.float32
    return is_fp32 and field.saved_dtype.itemsize < torch.float32.itemsize


def lacking_bytes(field: Field) -> int:
    """Of what is saved beside them for that."""
    return field.numel * (LOW_HALF_BYTES if _lacks_half(field) else WHOLE_BYTES)


def _lacks_half(field: Field) -> bool:
    """bf16 weights are the master rounded to nearest, as a split one holds it."""
    return field.is_split and field.saved_dtype == torch.bfloat16


def _in_order_of_updates(engine: Engine) -> list[Home]:
    """The home that is updated first comes first: its update is the first to wait."""
    order = update_order(engine, engine.homes)
    return order[::-1] if engine.config.clip == "layer" else order


def _weights_of(model: nn.Module) -> tuple[dict[Home, dict[str, Field]], Tensors]:
    """By home, the fields that are saved under each name; and copies of what belongs to no home."""
    state: dict[str, Any] = dict(model.state_dict(keep_vars=True))
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    state = _once(model, state)
    homes: dict[Home, dict[str, Field]] = {}
    others: Tensors = {}
    for name, value in state.items():
        if isinstance(value, HomeParameter):
            homes.setdefault(value._home, {})[name] = value._field
        else:
            others[name] = value.detach().cpu().clone()
    return homes, others


def _once(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A tied weight under one of its names: the one that transformers keeps, else the first."""
    if not hasattr(model, "save_pretrained"):
        kept = {id(value): name for name, value in reversed(state.items())}
        return {name: value for name, value in state.items() if kept[id(value)] == name}
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    hollow = {
        name: _hollow_one(value._field) if isinstance(value, HomeParameter) else value for name, value in state.items()
    }
    return {name: state[name] for name in remove_tied_weights_from_state_dict(hollow, model)}


def _converted(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """As the files of the model's own architecture name and cut them."""
    if not tensors or not hasattr(model, "save_pretrained"):
        return dict(tensors)
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(tensors)))


def _hollow(fields: Mapping[str, Field]) -> Tensors:
    """Tensors without bytes."""
    return {name: _hollow_one(field) for name, field in fields.items()}


def _hollow_one(field: Field) -> torch.Tensor:
    return torch.empty(field.shape, dtype=field.saved_dtype, device="meta")


def _entries(tensors: Mapping[str, torch.Tensor]) -> list[Entry]:
    return [Entry.of(name, tensor) for name, tensor in tensors.items()]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
