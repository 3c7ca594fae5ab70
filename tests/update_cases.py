"""Segments of every rule, master, gradient and format, with numbers of every kind, and how they are compared."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain.optim import definition, kernel, rules
from megatrain.optim.rules import Rule, Scalars
from megatrain.optim.segment import Ema, Segment
from megatrain.store import codecs, masters
from megatrain.store.codecs import BLOCK, FORMATS, Stored

VARIANTS = kernel.supported_variants()
RULES = (rules.ADAMW, rules.ADAM, rules.MOMENTUM, rules.SGD, rules.LION)
KERNEL_FORMATS = ("fp32", "bf16", "8bit", "4bit")
MASTERS = ("fp32", "split", "bf16")
GRADS = (torch.float32, torch.bfloat16)
LAYOUTS = tuple(itertools.product(MASTERS, GRADS))
KEY = (123456789, 4294967290)

SPECIAL = np.array(
    # zeros, denormals, the smallest normal, ones, the largest, infinities, NaNs of every kind
    [0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x1E000000, 0x3F800000, 0xBF808000,
     0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF],
    dtype=np.uint32,
)  # fmt: skip


def scalars_at(rule: Rule, step: int = 3, **changes: Any) -> Scalars:
    """Numbers of a step in which every term counts."""
    numbers: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "clip": 0.37}
    if rule in (rules.ADAMW, rules.ADAM):
        numbers |= {"step": step, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    elif rule == rules.MOMENTUM:
        numbers |= {"step": step, "momentum": 0.9, "dampening": 0.1, "nesterov": True}
    elif rule == rules.LION:
        numbers |= {"beta1": 0.9, "beta2": 0.99}
    return rule.scalars.at(**numbers | changes)


def random_floats(rng: np.random.Generator, size: int, scale: float = 1.0, odd: float = 0.4) -> np.ndarray:
    """fp32 of every kind: ordinary values, and a share `odd` of special ones and of any bit pattern at all."""
    # Of several octaves, so that blocks use many of their codes.
    values = (rng.standard_normal(size) * scale * 2.0 ** rng.uniform(-8, 0, size)).astype(np.float32)
    kind = rng.random(size)
    patterns = rng.integers(0, 2**32, size, dtype=np.uint32)
    values = np.where(kind < odd / 2, patterns.view(np.float32), values)
    return np.where(kind > 1 - odd / 2, rng.choice(SPECIAL, size).view(np.float32), values)


def make_segment(
    seed: int,
    size: int,
    master: str = "split",
    grad_dtype: torch.dtype = torch.bfloat16,
    format_name: str = "fp32",
    rule: Rule = rules.ADAMW,
    *,
    offset: int = 0,
    odd: float = 0.0,
    exponent: int = 0,
    has_ema: bool = False,
    first: int = 0,
) -> Segment:
    """A segment whose tensors all start `offset` elements into their memory.

    odd: share of numbers of odd kinds. All others are of about 2^exponent, or of its square in second moments.
    """
    rng = np.random.default_rng(seed)

    def floats(scale: float) -> Tensor:
        return torch.from_numpy(random_floats(rng, size, scale * 2.0**exponent, odd))

    weights, low = floats(1.0), None
    if master == "split":
        halves = torch.zeros(size, dtype=torch.bfloat16), torch.zeros(size, dtype=torch.int16)
        masters.split_(weights, *halves)
        weights, low = halves[0], _embed(halves[1], offset)
    elif master == "bf16":
        weights = weights.to(torch.bfloat16)
    grad, average = floats(1e-2).to(grad_dtype), floats(1.0)
    scales = [1e-3 * 2.0**exponent if state.is_signed else 1e-6 * 4.0**exponent for state in rule.states]
    states = [_make_state(rng, format_name, size, scale, offset, odd) for scale in scales]
    for state, stored in zip(rule.states, states, strict=True):
        if not state.is_signed and not stored.format.is_block:
            stored.codes.abs_()
    return Segment(
        rule=rule,
        scalars=scalars_at(rule),
        weights=_embed(weights, offset),
        low=low,
        grad=_embed(grad, offset),
        states=tuple(states),
        ema=Ema(average=_embed(average, offset), decay=0.999) if has_ema else None,
        key=KEY,
        first=first,
    )


def _make_state(rng: np.random.Generator, format_name: str, size: int, scale: float, offset: int, odd: float) -> Stored:
    """A moment: floats, or any codes at all, also where the last block has none, with scales that a block can have."""
    format_ = FORMATS[format_name]
    if not format_.is_block:
        values = torch.from_numpy(random_floats(rng, size, scale, odd)).to(format_.dtype)
        return Stored(format_, _embed(values, offset))
    codes = torch.from_numpy(rng.integers(0, 256, format_.num_codes(size), dtype=np.uint8))
    peaks = np.abs(random_floats(rng, format_.num_scales(size), scale, odd))
    peaks[~np.isfinite(peaks)] = np.nan
    peaks[peaks < 2.0**-126] = 0.0
    return Stored(format_, _embed(codes, offset), _embed(torch.from_numpy(peaks), offset))


def _embed(tensor: Tensor, offset: int) -> Tensor:
    """The tensor again, in the midst of memory that is nobody's."""
    whole = torch.full(((offset + tensor.numel() + 67) * tensor.element_size(),), 0xA5, dtype=torch.uint8)
    inside = whole.view(tensor.dtype)[offset : offset + tensor.numel()]
    return inside.copy_(tensor)


def is_alone(tensor: Tensor) -> bool:
    """Whether nobody wrote to the memory around the tensor."""
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    start = tensor.storage_offset() * tensor.element_size()
    around = torch.cat((memory[:start], memory[start + tensor.nbytes :]))
    return bool((around == 0xA5).all())


def make_stored(format_name: str, size: int) -> Stored:
    """A moment of zeros."""
    format_ = FORMATS[format_name]
    scales = torch.zeros(format_.num_scales(size)) if format_.is_block else None
    return Stored(format_, torch.zeros(format_.num_codes(size), dtype=format_.dtype), scales)


def copy(segment: Segment) -> Segment:
    return replace(
        segment,
        weights=segment.weights.clone(),
        low=None if segment.low is None else segment.low.clone(),
        grad=segment.grad.clone(),
        states=tuple(Stored(s.format, *(tensor.clone() for tensor in s.tensors)) for s in segment.states),
        ema=None if segment.ema is None else replace(segment.ema, average=segment.ema.average.clone()),
    )


def by_the_definition(segment: Segment) -> Segment:
    """The segment after one step by `optim/definition.py`, whole; the segment itself is left as it is."""
    result = copy(segment)
    definition.update_(result)
    return result


def value(segment: Segment) -> Tensor:
    """The master weights in fp32."""
    return segment.weights.float() if segment.low is None else masters.join(segment.weights, segment.low)


def moments(segment: Segment) -> list[Tensor]:
    """The moments in fp32."""
    rule, states = segment.rule, segment.states
    reference = None if rule.reference is None else states[rule.reference]
    return [
        codecs.decode(s, segment.numel, is_signed=kept.is_signed, reference=reference if kept.is_signed else None)
        for kept, s in zip(rule.states, states, strict=True)
    ]


def tensors(segment: Segment) -> dict[str, Tensor]:
    """All tensors of the segment, by name."""
    named = {"weights": segment.weights, "low": segment.low, "grad": segment.grad}
    for kept, stored in zip(segment.rule.states, segment.states, strict=True):
        named |= {kept.name: stored.codes, f"{kept.name} scales": stored.scales}
    named["ema"] = None if segment.ema is None else segment.ema.average
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def pattern(tensor: Tensor) -> np.ndarray:
    """The bits of a tensor; all NaNs of fp32 are one, since their payload is not promised."""
    if tensor.dtype == torch.float32:
        tensor = torch.where(torch.isnan(tensor), torch.full((), math.nan), tensor)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.detach().contiguous().view(integer).numpy()


def assert_same_bits(actual: Segment, expected: Segment, note: str = "") -> None:
    found = tensors(actual)
    for name, tensor in tensors(expected).items():
        np.testing.assert_array_equal(pattern(found[name]), pattern(tensor), f"{name} {note}")


def cut(segment: Segment, blocks: list[int]) -> list[Segment]:
    """The segment in parts that begin at these blocks (any order, any number)."""
    ends = sorted({0, *(block * BLOCK for block in blocks if block * BLOCK < segment.numel)})
    return [segment.part(a, b) for a, b in itertools.pairwise([*ends, segment.numel])]
