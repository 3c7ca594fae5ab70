"""Stochastic rounding: the random numbers, and fp32 to bf16 with them.

Rounding to nearest loses every change that is smaller than half a step, for good: a bf16 weight does not decay, an
average in few bits does not forget. Stochastic rounding goes up with the probability that makes the expectation right.

Rule: random numbers are a function of (key, index of the element) alone, so results depend on no order, thread, piece
or place. `optim/kernel.c` computes the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

Key = tuple[int, int]
"""Two 32-bit numbers that pick a stream of random numbers: one for each parameter and step."""

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_NAN_BF16 = 0x7FC0

# Odd factors that make further streams out of one.
UNSIGNED_STREAM = 0x9E3779B1
MASTER_STREAM = 0x85EBCA77


def make_key(seed: int, step: int, number: int) -> Key:
    """The key of parameter `number` at `step` of a run with `seed`: three rounds of SplitMix64 (Steele, Lea and Flood
    2014, Fast Splittable Pseudorandom Number Generators, figure 15)."""
    state = 0
    for value in (seed, step, number):
        state = (state ^ value) + 0x9E3779B97F4A7C15 & _MASK64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK64
        state ^= state >> 31
    return state & _MASK32, state >> 32


def random_bits(key: Key, first: int, count: int, device: torch.device) -> Tensor:
    """32 random bits for each of the elements first, first + 1, ...: (count,) int64.

    The integer hash lowbias32 (Wellons 2018, hash-prospector) of index + key[0], with key[1] between its two rounds.
    """
    x = torch.arange(first, first + count, dtype=torch.int64, device=device).add_(key[0]).bitwise_and_(_MASK32)
    x = (x ^ (x >> 16)).mul_(0x7FEB352D).bitwise_and_(_MASK32)
    x.bitwise_xor_(key[1])
    x = (x ^ (x >> 15)).mul_(0x846CA68B).bitwise_and_(_MASK32)
    return x ^ (x >> 16)


def stream(bits: Tensor, factor: int) -> Tensor:
    """Another stream of random bits out of `bits`; its upper bits are the random ones."""
    return (bits * factor).bitwise_and_(_MASK32)


def round_to_bf16(x: Tensor, random: Tensor) -> Tensor:
    """Each x rounded up or down to a bf16, so that the expectation is x.

    x: (n,) fp32. random: (n,) int64, 32 bits each; the upper 16 count. NaNs become 0x7FC0, infinities stay, and what
    lies beyond the largest bf16 may become infinite. Returns (n,) bf16.
    """
    bits = x.view(torch.int32).to(torch.int64).bitwise_and_(_MASK32)
    upper = (bits + (random >> 16)) >> 16
    upper = torch.where(torch.isnan(x), torch.full_like(upper, _NAN_BF16), upper)
    return upper.to(torch.int16).view(torch.bfloat16)
