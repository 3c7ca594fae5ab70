"""Which parameters live together: one home a layer, one for all layers that share a parameter, one for the rest.

Pure: plans layouts from names, shapes and dtypes; allocates nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import nn

from megatrain.spec.discover import FoundLayer, ParameterUse, parameter_uses
from megatrain.spec.layout import ALIGN_ELEMENTS, Field, padded

WIRE_ALIGN_BYTES = 2 * ALIGN_ELEMENTS


@dataclass(frozen=True, kw_only=True, eq=False)
class HomePlan:
    """Layout of one home and the layers that use it."""

    name: str
    fields: list[Field]
    layers: list[FoundLayer]
    """Empty for the resident home."""

    parameters: dict[int, Field]
    """id(parameter) -> its field."""

    grad_dtype: torch.dtype
    """Of gradients on the wire."""

    @functools.cached_property
    def numel(self) -> int:
        """Parameters of all fields."""
        return sum(field.numel for field in self.fields)


@dataclass(frozen=True, kw_only=True)
class Formats:
    """How weights and gradients are held."""

    precision: str
    """"fp32" or "bf16": what the device computes with. Parameters that the model keeps in fp32 stay so."""

    master: str
    """"fp32", "split" or "bf16"."""

    grad_dtype: str | None = None
    """"fp32", "bf16", or None: bf16 in homes with bf16 weights, fp32 in homes that are fp32 throughout."""

    @property
    def gradient_dtype_name(self) -> str:
        """Of most gradients on the wire: "fp32" or "bf16"."""
        return self.grad_dtype or self.precision

    def gradient(self, fields: list[Field]) -> torch.dtype:
        """Of gradients on the wire of a home with these fields."""
        if self.grad_dtype is not None:
            return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.grad_dtype]
        return torch.bfloat16 if any(field.dtype == torch.bfloat16 for field in fields) else torch.float32


def plan_homes(model: nn.Module, layers: list[FoundLayer], formats: Formats) -> list[HomePlan]:
    """Group the parameters of `model` into homes, resident leftovers last."""
    names = _first_names(model)
    keep_fp32 = _kept_in_fp32(model)
    plans = []
    taken: set[int] = set()
    for group in _groups(layers):
        uses = [use for layer in group for use in parameter_uses(layer.module)]
        plans.append(_plan(group[0].name, group, uses, names, keep_fp32, formats))
        taken |= plans[-1].parameters.keys()
    rest = [use for use in parameter_uses(model) if id(use.parameter) not in taken]
    if rest:
        plans.append(_plan("resident", [], rest, names, keep_fp32, formats))
    return plans


def _first_names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _kept_in_fp32(model: nn.Module) -> set[int]:
    """ids of parameters that stay fp32 beside bf16 compute weights: those that the model's authors keep so
    (transformers' `_keep_in_fp32_modules_strict`), and those that are fp32 in a model loaded in bf16."""
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    named = list(model.named_parameters())
    is_mixed = any(parameter.dtype == torch.bfloat16 for _, parameter in named)
    return {
        id(parameter)
        for name, parameter in named
        if any(f".{part}." in f".{name}." for part in strict) or (is_mixed and parameter.dtype == torch.float32)
    }


def _groups(layers: list[FoundLayer]) -> list[list[FoundLayer]]:
    """Layers that share a parameter, in order of their first member."""
    leader: dict[int, int] = {}
    groups: dict[int, list[FoundLayer]] = {}
    for index, layer in enumerate(layers):
        ids = [id(parameter) for parameter in layer.module.parameters()]
        shared = sorted({leader[i] for i in ids if i in leader})
        first = shared[0] if shared else index
        merged = [member for other in shared for member in groups.pop(other)]
        groups[first] = [*merged, layer]
        for member in groups[first]:
            leader.update((id(parameter), first) for parameter in member.module.parameters())
    return list(groups.values())


def _plan(
    name: str,
    layers: list[FoundLayer],
    uses: list[ParameterUse],
    names: dict[int, str],
    keep_fp32: set[int],
    formats: Formats,
) -> HomePlan:
    fields: dict[int, Field] = {}
    offset = wire_offset_bytes = 0
    for use in uses:
        parameter = use.parameter
        if id(parameter) in fields:
            continue
        canonical = names[id(parameter)]
        is_bf16 = formats.precision == "bf16" and id(parameter) not in keep_fp32
        field = Field(
            name=canonical,
            shape=tuple(parameter.shape),
            dtype=torch.bfloat16 if is_bf16 else torch.float32,
            saved_dtype=parameter.dtype,
            is_split=is_bf16 and formats.master == "split",
            offset=offset,
            wire_offset_bytes=wire_offset_bytes,
        )
        fields[id(parameter)] = field
        offset += padded(field.numel)
        wire_offset_bytes += -(-field.wire_bytes // WIRE_ALIGN_BYTES) * WIRE_ALIGN_BYTES
    grad_dtype = formats.gradient(list(fields.values()))
    return HomePlan(name=name, fields=list(fields.values()), layers=layers, parameters=fields, grad_dtype=grad_dtype)
