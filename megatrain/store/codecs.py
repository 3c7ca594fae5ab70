"""Formats of moments: how a number of the optimizer's state is stored, and what it is again when it is needed.

    fp32   exact                                4 bytes
    bf16   stochastically rounded               2
    8bit   blocks of 128 with one fp32 scale    1.03
    4bit   the same                             0.53
    2bit   the same                             0.28    (fails the quality test: docs/compression.md)

The block codes are small floats, so that both ways are a shift and an addition, without tables or roots. A block's
scale is its largest magnitude. Within it, with the code as the leading bits of a float (exponent and `mantissa` bits):

- unsigned (second moments): x / scale in (0, 1], the top code is 1. Every step is the same ratio, and there is no code
  for zero, which would be a division by nothing later: what lies below the lowest code is stored as the lowest.
- signed (first moments): 1 + |x| / scale * (top - 1) in [1, top], so zero is a code, steps near it are small and equal,
  and they double from octave to octave (as in the mu-law of telephony).

A first moment next to a second is divided before by the power of two nearest below the root of the second's own code:
what is coded is then the update's direction, which is of one size in a whole block, where gradients are not.

Rounding is stochastic (`store/rounding.py`): the moving averages change by less than a step at a time.

Rule: this file is the definition, with each fp32 operation rounded once; `optim/kernel.c` gives the same bits. A block
with a number that is not finite is NaN as a whole; one whose largest magnitude is below 2^-126 is zero.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.spec.formats import BLOCK, FORMATS, Format
from megatrain.store import rounding

__all__ = ["BLOCK", "FORMATS", "Format", "Stored", "decode", "encode_"]

_SMALLEST_NORMAL = 2.0**-126
_ONE_BITS = 127  # exponent field of 1.0
_MANTISSA = 23


@dataclass(frozen=True)
class Stored:
    """One moment of a run of parameters, as it is stored.

    codes: flat, of the format's dtype. scales: (blocks,) fp32, or None for formats without.
    """

    format: Format
    codes: Tensor
    scales: Tensor | None = None

    def part(self, start: int, stop: int) -> Stored:
        """Of the numbers [start, stop), as views. `start` is a multiple of BLOCK for block codes."""
        codes = self.codes[self.format.num_codes(start) : self.format.num_codes(stop)]
        if self.scales is None:
            return Stored(self.format, codes)
        return Stored(self.format, codes, self.scales[self.format.num_scales(start) : self.format.num_scales(stop)])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.codes,) if self.scales is None else (self.codes, self.scales)


def decode(stored: Stored, numel: int, *, is_signed: bool, reference: Stored | None = None) -> Tensor:
    """The numbers of a moment: (numel,) fp32, a view of `stored` where that is fp32 itself.

    reference: the second moment beside a first one, as it is stored with it; None where the rule has none.
    """
    format_ = stored.format
    if not format_.is_block:
        return stored.codes if format_.is_exact else stored.codes.float()
    codes = _unpack(stored.codes, format_.bits)
    assert stored.scales is not None
    if is_signed:
        top, mask = _signed_top(format_), (1 << (format_.bits - 1)) - 1
        shift = _MANTISSA - format_.signed_mantissa
        level = _float_of(((_ONE_BITS << format_.signed_mantissa) + (codes & mask)) << shift)
        unit = stored.scales.mul(_fp32(1.0 / (top - 1.0)))
        values = level.sub_(1.0).view(-1, BLOCK).mul_(unit.view(-1, 1)).view(-1)
        if reference is not None:
            values.mul_(_float_of((_ONE_BITS + _half_exponents(reference)) << _MANTISSA))
        values = torch.where(codes > mask, values.neg(), values)
    else:
        shift = _MANTISSA - format_.unsigned_mantissa
        level = _float_of((codes + _unsigned_base(format_)) << shift)
        values = level.view(-1, BLOCK).mul_(stored.scales.view(-1, 1)).view(-1)
    return values[:numel]


def encode_(
    values: Tensor, stored: Stored, random: Tensor | None, *, is_signed: bool, reference: Stored | None = None
) -> None:
    """Write `values` ((n,) fp32) into `stored`.

    random: (n,) int64 of `rounding.random_bits`; None with fp32. reference: as in `decode`, already encoded.
    """
    format_ = stored.format
    if format_.is_exact:
        if values.data_ptr() != stored.codes.data_ptr():
            stored.codes.copy_(values)
        return
    assert random is not None
    if not is_signed:
        random = rounding.stream(random, rounding.UNSIGNED_STREAM)
    if not format_.is_block:
        stored.codes.copy_(rounding.round_to_bf16(values, random))
        return
    assert stored.scales is not None
    values, random = _whole_blocks(values), _whole_blocks(random)
    if is_signed and reference is not None:
        values = values.mul(_float_of((_ONE_BITS - _half_exponents(reference)) << _MANTISSA))
    blocks = values.view(-1, BLOCK)
    peak = blocks.abs().amax(dim=1)
    is_finite, is_zero = torch.isfinite(peak), peak < _SMALLEST_NORMAL
    nan, zero = torch.full_like(peak, torch.nan), torch.zeros_like(peak)
    stored.scales.copy_(torch.where(is_finite, torch.where(is_zero, zero, peak), nan))
    is_used = is_finite & ~is_zero
    # A divisor on the device of the peaks, so that CUDA divides too.
    inverse = torch.where(is_used, torch.ones_like(peak).div_(peak), zero)
    scaled = (blocks.abs() if is_signed else blocks).mul(inverse.view(-1, 1)).view(-1)
    if is_signed:
        mantissa, most = format_.signed_mantissa, (1 << (format_.bits - 1)) - 1
        scaled.mul_(_signed_top(format_) - 1.0).add_(1.0)
        base = _ONE_BITS << mantissa
    else:
        mantissa, most = format_.unsigned_mantissa, (1 << format_.bits) - 1
        base = _unsigned_base(format_)
    shift = _MANTISSA - mantissa
    bits = scaled.view(torch.int32).to(torch.int64)
    codes = (((bits + (random >> (32 - shift))) >> shift) - base).clamp_(0, most)
    if is_signed:
        codes |= (values.view(torch.int32) < 0).to(torch.int64) << (format_.bits - 1)
    codes = codes.view(-1, BLOCK).mul_(is_used.view(-1, 1)).view(-1)
    stored.codes.copy_(_pack(codes, format_.bits))


def _signed_top(format_: Format) -> float:
    """The level of the largest magnitude code."""
    code = (1 << (format_.bits - 1)) - 1
    exponent, mantissa = divmod(code, 1 << format_.signed_mantissa)
    return 2.0**exponent * (1.0 + mantissa / (1 << format_.signed_mantissa))


def _unsigned_base(format_: Format) -> int:
    """Leading bits of the float that code 0 stands for, so that the top code is 1.0."""
    return (_ONE_BITS << format_.unsigned_mantissa) - ((1 << format_.bits) - 1)


def _half_exponents(second: Stored) -> Tensor:
    """Half the exponent of each second moment within its block, rounded down: (whole blocks,) int64."""
    if not second.format.is_block:
        raise ValueError(f"a first moment in a block code beside a second in {second.format.name}")
    return _unpack(second.codes, second.format.bits) >> (second.format.unsigned_mantissa + 1)


def _whole_blocks(tensor: Tensor) -> Tensor:
    """Zeros added up to a multiple of BLOCK."""
    return torch.nn.functional.pad(tensor, (0, -tensor.numel() % BLOCK))


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Byte j of a block holds the codes j, j + BLOCK * bits / 8, ..., the first one lowest."""
    parts = codes.view(-1, 8 // bits, BLOCK * bits // 8)
    packed = sum(parts[:, i] << (bits * i) for i in range(8 // bits))
    return packed.reshape(-1).to(torch.uint8)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """(n,) uint8 -> (n * 8 / bits,) int64."""
    blocks = packed.view(-1, 1, BLOCK * bits // 8).to(torch.int64)
    parts = [(blocks >> (bits * i)) & ((1 << bits) - 1) for i in range(8 // bits)]
    return torch.cat(parts, dim=1).view(-1)


def _float_of(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def _fp32(x: float) -> float:
    return ctypes.c_float(x).value
