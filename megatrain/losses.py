"""The loss that a model brings along, and what it takes to make a step's loss independent of its micro-batches."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatrain.base.errors import UserError


def own_loss(outputs: Any) -> torch.Tensor:
    """The scalar loss in a model's outputs: a tensor, a mapping or object with `loss`, or the first of a tuple.

    Raises UserError when there is none.
    """
    if isinstance(outputs, torch.Tensor):
        loss = outputs
    elif isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif isinstance(outputs, tuple):
        loss = outputs[0] if outputs else None
    else:
        loss = getattr(outputs, "loss", None)
    if loss is None:
        raise UserError("the model returned no loss: give the batches `labels`, or mt.accumulate a loss_fn")
    return loss


def num_target_tokens(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> torch.Tensor | None:
    """Target tokens of the whole step, where the model's own loss divides by `num_items_in_batch`; else None.

    Known of transformers' models whose forward hands its keywords to a causal or masked LM loss. Others ignore the
    number or do something else with it: their losses are means over a micro-batch.
    """
    is_shifted = _shifts_labels(model)
    if is_shifted is None or not all(isinstance(batch.get("labels"), torch.Tensor) for batch in batches):
        return None
    # A causal LM predicts the next token: the first label of a row is never a target.
    labels = [batch["labels"][..., 1:] if is_shifted else batch["labels"] for batch in batches]
    return sum(label.ne(-100).sum() for label in labels)


def is_language_modelling(model: nn.Module) -> bool:
    """Whether a model of transformers predicts tokens at each place: its own kind of loss is causal or masked LM, or
    unknown, of which transformers makes a causal one."""
    get_base_model = getattr(model, "get_base_model", None)  # of peft
    model = model if get_base_model is None else get_base_model()
    loss = getattr(model, "loss_function", None)
    return getattr(loss, "__name__", None) in ("ForCausalLMLoss", "ForMaskedLMLoss")


def _shifts_labels(model: nn.Module) -> bool | None:
    """Whether the model's loss shifts labels; None when it does not divide by the number of targets."""
    get_base_model = getattr(model, "get_base_model", None)  # of peft
    model = model if get_base_model is None else get_base_model()
    loss = getattr(getattr(model, "loss_function", None), "__name__", None)
    if loss not in ("ForCausalLMLoss", "ForMaskedLMLoss") or not getattr(model, "accepts_loss_kwargs", True):
        return None
    if not _hands_keywords_to_loss(type(model)):
        return None
    return loss == "ForCausalLMLoss"


def _hands_keywords_to_loss(cls: type[nn.Module]) -> bool:
    try:
        source = inspect.getsource(inspect.unwrap(cls.forward))
    except (OSError, TypeError):
        return False
    # `self.loss_function(...)`, with the forward's **kwargs among its arguments.
    _, found, call = source.partition("self.loss_function(")
    depth, end = 1, 0
    while end < len(call) and depth:
        depth += {"(": 1, ")": -1}.get(call[end], 0)
        end += 1
    return bool(found) and "**" in call[:end]
