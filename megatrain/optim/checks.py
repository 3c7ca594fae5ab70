"""What an optimizer is given, checked before anything is allocated. Everything here raises UserError."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megatrain.base.errors import UserError
from megatrain.execute.engine import Engine, engine_of
from megatrain.execute.parameters import HomeParameter
from megatrain.optim.rules import Rule

_TORCH_OPTIONS = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")


def refuse_torch_options(optimizer: str, options: dict[str, Any]) -> None:
    """Options of PyTorch's optimizers that these lack pass as long as they are off."""
    for name, value in options.items():
        if name not in _TORCH_OPTIONS:
            raise TypeError(f"{optimizer}() got an unexpected keyword argument {name!r}")
        if value:
            raise UserError(
                f"{optimizer}({name}={value!r}) is refused: weights in their homes are updated by one exact formula "
                f"and its own kernels. Leave {name} out"
            )


def trainable(params: Any) -> Any:
    """The trainable parameters of a streamed model; anything else as it is."""
    if not isinstance(params, nn.Module):
        return params
    if engine_of(params) is None:
        raise UserError(f"this {type(params).__name__} is not streamed: call mt.stream(model) first")
    found = [parameter for parameter in params.parameters() if parameter.requires_grad]
    if not found:
        raise UserError(f"{type(params).__name__} has no trainable parameters: unfreeze some with requires_grad_()")
    return found


def check_clipping(engine: Engine, max_norm: float | None) -> None:
    if engine.config.clip == "global" and max_norm is not None:
        raise UserError(
            'max_norm is for clip="layer"; with clip="global" call mt.clip_grad_norm_(model, max_norm) instead'
        )
    if engine.consumer is not None and engine.consumer() is not None:
        raise UserError('clip="layer" takes one optimizer a model, which has all its parameters: use param groups')


def check_options(max_norm: Any, ema_decay: Any, seed: Any, max_skipped_steps: Any) -> None:
    if max_norm is not None and not (is_number(max_norm) and float(max_norm) >= 0.0):
        raise UserError(f"max_norm={max_norm!r} must be a number and not negative, or None")
    if ema_decay is not None and not (is_number(ema_decay) and 0.0 <= float(ema_decay) < 1.0):
        raise UserError(f"ema_decay={ema_decay!r} must be a number in [0, 1), or None")
    for name, value in (("seed", seed), ("max_skipped_steps", max_skipped_steps)):
        if not (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
            raise UserError(f"{name}={value!r} must be a whole number and not negative")


def check_parameters(group: dict[str, Any]) -> None:
    for parameter in group["params"]:
        if not isinstance(parameter, HomeParameter):
            raise UserError(
                f"got a {type(parameter).__name__} of shape {tuple(parameter.shape)} that is not streamed: call "
                "mt.stream(model) before making the optimizer, and use a torch.optim optimizer for other parameters"
            )
    for name in ("amsgrad", "maximize"):
        if group.get(name):
            raise UserError(f"{name}={group[name]!r} is not supported: leave it out")


def check_rules(
    groups: list[dict[str, Any]], rule_of: Callable[[dict[str, Any]], Rule], rules: dict[HomeParameter, Rule]
) -> None:
    """A group's numbers must not ask for another rule than its states are made for (SGD's momentum, from or to 0)."""
    for group in groups:
        if not group["params"]:
            continue
        rule, made_for = rule_of(group), rules[group["params"][0]]
        if rule is not made_for:
            raise UserError(
                f"a param group now asks for the rule {rule.name!r}, and its states are those of {made_for.name!r}: "
                "make a new optimizer"
            )


def numbers_now(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups' numbers, without parameters: a scheduler may change a tensor in place before the update runs."""
    return [
        {key: value.item() if is_scalar(value) else value for key, value in group.items() if key != "params"}
        for group in groups
    ]


def check_numbers(group: dict[str, Any], names: Sequence[str]) -> None:
    """Numbers of a group that must be finite and not negative."""
    for name in names:
        if not (is_number(group[name]) and 0.0 <= float(group[name]) < math.inf):
            raise UserError(f"{name}={group[name]!r} must be a number and not negative")
    for name in ("amsgrad", "maximize"):
        if group.get(name):
            raise UserError(f"{name}={group[name]!r} is not supported: leave it out")


def check_betas(group: dict[str, Any]) -> None:
    betas = group["betas"]
    is_pair = isinstance(betas, (tuple, list)) and len(betas) == 2 and all(map(is_number, betas))
    if not (is_pair and all(0.0 <= beta < 1.0 for beta in betas)):
        raise UserError(f"betas={betas!r} must be two numbers in [0, 1)")


def check_share(group: dict[str, Any], name: str) -> None:
    if not (is_number(group[name]) and 0.0 <= float(group[name]) < 1.0):
        raise UserError(f"{name}={group[name]!r} must be a number in [0, 1)")


def is_number(value: Any) -> bool:
    # Schedulers may keep the learning rate in a tensor.
    is_plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_plain or is_scalar(value)


def is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1
