"""What an optimizer keeps for each parameter: allocated beside its home, seen as segments, saved and loaded.

`optimizer.state[parameter]` holds `step` (fp32 scalar) and, for each moment of the rule, by format:

    fp32, bf16   NAME              in the parameter's shape
    block codes  NAME.codes        flat uint8
                 NAME.scales       flat fp32
    lossless     NAME.lossless     a `LosslessMoment`; in a state_dict one flat uint8 tensor

and `ema` (fp32, in the parameter's shape) where an average of the weights is kept.
"""

from __future__ import annotations

from typing import Any

import torch

from megatrain.base.errors import UserError
from megatrain.execute.parameters import HomeParameter
from megatrain.optim.rules import Rule
from megatrain.spec.formats import FORMATS
from megatrain.spec.layout import Field
from megatrain.store import codecs, rounding
from megatrain.store.codecs import Stored
from megatrain.store.home import Home
from megatrain.store.lossless import LosslessMoment

State = dict[str, Any]

ALIGN_BYTES = 256
LOSSLESS = "lossless"
EMA = "ema"


def make_states(
    home: Home, rules: dict[HomeParameter, Rule], moments: str, *, has_ema: bool
) -> dict[HomeParameter, State]:
    """Zero moments, and averages that start as the weights, for parameters of one home: one block of memory."""
    sizes: list[tuple[HomeParameter, str, torch.dtype, int]] = []
    for parameter, rule in rules.items():
        for state in rule.states if moments != LOSSLESS else ():
            format_, numel = FORMATS[moments], parameter.numel()
            codes_name = f"{state.name}.codes" if format_.is_block else state.name
            sizes.append((parameter, codes_name, format_.dtype, format_.num_codes(numel)))
            if format_.is_block:
                sizes.append((parameter, f"{state.name}.scales", torch.float32, format_.num_scales(numel)))
        if has_ema:
            sizes.append((parameter, EMA, torch.float32, parameter.numel()))
    starts = [0]
    for _, _, dtype, count in sizes:
        starts.append(-(-(starts[-1] + count * dtype.itemsize) // ALIGN_BYTES) * ALIGN_BYTES)
    block = home.memory.empty(starts[-1], pinned=home.place == "stream")
    made: dict[HomeParameter, State] = {p: {"step": torch.zeros((), dtype=torch.float32)} for p in rules}
    for (parameter, name, dtype, count), start in zip(sizes, starts, strict=False):
        tensor = block[start : start + count * dtype.itemsize].view(dtype)
        made[parameter][name] = tensor if "." in name else tensor.view(parameter.shape)
    for parameter, rule in rules.items() if moments == LOSSLESS else ():
        for state in rule.states:
            made[parameter][f"{state.name}.{LOSSLESS}"] = LosslessMoment(parameter.numel())
    if has_ema:
        for parameter in rules:
            made[parameter][EMA].copy_(home.read(parameter._field))
    return made


def stored(state: State, rule: Rule, moments: str) -> tuple[Stored, ...]:
    """The moments as an update works on them (none of them lossless)."""
    format_ = FORMATS[moments]
    if not format_.is_block:
        return tuple(Stored(format_, state[one.name].view(-1)) for one in rule.states)
    return tuple(Stored(format_, state[f"{one.name}.codes"], state[f"{one.name}.scales"]) for one in rule.states)


def num_state_bytes(state: State) -> int:
    """Bytes that a parameter's moments and average take up now, scales included."""
    return sum(
        value.num_bytes if isinstance(value, LosslessMoment) else value.nbytes
        for name, value in state.items()
        if name != "step"
    )


def saved_state(state: State) -> State:
    """As it goes into a state_dict: tensors that view the state, lossless moments as one flat tensor."""
    return {
        name: value.pack() if isinstance(value, LosslessMoment) else value.view_as(value)
        for name, value in state.items()
    }


def format_of(saved: State, rule: Rule, name: str) -> str:
    """In which format `saved` holds its moments. `name`: what the state_dict says; None for one of PyTorch's."""
    if not rule.states or saved.get("step") is None:
        return name
    first = rule.states[0].name
    if f"{first}.{LOSSLESS}" in saved:
        return LOSSLESS
    if f"{first}.codes" in saved:
        return name
    return "bf16" if first in saved and torch.as_tensor(saved[first]).dtype == torch.bfloat16 else "fp32"


def load_state(own: State, saved: State, rule: Rule, moments: str, saved_moments: str, field: Field) -> None:
    """Overwrite `own`, of format `moments`, with what was saved in `saved_moments`, converting where they differ.

    Raises UserError when something is missing or of another shape; `own` may then
    be overwritten in part.
    """
    name = field.name
    own["step"].copy_(torch.as_tensor(_given(saved, "step", name)))
    if EMA in own and EMA in saved:
        _copy(own[EMA], saved[EMA], f"{name}: {EMA}")
    if moments == saved_moments != LOSSLESS or not rule.states:
        for key in sorted(own.keys() - {"step", EMA}):
            _copy(own[key], _given(saved, key, name), f"{name}: {key}")
        return
    values = _decoded(saved, rule, saved_moments, field)
    if moments == LOSSLESS:
        for one in rule.states:
            own[f"{one.name}.{LOSSLESS}"].copy_(values[one.name])
        return
    _encode(own, rule, moments, values)


def clear_state(own: State) -> None:
    """As before the first step. The average of the weights stays."""
    for name, value in own.items():
        if isinstance(value, LosslessMoment):
            own[name] = LosslessMoment(value.numel)
        elif name != EMA:
            value.zero_()


def _decoded(saved: State, rule: Rule, saved_moments: str, field: Field) -> dict[str, torch.Tensor]:
    """The saved moments as flat fp32 tensors."""
    name, numel = field.name, field.numel
    if saved_moments == LOSSLESS:
        return {
            one.name: LosslessMoment.unpack(_given(saved, f"{one.name}.{LOSSLESS}", name)).to_tensor()
            for one in rule.states
        }
    wanted = [f"{one.name}.codes" if FORMATS[saved_moments].is_block else one.name for one in rule.states]
    for key in wanted:
        _given(saved, key, name)
    of_saved = stored({key: torch.as_tensor(value).cpu() for key, value in saved.items()}, rule, saved_moments)
    values = {}
    reference = None if rule.reference is None else of_saved[rule.reference]
    for one, coded in zip(rule.states, of_saved, strict=True):
        if coded.codes.numel() != coded.format.num_codes(numel):
            raise UserError(f"{name}: the saved {one.name} has {coded.codes.numel()} numbers, not those of {numel}")
        decoded = codecs.decode(coded, numel, is_signed=one.is_signed, reference=reference if one.is_signed else None)
        values[one.name] = decoded.float()
    return values


def _encode(own: State, rule: Rule, moments: str, values: dict[str, torch.Tensor]) -> None:
    of_own = stored(own, rule, moments)
    reference = None if rule.reference is None else of_own[rule.reference]
    for i in rule.order():
        one = rule.states[i]
        flat = values[one.name].to(of_own[i].codes.device)
        random = rounding.random_bits((0, 0), 0, flat.numel(), flat.device)
        codecs.encode_(flat, of_own[i], random, is_signed=one.is_signed, reference=reference if one.is_signed else None)


def _given(saved: State, key: str, name: str) -> Any:
    if key not in saved:
        raise UserError(f"{name}: the saved optimizer state has no {key!r}; it has {', '.join(map(str, saved))}")
    return saved[key]


def _copy(own: torch.Tensor, saved: Any, what: str) -> None:
    saved = torch.as_tensor(saved)
    if saved.shape != own.shape or saved.dtype != own.dtype:
        raise UserError(
            f"{what} was saved as {saved.dtype} {tuple(saved.shape)}, this one is {own.dtype} {tuple(own.shape)}"
        )
    own.copy_(saved)
