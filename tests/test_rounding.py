"""Stochastic rounding: random numbers that are uniform and independent, a rounding whose expectation is exact.

Every test of chance has fixed keys, so it passes or fails for good; bounds are in standard errors of a fair generator.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from update_cases import SPECIAL, make_stored

from megatrain.optim import rules
from megatrain.optim.formula import AdamWScalars, SGDScalars
from megatrain.optim.segment import Segment
from megatrain.optim.update import CpuUpdater
from megatrain.store.rounding import (
    MASTER_STREAM,
    UNSIGNED_STREAM,
    Key,
    make_key,
    random_bits,
    round_to_bf16,
    stream,
)

CPU = torch.device("cpu")
N = 1 << 18
# Of about a thousand values below together: a fair generator fails one in about 2,000 choices of keys.
MOST_ERRORS = 5.0


def bits_of(key: Key, first: int = 0, count: int = N) -> np.ndarray:
    return random_bits(key, first, count, CPU).numpy()


def streams_of(key: Key, first: int = 0) -> dict[str, np.ndarray]:
    """The three streams of an element: of signed moments, of unsigned ones, and of masters."""
    bits = random_bits(key, first, N, CPU)
    factors = {"signed": 1, "unsigned": UNSIGNED_STREAM, "master": MASTER_STREAM}
    return {name: stream(bits, factor).numpy() for name, factor in factors.items()}


def cell_errors(x: np.ndarray, y: np.ndarray | None = None) -> float:
    """How far the counts over 256 cells (of x, or 16 x 16 of x and y) are from even ones: chi-square, as a normal."""
    cells = x >> 24 if y is None else (x >> 28) * 16 + (y >> 28)
    counts = np.bincount(cells, minlength=256)
    expected = len(x) / 256
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # Wilson and Hilferty 1931.
    return float(((chi_square / 255) ** (1 / 3) - (1 - 2 / (9 * 255))) / math.sqrt(2 / (9 * 255)))


# --- keys ---


def test_keys_are_two_words_and_pinned() -> None:
    """A run that is resumed by a later version rounds on with the same numbers."""
    assert make_key(0, 1, 0) == (13008816, 1155905921)
    assert make_key(1234, 567, 89) == (747131247, 2039537393)
    assert bits_of((1, 2), 0, 4).tolist() == [1605432451, 3359271750, 1556831113, 3797366418]


def test_bits_are_those_of_lowbias32() -> None:
    """In plain integers, with key[1] between the rounds."""

    def plain(index: int, key: Key) -> int:
        x = (index + key[0]) % 2**32
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32 ^ key[1]
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    for key in ((0, 0), (1, 2), (0xFFFFFFFF, 0xFFFFFFFF), make_key(5, 6, 7)):
        assert bits_of(key, 1000, 500).tolist() == [plain(index, key) for index in range(1000, 1500)]


def test_keys_differ() -> None:
    grid = list(itertools.product([0, 1, 2, 42, 2**32, 2**63, 2**64 - 1], range(1, 30), range(50)))
    keys = [make_key(*numbers) for numbers in grid]
    assert all(0 <= word < 2**32 for key in keys for word in key)
    assert len(set(keys)) == len(grid)
    # Each word is a good key on its own: of 10,150 words of 32 bits about 0.012 pairs are equal.
    assert all(len({key[i] for key in keys}) >= len(grid) - 1 for i in (0, 1))


# --- bits ---


@pytest.mark.parametrize("name", ["signed", "unsigned", "master"])
@pytest.mark.parametrize("key", [(0, 0), make_key(0, 1, 0), make_key(7, 1000, 3)])
def test_bits_are_uniform(key: Key, name: str) -> None:
    """The mean, each of the upper 23 bits (the most that a rounding uses), and the counts over 256 cells."""
    bits = streams_of(key)[name]
    assert bits.min() >= 0 and bits.max() < 2**32
    assert abs(bits.mean() / 2**32 - 0.5) < MOST_ERRORS * math.sqrt(1 / 12 / N)
    shares = np.array([(bits >> place & 1).mean() for place in range(9, 32)])
    assert np.abs(shares - 0.5).max() < MOST_ERRORS * 0.5 / math.sqrt(N)
    assert abs(cell_errors(bits)) < MOST_ERRORS


def assert_independent(x: np.ndarray, y: np.ndarray) -> None:
    """No correlation, no cell of the plane preferred, and the two round up together as often as chance has it."""
    correlation = np.corrcoef(x, y)[0, 1]
    assert abs(correlation) < MOST_ERRORS / math.sqrt(len(x))
    assert abs(cell_errors(x, y)) < MOST_ERRORS


@pytest.mark.parametrize("key", [(0, 0), make_key(0, 1, 0), make_key(7, 1000, 3)])
def test_streams_of_an_element_are_independent(key: Key) -> None:
    for x, y in itertools.combinations(streams_of(key).values(), 2):
        assert_independent(x, y)


def test_steps_parameters_and_seeds_are_independent() -> None:
    keys = [make_key(*numbers) for numbers in [(0, 1, 0), (0, 2, 0), (0, 3, 0), (0, 1, 1), (0, 1, 2), (1, 1, 0)]]
    for x, y in itertools.combinations([bits_of(key) for key in keys], 2):
        assert_independent(x, y)


@pytest.mark.parametrize("distance", [1, 2, 16, 64, 128, 4096])
def test_elements_are_independent(distance: int) -> None:
    bits = bits_of(make_key(0, 1, 0), 0, N + distance)
    assert_independent(bits[:N], bits[distance:])


def test_one_element_over_many_steps() -> None:
    """What a weight sees: one number from each of many keys, no two in a row related."""
    bits = np.array([bits_of(make_key(3, step, 5), 77, 1)[0] for step in range(20_000)])
    assert abs(bits.mean() / 2**32 - 0.5) < MOST_ERRORS * math.sqrt(1 / 12 / len(bits))
    assert abs(cell_errors(bits)) < MOST_ERRORS
    assert_independent(bits[:-1], bits[1:])


@pytest.mark.parametrize("first", [0, 1, 1000, 2**32 - 5, 2**33 + 7])
def test_bits_depend_on_the_index_alone(first: int) -> None:
    key = make_key(0, 9, 9)
    whole = bits_of(key, first, 300)
    pieces = [bits_of(key, first + start, 100) for start in (0, 100, 200)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    np.testing.assert_array_equal(bits_of(key, first % 2**32, 300), whole)


# --- rounding to bf16 ---


def patterns(x: Tensor) -> np.ndarray:
    return x.view(torch.int32).numpy().view(np.uint32)


def test_a_number_becomes_one_of_its_neighbours() -> None:
    """Truncated, or one step farther from zero; what bf16 holds exactly, stays."""
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint32)
    bits[:1000] &= 0xFFFF0000
    x = torch.from_numpy(bits.view(np.float32))
    x, bits = x[torch.isfinite(x)], bits[np.isfinite(bits.view(np.float32))]
    up = patterns(round_to_bf16(x, random_bits((3, 4), 0, len(x), CPU)).float()) - (bits & 0xFFFF0000)
    assert set(up.tolist()) == {0, 0x10000}
    assert not up[bits & 0xFFFF == 0].any()


def test_special_numbers() -> None:
    x = torch.from_numpy(SPECIAL.view(np.float32).copy())
    for number in (0, 0xFFFFFFFF):
        rounded = round_to_bf16(x, torch.full((len(x),), number))
        assert torch.equal(torch.isnan(rounded), torch.isnan(x))
        assert set(rounded[torch.isnan(x)].view(torch.int16).tolist()) == {0x7FC0}
        assert torch.equal(rounded[torch.isinf(x)].float(), x[torch.isinf(x)])
    largest = torch.tensor([3.4e38])
    assert round_to_bf16(largest, torch.zeros(1, dtype=torch.int64)).isfinite()
    assert round_to_bf16(largest, torch.full((1,), 0xFFFFFFFF)).isinf()


def test_rounding_is_exact_in_the_mean() -> None:
    """Over 4,096 keys, every number within 5 standard errors; and their mean too, as one number of all."""
    x = torch.from_numpy(np.random.default_rng(2).standard_normal(300).astype(np.float32))
    num_keys = 4096
    draws = torch.stack(
        [round_to_bf16(x, random_bits(make_key(0, k, 0), 0, 300, CPU)).double() for k in range(num_keys)]
    )
    below = (x.view(torch.int32) & ~0xFFFF).view(torch.float32).double()
    above = (x.view(torch.int32) + 0x10000 & ~0xFFFF).view(torch.float32).double()
    up = (x.double() - below) / (above - below)
    deviation = (above - below).abs() * (up * (1 - up)).sqrt() / math.sqrt(num_keys)
    error = draws.mean(0) - x.double()
    assert (error.abs() <= MOST_ERRORS * deviation + 1e-12).all()
    assert error.sum().abs() <= MOST_ERRORS * deviation.square().sum().sqrt()


# --- what it is for ---


@pytest.mark.parametrize("path", ["auto", "torch"])
@pytest.mark.parametrize("rule", [rules.ADAMW, rules.SGD], ids=lambda rule: rule.name)
def test_a_bf16_master_decays(rule: rules.Rule, path: str) -> None:
    """Without gradients and lr x weight_decay = 1e-5, 200 steps take 0.2 % of every weight. Rounded to nearest, no
    weight in bf16 would ever move: its steps are of 0.4 to 0.8 %.

    Bound: a weight goes down a step of at most 2^-7 of itself, with a probability of at most 2^8 x 1e-5 in each of 200
    steps, so its standard deviation is below 2^-7 sqrt(0.512) = 0.0056, and 5 errors of the mean are 5 x 0.0056 / 256.
    """
    size, num_steps, lr = 1 << 16, 200, 1e-3
    start = torch.from_numpy(np.random.default_rng(3).uniform(0.5, 2, size).astype(np.float32)).bfloat16()
    weights, grad = start.clone(), torch.zeros(size, dtype=torch.bfloat16)
    states = tuple(make_stored("fp32", size) for _ in rule.states)
    nearest = start.clone()
    with CpuUpdater(2, path) as updater:
        for step in range(1, num_steps + 1):
            if rule == rules.SGD:
                scalars = SGDScalars.at(lr, weight_decay=1e-2)
            else:
                scalars = AdamWScalars.at(step, lr, 0.9, 0.999, 1e-8, weight_decay=1e-2)
            key = make_key(0, step, 0)
            updater.run([Segment(rule=rule, scalars=scalars, weights=weights, grad=grad, states=states, key=key)])
            nearest = (nearest.float() * (1 - 1e-5)).bfloat16()
    assert torch.equal(nearest, start)
    kept = (weights.double() / start.double()).mean().item()
    # The factor rounded to fp32 (u / 2 = 0.3 % of 1e-5) and the product, each below 2^-24 a step.
    slack = num_steps * 2 * 2.0**-24
    assert abs(kept - (1 - 1e-5) ** num_steps) < 5 * 0.0056 / math.sqrt(size) + slack
    assert kept < 0.9985
