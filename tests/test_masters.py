"""The split master: every bit comes back, and `hi` is the nearest bf16."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.store import masters

# Patterns at which something changes: zeros, denormals, ties, the last finite values (hi overflows), infinities, NaNs.
EDGES = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00007FFF, 0x00008000, 0x00008001, 0x007FFFFF, 0x00800000,
    0x3F800000, 0x3F808000, 0x3F818000, 0xBF808000, 0x3F807FFF, 0x3F808001, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF,
    0xFF7F7FFF, 0xFF7F8000, 0xFF7FFFFF, 0x7F800000, 0xFF800000,
]  # fmt: skip
NAN_EDGES = [0x7F800001, 0x7F807FFF, 0x7F808000, 0x7FC00000, 0x7FFF7FFF, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF]


def floats(patterns: list[int] | np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(patterns, dtype=np.uint32).view(np.float32).copy())


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy().view(np.uint32)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Filled with a pattern that no test expects, so that an element left out shows.
    hi = torch.full(master.shape, 123.0, dtype=torch.bfloat16)
    lo = torch.full(master.shape, 12345, dtype=torch.int16)
    masters.split_(master, hi, lo)
    return hi, lo


def defined_split(pattern: int) -> tuple[int, int]:
    """The definition in plain integers of any size: (16 bits of hi, 16 bits of lo), for a pattern that is no NaN."""
    return ((pattern + 0x8000) >> 16) & 0xFFFF, pattern & 0xFFFF


patterns_strategy = st.lists(st.one_of(st.integers(0, 2**32 - 1), st.sampled_from(EDGES + NAN_EDGES)), max_size=70)


@given(patterns_strategy)
@settings(max_examples=300)
def test_split_is_the_definition_and_joins_back_to_every_bit(patterns: list[int]) -> None:
    master = floats(patterns)
    hi, lo = split(master)
    nan = np.isnan(master.numpy())
    expected = np.array([defined_split(p) for p in patterns], dtype=np.int64).reshape(-1, 2)
    expected[nan] = (0x7FC0, 0)
    assert (hi.view(torch.int16).numpy().view(np.uint16) == expected[:, 0]).all()
    assert (lo.numpy().view(np.uint16) == expected[:, 1]).all()
    assert (bits(master) == np.asarray(patterns, dtype=np.uint32)).all()
    joined = masters.join(hi, lo)
    assert (bits(joined)[~nan] == bits(master)[~nan]).all()
    assert (bits(joined)[nan] == 0x7FC00000).all()


def test_every_upper_half_with_every_kind_of_lower_half() -> None:
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        master = floats(upper | np.uint32(lower))
        joined = masters.join(*split(master))
        nan = torch.isnan(master).numpy()
        assert (bits(joined) == np.where(nan, np.uint32(0x7FC00000), bits(master))).all()


@given(patterns_strategy)
@settings(max_examples=200)
def test_hi_differs_from_torch_rounding_on_ties_only(patterns: list[int]) -> None:
    master = floats([p for p in patterns if not np.isnan(floats([p]).numpy()[0])])
    hi, lo = split(master)
    same = (hi.view(torch.int16) == master.to(torch.bfloat16).view(torch.int16)).numpy()
    tie = lo.numpy() == -32768
    assert same[~tie].all()


def test_a_tie_goes_away_from_zero() -> None:
    # 0x3F80 is even and 0x3F81 odd: torch would send the first tie down to the even neighbour.
    hi, lo = split(floats([0x3F808000, 0xBF808000]))
    assert hi.view(torch.int16).tolist() == [0x3F81, 0xBF81 - (1 << 16)]
    assert lo.tolist() == [-32768, -32768]


def test_the_largest_values_have_an_infinite_hi_and_still_join_back() -> None:
    master = floats([0x7F7FFFFF, 0xFF7FFFFF])
    hi, lo = split(master)
    assert hi.tolist() == [float("inf"), float("-inf")]
    assert torch.equal(masters.join(hi, lo), master)


@pytest.mark.parametrize("size", [0, 1, masters.PIECE - 1, masters.PIECE, masters.PIECE + 1, 3 * masters.PIECE + 17])
def test_sizes_around_the_piece_and_unaligned_starts(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    raw = torch.randint(-(2**31), 2**31, (size + 1,), generator=generator, dtype=torch.int64).to(torch.int32)
    master = raw.view(torch.float32)[1:]
    hi = torch.zeros(size + 1, dtype=torch.bfloat16)
    lo = torch.zeros(size + 1, dtype=torch.int16)
    out = torch.zeros(size + 1)
    masters.split_(master, hi[1:], lo[1:])
    assert masters.join(hi[1:], lo[1:], out=out[1:]) is not None
    finite = ~torch.isnan(master)
    assert torch.equal(out[1:][finite].view(torch.int32), master[finite].view(torch.int32))
    assert torch.isnan(out[1:][~finite]).all()
    assert (hi[0].item(), lo[0].item(), out[0].item()) == (0, 0, 0)


@pytest.mark.parametrize(
    ("hi", "lo", "master", "message"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.int16), torch.zeros(2), "hi must be torch.bfloat16"),
        (torch.zeros(2).bfloat16(), torch.zeros(2), torch.zeros(2), "lo must be torch.int16"),
        (torch.zeros(2).bfloat16(), torch.zeros(3, dtype=torch.int16), torch.zeros(2), "lo has 3 elements"),
        (torch.zeros(2, 2).bfloat16(), torch.zeros(4, dtype=torch.int16), torch.zeros(4), "hi must be flat"),
        (torch.zeros(4).bfloat16()[::2], torch.zeros(2, dtype=torch.int16), torch.zeros(2), "hi must be flat"),
    ],
)
def test_wrong_tensors_are_named(hi: torch.Tensor, lo: torch.Tensor, master: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        masters.split_(master, hi, lo)
    with pytest.raises(ValueError, match=message):
        masters.join(hi, lo, out=master)
