"""Forms of the fp32 master weights: the exact split in 16 + 16 bits.

A split master holds every fp32 value in two halves: `hi`, which is the weight that the device computes with (bf16),
and `lo`, the rest (int16). Four bytes a weight, nothing stored twice:

    hi   = (bits + 0x8000) >> 16          as bf16
    lo   = int16(bits)                    the lower 16 bits, signed
    bits = (hi << 16) + sign_extend(lo)   modulo 2^32

Rule: split, then join, gives back every bit of every value that is not a NaN. This is the definition; the update kernel
(`optim/kernel.c`) does the same and is tested against it.

What it gives up:
- `hi` is x rounded to the nearest bf16, and a tie goes away from zero. PyTorch's own `.to(torch.bfloat16)` sends a tie
  to the even neighbour. The two differ on exact ties only (`lo == -32768`), where both are equally near. Ties to even
  would also need `lo == +32768`, which 16 bits do not hold.
- NaNs lose sign and payload: each becomes hi = 0x7FC0, lo = 0, and joins back to 0x7FC00000. Without this guard
  0x7F800001 would have a hi of infinity, and 0x7FFFFFFF a hi of -0.
- Values from 0x7F7F8000 (3.396e38) up have an infinite `hi` but are exact in the master: `lo` brings them back.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Elements worked on at a time, so that temporaries stay in the cache and are never as large as a layer.
PIECE = 1 << 16

_HALF = 0x8000
_NAN_HI = 0x7FC0


def split_(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Write the two halves of `master` into `hi` and `lo`.

    master: (n,) fp32, contiguous; left as it is. hi: (n,) bf16. lo: (n,) int16. Neither may overlap `master`.
    """
    _check(hi, lo, master)
    for start in range(0, master.numel(), PIECE):
        piece = slice(start, start + PIECE)
        _split_piece(master[piece], hi[piece].view(torch.int16), lo[piece])


def join(hi: Tensor, lo: Tensor, out: Tensor | None = None) -> Tensor:
    """The fp32 master that `hi` and `lo` hold.

    hi: (n,) bf16, contiguous. lo: (n,) int16. out: (n,) fp32 to write into, or None for a new tensor. Returns `out`.
    """
    if out is None:
        out = torch.empty(hi.shape, dtype=torch.float32, device=hi.device)
    _check(hi, lo, out)
    for start in range(0, out.numel(), PIECE):
        piece = slice(start, start + PIECE)
        # copy_ from int16 extends the sign; shift and add then work modulo 2^32, as the definition says.
        bits = out[piece].view(torch.int32).copy_(hi[piece].view(torch.int16))
        bits.bitwise_left_shift_(16).add_(lo[piece])
    return out


def _split_piece(master: Tensor, hi_bits: Tensor, lo: Tensor) -> None:
    """One piece of `split_`. master: (n,) fp32. hi_bits, lo: (n,) int16."""
    bits = master.view(torch.int32)
    # The shift is arithmetic, so the result is already the signed 16-bit pattern and copy_ does not change it.
    hi_bits.copy_((bits + _HALF).bitwise_right_shift_(16))
    lo.copy_(bits)
    is_nan = torch.isnan(master)
    hi_bits.masked_fill_(is_nan, _NAN_HI)
    lo.masked_fill_(is_nan, 0)


def _check(hi: Tensor, lo: Tensor, master: Tensor) -> None:
    """Raise ValueError unless the three tensors are flat, of one size, and of the dtypes of a split master."""
    for name, tensor, dtype in (("hi", hi, torch.bfloat16), ("lo", lo, torch.int16), ("master", master, torch.float32)):
        if tensor.dtype != dtype:
            raise ValueError(f"split master: {name} must be {dtype}, got {tensor.dtype}")
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"split master: {name} must be flat and contiguous: pass tensor.view(-1)")
        if tensor.numel() != master.numel():
            raise ValueError(f"split master: {name} has {tensor.numel()} elements, master has {master.numel()}")
