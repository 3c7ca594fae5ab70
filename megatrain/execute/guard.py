"""Refuses changes that would go past the engine, at the moment they are made and before anything is changed.

A streamed model is fixed: a module or parameter that somebody puts into it would not be streamed, and a wrapper that
works on parameters by itself (peft, DistributedDataParallel, torch.compile) would work on empty shells. PyTorch calls
registration hooks for both. An optimizer that does not know homes is refused when it steps, before it reads anything.

Rule: what is refused leaves the model as it was, and usable.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatrain.base.errors import RefusedError
from megatrain.execute.parameters import HomeParameter

_streamed: weakref.WeakSet[nn.Module] = weakref.WeakSet()

WRAPPERS = {
    "DataParallel": "one device runs it, one layer at a time",
    "DistributedDataParallel": "one process trains it: raise gradient_accumulation_steps instead",
    "FullyShardedDataParallel": "its weights are at home already, not on the device",
    "OptimizedModule": "torch.compile would trace through the streaming: say mt.init(compile=True) before mt.stream",
}
"""Class of a module that must not take a streamed one in -> why, or what to do instead."""

PEFT_REMEDY = "apply peft first, then call mt.stream on the whole model"


def protect(model: nn.Module) -> None:
    """From now on, changes to the structure of `model` raise RefusedError."""
    _register_hooks()
    for module in model.modules():
        _streamed.add(module)


@functools.cache
def _register_hooks() -> None:
    torch_module.register_module_module_registration_hook(_check_module)
    torch_module.register_module_parameter_registration_hook(_check_parameter)
    register_optimizer_step_pre_hook(_check_optimizer)


def _check_module(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if torch.compiler.is_compiling():
        return  # it would become a condition of the compiled code; a streamed model is never compiled as a whole
    if parent in _streamed and parent._modules.get(name) is not child:
        raise RefusedError(
            f"{type(parent).__name__}.{name} is part of a streamed model and cannot become a {type(child).__name__}: "
            "change the model first (new embeddings, heads, layers, adapters), then call mt.stream"
        )
    if child not in _streamed:
        return
    kind = type(parent)
    if kind.__module__.partition(".")[0] == "peft":
        raise RefusedError(f"peft ({kind.__name__}) on a streamed {type(child).__name__} is refused: {PEFT_REMEDY}")
    if kind.__name__ in WRAPPERS:
        raise RefusedError(
            f"{kind.__name__} around a streamed {type(child).__name__} is refused: {WRAPPERS[kind.__name__]}"
        )


def _check_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if torch.compiler.is_compiling():
        return
    if isinstance(parameter, HomeParameter) and type(module).__name__ == "ParametrizationList":
        raise RefusedError(
            f"a parametrization of {parameter._field.name} is refused: register it first, then call mt.stream"
        )
    if module in _streamed and module._parameters.get(name) is not parameter:
        raise RefusedError(
            f"{type(module).__name__}.{name} is part of a streamed model and cannot be set to another parameter: write "
            "new values with p.copy_(...) under torch.no_grad(), tie or replace parameters before mt.stream"
        )


def _check_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if getattr(optimizer, "updates_homes", False):
        return
    name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if isinstance(parameter, HomeParameter):
            raise RefusedError(
                f"{name} cannot update a streamed model (moments, clipping and masters would bypass its homes): "
                "use mt.optim.AdamW(model), or mt.Trainer"
            )
        if getattr(parameter, "went_home", False):
            raise RefusedError(
                f"{name} was made before mt.stream, which took its parameters away: make mt.optim.AdamW(model) after it"
            )
