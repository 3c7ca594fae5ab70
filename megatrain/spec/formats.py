"""Formats of moments: their names, and the bytes that they take. What the codes mean is in `store/codecs.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAGE_BYTES = 4096
BLOCK = 128
"""Elements with one scale."""


@dataclass(frozen=True)
class Format:
    """How moments are stored. `bits` of 32 and 16 are whole floats; less are block codes."""

    name: str
    bits: int
    signed_mantissa: int = 0
    """Mantissa bits of a signed block code; its exponent has the rest, less one for the sign."""
    unsigned_mantissa: int = 0

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8, 16, 32):
            raise ValueError(f"format {self.name!r}: {self.bits} bits do not fill a byte evenly; use 2, 4, 8, 16 or 32")

    @property
    def is_block(self) -> bool:
        return self.bits < 16

    @property
    def is_exact(self) -> bool:
        return self.bits == 32

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored codes."""
        return {32: torch.float32, 16: torch.bfloat16}.get(self.bits, torch.uint8)

    def num_codes(self, numel: int) -> int:
        """Elements of `dtype` for `numel` numbers. The last block is stored whole."""
        return num_blocks(numel) * (BLOCK * self.bits // 8) if self.is_block else numel

    def num_scales(self, numel: int) -> int:
        return num_blocks(numel) if self.is_block else 0

    def num_bytes(self, numel: int) -> int:
        """Of one moment of `numel` numbers, scales included."""
        return self.num_codes(numel) * self.dtype.itemsize + 4 * self.num_scales(numel)


FORMATS = {
    format_.name: format_
    for format_ in (
        Format("fp32", 32),
        Format("bf16", 16),
        Format("8bit", 8, signed_mantissa=4, unsigned_mantissa=3),
        Format("4bit", 4, signed_mantissa=1, unsigned_mantissa=0),
        Format("2bit", 2, signed_mantissa=0, unsigned_mantissa=0),
    )
}


def num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def most_moment_bytes(name: str, numel: int) -> int:
    """Bytes that one moment of `numel` numbers takes up in the format `name`, at most: lossless codes vary with the
    numbers. Codes and scales each start at a page."""
    format_ = FORMATS["fp32" if name == "lossless" else name]
    return _whole_pages(format_.num_codes(numel) * format_.dtype.itemsize) + _whole_pages(4 * format_.num_scales(numel))


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
