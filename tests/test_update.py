"""The updater: the definition, however the work is split; what a segment refuses; errors that end a run."""

from __future__ import annotations

import itertools
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from update_cases import (
    LAYOUTS,
    MASTERS,
    RULES,
    VARIANTS,
    assert_same_bits,
    by_the_definition,
    copy,
    cut,
    make_segment,
    make_stored,
    value,
)

from megatrain.base.errors import UserError
from megatrain.optim import definition, rules, torch_update
from megatrain.optim.kernel import Kernel, load_kernel
from megatrain.optim.rules import Rule
from megatrain.optim.segment import Ema, Segment
from megatrain.optim.update import CpuUpdater, Measure
from megatrain.store.codecs import BLOCK, FORMATS

KINDS = list(itertools.product(LAYOUTS, FORMATS, RULES))


def make_list(sizes: list[int]) -> list[Segment]:
    """Segments of these sizes, of many kinds: 23 has no factor in common with their number."""
    segments = []
    for i, size in enumerate(sizes):
        layout, format_name, rule = KINDS[23 * i % len(KINDS)]
        numbers = {"offset": i % 5, "odd": 0.003, "has_ema": i % 2 == 0, "first": i * BLOCK}
        segments.append(make_segment(i, size, *layout, format_name, rule, **numbers))
    return segments


# --- pieces ---


@pytest.mark.parametrize("format_name", FORMATS)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(0, 1100),
    blocks=st.lists(st.integers(0, 8), max_size=5),
    rule=st.sampled_from(RULES),
    layout=st.sampled_from(LAYOUTS),
    odd=st.sampled_from([0.0, 0.003]),
)
@settings(max_examples=40)
def test_the_definition_in_any_pieces_is_the_whole(
    format_name: str,
    seed: int,
    size: int,
    blocks: list[int],
    rule: Rule,
    layout: tuple[str, torch.dtype],
    odd: float,
) -> None:
    """Cut at any multiples of a block, run in any order; the kernel runs each piece to the same bits."""
    segment = make_segment(seed, size, *layout, format_name, rule, odd=odd, has_ema=True, first=5 * BLOCK)
    expected = by_the_definition(segment)
    in_kernel = copy(segment)
    for part in reversed(cut(segment, blocks)):
        definition.update_(part)
    assert_same_bits(segment, expected)
    if VARIANTS and Kernel.knows(segment):
        kernel = load_kernel()
        assert kernel is not None
        for part in reversed(cut(in_kernel, blocks)):
            kernel.update([part], 1)
        assert_same_bits(in_kernel, expected)


@pytest.mark.parametrize("path", ["auto", "torch"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_updater_is_the_definition_however_it_splits(
    path: str, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Short ranges and pieces; many small segments, so that tasks gather several.
    monkeypatch.setattr(torch_update, "RANGE", 3 * BLOCK)
    monkeypatch.setattr(torch_update, "PIECE", BLOCK)
    sizes = [0, 1, 5000, 3, 200, 200, 777, 384, 400, 0, 383, *[100 + i for i in range(25)], 128, 385]
    segments = make_list(sizes)
    expected = [by_the_definition(segment) for segment in segments]
    with CpuUpdater(num_threads, path) as updater:
        assert updater.run(segments) == [None] * len(sizes)
        assert updater.run([]) == []
    for segment, truth in zip(segments, expected, strict=True):
        assert_same_bits(segment, truth)


def test_what_the_kernel_does_not_know_runs_in_pytorch() -> None:
    for format_name in FORMATS:
        segment = make_segment(3, 500, format_name=format_name)
        expected = by_the_definition(segment)
        with CpuUpdater(1) as updater:
            updater.run([segment, make_segment(4, 10)])
            assert (updater._pool is not None) == (format_name == "2bit")
        assert_same_bits(segment, expected)


def test_ranges_and_pieces_are_whole_blocks() -> None:
    assert torch_update.RANGE % torch_update.PIECE == torch_update.PIECE % BLOCK == 0


@pytest.mark.parametrize("path", ["auto", "torch"])
def test_measures_do_not_depend_on_threads(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_update, "RANGE", 4 * BLOCK)
    sizes = [7, 200_000, 600, 0]
    per_count = []
    for num_threads in (1, 2, 3, 7):
        with CpuUpdater(num_threads, path) as updater:
            per_count.append(updater.run([make_segment(i, n) for i, n in enumerate(sizes)], measure=True))
    assert all(measures == per_count[0] for measures in per_count)
    for measure, segment in zip(per_count[0], [make_segment(i, n) for i, n in enumerate(sizes)], strict=True):
        old, new = value(segment), value(by_the_definition(segment))
        assert measure is not None
        np.testing.assert_allclose(measure.change_squares, (new - old).double().square().sum().item(), rtol=1e-12)
        np.testing.assert_allclose(measure.weight_squares, old.double().square().sum().item(), rtol=1e-12)


@pytest.mark.parametrize("path", ["auto", "torch"])
def test_runs_of_several_threads_at_once(path: str) -> None:
    lists = [make_list([5000, 0, 100_000, 31]) for _ in range(3)]
    expected = [by_the_definition(segment) for segment in lists[0]]
    with CpuUpdater(2, path) as updater, ThreadPoolExecutor(3) as callers:
        list(callers.map(updater.run, lists))
    for segments in lists:
        for segment, truth in zip(segments, expected, strict=True):
            assert_same_bits(segment, truth)


def test_a_run_is_one_call_of_the_kernel() -> None:
    """So that no thread of Python's waits for the update: many small calls would take turns with it at its lock."""
    calls = []
    with CpuUpdater(3) as updater:
        kernel = updater._kernel
        assert kernel is not None

        def spy(*args: object) -> int:
            calls.append(args)
            return kernel._update(*args)

        updater._kernel = replace(kernel, _update=spy)
        segments = [make_segment(i, n, format_name="8bit") for i, n in enumerate([300_000, 5, 0, 70_000])]
        expected = [by_the_definition(segment) for segment in segments]
        updater.run(segments)
        updater.run([], num_threads=2)
    for segment, truth in zip(segments, expected, strict=True):
        assert_same_bits(segment, truth)
    assert [(num_ranges, num_threads) for _, num_ranges, num_threads, _ in calls] == [(4, 3), (0, 2)]


def test_measure_ratio() -> None:
    assert Measure(4.0, 16.0).ratio == 0.5
    assert Measure(0.0, 0.0).ratio == 0.0
    assert Measure(1.0, 0.0).ratio == math.inf


def test_a_worker_exception_is_raised_after_the_others_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """In PyTorch: of 100 tasks on 3 threads, task 1 fails while task 2 runs."""
    monkeypatch.setattr(torch_update, "RANGE", BLOCK)
    task_2_runs = threading.Event()
    ended = []

    def work(part: Segment, measure: bool, marks: object) -> None:
        task = int(part.grad[0])
        if task == 1:
            assert task_2_runs.wait(60)
            raise MemoryError("worker 1 is out of memory")
        if task == 2:
            task_2_runs.set()
        time.sleep(0.2 if task == 2 else 0.02)
        ended.append(task)

    monkeypatch.setattr(torch_update, "_update", work)
    segment = make_segment(0, 100 * BLOCK, "fp32", torch.float32)
    segment.grad.copy_(torch.arange(100 * BLOCK) // BLOCK)
    with CpuUpdater(3, "torch") as updater:
        with pytest.raises(MemoryError, match="worker 1"):
            updater.run([segment])
        assert 2 in ended, "no worker may still be writing when run raises"
        assert len(ended) < 50, "tasks not yet started must be dropped"


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("path", ["auto", "torch"])
def test_weights_that_require_grad_are_updated_in_place(path: str, master: str) -> None:
    segment = make_segment(3, 100, master)
    expected = by_the_definition(segment)
    segment.weights.requires_grad_(True)
    with CpuUpdater(1, path) as updater:
        updater.run([segment])
    assert_same_bits(segment, expected)
    assert segment.weights.grad_fn is None


@pytest.mark.parametrize("path", ["auto", "torch"])
def test_a_closed_updater_refuses(path: str) -> None:
    updater = CpuUpdater(1, path)
    updater.close()
    updater.close()
    with pytest.raises(RuntimeError, match="closed"):
        updater.run([make_segment(0, 10)])


def test_bad_arguments_are_named() -> None:
    for num_threads in (0, -1, 2.5, True, "2"):
        with pytest.raises(UserError, match=f"num_threads must be a whole number of 1 or more, got {num_threads!r}"):
            CpuUpdater(num_threads)
    with pytest.raises(UserError, match="unknown variant 'fast'"):
        CpuUpdater(1, "fast")


def test_a_segment_refuses_what_the_kernel_would_misread() -> None:
    good = make_segment(0, 300, format_name="8bit", has_ema=True)
    first, second = good.states
    assert good.ema is not None

    def refuses(message: str, **changes: object) -> None:
        with pytest.raises(ValueError, match=message):
            replace(good, **changes)

    refuses("Segment.weights must be torch.bfloat16, got torch.float32", weights=torch.zeros(300))
    refuses("Segment.weights must be torch.float32 or torch.bfloat16", low=None, weights=torch.zeros(300).half())
    refuses("Segment.low must be torch.int16", low=torch.zeros(300))
    refuses("Segment.grad must be torch.float32 or torch.bfloat16", grad=torch.zeros(300).double())
    refuses("Segment.grad must be flat and contiguous", grad=torch.zeros(600)[::2])
    on_meta = torch.zeros(300, device="meta").bfloat16()
    refuses("Segment: tensors lie on the host or on one device, not on .*meta", weights=on_meta)
    refuses("Segment.weights has 299 elements instead of 300", weights=torch.zeros(299).bfloat16())
    refuses("adamw keeps 2, got 1", states=(first,))
    refuses("sgd keeps 0, got 2", rule=rules.SGD)
    refuses("exp_avg has 256 elements instead of 384", states=(replace(first, codes=first.codes[:256]), second))
    refuses("exp_avg_sq must be torch.uint8", states=(first, replace(second, codes=torch.zeros(384))))
    refuses("exp_avg_sq scales has 2 elements instead of 3", states=(first, replace(second, scales=torch.ones(2))))
    refuses("exp_avg scales must be flat", states=(replace(first, scales=torch.ones(3, 1)), second))
    refuses("must be of one format", states=(make_stored("4bit", 300), second))
    refuses("Segment.ema must be torch.float32", ema=Ema(average=good.weights, decay=0.9))
    refuses("Segment.ema has 9 elements", ema=Ema(average=torch.zeros(9), decay=0.9))
