"""An optimizer as a checkpoint keeps it: states under the names of their parameters, every number beside them.

    PARAMETER/MOMENT...    as in `optim/states.py`; a lossless moment is one flat uint8 tensor
    PARAMETER/ema          where an average of the weights is kept

Settings (JSON) hold the format of the moments, the groups with rule and numbers, and how many steps each parameter has
made. Both together are what `HomeOptimizer.state_dict` has, without all of it being in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatrain.base.errors import UserError
from megatrain.optim.checks import is_scalar
from megatrain.optim.saved_rule import check_rule
from megatrain.optim.states import State
from megatrain.store.home import Home
from megatrain.store.lossless import LosslessMoment

if TYPE_CHECKING:
    from megatrain.optim.base import HomeOptimizer

FORMAT = 1
STEP = "step"
SEPARATOR = "/"
MASTER_LOW_HALF = "master_low_half"
"""In the same files, the 16 bits of an fp32 master that bf16 weights lack."""
MASTER = "master"
"""In the same files, the fp32 master of weights that are saved rounded in another way."""

States = Mapping[str, "torch.Tensor | LosslessMoment"]


def settings_of(optimizer: HomeOptimizer) -> dict[str, Any]:
    """All numbers as they are now, as JSON takes them. Raises UserError for a setting that it cannot take."""
    groups = [
        {
            "rule": optimizer.rule(group).name,
            "parameters": [parameter._field.name for parameter in group["params"]],
            "numbers": {key: _plain(key, value) for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]
    steps = {parameter._field.name: float(state[STEP]) for parameter, state in optimizer._states.items()}
    return {"format": FORMAT, "moments": optimizer.moments, "groups": groups, "steps": steps}


def states_of(optimizer: HomeOptimizer, home: Home) -> States:
    """The states of a home's parameters, steps apart, as they lie: nothing is copied, nothing waited for."""
    named: dict[str, torch.Tensor | LosslessMoment] = {}
    for parameter, _ in optimizer._members.get(home, ()):
        for key, value in optimizer._states[parameter].items():
            if key != STEP:
                named[f"{parameter._field.name}{SEPARATOR}{key}"] = value
    return named


def state_dict_of(
    settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], optimizer: HomeOptimizer
) -> dict[str, Any]:
    """What `optimizer.load_state_dict` takes, out of saved settings and states.

    Raises UserError for settings of another kind, for groups of another rule or of other parameters.
    """
    _check(settings, optimizer)
    numbers = {
        name: number
        for number, name in enumerate(
            parameter._field.name for group in optimizer.param_groups for parameter in group["params"]
        )
    }
    state: dict[int, State] = {
        numbers[name]: {STEP: torch.tensor(step, dtype=torch.float32)} for name, step in settings["steps"].items()
    }
    for full_name in tensors:
        name, _, key = full_name.rpartition(SEPARATOR)
        if name in numbers and key not in (MASTER_LOW_HALF, MASTER):
            state[numbers[name]][key] = tensors[full_name]
    groups = [
        {
            **{key: _tuples(value) for key, value in group["numbers"].items()},
            "params": [numbers[parameter._field.name] for parameter in own["params"]],
        }
        for group, own in zip(settings["groups"], optimizer.param_groups, strict=True)
    ]
    return {"state": state, "param_groups": groups, "moments": settings["moments"]}


def _check(settings: Mapping[str, Any], optimizer: HomeOptimizer) -> None:
    if settings.get("format") != FORMAT:
        raise UserError(
            f"the saved optimizer is of format {settings.get('format')!r}, and this version of megatrain reads "
            f"{FORMAT}: use the version that wrote it, or start a new run from the weights"
        )
    saved, own = settings["groups"], optimizer.param_groups
    check_rule(own, [group["numbers"] for group in saved])
    names = [[parameter._field.name for parameter in group["params"]] for group in own]
    if [sorted(group["parameters"]) for group in saved] != [sorted(group) for group in names]:
        raise UserError(
            f"the saved optimizer has groups of {_sizes(group['parameters'] for group in saved)} parameters, this one "
            f"of {_sizes(names)}, or of others: make it as it was when the checkpoint was saved (frozen parameters, "
            "groups with and without weight decay), or start a new run from the weights"
        )
    for group, of_own, members in zip(saved, own, names, strict=True):
        rule = optimizer.rule(of_own).name
        if members and group["rule"] != rule:
            raise UserError(
                f"the saved optimizer is {group['rule']}, this one {rule}: go on with the one it was saved with, or "
                "start a new run from the weights"
            )


def _sizes(groups: Iterable[Sequence[str]]) -> str:
    return " + ".join(str(len(group)) for group in groups)


def _plain(key: str, value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, (list, tuple)):
        return [_plain(key, one) for one in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic) or is_scalar(value):
        return value.item()
    raise UserError(f"the param group's {key}={value!r} cannot be saved: make it a number, a text or a list of them")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
