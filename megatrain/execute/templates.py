"""Templates: layers with the same code, told apart by structure AND behaviour, and compiled once each.

Two blocks may have equal shapes and run different code (sliding and full attention take turns). So the signature of a
layer holds, for every module in it, its class, shapes and plain attributes; an index that counts the layer's place in
its list is not behaviour.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatrain.base.errors import UserError
from megatrain.execute.attention import AttentionKernels
from megatrain.execute.layer import StreamedLayer

if TYPE_CHECKING:
    from megatrain.execute.engine import Engine

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_SKIPPED = {"training", "_streamed_layer", "_streamed_call"}


Positional = frozenset[tuple[int, str]]
"""(index of the module in the layer, attribute) of integers that only count the layer's place in its list."""


def signature(layer: StreamedLayer, positional: Positional) -> Hashable:
    """Equal for layers that run the same code on weights of the same layout."""
    fields = tuple((field.shape, field.dtype, layer.home.trainable[field]) for field in layer.fields)
    modules = tuple(
        _module_signature(module, {name for number, name in positional if number == index})
        for index, module in enumerate(layer.modules)
    )
    # Of one class, unless somebody patched it on the instance.
    return layer.forward, fields, modules


def group_templates(layers: list[StreamedLayer]) -> dict[Hashable, list[StreamedLayer]]:
    """Blocks by signature."""
    lists: dict[str, list[StreamedLayer]] = {}
    for layer in layers:
        if layer.kind == "block":
            lists.setdefault(layer.name.rpartition(".")[0], []).append(layer)
    groups: dict[Hashable, list[StreamedLayer]] = {}
    for members in lists.values():
        positional = frozenset.intersection(*(_counts_position(layer) for layer in members))
        for layer in members:
            groups.setdefault(signature(layer, positional), []).append(layer)
    return groups


def kinds_of(layers: list[StreamedLayer], names: Collection[str]) -> dict[str, int]:
    """Of the blocks of these names: those of one kind, a number, run the same code. Raises UserError for others."""
    if not names:
        return {}
    groups = group_templates(layers).values()
    kinds = {layer.name: number for number, members in enumerate(groups) for layer in members}
    unknown = [name for name in names if name not in kinds]
    if unknown:
        raise UserError(f"kept_layers: {unknown[0]!r} is no block of this model: its blocks are {', '.join(kinds)}")
    return {name: kinds[name] for name in names}


def compile_templates(layers: list[StreamedLayer]) -> None:
    """Give the blocks compiled forwards: one without and one with gradients a template.

    They are separate callables with code objects of their own: one compiled function used with and without gradients,
    or for several templates, hits dynamo's recompilation limit and silently falls back to eager.
    """
    for number, members in enumerate(group_templates(layers).values()):
        forward = members[0].forward
        plain = _compiled(forward, f"template{number}_forward")
        differentiable = _compiled(forward, f"template{number}_recompute")
        for layer in members:
            layer.compiled = (plain, differentiable)


def prefer_attention(engine: Engine, kernels: AttentionKernels) -> None:
    """Before a step, on which another one may follow other kernels than the one before."""
    if engine.attention.order != kernels.order and engine.config.compile:
        compile_templates(engine.layers)  # compiled code keeps the kernel that it was compiled with
    engine.attention = kernels


def _compiled(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    own = types.FunctionType(run.__code__.replace(co_name=name), run.__globals__, name, None, run.__closure__)
    # Dropout must draw the same numbers in both callables: random operations stay those of eager mode.
    return torch.compile(own, options={"fallback_random": True})


def _counts_position(layer: StreamedLayer) -> Positional:
    """Integers in the layer that equal its place in the list. Only those that do in every layer are positional."""
    place = layer.name.rpartition(".")[2]
    return frozenset(
        (index, name)
        for index, module in enumerate(layer.modules)
        for name, value in vars(module).items()
        if type(value) is int and str(value) == place
    )


def _module_signature(module: nn.Module, positional: set[str]) -> Hashable:
    attributes = []
    for name, value in sorted(vars(module).items()):
        if name in _SKIPPED or name in positional:
            continue
        if isinstance(value, _PLAIN):
            attributes.append((name, value))
        elif isinstance(value, (tuple, list)) and all(isinstance(item, _PLAIN) for item in value):
            attributes.append((name, tuple(value)))
        elif isinstance(value, types.FunctionType):
            attributes.append((name, value.__qualname__))
    buffers = tuple((name, tuple(b.shape), b.dtype) for name, b in module._buffers.items() if b is not None)
    return f"{type(module).__module__}.{type(module).__qualname__}", tuple(attributes), buffers
