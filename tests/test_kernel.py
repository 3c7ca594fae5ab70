"""Every kernel variant against the definition, its threads, and how it is found."""

from __future__ import annotations

import functools
import itertools
import logging
import multiprocessing
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from update_cases import (
    KERNEL_FORMATS,
    LAYOUTS,
    MASTERS,
    RULES,
    VARIANTS,
    assert_same_bits,
    by_the_definition,
    copy,
    is_alone,
    make_segment,
    tensors,
    value,
)

from megatrain.base.errors import UserError
from megatrain.optim import compiler, kernel
from megatrain.optim.rules import Rule
from megatrain.optim.segment import Segment
from megatrain.optim.update import CpuUpdater
from megatrain.store.codecs import BLOCK


def load(variant: str | None = None) -> kernel.Kernel:
    loaded = kernel.load_kernel(variant)
    assert loaded is not None
    return loaded


def run_kernel(variant: str, segment: Segment, measure: bool = False) -> tuple[float, float] | None:
    sums = load(variant).update([segment], 1, measure)
    return None if sums is None else sums[0]


def test_a_kernel_is_under_test_here() -> None:
    assert "baseline" in VARIANTS, "no C compiler: the kernel's own tests would pass by testing nothing"
    assert all(load().knows(make_segment(0, 9, format_name=name)) for name in KERNEL_FORMATS)
    assert not load().knows(make_segment(0, 9, format_name="2bit"))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("format_name", KERNEL_FORMATS)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(0, 1300),
    offset=st.integers(0, 33),
    odd=st.sampled_from([0.0, 0.003, 0.4]),
    # Ordinary ones, and with the largest of a block about the smallest normal number, of second or first moments.
    exponent=st.sampled_from([0, 0, 60, -54, -117]),
    has_ema=st.booleans(),
    measure=st.booleans(),
    first=st.sampled_from([0, 17 * BLOCK, 2**32 - 2 * BLOCK, 2**32 + BLOCK]),
)
@settings(max_examples=15)
def test_kernel_is_the_definition(
    format_name: str,
    rule: Rule,
    seed: int,
    size: int,
    offset: int,
    odd: float,
    exponent: int,
    has_ema: bool,
    measure: bool,
    first: int,
) -> None:
    """All masters, gradients and variants; and nothing around the tensors is written to."""
    for master, grad_dtype in LAYOUTS:
        segment = make_segment(
            *(seed, size, master, grad_dtype, format_name, rule),
            **{"offset": offset, "odd": odd, "exponent": exponent, "has_ema": has_ema, "first": first},
        )
        expected = by_the_definition(segment)
        before = copy(segment)
        for variant in VARIANTS:
            for name, tensor in tensors(segment).items():
                tensor.copy_(tensors(before)[name])
            run_kernel(variant, segment, measure)
            assert_same_bits(segment, expected, f"{master} {grad_dtype} {variant}")
            assert all(map(is_alone, tensors(segment).values()))


@pytest.mark.parametrize("format_name", KERNEL_FORMATS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_part_leaves_the_rest_alone(variant: str, format_name: str) -> None:
    whole = make_segment(1, 1000, format_name=format_name)
    before = copy(whole)
    run_kernel(variant, whole.part(BLOCK, 5 * BLOCK))
    for part in ((0, BLOCK), (5 * BLOCK, 1000)):
        assert_same_bits(whole.part(*part), before.part(*part))
    assert_same_bits(whole.part(BLOCK, 5 * BLOCK), by_the_definition(before.part(BLOCK, 5 * BLOCK)))
    assert not torch.equal(whole.weights, before.weights)


@pytest.mark.parametrize("size", [0, 1, 15, 1024, 5000])
@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("format_name", ["fp32", "4bit"])
def test_measure(format_name: str, master: str, size: int) -> None:
    """Of the fp32 weights: with a bf16 master, before they are rounded."""
    segment = make_segment(9, size, master, format_name=format_name)
    old = value(segment)
    exact = replace(copy(segment), weights=old.clone(), low=None)
    change = (value(by_the_definition(exact)) - old).double().numpy()
    expected = ((change**2).sum(), (old.double().numpy() ** 2).sum())
    results = [run_kernel(variant, copy(segment), measure=True) for variant in VARIANTS]
    # The order of the sums does not depend on the instruction set; against NumPy's order, fp64 rounding is left.
    assert all(result == results[0] for result in results)
    np.testing.assert_allclose(results[0], expected, rtol=1e-12)


# --- its threads ---

# What a thread takes at a time, as kernel.c says.
PIECE = 1 << int(re.search(r"\bpiece = 1 << (\d+)", compiler.SOURCE.read_text()).group(1))


@functools.cache
def _list(odd: float) -> tuple[list[Segment], list[Segment]]:
    """Empty segments, many tiny ones, and some of less, exactly and more than a piece, of every kind; and what they
    become."""
    sizes = [0, 1, *[30 + i for i in range(40)], PIECE, PIECE + 1, 2 * PIECE + 17, 0, PIECE - 1, 5000, 0]
    kinds = list(itertools.product(LAYOUTS, KERNEL_FORMATS, RULES))
    segments = []
    for i, size in enumerate(sizes):
        # 23 has no factor in common with the number of kinds, so neighbours differ in everything.
        layout, format_name, rule = kinds[23 * i % len(kinds)]
        segments.append(make_segment(i, size, *layout, format_name, rule, offset=i % 5, odd=odd, first=i * BLOCK))
    return segments, [by_the_definition(segment) for segment in segments]


def make_list(odd: float = 0.003) -> list[Segment]:
    return [copy(segment) for segment in _list(odd)[0]]


def assert_updated(segments: list[Segment]) -> None:
    """Whether a `make_list` is now what one step by the definition makes of it."""
    for segment, truth in zip(segments, _list(0.003)[1], strict=True):
        assert_same_bits(segment, truth)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("measure", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_list_of_segments_is_the_definition(variant: str, measure: bool, num_threads: int) -> None:
    segments = make_list()
    load(variant).update(segments, num_threads, measure)
    assert_updated(segments)


def test_a_measure_depends_on_its_segment_alone() -> None:
    """Not on the number of threads, not on the instruction set, not on what else is in the list."""
    alone = [run_kernel(VARIANTS[0], segment, measure=True) for segment in make_list(odd=0.0)]
    assert sum(pair[0] > 0.0 for pair in alone) == sum(segment.numel > 0 for segment in make_list())
    for variant in VARIANTS:
        for num_threads in (1, 2, 3, 7):
            assert load(variant).update(make_list(odd=0.0), num_threads, measure=True) == alone


def test_an_empty_list() -> None:
    assert load().update([], 3) is None
    assert load().update([], 3, measure=True) == []


def test_calls_may_run_at_once() -> None:
    lists = [make_list() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda segments: load().update(segments, 3), lists))
    for segments in lists:
        assert_updated(segments)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_forked_after_use_may_use_it_too() -> None:
    load().update(make_list(), 3)
    segment = make_segment(4, 3 * PIECE, format_name="8bit")
    expected = by_the_definition(segment)
    for tensor in tensors(segment).values():
        tensor.share_memory_()
    child = multiprocessing.get_context("fork").Process(target=load().update, args=([segment], 3))
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
    assert child.exitcode == 0
    assert_same_bits(segment, expected)


def test_no_memory_is_an_error_and_not_half_an_update() -> None:
    segment = make_segment(4, 3 * PIECE)
    before = copy(segment)
    starved = replace(load(), _update=lambda ranges, num_ranges, num_threads, sums: -1)
    with pytest.raises(MemoryError, match="update on the CPU"):
        starved.update([segment], 2)
    assert_same_bits(segment, before)


# --- finding and compiling it ---

# Compiled in a third of a second instead of several: the tests above have run the real one.
FAST_FLAGS = tuple("-O0" if flag == "-O3" else flag for flag in compiler.FLAGS)


@pytest.fixture
def fresh_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The kernel is searched anew, with an empty cache folder (which it returns) and nothing shipped."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "LIBRARY_NAME", "_no_such_kernel.so")
    monkeypatch.setattr(compiler, "FLAGS", FAST_FLAGS)
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
    segment = make_segment(2, 50)
    expected = by_the_definition(segment)
    loaded.update([segment], 1)
    assert_same_bits(segment, expected)


def _compile_into(path: str) -> None:
    compiler.FLAGS = FAST_FLAGS
    compiler.compile_kernel(Path(path))


def test_processes_may_compile_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "FLAGS", FAST_FLAGS)
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


def test_a_library_may_be_read_by_whoever_may_read_the_users_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "FLAGS", FAST_FLAGS)
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
