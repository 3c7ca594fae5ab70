"""Templates: layers with the same code, told apart by structure AND behaviour, and compiled once each.

Two blocks may have equal shapes and run different code (sliding and full attention take turns). So the signature of a
layer holds, for every module in it, its class, shapes and plain attributes; an index that counts the layer's place in
its list is not behaviour.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch._functorch import config as functorch_config

from megatrain.base.config import KEEPS
from megatrain.base.errors import UserError
from megatrain.base.paths import cache_folder, existing_parent
from megatrain.execute.attention import AttentionKernels
from megatrain.execute.layer import Compiled, StreamedLayer

if TYPE_CHECKING:
    from megatrain.execute.engine import Engine

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_SKIPPED = {"training", "_streamed_layer", "_streamed_call"}

_CODE_FOLDER = "TORCHINDUCTOR_CACHE_DIR"

Positional = frozenset[tuple[int, str]]
"""(index of the module in the layer, attribute) of integers that only count the layer's place in its list."""


class Kind(NamedTuple):
    """What layers have in common that keep the same of the same code."""

    template: int
    keeps: str
    """Of `base/config.py:KEEPS`."""


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


def kept_kinds(layers: list[StreamedLayer], kept: Mapping[str, str], *, compiled: bool) -> dict[str, Kind]:
    """By name, of the blocks that keep something. Raises UserError for others, and for what only compiled ones can."""
    if not kept:
        return {}
    groups = group_templates(layers).values()
    kinds = {layer.name: number for number, members in enumerate(groups) for layer in members}
    for name, keeps in kept.items():
        if name not in kinds:
            raise UserError(f"kept_layers: {name!r} is no block of this model: its blocks are {', '.join(kinds)}")
        if not compiled and keeps != "all":
            raise UserError(f"kept_layers: {name!r} can keep {keeps!r} where it is compiled: set compile=True")
    return {name: Kind(kinds[name], keeps) for name, keeps in kept.items()}


def compile_templates(layers: list[StreamedLayer]) -> None:
    """Give the blocks compiled forwards: for a template one without gradients, and one for each of what a layer may
    keep for its backward. Each is compiled when it is first called.

    They are separate callables with code objects of their own: one compiled function used with and without gradients,
    or for several templates, hits dynamo's recompilation limit and silently falls back to eager.
    """
    _keep_code_between_runs()
    for number, members in enumerate(group_templates(layers).values()):
        forward = members[0].forward
        plain = compiled(forward, f"template{number}_forward", Compiler())
        keeping = {name: compiled(forward, f"template{number}_{name}", Compiler(budget))
                   for name, budget in KEEPS.items()}  # fmt: skip
        for layer in members:
            layer.compiled = Compiled(plain, keeping)


def prefer_attention(engine: Engine, kernels: AttentionKernels) -> None:
    """Before a step, on which another one may follow other kernels than the one before."""
    if engine.attention.order != kernels.order and engine.config.compile:
        compile_templates(engine.layers)  # compiled code keeps the kernel that it was compiled with
    engine.attention = kernels


class Compiler:
    """Inductor, as a backend of torch.compile.

    Args:
        budget: what the forward leaves to its backward (PyTorch's activation_memory_budget). It is decided when a graph
            is taken apart into the two, which is here, and set for that alone: what a user compiles is not touched.
    """

    def __init__(self, budget: float = 1.0) -> None:
        self._budget = budget

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with functorch_config.patch(activation_memory_budget=self._budget):
            return generate(graph, inputs)


def generate(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Inductor's code for it."""
    from torch._inductor.compile_fx import compile_fx  # takes a second

    # Dropout must draw the same numbers in all callables: random operations stay those of eager mode.
    return compile_fx(graph, inputs, config_patches={"fallback_random": True})


def _keep_code_between_runs() -> None:
    """What inductor makes goes to a folder that outlives a restart of the machine, unless the user has named one.
    Importing inductor names its own, which lies among temporary files."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = cache_folder("compiled code") / "compiled"
    is_named = os.environ.get(_CODE_FOLDER, default_cache_dir()) != default_cache_dir()
    if not is_named and os.access(existing_parent(folder), os.W_OK):
        os.environ[_CODE_FOLDER] = str(folder)


def compiled(function: Callable[..., Any], name: str, compiler: Compiler) -> Callable[..., Any]:
    """It compiled, under a code object of its own with that name."""

    def run(first: Any, *args: Any, **kwargs: Any) -> Any:
        return function(first, *args, **kwargs)

    own = types.FunctionType(run.__code__.replace(co_name=name), run.__globals__, name, None, run.__closure__)
    return torch.compile(own, backend=compiler)


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
