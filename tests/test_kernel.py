"""The formula against NumPy, every kernel variant against the formula, and how the kernel is found."""

from __future__ import annotations

import functools
import logging
import math
import multiprocessing
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from update_cases import (
    FORMATS,
    VARIANTS,
    assert_same_bits,
    by_the_definition,
    copy,
    make_segment,
    pattern,
    random_floats,
)

from megatrain.base.errors import UserError
from megatrain.optim import compiler, kernel
from megatrain.optim.formula import AdamWScalars, _sqrt, adamw_
from megatrain.optim.segment import Segment
from megatrain.optim.update import CpuUpdater
from megatrain.store import masters

# --- the formula ---


def adamw_in_numpy(w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, s: AdamWScalars) -> tuple:
    """The definition again, in NumPy, which rounds each fp32 operation once."""
    f = {name: np.float32(value) for name, value in asdict(s).items()}
    with np.errstate(all="ignore"):
        g = g * f["clip"]
        m = m * f["beta1"] + g * f["one_minus_beta1"]
        v = v * f["beta2"] + (g * g) * f["one_minus_beta2"]
        w = w * f["decay"] - (m / (np.sqrt(v) / f["bias2_sqrt"] + f["eps"])) * f["step_size"]
    return w, m, v


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(0, 200), step=st.integers(1, 5000))
@settings(max_examples=150, deadline=None)
def test_formula_rounds_every_operation_once(seed: int, size: int, step: int) -> None:
    scalars = AdamWScalars.at(step, lr=3e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01, clip=0.21)
    rng = np.random.default_rng(seed)
    arrays = [random_floats(rng, size, scale) for scale in (1.0, 1e-2, 1e-3, 1e-4)]
    w, g, m, v = (torch.from_numpy(array.copy()) for array in arrays)
    adamw_(w, g, m, v, scalars)
    for actual, expected in zip((w, m, v), adamw_in_numpy(*arrays, scalars), strict=True):
        np.testing.assert_array_equal(pattern(actual), pattern(torch.from_numpy(expected)))
    np.testing.assert_array_equal(g.numpy().view(np.uint32), arrays[1].view(np.uint32))


def test_square_root_is_rounded_once_for_every_mantissa() -> None:
    """All of [1, 4): both parities of the exponent, every mantissa. (torch.sqrt itself fails this with MKL.)"""
    for start in range(0x3F800000, 0x40800000, 1 << 21):
        x = np.arange(start, start + (1 << 21), dtype=np.uint32).view(np.float32)
        assert np.array_equal(_sqrt(torch.from_numpy(x)).numpy(), np.sqrt(x))


def test_scalars_are_computed_in_fp64_and_rounded_once() -> None:
    s = AdamWScalars.at(7, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, clip=0.3)
    assert all(value == float(np.float32(value)) for value in asdict(s).values())
    # Not 1 - fp32(0.999), which is 0.00100004673.
    assert s.one_minus_beta2 == float(np.float32(1 - 0.999))
    assert s.decay == float(np.float32(1 - 1e-3 * 0.01))
    assert s.step_size == float(np.float32(1e-3 / (1 - 0.9**7)))
    assert s.bias2_sqrt == float(np.float32(math.sqrt(1 - 0.999**7)))
    assert s.clip == float(np.float32(0.3))


@pytest.mark.parametrize(
    ("step", "beta1", "beta2", "message"),
    [(0, 0.9, 0.999, "step must be 1"), (1, 1.0, 0.999, "beta1 must be in"), (1, 0.9, -0.1, "beta2 must be in")],
)
def test_scalars_refuse_what_would_divide_by_zero(step: int, beta1: float, beta2: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamWScalars.at(step, lr=1e-3, beta1=beta1, beta2=beta2, eps=1e-8, weight_decay=0.0)


# --- the kernel ---


def run_kernel(variant: str, segment: Segment, measure: bool = False) -> tuple[float, float] | None:
    loaded = kernel.load_kernel(variant)
    assert loaded is not None
    sums = loaded.adamw([segment], 1, measure)
    return None if sums is None else sums[0]


def test_a_kernel_is_under_test_here() -> None:
    assert "baseline" in VARIANTS, "no C compiler: the kernel's own tests would pass by testing nothing"


@pytest.mark.parametrize(("split", "grad_dtype"), FORMATS)
@pytest.mark.parametrize("variant", VARIANTS)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(0, 200), offset=st.integers(0, 33))
@settings(max_examples=60, deadline=None)
def test_kernel_is_the_definition(
    variant: str, split: bool, grad_dtype: torch.dtype, seed: int, size: int, offset: int
) -> None:
    segment = make_segment(seed, size, split, grad_dtype, offset)
    expected = by_the_definition(segment)
    measured = copy(segment)
    run_kernel(variant, segment)
    assert_same_bits(segment, expected)
    run_kernel(variant, measured, measure=True)
    assert_same_bits(measured, expected)


@pytest.mark.parametrize(("split", "grad_dtype"), FORMATS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_kernel_leaves_its_neighbours_alone(variant: str, split: bool, grad_dtype: torch.dtype) -> None:
    whole = make_segment(1, 100, split, grad_dtype, special=False)
    before = copy(whole)
    run_kernel(variant, whole.part(3, 78))
    assert_same_bits(whole.part(0, 3), before.part(0, 3))
    assert_same_bits(whole.part(78, 100), before.part(78, 100))
    assert not torch.equal(whole.weights[3:78], before.weights[3:78])


@pytest.mark.parametrize("size", [0, 1, 15, 1024, 5000])
@pytest.mark.parametrize(("split", "grad_dtype"), FORMATS)
def test_measure(split: bool, grad_dtype: torch.dtype, size: int) -> None:
    segment = make_segment(9, size, split, grad_dtype, special=False)
    after = by_the_definition(segment)

    def value(s: Segment) -> np.ndarray:
        return (s.weights if s.low is None else masters.join(s.weights, s.low)).numpy()

    change = (value(after) - value(segment)).astype(np.float64)
    expected = ((change**2).sum(), (value(segment).astype(np.float64) ** 2).sum())
    results = [run_kernel(variant, copy(segment), measure=True) for variant in VARIANTS]
    # The order of the sums does not depend on the instruction set; against NumPy's order, fp64 rounding is left.
    assert all(result == results[0] for result in results)
    np.testing.assert_allclose(results[0], expected, rtol=1e-12)


# --- its threads ---

# What a thread takes at a time, as kernel.c says.
PIECE = 1 << int(re.search(r"\bpiece = 1 << (\d+)", compiler.SOURCE.read_text()).group(1))


@functools.cache
def _list(special: bool) -> tuple[list[Segment], list[Segment]]:
    """Empty segments, many tiny ones, and some of less, exactly and more than a piece; and what they become."""
    sizes = [0, 1, *[30 + i for i in range(40)], PIECE, PIECE + 1, 2 * PIECE + 17, 0, PIECE - 1, 5000, 0]
    segments = [make_segment(i, n, *FORMATS[i % 4], offset=i % 5, special=special) for i, n in enumerate(sizes)]
    return segments, [by_the_definition(segment) for segment in segments]


def make_list(special: bool = True) -> list[Segment]:
    return [copy(segment) for segment in _list(special)[0]]


def assert_updated(segments: list[Segment]) -> None:
    """Whether a `make_list` is now what one step by the definition makes of it."""
    for segment, truth in zip(segments, _list(True)[1], strict=True):
        assert_same_bits(segment, truth)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("measure", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_list_of_segments_is_the_definition(variant: str, measure: bool, num_threads: int) -> None:
    segments = make_list()
    loaded = kernel.load_kernel(variant)
    assert loaded is not None
    loaded.adamw(segments, num_threads, measure)
    assert_updated(segments)


def test_a_measure_depends_on_its_segment_alone() -> None:
    """Not on the number of threads, not on the instruction set, not on what else is in the list."""
    alone = [run_kernel(VARIANTS[0], segment, measure=True) for segment in make_list(special=False)]
    assert sum(pair[0] > 0.0 for pair in alone) == sum(segment.grad.numel() > 0 for segment in make_list())
    for variant in VARIANTS:
        loaded = kernel.load_kernel(variant)
        assert loaded is not None
        for num_threads in (1, 2, 3, 7):
            assert loaded.adamw(make_list(special=False), num_threads, measure=True) == alone


def test_an_empty_list() -> None:
    loaded = kernel.load_kernel()
    assert loaded is not None
    assert loaded.adamw([], 3) is None
    assert loaded.adamw([], 3, measure=True) == []


def test_calls_may_run_at_once() -> None:
    loaded = kernel.load_kernel()
    assert loaded is not None
    lists = [make_list() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda segments: loaded.adamw(segments, 3), lists))
    for segments in lists:
        assert_updated(segments)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_forked_after_use_may_use_it_too() -> None:
    loaded = kernel.load_kernel()
    assert loaded is not None
    loaded.adamw(make_list(), 3)
    segment = make_segment(4, 3 * PIECE, True, torch.bfloat16)
    expected = by_the_definition(segment)
    for tensor in (segment.weights, segment.low, segment.grad, segment.m, segment.v):
        tensor.share_memory_()
    child = multiprocessing.get_context("fork").Process(target=loaded.adamw, args=([segment], 3))
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
    assert child.exitcode == 0
    assert_same_bits(segment, expected)


def test_no_memory_is_an_error_and_not_half_an_update() -> None:
    loaded = kernel.load_kernel()
    assert loaded is not None
    segment = make_segment(4, 3 * PIECE, True, torch.bfloat16)
    before = copy(segment)
    starved = replace(loaded, _adamw=lambda ranges, num_ranges, num_threads, sums: -1)
    with pytest.raises(MemoryError, match="update on the CPU"):
        starved.adamw([segment], 2)
    assert_same_bits(segment, before)


# --- finding and compiling it ---


@pytest.fixture
def fresh_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The kernel is searched anew, with an empty cache folder (which it returns) and nothing shipped."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "LIBRARY_NAME", "_no_such_kernel.so")
    kernel._library.cache_clear()
    yield tmp_path / "megatrain"
    kernel._library.cache_clear()


def test_compiled_once_and_says_so(fresh_search: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        first = kernel.load_kernel("baseline")
    assert first is not None and first.path.parent == fresh_search
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "Compiling" in caplog.text
    caplog.clear()
    kernel._library.cache_clear()
    second = kernel.load_kernel("baseline")
    assert second is not None and second.path == first.path
    assert caplog.text == ""
    assert [p.name for p in fresh_search.iterdir()] == [first.path.name]


def test_without_a_compiler_there_is_no_kernel_and_one_warning(
    fresh_search: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(fresh_search))
    assert kernel.load_kernel() is None
    assert kernel.load_kernel() is None
    assert kernel.supported_variants() == ()
    assert len(caplog.records) == 1 and "install gcc" in caplog.text
    with CpuUpdater(1) as updater:
        assert updater.path == "torch"
    with pytest.raises(UserError, match="'baseline' was asked for"):
        CpuUpdater(1, "baseline")


def test_a_compiler_that_fails_is_reported_and_not_fatal(
    fresh_search: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = fresh_search.parent / "bin"
    broken.mkdir()
    (broken / "cc").write_text("#!/bin/sh\necho 'error: the disk is full of bees' >&2\nexit 1\n")
    (broken / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken}:/nonexistent")
    assert kernel.load_kernel() is None
    assert "full of bees" in caplog.text
    assert list(fresh_search.iterdir()) == []


def test_a_library_of_another_source_is_not_used(fresh_search: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    current = kernel.load_kernel("baseline")
    assert current is not None
    monkeypatch.setattr(compiler, "build_hash", lambda: "0123456789abcdef")
    assert kernel._open(current.path) is None


def test_no_home_folder_compiles_into_a_folder_that_goes_away(
    fresh_search: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fresh_search.parent / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh_search.parent / "file"))
    loaded = kernel.load_kernel("baseline")
    assert loaded is not None and not loaded.path.exists()
    segment = make_segment(2, 50, True, torch.bfloat16)
    expected = by_the_definition(segment)
    loaded.adamw([segment], 1)
    assert_same_bits(segment, expected)


def _compile_into(path: str) -> None:
    compiler.compile_kernel(Path(path))


def test_processes_may_compile_at_once(tmp_path: Path) -> None:
    target = tmp_path / "kernel.so"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_compile_into, args=(str(target),)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert kernel._open(target) is not None
    assert [p.name for p in tmp_path.iterdir()] == ["kernel.so"]


def test_a_library_may_be_read_by_whoever_may_read_the_users_files(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    compiler.compile_kernel(tmp_path / "kernel.so")
    readable = [(tmp_path / name).stat().st_mode & 0o444 for name in ("plain", "kernel.so")]
    assert readable[0] == readable[1]


def test_variants_are_checked_by_name_and_by_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown variant 'sse9'"):
        kernel.load_kernel("sse9")
    monkeypatch.setattr(kernel, "_supports", lambda library, variant: variant == "baseline")
    with pytest.raises(ValueError, match="does not run 'avx512'"):
        kernel.load_kernel("avx512")
    with pytest.raises(UserError, match="does not run 'avx512'"):
        CpuUpdater(1, "avx512")
