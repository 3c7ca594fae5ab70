"""Numbers and moments in Triton kernels: what `store/rounding.py` and `store/codecs.py` define, for tiles of blocks.

A tile is (BLOCKS, 128): whole blocks, so that a block's scale is a reduction over a row.

Rule: the same bits as the definition, so each operation is rounded once: divisions are the `_rn` ones, constants are
exact in fp32 or rounded once to it, and the kernel is compiled without fused multiply-add. bf16 comes as int16 and is
widened by a shift.

What it gives up: the module can be imported without Triton, but to no use. Only builds of PyTorch for CUDA bring it.
"""

from __future__ import annotations

from collections.abc import Callable

from megatrain.store import rounding

try:
    import triton
    import triton.language as tl

    jit, constexpr = triton.jit, tl.constexpr
except ImportError:
    triton = tl = None
    constexpr = int

    def jit(function: Callable | None = None, **_: object) -> Callable:
        return function or jit


UNSIGNED_STREAM = constexpr(rounding.UNSIGNED_STREAM)
MASTER_STREAM = constexpr(rounding.MASTER_STREAM)

# Below, rows: (BLOCKS,) numbers of the tile's blocks. n: parameters of the segment.


@jit
def places(rows: tl.tensor) -> tl.tensor:
    return rows[:, None] * 128 + tl.arange(0, 128)[None, :]


@jit
def _has_any(rows: tl.tensor, n: tl.tensor) -> tl.tensor:
    return rows * 128 < n


# Numbers. Those behind the end of the segment are 0 when loaded, and are not stored.


@jit
def bits_of(x: tl.tensor) -> tl.tensor:
    return x.to(tl.int32, bitcast=True)


@jit
def float_of(bits: tl.tensor) -> tl.tensor:
    return bits.to(tl.float32, bitcast=True)


@jit
def load(pointer: tl.tensor, rows: tl.tensor, n: tl.tensor) -> tl.tensor:
    at = places(rows)
    return tl.load(pointer + at, at < n, 0)


@jit
def store(pointer: tl.tensor, x: tl.tensor, rows: tl.tensor, n: tl.tensor) -> None:
    at = places(rows)
    tl.store(pointer + at, x, at < n)


@jit
def load_float(pointer: tl.tensor, rows: tl.tensor, n: tl.tensor) -> tl.tensor:
    """fp32, or bf16 in int16."""
    x = load(pointer, rows, n)
    if pointer.dtype.element_ty == tl.int16:
        x = float_of(x.to(tl.int32) << 16)
    return x


@jit
def random_bits(rows: tl.tensor, first: tl.tensor, key0: tl.tensor, key1: tl.tensor) -> tl.tensor:
    """`store/rounding.py`: random_bits, as uint32."""
    x = (places(rows) + first + key0).to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = x ^ key1.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@jit
def _round_to_bf16(x: tl.tensor, random: tl.tensor) -> tl.tensor:
    """`store/rounding.py`: round_to_bf16, as int16."""
    upper = (x.to(tl.uint32, bitcast=True) + (random >> 16)) >> 16
    return tl.where(x == x, upper, 0x7FC0).to(tl.int16)


@jit
def store_float(pointer: tl.tensor, x: tl.tensor, random: tl.tensor, rows: tl.tensor, n: tl.tensor) -> None:
    """fp32, or stochastically rounded to bf16 in int16."""
    if pointer.dtype.element_ty == tl.int16:
        x = _round_to_bf16(x, random)
    store(pointer, x, rows, n)


# Block codes (`store/codecs.py`). Byte j of a block holds the codes j, j + 16 * BITS, ..., the first one lowest.


@jit
def _load_codes(codes: tl.tensor, rows: tl.tensor, n: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    column = tl.arange(0, 128)[None, :]
    byte = codes + rows[:, None] * (16 * BITS) + column % (16 * BITS)
    packed = tl.load(byte, _has_any(rows, n)[:, None], 0).to(tl.int32)
    return (packed >> (column // (16 * BITS) * BITS)) & ((1 << BITS) - 1)


@jit
def _float_of_code(code: tl.tensor, BASE: tl.constexpr, MANTISSA: tl.constexpr) -> tl.tensor:
    """What the leading bits BASE + code stand for."""
    return float_of((BASE + code) << (23 - MANTISSA))


@jit
def _store_codes(codes: tl.tensor, code: tl.tensor, rows: tl.tensor, n: tl.tensor, BITS: tl.constexpr) -> None:
    """No byte is written before all of its block are read: a code depends on the largest number of the block."""
    if BITS < 8:
        code = code << (tl.arange(0, 128)[None, :] // (16 * BITS) * BITS)
        code = tl.sum(tl.reshape(code, (rows.shape[0], 8 // BITS, 16 * BITS)), axis=1)
    byte = codes + rows[:, None] * (16 * BITS) + tl.arange(0, 16 * BITS)[None, :]
    tl.store(byte, code.to(tl.uint8), _has_any(rows, n)[:, None])


@jit
def _block_scale(x: tl.tensor) -> tl.tuple:
    """The scale of each row, and its inverse: 0 for a row that gets no codes."""
    peak_bits = tl.max(bits_of(x) & 0x7FFFFFFF, axis=1)
    is_finite = peak_bits < 0x7F800000
    is_used = is_finite & (peak_bits >= 0x00800000)
    peak = float_of(peak_bits)
    inverse = tl.where(is_used, tl.div_rn(1.0, peak), 0.0)
    return tl.where(is_used, peak, tl.where(is_finite, 0.0, float("nan"))), inverse


@jit
def _round_to_code(
    y: tl.tensor, random: tl.tensor, MANTISSA: tl.constexpr, BASE: tl.constexpr, MOST: tl.constexpr
) -> tl.tensor:
    """The leading bits of y, counted from BASE, in [0, MOST]."""
    up = bits_of(y) + (random >> (9 + MANTISSA)).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum((up >> (23 - MANTISSA)) - BASE, 0), MOST)


# First moments. half: half the exponents of the second moment beside it, as it is stored; or None.


@jit
def load_first(
    codes: tl.tensor,
    scales: tl.tensor,
    half: tl.tensor,
    rows: tl.tensor,
    n: tl.tensor,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    SHARE: tl.constexpr,
) -> tl.tensor:
    """SHARE: 1 / (top level - 1)."""
    sign_bit: tl.constexpr = 1 << (BITS - 1)
    code = _load_codes(codes, rows, n, BITS)
    unit = tl.load(scales + rows, _has_any(rows, n), 0.0) * SHARE
    x = (_float_of_code(code & (sign_bit - 1), 127 << MANTISSA, MANTISSA) - 1.0) * unit[:, None]
    if half is not None:
        x = x * float_of((127 + half) << 23)
    # By its bit, since -x in Triton is 0 - x, which loses the sign of zero.
    return float_of(bits_of(x) ^ ((code & sign_bit) << (32 - BITS)))


@jit
def store_first(
    codes: tl.tensor,
    scales: tl.tensor,
    m: tl.tensor,
    half: tl.tensor,
    random: tl.tensor,
    rows: tl.tensor,
    n: tl.tensor,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    """SPAN: top level - 1."""
    x = tl.where(places(rows) < n, m, 0.0)
    if half is not None:
        x = x * float_of((127 - half) << 23)
    scale, inverse = _block_scale(x)
    most: tl.constexpr = (1 << (BITS - 1)) - 1
    y = float_of(bits_of(x) & 0x7FFFFFFF) * inverse[:, None] * SPAN + 1.0
    code = _round_to_code(y, random, MANTISSA, 127 << MANTISSA, most)
    code = tl.where(bits_of(x) < 0, code + (most + 1), code)
    _store_codes(codes, tl.where(inverse[:, None] != 0.0, code, 0), rows, n, BITS)
    tl.store(scales + rows, scale, _has_any(rows, n))


# Second moments, and `half` of them.


@jit
def load_second(
    codes: tl.tensor, scales: tl.tensor, rows: tl.tensor, n: tl.tensor, BITS: tl.constexpr, MANTISSA: tl.constexpr
) -> tl.tuple:
    base: tl.constexpr = (127 << MANTISSA) - ((1 << BITS) - 1)
    code = _load_codes(codes, rows, n, BITS)
    scale = tl.load(scales + rows, _has_any(rows, n), 0.0)
    return _float_of_code(code, base, MANTISSA) * scale[:, None], code >> (MANTISSA + 1)


@jit
def store_second(
    codes: tl.tensor,
    scales: tl.tensor,
    v: tl.tensor,
    random: tl.tensor,
    rows: tl.tensor,
    n: tl.tensor,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
) -> tl.tensor:
    x = tl.where(places(rows) < n, v, 0.0)
    scale, inverse = _block_scale(x)
    most: tl.constexpr = (1 << BITS) - 1
    code = _round_to_code(x * inverse[:, None], random, MANTISSA, (127 << MANTISSA) - most, most)
    code = tl.where(inverse[:, None] != 0.0, code, 0)
    _store_codes(codes, code, rows, n, BITS)
    tl.store(scales + rows, scale, _has_any(rows, n))
    return code >> (MANTISSA + 1)
