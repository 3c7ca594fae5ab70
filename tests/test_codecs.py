"""The codes of moments: bytes, error bounds, unbiased rounding, special blocks, and that averages in few bits move."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from update_cases import make_stored

from megatrain.store.codecs import BLOCK, FORMATS, Format, Stored, decode, encode_
from megatrain.store.rounding import make_key, random_bits

ROUNDED = ("bf16", "8bit", "4bit", "2bit")
BLOCK_FORMATS = ROUNDED[1:]
KINDS = ("signed", "unsigned", "beside")
"""First moments alone, second moments, and first moments beside a second."""
PAIRS = [(name, kind) for name in ROUNDED for kind in KINDS if FORMATS[name].is_block or kind != "beside"]

U = 2.0**-24
NEAREST = 1 << 31
"""In place of random bits: half a step, so that rounding is to nearest."""
SLACK = 12 * U
"""Of the largest number: at most 8 roundings from a number to its code (scaling twice, product, span, sum) and back."""


def bits(numel: int, number: int = 0) -> Tensor:
    return random_bits(make_key(11, number, 0), 0, numel, torch.device("cpu"))


def store(x: Tensor, name: str, kind: str, random: Tensor | None = None, second: Stored | None = None) -> Stored:
    stored = make_stored(name, x.numel())
    random = bits(x.numel()) if random is None else random
    encode_(x, stored, random, is_signed=kind != "unsigned", reference=second)
    return stored


def back(x: Tensor, name: str, kind: str, random: Tensor | None = None, second: Stored | None = None) -> Tensor:
    """x stored and decoded. second: what it stands beside."""
    stored = store(x, name, kind, random, second)
    return decode(stored, x.numel(), is_signed=kind != "unsigned", reference=second).clone()


def numbers(seed: int, numel: int, name: str, kind: str, octaves: float = 8.0) -> tuple[Tensor, Stored | None]:
    """Moments of about 1 and up to some octaves less, with the second moments that they stand beside."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy((rng.standard_normal(numel) * 2.0 ** rng.uniform(-octaves, 0, numel)).astype(np.float32))
    if kind == "unsigned":
        return x.square(), None
    if kind == "signed":
        return x, None
    spread = torch.from_numpy(rng.uniform(0.5, 4, numel).astype(np.float32))
    return x, store(x.square() * spread, name, "unsigned")


# --- the codes again, read plainly ---


def codes_of(stored: Stored, numel: int) -> np.ndarray:
    """Byte j of a block holds the codes j, j + bytes, j + 2 x bytes, ..., from the lowest bits up."""
    width, num_bytes = stored.format.bits, BLOCK * stored.format.bits // 8
    blocks = stored.codes.numpy().astype(np.int64).reshape(-1, num_bytes)
    parts = [blocks >> low & 2**width - 1 for low in range(0, 8, width)]
    return np.concatenate(parts, axis=1).reshape(-1)[:numel]


def float_of(code: np.ndarray | int, mantissa: int) -> np.ndarray:
    """The float with these leading bits, 0 being 1.0."""
    exponent, fraction = np.divmod(code, 2**mantissa)
    return 2.0**exponent * (1 + fraction / 2**mantissa)


def unsigned_level(format_: Format, code: np.ndarray | int) -> np.ndarray:
    """In parts of the scale: the last code is 1, and each code before it is one leading bit less."""
    return float_of(code - (2**format_.bits - 1), format_.unsigned_mantissa)


def signed_level(format_: Format, code: np.ndarray | int) -> np.ndarray:
    """In parts of the scale: 0 to 1, and the same with the upper bit for minus."""
    most = 2 ** (format_.bits - 1) - 1
    magnitude = (float_of(code & most, format_.signed_mantissa) - 1) / span(format_)
    return np.where(code > most, -magnitude, magnitude)


def span(format_: Format) -> float:
    """The largest level less the one of zero; the first step is 2^-mantissa."""
    return float(float_of(2 ** (format_.bits - 1) - 1, format_.signed_mantissa) - 1)


def units(second: Stored | None, numel: int) -> Tensor:
    """What first moments are divided by before they are coded: 2^half, half of the octave of the second's code."""
    if second is None:
        return torch.ones(numel)
    return torch.from_numpy(2.0 ** (codes_of(second, numel) >> second.format.unsigned_mantissa + 1)).float()


def by_block(values: Tensor) -> Tensor:
    """For each number, the largest magnitude of its block."""
    blocks = torch.nn.functional.pad(values.abs(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    return blocks.amax(1, keepdim=True).expand_as(blocks).reshape(-1)[: values.numel()]


def steps(x: Tensor, name: str, kind: str, second: Stored | None) -> Tensor:
    """At most the distance between the codes around each number; fp64.

    bf16: 2^-7 of the number. Unsigned: 2^-mantissa of it. Signed: levels 1 + span |x| / scale double from octave to
    octave, so 2^-mantissa (|x| + scale / span), of numbers divided by their unit.
    """
    format_ = FORMATS[name]
    if name == "bf16":
        return 2.0**-7 * x.abs().double()
    if kind == "unsigned":
        return 2.0**-format_.unsigned_mantissa * x.double()
    unit = units(second, x.numel())
    scaled = x / unit
    return 2.0**-format_.signed_mantissa * (scaled.abs() + by_block(scaled) / span(format_)).double() * unit


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_every_code_is_what_it_says(name: str) -> None:
    """Two blocks of random bytes, signed and unsigned, alone and beside the other, against the plain reading."""
    format_, rng = FORMATS[name], np.random.default_rng(1)
    first, second = (
        Stored(format_, torch.from_numpy(rng.integers(0, 256, format_.num_codes(4 * BLOCK), dtype=np.uint8)), scales)
        for scales in (torch.tensor([3.0, 0.7, 1e-20, 1e20]), torch.tensor([0.3, 7.0, 1e-10, 1e10]))
    )
    n = 4 * BLOCK - 3
    first_scale, second_scale = (np.repeat(s.scales.numpy().astype(np.float64), BLOCK)[:n] for s in (first, second))
    signed = signed_level(format_, codes_of(first, n)) * first_scale
    np.testing.assert_allclose(decode(first, n, is_signed=True).numpy(), signed, rtol=3 * U)
    beside = signed * units(second, n).numpy()
    np.testing.assert_allclose(decode(first, n, is_signed=True, reference=second).numpy(), beside, rtol=3 * U)
    unsigned = unsigned_level(format_, codes_of(second, n)) * second_scale
    np.testing.assert_allclose(decode(second, n, is_signed=False).numpy(), unsigned, rtol=U)
    assert len(set(codes_of(first, n))) == min(2**format_.bits, 256) or name == "8bit"


# --- bytes ---


@pytest.mark.parametrize(
    ("name", "num_bytes"), [("fp32", 8.0), ("bf16", 4.0), ("8bit", 2.0625), ("4bit", 1.0625), ("2bit", 0.5625)]
)
def test_bytes_of_two_moments(name: str, num_bytes: float) -> None:
    """Of a parameter of AdamW, scales included. A last block that is not full is stored whole."""
    format_ = FORMATS[name]
    assert 2 * format_.num_bytes(1 << 20) / (1 << 20) == num_bytes
    for numel in (0, 1, 127, 128, 129, 1000):
        held = sum(tensor.nbytes for tensor in make_stored(name, numel).tensors)
        assert format_.num_bytes(numel) == held
        assert 2 * held == num_bytes * (-(-numel // BLOCK) * BLOCK if format_.is_block else numel)


# --- errors ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BLOCK_FORMATS)
@given(seed=st.integers(0, 2**32 - 1), numel=st.integers(0, 700), exponent=st.integers(-40, 40))
@settings(max_examples=25)
def test_errors_are_below_a_step(name: str, kind: str, seed: int, numel: int, exponent: int) -> None:
    """And a second moment below the lowest level becomes that level."""
    x, second = numbers(seed, numel, name, kind)
    x = x * 2.0**exponent
    error = (back(x, name, kind, bits(numel, seed), second) - x).double().abs()
    bound = steps(x, name, kind, second)
    if kind == "unsigned":
        floor = unsigned_level(FORMATS[name], 0) * by_block(x).double()
        bound = torch.where(x < floor, floor - x, bound)
    unit = units(second, numel)
    assert (error <= bound + SLACK * by_block(x / unit) * unit).all()


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_rounding_is_exact_in_the_mean(name: str, kind: str) -> None:
    """Over 500 keys, within 5 standard errors, of which one is at most half a step / sqrt(500); so is their sum.

    Second moments are drawn from above the lowest level: below it there is nothing to round down to.
    """
    num_keys, numel = 500, 2 * BLOCK + 50
    x, second = numbers(4, numel, name, kind)
    if kind == "unsigned" and name != "bf16":
        x = torch.maximum(x, by_block(x) * float(unsigned_level(FORMATS[name], 0)) * 1.01)
    total = sum(back(x, name, kind, bits(numel, number), second).double() for number in range(num_keys))
    error = total / num_keys - x.double()
    deviation = steps(x, name, kind, second) / 2 / math.sqrt(num_keys)
    assert (error.abs() <= 5 * deviation + SLACK).all()
    assert error.sum().abs() <= 5 * deviation.square().sum().sqrt()
    assert (error.abs() > 0.1 * deviation).float().mean() > 0.3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_the_largest_of_a_block_comes_back(name: str, kind: str) -> None:
    """Within 2u: the scale times the rounded inverse of the span."""
    x, second = numbers(5, 64 * BLOCK, name, kind)
    scaled = x / units(second, x.numel())
    is_peak = scaled.abs() == by_block(scaled)
    y = back(x, name, kind, second=second)
    assert is_peak.sum() >= 64
    assert ((y - x)[is_peak].abs() <= 2 * U * x[is_peak].abs()).all()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_zeros(name: str) -> None:
    """A first moment of zero stays zero, whatever the rounding; a second becomes the lowest level, which is not zero,
    even where the largest of the block is as small as 2^-90."""
    x, second = numbers(6, 5 * BLOCK, name, "beside")
    x[::3] = 0.0
    x[1::30] = -0.0
    for random in (bits(x.numel()), torch.full((x.numel(),), 2**32 - 1)):
        for other in (None, second):
            assert (back(x, name, "signed", random, other)[x == 0] == 0).all()
        v = x.square() * 2.0**-90
        y = back(v, name, "unsigned", random)
        assert (y > 0).all() and not torch.isinf(1 / y.sqrt()).any()
        assert (y[v == 0] == by_block(v)[v == 0] * float(unsigned_level(FORMATS[name], 0))).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_makes_its_block_nan(name: str, kind: str, bad: float) -> None:
    x, second = numbers(7, 3 * BLOCK, name, kind)
    before = back(x, name, kind, second=second)
    x[BLOCK + 17] = abs(bad) if kind == "unsigned" else bad
    y = back(x, name, kind, second=second)
    assert y[BLOCK : 2 * BLOCK].isnan().all()
    assert torch.equal(y[:BLOCK], before[:BLOCK]) and torch.equal(y[2 * BLOCK :], before[2 * BLOCK :])


@pytest.mark.parametrize("kind", ["signed", "unsigned"])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_small_and_large_blocks(name: str, kind: str) -> None:
    """Below the smallest normal number a block is zero; the inverse of the largest number is denormal and serves."""
    x, _ = numbers(8, 4 * BLOCK, name, kind)
    peak = by_block(x)
    tops = torch.tensor([2.0**-127, 2.0**-126, 3.4e38, 0.0]).repeat_interleave(BLOCK)
    x = x / peak * tops
    y = back(x, name, kind)
    assert not y[:BLOCK].any() and not y[3 * BLOCK :].any()
    for block, tolerance in ((1, 2.0**-14), (2, 4 * U)):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        assert y[rows].isfinite().all()
        top = x[rows].abs().argmax()
        assert abs(y[rows][top] / x[rows][top] - 1) <= tolerance


@pytest.mark.parametrize("kind", ["signed", "unsigned"])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_no_number_is_rounded_beyond_the_largest_code(name: str, kind: str) -> None:
    """All of a block near its largest, rounded up; also where the inverse of that is denormal, so that the quotient may
    be above 1 by 2^-22."""
    tops = torch.cat((torch.linspace(2.0**125, 3.4e38, 200), torch.linspace(1, 2, 200)))
    x = tops.repeat_interleave(BLOCK).view(-1, BLOCK)
    x = (x * (1 - torch.arange(BLOCK) * 2.0**-24)).view(-1)
    y = back(x, name, kind, torch.full((x.numel(),), 2**32 - 1))
    assert ((y / by_block(x) - 1).abs() <= 2 * U).all()


# --- pieces ---


@pytest.mark.parametrize(("name", "kind"), [("fp32", "signed"), *PAIRS])
@given(numel=st.integers(0, 1000), cuts=st.lists(st.integers(0, 7), max_size=4))
@settings(max_examples=20)
def test_parts_are_the_whole(name: str, kind: str, numel: int, cuts: list[int]) -> None:
    """Encoded and decoded in parts; what lies around a part is left alone."""
    x, second = numbers(9, numel, name, kind)
    whole = store(x, name, kind, second=second)
    parts = make_stored(name, numel)
    ends = sorted({0, numel, *(cut * BLOCK for cut in cuts if cut * BLOCK < numel)})
    for start, stop in zip(ends, ends[1:], strict=False):
        other = None if second is None else second.part(start, stop)
        part, random = parts.part(start, stop), bits(numel)[start:stop]
        encode_(x[start:stop], part, random, is_signed=kind != "unsigned", reference=other)
        y = decode(part, stop - start, is_signed=kind != "unsigned", reference=other)
        assert torch.equal(y, back(x, name, kind, second=second)[start:stop])
        assert part.codes.untyped_storage().data_ptr() == parts.codes.untyped_storage().data_ptr()
    for a, b in zip(parts.tensors, whole.tensors, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_a_first_moment_is_coded_beside_a_second_in_a_block_code(name: str) -> None:
    with pytest.raises(ValueError, match="beside a second in bf16"):
        back(torch.ones(BLOCK), name, "signed", second=make_stored("bf16", BLOCK))


def test_fp32_is_a_view() -> None:
    stored = make_stored("fp32", 10)
    values = decode(stored, 10, is_signed=True)
    values.add_(1.0)
    encode_(values, stored, None, is_signed=True)
    assert torch.equal(stored.codes, torch.ones(10))
    encode_(torch.full((10,), 3.0), stored, None, is_signed=True)
    assert torch.equal(stored.codes, torch.full((10,), 3.0))


# --- what it is for ---


def average(x: Tensor, name: str, kind: str, beta: float, num_steps: int, random: Tensor | None) -> Tensor:
    """The stored moving average of the constant input x, from 2 x on, in the mean over the second half of the steps.

    The largest of each block is x from the start, so that the scale stays. random: in place of random bits.
    """
    stored = store(torch.where(x.abs() == by_block(x), x, 2 * x), name, kind, torch.full((x.numel(),), NEAREST))
    total = torch.zeros(x.numel(), dtype=torch.float64)
    is_signed = kind != "unsigned"
    for step in range(num_steps):
        value = beta * decode(stored, x.numel(), is_signed=is_signed) + (1 - beta) * x
        encode_(value, stored, bits(x.numel(), step) if random is None else random, is_signed=is_signed)
        if step >= num_steps // 2:
            total += decode(stored, x.numel(), is_signed=is_signed)
    return total / (num_steps - num_steps // 2)


@pytest.mark.parametrize("kind", ["signed", "unsigned"])
@pytest.mark.parametrize(("name", "beta"), [("bf16", 0.998), ("8bit", 0.99), ("4bit", 0.99)])
def test_an_average_converges_where_rounding_to_nearest_is_stuck(name: str, kind: str, beta: float) -> None:
    """A step goes (1 - beta) of the distance, less than half of that between two codes: to nearest, nothing ever moves.

    The expectation of a stochastic average is the exact one, here within 0.5 % of x after 10 / (1 - beta) steps.
    """
    numel, rng = 4 * BLOCK, np.random.default_rng(10)
    # In [0.1, 0.45] of the largest of the block.
    x = torch.from_numpy(rng.uniform(0.1, 0.45, numel).astype(np.float32))
    if kind == "signed":
        x *= torch.from_numpy(rng.choice([-1, 1], numel))
    x[::BLOCK] = 1.0
    others = x.abs() < 1
    nearest = torch.full((numel,), NEAREST)
    first, last = (average(x, name, kind, beta, num_steps, nearest) for num_steps in (2, 40))
    assert torch.equal(first, last) and (last / x)[others].min() > 4 / 3 - SLACK
    found = average(x, name, kind, beta, round(10 / (1 - beta)), None)
    assert abs((found / x)[others].mean() - 1) < 0.01
    assert ((found - x).abs() <= steps(x, name, kind, None))[others].float().mean() > 0.95
