"""Check sums: the same bytes have the same sums wherever and however they lie; other bytes have others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.store.checksum import checksum, page_sums
from megatrain.store.tier import PAGE_BYTES

SIZES = st.one_of(st.integers(0, 40), st.integers(PAGE_BYTES - 9, 3 * PAGE_BYTES + 9))


def random_bytes(num_bytes: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8))


def sums_in_python(content: bytes) -> list[int]:
    """The definition."""
    rows = [
        content[start : start + PAGE_BYTES].ljust(PAGE_BYTES, b"\0") for start in range(0, len(content), PAGE_BYTES)
    ]
    sums = [sum(int.from_bytes(row[at : at + 8], "little") for at in range(0, PAGE_BYTES, 8)) for row in rows]
    totals = sum(sums), sum((2 * index + 1) * row for index, row in enumerate(sums))
    return [(total + 2**63) % 2**64 - 2**63 for total in totals]


@given(SIZES, st.integers(0, 99), st.integers(0, 17))
def test_sums_are_their_definition_at_every_length_and_alignment(num_bytes: int, seed: int, offset: int) -> None:
    tensor = random_bytes(offset + num_bytes, seed)[offset:]
    expected = sums_in_python(tensor.numpy().tobytes())
    assert checksum(tensor).tolist() == expected
    rows = page_sums(memoryview(tensor.numpy()))
    assert int(rows.sum()) == expected[0] and len(rows) == -(-num_bytes // PAGE_BYTES)


@settings(max_examples=300)
@given(SIZES.filter(bool), st.integers(0, 99), st.data())
def test_any_flipped_bit_is_found(num_bytes: int, seed: int, data: st.DataObject) -> None:
    tensor = random_bytes(num_bytes, seed)
    before, rows = checksum(tensor).tolist(), page_sums(memoryview(tensor.numpy()))
    bit = data.draw(st.integers(0, 8 * num_bytes - 1))
    tensor[bit // 8] ^= 1 << (bit % 8)
    after = page_sums(memoryview(tensor.numpy()))
    assert checksum(tensor).tolist()[0] != before[0]
    assert (after != rows).nonzero()[0].tolist() == [bit // 8 // PAGE_BYTES]


@given(st.integers(0, 99), st.permutations(range(4)))
def test_rows_that_changed_places_are_found(seed: int, order: list[int]) -> None:
    rows = random_bytes(4 * PAGE_BYTES, seed).view(4, -1)
    is_same = checksum(rows[order].contiguous()).tolist() == checksum(rows).tolist()
    assert is_same == (list(order) == [0, 1, 2, 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.complex64, torch.bool])
def test_only_the_bytes_count_whatever_they_mean(dtype: torch.dtype) -> None:
    numel = 3 * 7 * 800
    tensor = (torch.randn(numel) > 0) if dtype == torch.bool else torch.randn(numel).to(dtype)
    content = tensor.view(torch.uint8).clone()
    expected = sums_in_python(content.numpy().tobytes())
    shaped = tensor.view(3, 7, 800)
    for view in (tensor, shaped, shaped.transpose(0, 2), shaped.permute(1, 2, 0)):
        assert checksum(view).tolist() == expected  # without gaps, strides are those of the memory


def test_gaps_between_elements_are_left_out() -> None:
    tensor = torch.randn(6, 700)
    view, copy = tensor[::2, 5:], tensor.clone()[::2, 5:]
    tensor[1], tensor[:, :5] = 0.0, 1.0
    assert checksum(view).tolist() == checksum(copy).tolist() == checksum(copy.contiguous()).tolist()
