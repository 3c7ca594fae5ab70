"""Finds the layers of a model: repeated blocks, embeddings and heads. Knows no model by name.

A block is a child of a ModuleList, or of a Sequential of like children, that has parameters of its own and is not
inside another block. Outside the blocks, embeddings and linear heads (and anything as large as a block) stream too;
small leftovers (norms, routers) stay resident on the device.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from megatrain.base.errors import UserError
from megatrain.spec.layout import span


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundLayer:
    """A module that will be streamed as one layer."""

    name: str
    """Qualified name in the model."""

    module: nn.Module
    kind: str
    """`block`, `embedding`, `head` or `other`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterUse:
    """One place in the module tree that holds a parameter. Tied parameters have several."""

    owner: nn.Module
    attribute: str
    name: str
    parameter: nn.Parameter


def find_layers(model: nn.Module) -> list[FoundLayer]:
    """The layers of `model` in the order of definition.

    Raises UserError when no repeated blocks are found.
    """
    blocks = list(_blocks(model, ""))
    if not blocks:
        raise UserError(
            f"{type(model).__name__} has no repeated blocks to stream: put its layers in a torch.nn.ModuleList "
            "(or a Sequential of like modules), each with parameters of its own. If the whole model fits in the "
            "device's memory, plain PyTorch trains it."
        )
    inside = {id(module) for block in blocks for module in block.module.modules()}
    outside = _streamed_leftovers(model, inside, max(_own_bytes(block.module) for block in blocks))
    positions = {id(module): index for index, module in enumerate(model.modules())}
    return sorted([*blocks, *outside], key=lambda layer: positions[id(layer.module)])


def is_plain_linear(module: nn.Module) -> bool:
    """Whether all that the module does is what `nn.Linear` does: forward, parameters, no hooks."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return (
        # A streamed layer's forward wraps that of its class.
        inspect.unwrap(type(module).forward) is nn.Linear.forward
        and "forward" not in vars(module)
        and set(module._parameters) == {"weight", "bias"}
        and next(module.children(), None) is None
        and not any(hooks)
    )


def parameter_uses(module: nn.Module, prefix: str = "") -> Iterator[ParameterUse]:
    """Every place in `module` that holds a parameter, shared modules and tied parameters once a place."""
    for module_name, owner in module.named_modules(prefix=prefix):
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                name = f"{module_name}.{attribute}" if module_name else attribute
                yield ParameterUse(owner=owner, attribute=attribute, name=name, parameter=parameter)


def _blocks(module: nn.Module, name: str) -> Iterator[FoundLayer]:
    is_list = _is_block_list(module)
    for child_name, child in module.named_children():
        qualified = f"{name}.{child_name}" if name else child_name
        if is_list and _runs_itself(child) and _has_parameters(child):
            yield FoundLayer(name=qualified, module=child, kind="block")
        else:
            yield from _blocks(child, qualified)


def _is_block_list(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return True
    if not isinstance(module, nn.Sequential):
        return False
    children = [child for child in module if _has_parameters(child)]
    return len(children) > 1 and len({type(child) for child in children}) == 1 and not _is_plain_leaf(children[0])


def _is_plain_leaf(module: nn.Module) -> bool:
    """A Linear or Conv in a Sequential is part of a small MLP, not a block."""
    return next(module.children(), None) is None


def _runs_itself(module: nn.Module) -> bool:
    """Containers have no forward; their children are called directly."""
    has_forward = type(module).forward is not nn.Module.forward or "forward" in vars(module)
    return has_forward and not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _streamed_leftovers(model: nn.Module, inside: set[int], block_bytes: int) -> Iterator[FoundLayer]:
    embeddings = {id(module) for module in (_get(model, "get_input_embeddings"),) if module is not None}
    heads = {id(module) for module in (_get(model, "get_output_embeddings"),) if module is not None}
    for name, module in model.named_modules():
        if id(module) in inside or not any(p is not None for p in module._parameters.values()):
            continue
        if id(module) in heads:
            yield FoundLayer(name=name, module=module, kind="head")
        elif id(module) in embeddings or isinstance(module, nn.Embedding):
            yield FoundLayer(name=name, module=module, kind="embedding")
        elif isinstance(module, nn.Linear):
            yield FoundLayer(name=name, module=module, kind="head")
        elif _is_plain_leaf(module) and _own_bytes(module) >= block_bytes:
            yield FoundLayer(name=name, module=module, kind="other")


def _get(model: nn.Module, method: str) -> nn.Module | None:
    getter = getattr(model, method, None)
    if getter is None:
        return None
    try:
        found = getter()
    except (NotImplementedError, AttributeError):
        # transformers raises these for models that have none.
        return None
    return found if isinstance(found, nn.Module) else None


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _own_bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def check_weights(model: nn.Module, *, may_be_meta: bool) -> None:
    """Refuse weights that cannot be taken home: on meta, sharded, quantised or of no float dtype. Raises UserError."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UserError(f"{name} has no shape yet: run one batch through the model, then call mt.stream")
        if parameter.device.type == "meta" and not may_be_meta:
            raise UserError(
                f"{name} is on the meta device and has no values: load the model with device_map=None, or give "
                "mt.stream(model, initialize=...) a function that makes the values"
            )
        if parameter.device.type not in ("cpu", "cuda", "meta"):
            raise UserError(f"{name} is on device {parameter.device}: move the model to the CPU before mt.stream")
        if not parameter.dtype.is_floating_point or parameter.dtype.itemsize not in (2, 4):
            raise UserError(
                f"{name} has dtype {parameter.dtype}: full-parameter training needs float32 or bfloat16 weights; "
                "load the model unquantised"
            )
        if parameter.layout is not torch.strided:
            raise UserError(f"{name} is {parameter.layout}: mt.stream takes dense weights; call .to_dense() first")
        if _has_values(parameter) and type(parameter.data) is not torch.Tensor:
            raise UserError(
                f"{name} is a {type(parameter.data).__name__}: mt.stream takes plain tensors; load the model "
                "without sharding or quantisation"
            )
    _refuse_shared_memory(model)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise UserError(
                f"{name} has max_norm={module.max_norm}, which changes its weights in every forward: build it with "
                "max_norm=None"
            )
    for name, buffer in model.named_buffers():
        if buffer.device.type == "meta":
            raise UserError(
                f"buffer {name} is on the meta device and has no values: build the model with "
                "accelerate.init_empty_weights(include_buffers=False), which makes buffers for real"
            )


def _has_values(parameter: nn.Parameter) -> bool:
    """Neither on the meta device nor still in a file (`execute/deferred.py`)."""
    return parameter.device.type != "meta" and not getattr(parameter, "is_deferred", False)


def _refuse_shared_memory(model: nn.Module) -> None:
    """Parameters that are two objects over the same memory would be two weights from here on."""
    places = []
    for name, parameter in model.named_parameters():
        if _has_values(parameter) and parameter.numel() > 0:
            num_elements = span(parameter.data)
            if num_elements is None:
                raise UserError(
                    f"{name} has elements that share memory (expand?): give it a tensor of its own, .clone()"
                )
            start = parameter.data_ptr()
            places.append((str(parameter.device), start, start + num_elements * parameter.element_size(), name))
    places.sort()
    for (device, _, end, name), (next_device, next_start, _, next_name) in itertools.pairwise(places):
        if device == next_device and next_start < end:
            raise UserError(
                f"{name} and {next_name} are two parameters over the same memory, and would be trained apart: to tie "
                "them, assign one Parameter to both places (head.weight = embedding.weight); else .clone() one"
            )
