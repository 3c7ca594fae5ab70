"""Lossless moments: every bit of every pattern comes back, in no more bytes than fp32, from any thread and any file."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.base.errors import UserError
from megatrain.store import planes
from megatrain.store.lossless import HEADER_BYTES, PIECE, LosslessMoment
from megatrain.store.tier import PAGE_BYTES

# Zeros, denormals, ones, the largest finite numbers, infinities, NaNs with and without payload.
EDGES = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x7F7FFFFF,
    0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFBFFFFF, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF,
]  # fmt: skip


def floats(patterns: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(patterns, dtype=np.uint32).view(np.float32).copy())


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))


def moment_of(values: torch.Tensor) -> LosslessMoment:
    moment = LosslessMoment(values.numel())
    moment.copy_(values)
    return moment


def first_moments(numel: int, seed: int = 0) -> torch.Tensor:
    """Like those of training: normal, of another size in each row."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(-(-numel // 512), generator=generator).exp().repeat_interleave(512)[:numel]
    return torch.randn(numel, generator=generator) * sizes * 1e-4


def second_moments(numel: int) -> torch.Tensor:
    return first_moments(numel).square()


def random_patterns(numel: int, seed: int = 0) -> torch.Tensor:
    return floats(np.random.default_rng(seed).integers(0, 2**32, numel, dtype=np.uint32))


def spread(numel: int) -> torch.Tensor:
    """Every other number a zero, so that distances to the largest exponent are no help."""
    values = second_moments(numel)
    values[::2] = 0.0
    return values


# Bits


@st.composite
def any_patterns(draw: st.DrawFn) -> np.ndarray:
    """Few or many numbers: arbitrary bits, edges, runs, or bits of which only some vary."""
    number = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from(EDGES))
    short = draw(st.lists(number, max_size=40))
    numel = draw(st.sampled_from([0, 1, 127, 128, 129, 255, 256, 257, 1000, 5000]))
    mask, base = draw(st.integers(0, 2**32 - 1)), draw(number)
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    long = rng.integers(0, 2**32, numel, dtype=np.uint32) & np.uint32(mask) ^ np.uint32(base)
    run = np.full(draw(st.integers(0, 3000)), draw(number), dtype=np.uint32)
    return np.concatenate([np.asarray(short, dtype=np.uint32), long, run])


@given(any_patterns())
@settings(max_examples=200)
def test_every_bit_of_every_pattern_comes_back_in_no_more_bytes(patterns: np.ndarray) -> None:
    values = floats(patterns)
    moment = moment_of(values)
    assert_same_bits(moment.to_tensor(), values)
    assert_same_bits(LosslessMoment.unpack(moment.pack()).to_tensor(), values)
    num_pieces = len(list(moment.pieces()))
    assert moment.num_coded_bytes <= 4 * len(patterns) + HEADER_BYTES * num_pieces
    assert moment.num_bytes <= 4 * len(patterns) + (HEADER_BYTES + PAGE_BYTES) * num_pieces


@pytest.mark.parametrize("numel", [PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 777])
@pytest.mark.parametrize("make", [first_moments, second_moments, random_patterns, spread])
def test_pieces_of_full_size_come_back(make, numel: int) -> None:
    values = make(numel)
    moment = moment_of(values)
    assert_same_bits(moment.to_tensor(), values)
    buffer = torch.full((PIECE,), torch.nan)
    for start, stop in moment.pieces():
        out = buffer[: stop - start]
        assert moment.decode(start, stop, out) is out
        assert_same_bits(out, values[start:stop])


def test_a_piece_is_changed_alone_and_by_whole_runs() -> None:
    values = first_moments(3 * PIECE + 100)
    moment = moment_of(values)
    values[PIECE : 2 * PIECE] = second_moments(PIECE)
    moment.encode_(PIECE, values[PIECE : 2 * PIECE])
    values[2 * PIECE :] = random_patterns(PIECE + 100)
    moment.encode_(2 * PIECE, values[2 * PIECE :])
    assert_same_bits(moment.decode(0, 2 * PIECE), values[: 2 * PIECE])
    assert_same_bits(moment.to_tensor(), values)


# Codes and sizes


def sixteenths(numel: int) -> torch.Tensor:
    """Few mantissas, as in first moments of the first step."""
    return torch.randint(-15, 16, (numel,), generator=torch.Generator().manual_seed(0)) / 16


@pytest.mark.parametrize(
    ("values", "code", "most_bits"),
    [
        (torch.zeros(PIECE), planes.CONSTANT, 0),
        (torch.full((PIECE,), -torch.nan), planes.CONSTANT, 0),
        (random_patterns(PIECE), planes.RAW, 32),
        (first_moments(PIECE), planes.BLOCKS, 27),
        (second_moments(PIECE), planes.BLOCKS, 27.5),
        (-second_moments(PIECE), planes.BLOCKS, 27.5),  # one sign, though not plus
        (sixteenths(PIECE), planes.BLOCKS, 10),
        (spread(PIECE), planes.BYTES, 27),
    ],
)
def test_each_code_is_chosen_where_it_is_smallest(values: torch.Tensor, code: int, most_bits: float) -> None:
    header, contents = planes.encode(values.numpy().view(np.uint32))
    assert header.code == code
    assert header.num_bytes == sum(map(len, contents)) <= most_bits * PIECE / 8
    assert_same_bits(moment_of(values).to_tensor(), values)


def test_every_code_of_a_section_is_chosen_somewhere() -> None:
    makes = (first_moments, second_moments, lambda n: -second_moments(n), sixteenths)
    chosen = {code for make in makes for code in planes.encode(make(PIECE).numpy().view(np.uint32))[0].section_codes}
    assert chosen == {planes._AS_IS, planes._DEFLATED, planes._SEVEN_PLUS, planes._SEVEN_MINUS}


def test_rows_of_zeros_take_next_to_nothing() -> None:
    values = first_moments(PIECE)
    values.view(-1, 512)[torch.arange(PIECE // 512) % 4 != 0] = 0.0
    assert moment_of(values).num_coded_bytes < 0.26 * 4 * PIECE


def test_a_new_moment_is_zero_and_takes_only_headers() -> None:
    numel = 10 * PIECE + 3
    moment = LosslessMoment(numel)
    assert_same_bits(moment.to_tensor(), torch.zeros(numel))
    assert moment.num_bytes == moment.num_coded_bytes == 11 * HEADER_BYTES


def test_pages_are_given_back_when_pieces_shrink() -> None:
    numel = 24 * PIECE
    values, zeros = random_patterns(numel), torch.zeros(numel)
    moment = LosslessMoment(numel)
    before_bytes = psutil.Process().memory_info().rss
    moment.copy_(values)
    full_bytes = psutil.Process().memory_info().rss
    assert full_bytes - before_bytes > 0.9 * 4 * numel
    assert moment.num_bytes == 4 * numel + 24 * HEADER_BYTES
    moment.copy_(zeros)
    assert full_bytes - psutil.Process().memory_info().rss > 0.9 * 4 * numel
    assert moment.num_bytes == 24 * HEADER_BYTES


def test_memory_that_cannot_be_given_back_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = moment_of(random_patterns(PIECE))
    monkeypatch.setattr("megatrain.store.lossless._advise", lambda *_: False)
    moment.copy_(torch.zeros(PIECE))
    assert moment.num_bytes == 4 * PIECE + HEADER_BYTES
    assert_same_bits(moment.to_tensor(), torch.zeros(PIECE))


# Threads


def test_threads_work_on_different_pieces_at_the_same_time() -> None:
    num_pieces, num_threads = 12, 4
    moment = LosslessMoment(num_pieces * PIECE)
    together = threading.Barrier(num_threads)

    def work(thread: int) -> None:
        together.wait()
        for round_ in range(3):
            for number in range(thread, num_pieces, num_threads):
                make = (first_moments, random_patterns, first_moments)[round_]
                values = make(PIECE, seed=100 * round_ + number)
                moment.encode_(number * PIECE, values)
                assert_same_bits(moment.decode(number * PIECE, (number + 1) * PIECE), values)

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(work, range(num_threads)))
    for number, (start, stop) in enumerate(moment.pieces()):
        assert_same_bits(moment.decode(start, stop), first_moments(PIECE, seed=200 + number))


# Files


@pytest.fixture(scope="module")
def packed() -> torch.Tensor:
    return moment_of(torch.cat([first_moments(PIECE), torch.zeros(PIECE), random_patterns(300)])).pack()


def test_a_packed_moment_is_flat_bytes_and_packs_again_to_the_same(packed: torch.Tensor) -> None:
    moment = LosslessMoment.unpack(packed)
    assert packed.dtype == torch.uint8 and packed.dim() == 1
    assert packed.numel() <= moment.num_coded_bytes + 64
    assert torch.equal(moment.pack(), packed)


@pytest.mark.parametrize(
    ("num_bytes", "fault"),
    [(0, "less than its head"), (23, "less than its head"), (40, "less than the table"), (-1, "in place of")],
)
def test_a_truncated_moment_is_refused(packed: torch.Tensor, num_bytes: int, fault: str) -> None:
    with pytest.raises(UserError, match=f"{fault}.*truncated"):
        LosslessMoment.unpack(packed[:num_bytes])


def test_bytes_too_many_are_refused(packed: torch.Tensor) -> None:
    with pytest.raises(UserError, match=f"has {packed.numel() + 1} bytes in place of {packed.numel()}"):
        LosslessMoment.unpack(torch.cat([packed, packed[:1]]))


@pytest.mark.parametrize(
    ("at", "fault"),
    [
        (0, "it begins with"),
        (8, "checksum of its table"),  # the number of numbers
        (12, "less than the table"),  # the same, by far
        (16, "it begins with"),
        (20, "checksum of its table"),
        (24, "checksum of its table"),
        (24 + 3 * HEADER_BYTES - 1, "checksum of its table"),
        (24 + 3 * HEADER_BYTES, "checksum of piece 0 of 3"),
        (-1, "checksum of piece 2 of 3"),
    ],
)
def test_a_damaged_byte_is_named(packed: torch.Tensor, at: int, fault: str) -> None:
    damaged = packed.clone()
    damaged[at] ^= 0x10
    with pytest.raises(UserError, match=fault):
        LosslessMoment.unpack(damaged)


@given(st.data())
@settings(max_examples=60)
def test_no_damaged_bit_goes_unseen(packed: torch.Tensor, data: st.DataObject) -> None:
    damaged = packed.clone()
    damaged[data.draw(st.integers(0, packed.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(UserError, match="packed moment"):
        LosslessMoment.unpack(damaged)


# Calls


@pytest.mark.parametrize("start, stop", [(1, PIECE), (0, PIECE - 1), (PIECE, 0), (0, 2 * PIECE + 200), (-PIECE, 0)])
def test_ranges_that_are_no_whole_pieces_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="not whole pieces"):
        LosslessMoment(2 * PIECE + 100).decode(start, stop)


@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(100, dtype=torch.float64),
        torch.zeros(10, 10),
        torch.zeros(200)[::2],
        torch.zeros(100, device="meta"),
    ],
)
def test_values_of_another_form_are_refused(values: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="a moment's numbers"):
        LosslessMoment(100).encode_(0, values)


def test_copying_another_number_of_values_is_refused() -> None:
    with pytest.raises(ValueError, match="100 numbers cannot take 99"):
        LosslessMoment(100).copy_(torch.zeros(99))
