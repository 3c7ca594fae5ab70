"""The updater: the definition, however the work is split; torch.optim.AdamW, within rounding; errors that end a run."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from update_cases import FORMATS, VARIANTS, assert_same_bits, by_the_definition, make_segment

from megatrain.base.errors import UserError
from megatrain.optim import torch_update, update
from megatrain.optim.formula import AdamWScalars
from megatrain.optim.segment import Segment
from megatrain.optim.update import CpuUpdater, Measure
from megatrain.store import masters


@pytest.mark.parametrize("path", [*VARIANTS, "torch"])
def test_twenty_steps_agree_with_torch_adamw(path: str) -> None:
    """torch.optim.AdamW is the same rule with other roundings: lerp, addcmul and addcdiv, contracted or not.

    Tolerance, with u = 2^-24, |g| in [0.5, 1], |w| <= 1.1, betas (0.9, 0.999), 20 steps; first order in u:
    - m: ours rounds 3 times, by at most 2u in all (of terms of size <= 1); lerp by at most 1.4u. An error decays by 0.9
      a step, so the two differ by at most 3.4u / (1 - 0.9) = 34u. Corrected for bias (1 - 0.9^20 = 0.878): 39u.
      The denominator is at least 0.5, so m / denominator differs by at most 78u.
    - v: all terms are positive, at most 4 roundings a step on each side, so 20 x 8u = 160u relative, and 80u after the
      root. With root (theirs may be off by a whole unit), division, eps, the quotient and the step size on both sides
      (11u): 91u of |m / denominator|, which is at most 1.2 by Cauchy-Schwarz: 110u.
    - So one step differs by at most lr x 188u, and 20 steps by lr x 3760u = 3.8u at lr = 1e-3.
    - The weight itself is rounded at most 2 times a step by each side: 20 x 4u x 1.1 = 88u.
    Together 92u = 5.5e-6. Leaving out the decay would cost 20 x 1e-3 x 0.1 x |w| = 2e-3.
    """
    rng = np.random.default_rng(5)
    size, lr = 3001, 1e-3
    start = torch.from_numpy(rng.uniform(-1, 1, size).astype(np.float32))
    theirs = torch.nn.Parameter(start.clone())
    torch_adamw = torch.optim.AdamW([theirs], lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    ours, m, v = start.clone(), torch.zeros(size), torch.zeros(size)
    with CpuUpdater(1, path) as updater:
        for step in range(1, 21):
            grad = rng.uniform(0.5, 1, size) * rng.choice([-1.0, 1.0], size)
            theirs.grad = torch.from_numpy(grad.astype(np.float32))
            torch_adamw.step()
            scalars = AdamWScalars.at(step, lr, 0.9, 0.999, 1e-8, 0.1)
            updater.run([Segment(ours, None, theirs.grad, m, v, scalars)])
    assert (ours - start).abs().max() > 1e-3
    assert (ours - theirs.detach()).abs().max() <= 92 * 2.0**-24


@pytest.mark.parametrize("path", ["auto", "torch"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_updater_is_the_definition_however_it_splits(
    path: str, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Odd sizes, so that PyTorch's ranges and pieces end anywhere; many small segments, so that tasks gather several.
    monkeypatch.setattr(torch_update, "RANGE", 777)
    monkeypatch.setattr(torch_update, "PIECE", 100)
    sizes = [0, 1, 5000, 3, 200, 200, 777, 1554, 400, 0, 776]
    segments = [make_segment(i, n, *FORMATS[i % 4], offset=i % 5) for i, n in enumerate(sizes)]
    expected = [by_the_definition(segment) for segment in segments]
    with CpuUpdater(num_threads, path) as updater:
        assert updater.run(segments) == [None] * len(sizes)
        assert updater.run([]) == []
    for segment, truth in zip(segments, expected, strict=True):
        assert_same_bits(segment, truth)


@pytest.mark.parametrize("path", ["auto", "torch"])
def test_measures_do_not_depend_on_threads(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_update, "RANGE", 501)
    sizes = [7, 200_000, 600, 0]
    per_count = []
    for num_threads in (1, 2, 3, 7):
        segments = [make_segment(i, n, True, torch.bfloat16, special=False) for i, n in enumerate(sizes)]
        with CpuUpdater(num_threads, path) as updater:
            per_count.append(updater.run(segments, measure=True))
    assert all(measures == per_count[0] for measures in per_count)
    whole = [make_segment(i, n, True, torch.bfloat16, special=False) for i, n in enumerate(sizes)]
    for measure, segment in zip(per_count[0], whole, strict=True):
        old = masters.join(segment.weights, segment.low).double()
        after = by_the_definition(segment)
        change = (masters.join(after.weights, after.low) - old.float()).double()
        assert measure is not None
        np.testing.assert_allclose(measure.change_squares, (change**2).sum().item(), rtol=1e-12)
        np.testing.assert_allclose(measure.weight_squares, (old**2).sum().item(), rtol=1e-12)


@pytest.mark.parametrize("path", ["auto", "torch"])
def test_runs_of_several_threads_at_once(path: str) -> None:
    sizes = [5000, 0, 100_000, 31]
    lists = [[make_segment(i, n, *FORMATS[i % 4]) for i, n in enumerate(sizes)] for _ in range(3)]
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
            return kernel._adamw(*args)

        updater._kernel = replace(kernel, _adamw=spy)
        segments = [make_segment(i, n, True, torch.bfloat16) for i, n in enumerate([300_000, 5, 0, 70_000])]
        expected = [by_the_definition(segment) for segment in segments]
        updater.run(segments)
    for segment, truth in zip(segments, expected, strict=True):
        assert_same_bits(segment, truth)
    assert [(num_ranges, num_threads) for _, num_ranges, num_threads, _ in calls] == [(4, 3)]


def test_two_cores_of_many_are_left_to_the_other_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_cores, num_threads in {1: 1, 2: 2, 7: 7, 8: 6, 16: 14, 96: 94}.items():
        monkeypatch.setattr(update, "_num_usable_cores", lambda n=num_cores: n)
        assert CpuUpdater().num_threads == num_threads
    assert CpuUpdater(96).num_threads == 96


def test_measure_ratio() -> None:
    assert Measure(4.0, 16.0).ratio == 0.5
    assert Measure(0.0, 0.0).ratio == 0.0
    assert Measure(1.0, 0.0).ratio == math.inf


def test_a_worker_exception_is_raised_after_the_others_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """In PyTorch: of 100 tasks on 3 threads, task 1 fails while task 2 runs."""
    monkeypatch.setattr(torch_update, "RANGE", 10)
    task_2_runs = threading.Event()
    ended = []

    def work(part: Segment, measure: bool) -> None:
        task = int(part.grad[0])
        if task == 1:
            assert task_2_runs.wait(10)
            raise MemoryError("worker 1 is out of memory")
        if task == 2:
            task_2_runs.set()
        time.sleep(0.2 if task == 2 else 0.02)
        ended.append(task)

    monkeypatch.setattr(torch_update, "_update", work)
    segment = make_segment(0, 1000, False, torch.float32, special=False)
    segment.grad.copy_(torch.arange(1000) // 10)
    with CpuUpdater(3, "torch") as updater:
        with pytest.raises(MemoryError, match="worker 1"):
            updater.run([segment])
        assert 2 in ended, "no worker may still be writing when run raises"
        assert len(ended) < 50, "tasks not yet started must be dropped"


def test_weights_that_require_grad_are_updated_in_place() -> None:
    for path in ("auto", "torch"):
        segment = make_segment(3, 100, False, torch.float32, special=False)
        expected = by_the_definition(segment)
        segment.weights.requires_grad_(True)
        with CpuUpdater(1, path) as updater:
            updater.run([segment])
        assert torch.equal(segment.weights, expected.weights)
        assert segment.weights.grad_fn is None


@pytest.mark.parametrize("path", ["auto", "torch"])
def test_a_closed_updater_refuses(path: str) -> None:
    updater = CpuUpdater(1, path)
    updater.close()
    updater.close()
    with pytest.raises(RuntimeError, match="closed"):
        updater.run([make_segment(0, 10, False, torch.float32)])


def test_bad_arguments_are_named() -> None:
    with pytest.raises(UserError, match="num_threads must be 1 or more, got 0"):
        CpuUpdater(0)
    with pytest.raises(UserError, match="unknown variant 'fast'"):
        CpuUpdater(1, "fast")
    good = make_segment(0, 10, True, torch.bfloat16)
    with pytest.raises(ValueError, match="Segment.weights must be torch.bfloat16"):
        replace(good, weights=torch.zeros(10))
    with pytest.raises(ValueError, match="Segment.weights must be torch.float32"):
        replace(good, low=None)
    with pytest.raises(ValueError, match="Segment.low must be torch.int16"):
        replace(good, low=torch.zeros(10))
    with pytest.raises(ValueError, match="Segment.m has 9 elements, grad has 10"):
        replace(good, m=torch.zeros(9))
    with pytest.raises(ValueError, match="Segment.v must be a flat contiguous CPU tensor"):
        replace(good, v=torch.zeros(2, 5))
    with pytest.raises(ValueError, match="Segment.grad must be a flat contiguous CPU tensor"):
        replace(good, grad=torch.zeros(20)[::2])
