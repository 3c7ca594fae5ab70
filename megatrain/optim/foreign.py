"""Optimizers that somebody hands to the Trainer: only those of megatrain.optim update homes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatrain import optim
from megatrain.base.errors import UserError

_OPTIMIZERS = tuple(getattr(optim, name) for name in optim.__all__)


def check_given_optimizer(given: dict[str, Any], model: nn.Module | None) -> None:
    """`given`: the Trainer's arguments. Raises UserError for an optimizer that cannot update streamed weights."""
    optimizer = (given.get("optimizers") or (None, None))[0]
    optimizer_class = (given.get("optimizer_cls_and_kwargs") or (None, None))[0]
    if optimizer is not None:
        check_optimizer("optimizers=", optimizer, model)
    if optimizer_class is not None and not issubclass(optimizer_class, _OPTIMIZERS):
        raise UserError(_foreign_optimizer("optimizer_cls_and_kwargs=", optimizer_class))


def check_optimizer(source: str, optimizer: torch.optim.Optimizer, model: nn.Module | None) -> None:
    """Raises UserError unless `optimizer` is of this library and of `model`."""
    if not isinstance(optimizer, _OPTIMIZERS):
        raise UserError(_foreign_optimizer(source, type(optimizer)))
    own = set() if model is None else {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
        raise UserError(f"{source} an optimizer of another model: build it from the model that the Trainer gets")


def _foreign_optimizer(source: str, optimizer_class: type) -> str:
    names = ", ".join(f"megatrain.optim.{available.__name__}" for available in _OPTIMIZERS)
    return (
        f"{source} {optimizer_class.__module__}.{optimizer_class.__qualname__} cannot update streamed weights. "
        f"Available: {names}. Build one from the model after megatrain.stream(model), or let the Trainer build it"
    )
