"""Segments that differ in numbers, sizes and places alone are one launch, with the bits of the definition."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from test_device_update import (
    IS_INTERPRETED,
    STEPS,
    assert_close,
    assert_same_bits,
    by_the_definition,
    in_every_place,
    make_segment,
    needs_interpreter,
    true_measure,
)
from torch import Tensor
from update_training import assert_same, batches, result, start, train

import megatrain as mt
from megatrain.base.config import StreamOptions
from megatrain.optim import device_batch, device_kernel, rules, tensors, updaters
from megatrain.optim.device_update import DeviceUpdater
from megatrain.optim.formula import AdamWScalars
from megatrain.optim.marks import Marks
from megatrain.optim.segment import Segment
from megatrain.plan.placement import HBM
from megatrain.spec.formats import FORMATS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MASTERS = ("fp32", "split", "bf16")
SIZES = (256, 16, 2048, 1200, 16, 3072)


class Launches:
    """In place of the kernel: counts its launches, of which one may fail."""

    def __init__(self, kernel: Any, fails_at: int | None = None) -> None:
        self._kernel, self.count, self._fails_at = kernel, 0, fails_at

    def __getitem__(self, grid: tuple[int]) -> Callable[..., object]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int], *arguments: object, **options: object) -> object:
        self.count += 1
        if self.count == self._fails_at:
            raise RuntimeError("this launch fails")
        return self._kernel[grid](*arguments, **options)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    counting = Launches(device_kernel._update)
    monkeypatch.setattr(device_kernel, "_update", counting)
    return counting


def of_one_home(segments: Sequence[Segment], device: str = "cpu", gap: int = 16) -> list[Segment]:
    """Copies whose tensors of a kind lie in one allocation, each at a multiple of `gap` elements."""
    lists = [tensors.tensors_of(segment) for segment in segments]
    rooms = [
        torch.zeros(sum(tensor.numel() + gap for tensor in of_a_kind), dtype=of_a_kind[0].dtype, device=device)
        for of_a_kind in zip(*lists, strict=True)
    ]
    starts = [0] * len(rooms)
    placed = []
    for segment in segments:
        kinds = iter(range(len(rooms)))

        def place(tensor: Tensor, kinds: Any = kinds) -> Tensor:
            kind = next(kinds)
            view = rooms[kind][starts[kind] : starts[kind] + tensor.numel()].copy_(tensor)
            starts[kind] += -(-tensor.numel() // gap) * gap
            return view

        placed.append(tensors.with_tensors(segment, place))
    return placed


def like_a_home(sizes: Sequence[int] = SIZES, step: str = "adamw", master: str = "split", **kind: Any) -> list[Segment]:
    """Segments of one kind with keys and scalars of their own."""
    made = [make_segment(i, size, step, master, torch.bfloat16, **kind) for i, size in enumerate(sizes)]
    return [replace(one, scalars=replace(one.scalars, clip=0.25 * (i + 1))) for i, one in enumerate(made)]


def run_and_compare(segments: list[Segment], device: str, kernel: str, gap: int = 16) -> None:
    updater = DeviceUpdater(device, kernel)
    there = of_one_home(segments, device, gap)
    updater.run(there)
    for segment, updated in zip(segments, there, strict=True):
        assert_same_bits(updated, by_the_definition(segment))


# --- one launch, the same bits ---


@in_every_place
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("step", STEPS)
def test_a_home_is_updated_as_by_the_definition(device: str, kernel: str, step: str, format_name: str) -> None:
    number = list(STEPS).index(step)
    segments = like_a_home(
        step=step, master=MASTERS[number % 3], format_name=format_name, has_ema=bool(number % 2), kinds="mixed"
    )
    run_and_compare(segments, device, kernel)


@needs_interpreter
@pytest.mark.parametrize("master", MASTERS)
def test_a_home_is_one_launch(master: str, launches: Launches) -> None:
    updater = DeviceUpdater("cpu", "triton")
    launches.count = 0
    updater.run(of_one_home(like_a_home(master=master)))
    assert launches.count == 1
    updater.run([])
    assert launches.count == 1


@needs_interpreter
def test_kinds_have_a_launch_each(launches: Launches) -> None:
    """Rule, master, average, and whether sizes are such that loads are wide."""
    kinds = [
        like_a_home(),
        like_a_home(step="lion"),
        like_a_home(master="bf16"),
        like_a_home(has_ema=True),
        like_a_home((100, 129)),
    ]
    segments = [one for segments in zip(*kinds, strict=False) for one in segments]
    updater = DeviceUpdater("cpu", "triton")
    launches.count = 0
    there = [placed for of_kind in kinds for placed in of_one_home(of_kind[:2])]
    order = [there[2 * kind + place] for place in range(2) for kind in range(5)]
    updater.run(order)
    assert launches.count == 5
    for segment, updated in zip(segments, order, strict=True):
        assert_same_bits(updated, by_the_definition(segment))


@in_every_place
def test_segments_anywhere_get_launches_of_their_own(device: str, kernel: str) -> None:
    """At places that are no multiples of what the kernel relies on, also of the item size."""
    run_and_compare(like_a_home((160, 160, 144)), device, kernel, gap=3)
    run_and_compare(like_a_home((100, 7, 129), has_ema=True), device, kernel, gap=1)


def test_how_segments_are_gathered() -> None:
    home = of_one_home(like_a_home())
    assert [batch.places for batch in device_batch.batches(home)] == [[0, 1, 2, 3, 4, 5]]
    odd = of_one_home(like_a_home((16, 17, 16, 16)), gap=32)
    assert [batch.places for batch in device_batch.batches(odd)] == [[0, 2, 3], [1]]
    crooked = of_one_home(like_a_home((16, 16, 16)), gap=8)
    assert [batch.places for batch in device_batch.batches(crooked)] == [[0, 1, 2]]
    crooked = of_one_home(like_a_home((40 * 16, 16, 16)), gap=3)
    assert [batch.places for batch in device_batch.batches(crooked)] == [[0], [1], [2]]
    assert device_batch.batches([]) == []


@in_every_place
def test_hundreds_of_segments(device: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_batch, "MAX_SEGMENTS", 32)
    segments = like_a_home([16 * (1 + i % 3) for i in range(70)], kinds="ordinary")
    there = of_one_home(segments, device)
    assert [len(batch.places) for batch in device_batch.batches(there)] == [32, 32, 6]
    assert [batch.num_rows for batch in device_batch.batches(there)] == [32, 32, 16]
    run_and_compare(segments, device, kernel)


@in_every_place
def test_each_segment_has_its_measure(device: str, kernel: str) -> None:
    segments = like_a_home((2048, 16, 1200, 0, 77, 3072), kinds="ordinary", format_name="8bit")
    expected = [true_measure(segment) for segment in segments]
    assert_close(DeviceUpdater(device, kernel).run(of_one_home(segments, device), measure=True), expected)


# --- faults ---


@needs_interpreter
@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_launch_that_failed_is_made_and_no_other_twice(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"adamw": SIZES, "lion": SIZES, "sgd": (33, 70)}
    kinds = [like_a_home(of_step, step, kinds="ordinary") for step, of_step in sizes.items()]
    segments = [segment for of_kind in kinds for segment in of_kind]
    there = [segment for of_kind in kinds for segment in of_one_home(of_kind)]
    updater, marks = DeviceUpdater("cpu", "triton"), Marks()
    launches = Launches(device_kernel._update, fails_at)
    monkeypatch.setattr(device_kernel, "_update", launches)
    with pytest.raises(RuntimeError, match="this launch fails"):
        updater.run(there, marks=marks)
    changed = sum(not torch.equal(a.weights, b.weights) for a, b in zip(there, segments, strict=True))
    assert bool(changed) == (fails_at > 1)
    updater.run(there, marks=marks)
    assert launches.count == 3 + 1
    for segment, updated in zip(segments, there, strict=True):
        assert_same_bits(updated, by_the_definition(segment))


# --- a model ---


@needs_interpreter
def test_a_step_launches_once_a_home(monkeypatch: pytest.MonkeyPatch, launches: Launches) -> None:
    """Matrices with weight decay, vectors without: two groups, and still one launch a home; the CPU's bits."""

    def two_groups(model: torch.nn.Module, **numbers: Any) -> mt.optim.AdamW:
        vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        return mt.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], **numbers)

    def trained(**options: Any) -> tuple[dict, int]:
        model, optimizer = start(StreamOptions(**options), two_groups, precision="bf16")
        train(model, optimizer, batches(3))
        return result(model, optimizer), sum(home.place == HBM for home in optimizer._members)

    truth, _ = trained()
    monkeypatch.setattr(updaters, "DeviceUpdater", lambda device: DeviceUpdater(device, "triton"))
    launches.count = -1  # that which tries the kernel
    state, num_homes = trained(places="hbm")
    assert_same(state, truth)
    assert launches.count == 3 * num_homes > 0


# --- the compiled kernel ---


@pytest.mark.skipif(IS_INTERPRETED or find_spec("triton") is None, reason="needs Triton, not its interpreter")
@pytest.mark.parametrize("master", MASTERS)
def test_loads_are_as_wide_as_they_can_be(master: str) -> None:
    """16 bytes each: what the table holds says nothing of alignment, so the kernel is told. Compiles without a GPU."""
    from triton import compile as compile_
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, half = device_kernel._update, "*fp32" if master == "fp32" else "*bf16"
    tensor_types = {"weights": half, "grad": "*bf16", "m_codes": "*fp32", "v_codes": "*fp32", "table": "*i64"}
    tensor_types |= {"low": "*i16"} if master == "split" else {}
    constants = {
        **dict.fromkeys(set(kernel.arg_names[:10]) - set(tensor_types)),
        **device_kernel._format_constants(FORMATS["fp32"]),
        "ROWS": 16,
        "DIVISOR": device_batch.OFFSET_DIVISOR,
        "STEP": device_kernel._STEPS[rules.ADAMW],
        "NUM_SCALARS": len(fields(AdamWScalars)),
        "BLOCKS": device_kernel.TILE_BLOCKS,
    }
    signature = {name: tensor_types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if name in tensor_types
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    made = compile_(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "enable_fp_fusion": False})
    stores = re.findall(r"st\.global\S*", made.asm["ptx"])
    # A thread has 8 parameters: two times 16 bytes of fp32, once of bf16.
    num_fp32, num_16_bits = 2 + (master == "fp32"), {"fp32": 0, "split": 2, "bf16": 1}[master]
    assert stores == ["st.global.v4.b32"] * (2 * num_fp32 + num_16_bits)
    assert len(re.findall(r"ld\.global\S*v4\.b32", made.asm["ptx"])) == len(stores) + 1
