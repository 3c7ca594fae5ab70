"""What an optimizer keeps for each parameter: allocated beside its home, seen as segments, lent to others.

`optimizer.state[parameter]` holds `step` (fp32 scalar) and, for each moment of the rule, by format:

    fp32, bf16   NAME              in the parameter's shape
    block codes  NAME.codes        flat uint8
                 NAME.scales       flat fp32
    lossless     NAME.lossless     a `LosslessMoment`; in a state_dict one flat uint8 tensor

and `ema` (fp32, in the parameter's shape) where an average of the weights is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from megatrain.base.errors import RefusedError
from megatrain.execute.parameters import HomeParameter
from megatrain.optim.rules import Rule
from megatrain.plan.placement import DISK_TIER, Place
from megatrain.spec.formats import FORMATS
from megatrain.store.codecs import Stored
from megatrain.store.home import Home
from megatrain.store.lending import Lending
from megatrain.store.lossless import LosslessMoment
from megatrain.store.tier import PAGE_BYTES, round_up
from megatrain.transport.hops import hops_at_hand

State = dict[str, Any]

ALIGN_BYTES = PAGE_BYTES
"""So that states on disk go past the page cache."""
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
    made: dict[HomeParameter, State] = {p: {"step": torch.zeros((), dtype=torch.float32)} for p in rules}
    flat = _block(home, home.place, [(dtype, count) for _, _, dtype, count in sizes])
    for (parameter, name, _, _), tensor in zip(sizes, flat, strict=True):
        made[parameter][name] = tensor if "." in name else tensor.view(parameter.shape)
    for parameter, rule in rules.items() if moments == LOSSLESS else ():
        for state in rule.states:
            made[parameter][f"{state.name}.{LOSSLESS}"] = _lossless(home, parameter.numel())
    if has_ema:
        for parameter in rules:
            made[parameter][EMA].copy_(home.read(parameter._field))
    return made


def _block(home: Home, place: Place, sizes: Sequence[tuple[torch.dtype, int]]) -> list[torch.Tensor]:
    """Flat tensors of these dtypes and numbers of elements, in one block of memory where `place` has moments."""
    starts = [0]
    for dtype, count in sizes:
        starts.append(round_up(starts[-1] + count * dtype.itemsize, ALIGN_BYTES))
    owner = f"moments of {home.name}"
    block = home.tiers[place.moments].empty(starts[-1], pinned=place.is_staged, owner=owner)
    return [
        block[start : start + count * dtype.itemsize].view(dtype)
        for (dtype, count), start in zip(sizes, starts, strict=False)
    ]


def copied_states(home: Home, own: Mapping[HomeParameter, State], place: Place) -> dict[HomeParameter, State]:
    """Copies of the moments and averages of parameters of one home, in one block where `place` has them; without
    `step`. (None is lossless: those lie on no device.)"""
    named = [(parameter, name) for parameter, state in own.items() for name in state if name != "step"]
    tensors = [own[parameter][name] for parameter, name in named]
    flat = _block(home, place, [(tensor.dtype, tensor.numel()) for tensor in tensors])
    hops, _ = hops_at_hand()
    copies: dict[HomeParameter, State] = {parameter: {} for parameter in own}
    for (parameter, name), tensor, copy in zip(named, tensors, flat, strict=True):
        copies[parameter][name] = copy.view(tensor.shape)
        hops.move(copy, tensor.view(-1), f"states of {home.name} on their way to another tier")
    return copies


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


def _refused(what: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RefusedError(
            f"optimizer.state{what} would not reach the states, which lie beside their homes: write into the tensors "
            "(.copy_, .zero_), or use load_state_dict"
        )

    return refuse


class _LentState(dict[str, Any]):
    """One parameter's state as others see it. Its tensors may be written, it may not."""

    __setitem__ = _refused("[p][name] = ...")
    __delitem__ = _refused("[p]: del [name]")
    __ior__ = _refused("[p] |= ...")
    update, clear, pop = _refused("[p].update"), _refused("[p].clear"), _refused("[p].pop")
    popitem, setdefault = _refused("[p].popitem"), _refused("[p].setdefault")

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is a dict of its own."""
        return dict, (dict(self),)


def check_not_replaced(own: dict[HomeParameter, State]) -> None:
    """Raises RefusedError for an optimizer that has states already."""
    if own:
        raise RefusedError("optimizer.state cannot be replaced: write into its tensors, or use load_state_dict")


def count_step(own: Iterable[State]) -> None:
    """Their update is queued."""
    for state in own:
        state["step"] += 1


class LentStates(Mapping[HomeParameter, State]):
    """States as others see them: read once their updates are done, and lent."""

    __setitem__, __delitem__ = _refused("[p] = ..."), _refused(": del [p]")
    update, clear, pop = _refused(".update"), _refused(".clear"), _refused(".pop")
    popitem, setdefault = _refused(".popitem"), _refused(".setdefault")

    def __init__(self, own: dict[HomeParameter, State], lending: Lending) -> None:
        self._own, self._lending = own, lending

    def __getitem__(self, parameter: HomeParameter) -> State:
        if parameter not in self:
            raise KeyError(parameter)
        parameter._home.wait()
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
