"""The states of an optimizer on their way into a state_dict and back: packed, checked, converted, taken over.

`optim/states.py` says how a parameter's state lies; in a state_dict a lossless moment is one flat uint8 tensor.
Rule: everything that was saved is checked before anything is overwritten.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatrain.base.errors import UserError
from megatrain.execute.parameters import HomeParameter
from megatrain.optim.rules import Rule
from megatrain.optim.saved_rule import check_rule
from megatrain.optim.states import EMA, LOSSLESS, State, stored
from megatrain.spec.formats import FORMATS
from megatrain.store import codecs, rounding
from megatrain.store.lossless import LosslessMoment

logger = logging.getLogger("megatrain")

Group = dict[str, Any]

PARTS = ("", ".codes", ".scales", f".{LOSSLESS}")
"""What the names of a moment's tensors end in."""


def saved_state(state: State) -> State:
    """As it goes into a state_dict: lossless moments as one flat tensor, and what lies on a device as a copy."""
    return {
        name: value.pack() if isinstance(value, LosslessMoment) else value.view_as(value).cpu()
        for name, value in state.items()
    }


def pack(groups: Sequence[Group], own: Mapping[HomeParameter, State]) -> dict[str, Any]:
    """As torch.optim.Optimizer packs them: parameters by their number, groups with all of their numbers."""
    numbers = {parameter: i for i, parameter in enumerate(p for group in groups for p in group["params"])}
    packed = [{**group, "params": [numbers[parameter] for parameter in group["params"]]} for group in groups]
    return {"state": {numbers[p]: saved_state(state) for p, state in own.items()}, "param_groups": packed}


def through(hooks: Mapping[int, Callable[..., Any]], optimizer: Any, state_dict: Any) -> Any:
    """What hooks make of a state_dict: each changes it, or returns another."""
    for hook in hooks.values():
        replaced = hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    return state_dict


def with_saved_numbers(groups: Sequence[Group], state_dict: Any) -> list[Group]:
    """The groups with copies of the saved ones' numbers.

    Raises UserError for what is no state_dict of an optimizer, for states that no group names, and when groups do not
    match.
    """
    for section, kind in (("state", Mapping), ("param_groups", Sequence)):
        if not (isinstance(state_dict, Mapping) and isinstance(state_dict.get(section), kind)):
            raise UserError(f"the saved optimizer has no {section!r}: give it what optimizer.state_dict() returned")
    saved = state_dict["param_groups"]
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), Sequence) for group in saved):
        raise UserError("a param group of the saved optimizer has no 'params': give it what state_dict() returned")
    check_rule(groups, saved)
    sizes, saved_sizes = [[len(group["params"]) for group in of] for of in (groups, saved)]
    if sizes != saved_sizes:
        raise UserError(
            f"the saved optimizer has groups of {saved_sizes} parameters, this one of {sizes}: make it as it was when "
            "it was saved (frozen parameters, groups with and without weight decay)"
        )
    named = dict.fromkeys(number for group in saved for number in group["params"])
    nameless = [key for key in state_dict["state"] if key not in named]
    if nameless:
        raise UserError(
            f"the saved optimizer has states under {_some(nameless)}, and its param groups name {_some(list(named))}: "
            "both must be the same numbers (JSON makes text of keys: {int(key): state})"
        )
    return [
        {**group, **{key: copy.deepcopy(value) for key, value in of_saved.items() if key != "params"}}
        for group, of_saved in zip(groups, saved, strict=True)
    ]


def checked_loads(
    state_dict: Mapping[str, Any],
    groups: Sequence[Group],
    own: Mapping[HomeParameter, State],
    rules: Mapping[HomeParameter, Rule],
    moments: str,
) -> list[Load]:
    """One for each parameter. moments: the format of the own states. Raises UserError for a state that does not fit."""
    loads = []
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            state, format_name = state_dict["state"].get(number), state_dict.get("moments")
            loads.append(Load(parameter, own[parameter], state, rules[parameter], moments, format_name))
    return loads


def _some(keys: Sequence[Any]) -> str:
    shown = ", ".join(map(repr, keys[:3]))
    return f"{shown} and {len(keys) - 3} more" if len(keys) > 3 else shown or "none"


def report(loads: Sequence[Load], moments: str) -> None:
    """Says what was not taken over as it was saved. moments: the format that all have now."""
    for name in sorted({load.saved_moments for load in loads if load.has_saved} - {moments}):
        logger.warning("the saved moments are %s and were converted to %s", name, moments)
    without = [load.name for load in loads if load.starts_average]
    if without:
        logger.warning(
            "the saved optimizer has no average of the weights (ema_decay) for %s: it starts as the weights are now",
            _some(without),
        )
    dropped = [load.name for load in loads if load.drops_average]
    if dropped:
        logger.warning(
            "the saved average of the weights was dropped for %s: make the optimizer with ema_decay=... to go on with "
            "it",
            _some(dropped),
        )


class Load:
    """One parameter's saved state on its way into its own. Made, it has been checked; `run` then cannot fail.

    Args:
        own: of format `moments`. saved: None where nothing was saved: as before the first step.
        format_name: of the saved moments, as the state_dict says; None for one of PyTorch's.

    Raises UserError when something is missing, is no tensor, or has another shape or dtype.
    """

    def __init__(
        self, parameter: HomeParameter, own: State, saved: Any, rule: Rule, moments: str, format_name: str | None
    ) -> None:
        self._own, self._saved, self._rule, self._moments = own, saved, rule, moments
        self._parameter, self._field = parameter, parameter._field
        field = self._field
        self.saved_moments = moments
        if saved is None:
            return
        if not isinstance(saved, Mapping):
            raise UserError(f"{field.name}: the saved optimizer state is a {type(saved).__name__}, not a dict")
        if rule.reference is None and "step" not in saved:
            # PyTorch counts no steps for rules without a second moment; there was one.
            saved = self._saved = {**saved, "step": 1.0}
        step = self._tensor("step")
        if step.numel() != 1 or not (math.isfinite(step.item()) and step.item() >= 0):
            raise UserError(f"{field.name}: the saved step is {step.tolist()}: it must be a number of 0 or more")
        if EMA in own and EMA in saved:
            self._check(EMA, torch.float32, field.shape)
        if rule.states:
            self.saved_moments = self._find_format(format_name)
            self._check_moments()
        known = {"step", EMA} | {f"{one.name}{part}" for one in rule.states for part in PARTS}
        foreign = [key for key, value in saved.items() if key not in known and value is not None]
        if foreign:
            raise UserError(
                f"{field.name}: the saved optimizer is of another rule than {rule.name}: it has {foreign[0]!r}"
            )

    @property
    def name(self) -> str:
        return self._field.name

    @property
    def has_saved(self) -> bool:
        return self._saved is not None

    @property
    def starts_average(self) -> bool:
        """An average is kept, and none was saved."""
        return EMA in self._own and not (self.has_saved and EMA in self._saved)

    @property
    def drops_average(self) -> bool:
        """One was saved, and none is kept."""
        return EMA not in self._own and self.has_saved and EMA in self._saved

    @torch.no_grad()
    def run(self) -> None:
        """Overwrite the own state."""
        self._parameter._home.expose()
        if self.starts_average:
            self._own[EMA].copy_(self._parameter.master())
        if not self.has_saved:
            clear_state(self._own)
            return
        self._own["step"].copy_(self._tensor("step").reshape(()))
        if EMA in self._own and EMA in self._saved:
            self._own[EMA].copy_(self._saved[EMA])
        if self._moments == self.saved_moments != LOSSLESS:
            for key in self._own.keys() - {"step", EMA}:
                self._own[key].copy_(self._saved[key])
        elif self._rule.states:
            self._convert()

    def _find_format(self, name: str | None) -> str:
        first = self._rule.states[0].name
        if f"{first}.{LOSSLESS}" in self._saved:
            return LOSSLESS
        if f"{first}.codes" in self._saved:
            if name not in FORMATS or not FORMATS[name].is_block:
                raise UserError(
                    f"{self._field.name}: the saved optimizer has codes, and its format {name!r} is not known"
                )
            return name
        return "bf16" if self._tensor(first).dtype == torch.bfloat16 else "fp32"

    def _check_moments(self) -> None:
        numel, shape = self._field.numel, self._field.shape
        for one in self._rule.states:
            if self.saved_moments == LOSSLESS:
                moment = LosslessMoment.unpack(self._tensor(f"{one.name}.{LOSSLESS}"))
                if moment.numel != numel:
                    raise UserError(f"{self._field.name}: the saved {one.name} has {moment.numel} numbers, not {numel}")
                continue
            format_ = FORMATS[self.saved_moments]
            if format_.is_block:
                self._check(f"{one.name}.codes", torch.uint8, (format_.num_codes(numel),))
                self._check(f"{one.name}.scales", torch.float32, (format_.num_scales(numel),))
            else:
                self._check(one.name, format_.dtype, shape)

    def _check(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        saved = self._tensor(key)
        if tuple(saved.shape) != tuple(shape) or saved.dtype != dtype:
            raise UserError(
                f"{self._field.name}: {key} was saved as {saved.dtype} {tuple(saved.shape)}, this one is {dtype} "
                f"{tuple(shape)}"
            )

    def _tensor(self, key: str) -> torch.Tensor:
        if key not in self._saved:
            raise UserError(
                f"{self._field.name}: the saved optimizer state has no {key!r}; it has "
                f"{', '.join(map(str, self._saved))}"
            )
        value = self._saved[key]
        if not isinstance(value, (torch.Tensor, int, float)):
            raise UserError(f"{self._field.name}: the saved {key} is a {type(value).__name__}, not a tensor")
        return torch.as_tensor(value)

    def _convert(self) -> None:
        values = self._decoded()
        if self._moments == LOSSLESS:
            for name, value in values.items():
                self._own[f"{name}.{LOSSLESS}"].copy_(value)
            return
        of_own = stored(self._own, self._rule, self._moments)
        reference = None if self._rule.reference is None else of_own[self._rule.reference]
        for i in self._rule.order():
            one = self._rule.states[i]
            flat = values[one.name].to(of_own[i].codes.device)
            random = rounding.random_bits((0, 0), 0, flat.numel(), flat.device)
            other = reference if one.is_signed else None
            codecs.encode_(flat, of_own[i], random, is_signed=one.is_signed, reference=other)

    def _decoded(self) -> dict[str, torch.Tensor]:
        """The saved moments as flat fp32 tensors."""
        if self.saved_moments == LOSSLESS:
            # Unpacked again, one parameter at a time: all of them need not fit beside the own ones.
            names = {one.name: f"{one.name}.{LOSSLESS}" for one in self._rule.states}
            return {name: LosslessMoment.unpack(self._saved[key]).to_tensor() for name, key in names.items()}
        on_host = {key: value.cpu() for key, value in self._saved.items() if isinstance(value, torch.Tensor)}
        of_saved = stored(on_host, self._rule, self.saved_moments)
        reference = None if self._rule.reference is None else of_saved[self._rule.reference]
        return {
            one.name: codecs.decode(
                coded, self._field.numel, is_signed=one.is_signed, reference=reference if one.is_signed else None
            ).float()
            for one, coded in zip(self._rule.states, of_saved, strict=True)
        }


def clear_state(own: State) -> None:
    """Step and moments as before the first step."""
    for name, value in own.items():
        if name != EMA:
            value.zero_()
