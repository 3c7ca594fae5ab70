"""What an optimizer keeps for each parameter: allocated beside its home, seen as segments, saved and loaded.

`optimizer.state[parameter]` holds `step` (fp32 scalar) and, for each moment of the rule, by format:

    fp32, bf16   NAME              in the parameter's shape
    block codes  NAME.codes        flat uint8
                 NAME.scales       flat fp32
    lossless     NAME.lossless     a `LosslessMoment`; in a state_dict one flat uint8 tensor

and `ema` (fp32, in the parameter's shape) where an average of the weights is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from megatrain.base.errors import RefusedError, UserError
from megatrain.execute.parameters import HomeParameter
from megatrain.optim.rules import Rule
from megatrain.plan.placement import DISK_TIER
from megatrain.spec.formats import FORMATS
from megatrain.spec.layout import Field
from megatrain.store import codecs, rounding
from megatrain.store.codecs import Stored
from megatrain.store.home import Home
from megatrain.store.lending import Lending
from megatrain.store.lossless import LosslessMoment
from megatrain.store.tier import PAGE_BYTES

State = dict[str, Any]

ALIGN_BYTES = PAGE_BYTES
"""So that states on disk go past the page cache."""
LOSSLESS = "lossless"
EMA = "ema"
PARTS = ("", ".codes", ".scales", f".{LOSSLESS}")
"""What the names of a moment's tensors end in."""


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
    block = home.tiers[home.place.moments].empty(starts[-1], pinned=home.place.is_staged)
    made: dict[HomeParameter, State] = {p: {"step": torch.zeros((), dtype=torch.float32)} for p in rules}
    for (parameter, name, dtype, count), start in zip(sizes, starts, strict=False):
        tensor = block[start : start + count * dtype.itemsize].view(dtype)
        made[parameter][name] = tensor if "." in name else tensor.view(parameter.shape)
    for parameter, rule in rules.items() if moments == LOSSLESS else ():
        for state in rule.states:
            made[parameter][f"{state.name}.{LOSSLESS}"] = _lossless(home, parameter.numel())
    if has_ema:
        for parameter in rules:
            made[parameter][EMA].copy_(home.read(parameter._field))
    return made


def _lossless(home: Home, numel: int) -> LosslessMoment:
    if home.place.moments != DISK_TIER:
        return LosslessMoment(numel)
    return LosslessMoment(numel, home.tiers[DISK_TIER].empty(4 * numel))


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


class _LentState(dict[str, Any]):
    """One parameter's state as others see it. Its tensors may be written, it may not."""

    def __setitem__(self, name: str, value: Any) -> NoReturn:
        raise RefusedError(
            f"optimizer.state[p][{name!r}] = ... would not reach the state, which lies beside its home: write into the "
            "tensor (.copy_, .zero_), or use load_state_dict"
        )


def check_not_replaced(own: dict[HomeParameter, State]) -> None:
    """Raises RefusedError for an optimizer that has states already."""
    if own:
        raise RefusedError("optimizer.state cannot be replaced: write into its tensors, or use load_state_dict")


class LentStates(Mapping[HomeParameter, State]):
    """States as others see them: read once their updates are done, and lent."""

    def __init__(self, own: dict[HomeParameter, State], lending: Lending) -> None:
        self._own, self._lending = own, lending

    def __getitem__(self, parameter: HomeParameter) -> State:
        if parameter not in self:
            raise KeyError(parameter)
        parameter._home.updated.wait()
        parameter._home.expose()
        return _LentState(
            (name, self._lending.lend(value) if isinstance(value, torch.Tensor) and name != "step" else value)
            for name, value in self._own[parameter].items()
        )

    def __contains__(self, parameter: object) -> bool:
        return isinstance(parameter, HomeParameter) and parameter in self._own

    def __iter__(self) -> Iterator[HomeParameter]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def saved_state(state: State) -> State:
    """As it goes into a state_dict: lossless moments as one flat tensor, and what lies on a device as a copy."""
    return {
        name: value.pack() if isinstance(value, LosslessMoment) else value.view_as(value).cpu()
        for name, value in state.items()
    }


def check_sections(state_dict: Any) -> None:
    """Raises UserError for what is no state_dict of an optimizer."""
    for section, kind in (("state", Mapping), ("param_groups", Sequence)):
        if not (isinstance(state_dict, Mapping) and isinstance(state_dict.get(section), kind)):
            raise UserError(f"the saved optimizer has no {section!r}: give it what optimizer.state_dict() returned")


class Load:
    """One parameter's saved state on its way into its own. Made, it has been checked; `run` then cannot fail.

    Args:
        own: of format `moments`. saved: None where nothing was saved: as before the first step.
        name: of the saved format, as the state_dict says; None for one of PyTorch's.

    Raises UserError when something is missing, is no tensor, or has another shape or dtype.
    """

    def __init__(self, own: State, saved: Any, rule: Rule, moments: str, name: str | None, field: Field) -> None:
        self._own, self._saved, self._rule, self._moments, self._field = own, saved, rule, moments, field
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
            self.saved_moments = self._find_format(name)
            self._check_moments()
        known = {"step", EMA} | {f"{one.name}{part}" for one in rule.states for part in PARTS}
        foreign = [key for key, value in saved.items() if key not in known and value is not None]
        if foreign:
            raise UserError(
                f"{field.name}: the saved optimizer is of another rule than {rule.name}: it has {foreign[0]!r}"
            )

    def run(self) -> bool:
        """Overwrite the own state. Returns whether there was a saved one."""
        if self._saved is None:
            clear_state(self._own)
            return False
        self._own["step"].copy_(self._tensor("step").reshape(()))
        if EMA in self._own and EMA in self._saved:
            self._own[EMA].copy_(self._saved[EMA])
        if self._moments == self.saved_moments != LOSSLESS:
            for key in self._own.keys() - {"step", EMA}:
                self._own[key].copy_(self._saved[key])
        elif self._rule.states:
            self._convert()
        return True

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
    """As before the first step. The average of the weights stays."""
    for name, value in own.items():
        if name != EMA:
            value.zero_()
