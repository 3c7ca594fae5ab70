"""Segments of every format and kind of number, and their update by the definition: for the tests of the update."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from megatrain.optim import kernel
from megatrain.optim.formula import AdamWScalars, adamw_
from megatrain.optim.segment import Segment
from megatrain.store import masters

VARIANTS = kernel.supported_variants()
FORMATS = [(split, grad) for split in (False, True) for grad in (torch.float32, torch.bfloat16)]
SCALARS = AdamWScalars.at(3, lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, clip=0.37)
SPECIAL = np.array(
    # zeros, denormals, the smallest normal, ones, the largest, infinities, NaNs of every kind
    [0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x1E000000, 0x3F800000, 0xBF808000,
     0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF],
    dtype=np.uint32,
)  # fmt: skip


def random_floats(rng: np.random.Generator, size: int, scale: float = 1.0) -> np.ndarray:
    """fp32 of every kind: ordinary values, special ones, and any bit pattern at all."""
    values = (rng.standard_normal(size) * scale).astype(np.float32)
    kind = rng.random(size)
    patterns = rng.integers(0, 2**32, size, dtype=np.uint32)
    values = np.where(kind < 0.2, patterns.view(np.float32), values)
    return np.where(kind > 0.8, rng.choice(SPECIAL, size).view(np.float32), values)


def ordinary_floats(rng: np.random.Generator, size: int, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(size) * scale).astype(np.float32)


def make_segment(
    seed: int, size: int, split: bool, grad_dtype: torch.dtype, offset: int = 0, special: bool = True
) -> Segment:
    """A segment whose tensors all start `offset` elements into their memory."""
    rng = np.random.default_rng(seed)
    make = random_floats if special else ordinary_floats
    total = size + offset
    master, grad, m = (torch.from_numpy(make(rng, total, scale)) for scale in (1.0, 1e-2, 1e-3))
    v = torch.from_numpy(make(rng, total, 1e-4)).abs_()
    low = None
    weights = master
    if split:
        weights, low = torch.zeros(total, dtype=torch.bfloat16), torch.zeros(total, dtype=torch.int16)
        masters.split_(master, weights, low)
        low = low[offset:]
    rest = (tensor[offset:] for tensor in (grad.to(grad_dtype), m, v))
    return Segment(weights[offset:], low, *rest, SCALARS)


def copy(segment: Segment) -> Segment:
    tensors = {k: t.clone() for k, t in vars(segment).items() if isinstance(t, torch.Tensor)}
    return replace(segment, **tensors)


def by_the_definition(segment: Segment) -> Segment:
    """The segment after one step: join, formula, split; whole tensors, nothing in pieces."""
    result = copy(segment)
    w = result.weights if result.low is None else masters.join(result.weights, result.low)
    adamw_(w, result.grad.float(), result.m, result.v, result.scalars)
    if result.low is not None:
        masters.split_(w, result.weights, result.low)
    return result


def pattern(tensor: torch.Tensor) -> np.ndarray:
    """The bits of a tensor; in fp32 all NaNs are one, since their payload is not promised."""
    if tensor.dtype == torch.float32:
        tensor = torch.where(torch.isnan(tensor), torch.full((), math.nan), tensor)
        return tensor.contiguous().numpy().view(np.uint32)
    return tensor.contiguous().view(torch.int16).numpy()


def assert_same_bits(actual: Segment, expected: Segment) -> None:
    for name in ("weights", "low", "grad", "m", "v"):
        if getattr(expected, name) is not None:
            np.testing.assert_array_equal(pattern(getattr(actual, name)), pattern(getattr(expected, name)), name)
