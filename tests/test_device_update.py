"""The update on a device is the definition, bit for bit: by the Triton kernel and in PyTorch, in place and streamed.

The kernel is tested where CUDA is, or in Triton's interpreter where TRITON_INTERPRET=1 is set and Triton is installed.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from megatrain.base.errors import UserError
from megatrain.optim import definition, device_update, rules, tensors, torch_update
from megatrain.optim.device_update import DeviceUpdater
from megatrain.optim.formula import AdamScalars, AdamWScalars, LionScalars, MomentumScalars, SGDScalars
from megatrain.optim.segment import Ema, Segment
from megatrain.optim.update import Measure
from megatrain.spec.formats import FORMATS
from megatrain.store.codecs import Stored

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
needs_interpreter = pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1 and Triton")
PLACES = [
    pytest.param("cpu", "torch", id="cpu"),
    pytest.param("cpu", "triton", id="interpreter", marks=needs_interpreter),
    pytest.param("cuda", "torch", id="cuda-torch", marks=needs_cuda),
    # The interpreter would run the kernel in NumPy, on tensors of the GPU.
    pytest.param(
        "cuda", "triton", id="cuda-triton", marks=[needs_cuda, pytest.mark.skipif(IS_INTERPRETED, reason="interpreted")]
    ),
]
# NumPy, in which the interpreter runs, warns of infinities and NaNs.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
in_every_place = pytest.mark.parametrize(("device", "kernel"), PLACES)

STEPS = {
    "adamw": (rules.ADAMW, AdamWScalars.at(3, 1e-2, 0.9, 0.999, 1e-8, 0.1, clip=0.37)),
    "adam": (rules.ADAM, AdamScalars.at(7, 1e-2, 0.8, 0.99, 1e-6, 0.1, clip=0.37)),
    "momentum": (rules.MOMENTUM, MomentumScalars.at(2, 1e-2, 0.9, 0.1, False, 0.1, clip=0.37)),
    "nesterov": (rules.MOMENTUM, MomentumScalars.at(1, 1e-2, 0.9, 0.0, True, 0.0)),
    "sgd": (rules.SGD, SGDScalars.at(1e-2, 0.1, clip=0.37)),
    "lion": (rules.LION, LionScalars.at(1e-3, 0.9, 0.99, 0.1, clip=0.37)),
}
MASTERS = ("fp32", "split", "bf16")
SPECIAL = np.array(
    # zeros, denormals, the smallest normal, ones, the largest, infinities, NaNs of every kind
    [0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x1E000000, 0x3F800000, 0xBF808000,
     0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF],
    dtype=np.uint32,
).view(np.float32)  # fmt: skip


def floats(rng: np.random.Generator, size: int, scale: float, kinds: str) -> Tensor:
    """fp32. kinds: "ordinary"; "special", with special values and any bit patterns at every place; or "mixed", where
    most blocks of 128 are ordinary, so that block codes meet more than NaNs."""
    values = (rng.standard_normal(size) * scale * 10.0 ** rng.uniform(-3, 0, size)).astype(np.float32)
    kind = {"ordinary": 1.0, "special": 0.0, "mixed": 0.6}[kinds]
    is_special = np.repeat(rng.random(-(-size // 128)) >= kind, 128)[:size]
    patterns = rng.integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
    strange = np.where(rng.random(size) < 0.5, patterns, rng.choice(SPECIAL, size))
    # Tiny ones too: products and codes of denormals.
    tiny = values * np.float32(2.0**-120)
    values = np.where(np.repeat(rng.random(-(-size // 128)) < 0.1, 128)[:size], tiny, values)
    return torch.from_numpy(np.where(is_special & (rng.random(size) < 0.4), strange, values))


def moment(rng: np.random.Generator, name: str, size: int, is_signed: bool, kinds: str) -> Stored:
    """A stored moment; block codes are any bytes, with scales of every kind."""
    format_ = FORMATS[name]
    if format_.is_block:
        codes = torch.from_numpy(rng.integers(0, 256, format_.num_codes(size), dtype=np.uint8))
        scales = 10.0 ** rng.uniform(-9, 0, format_.num_scales(size))
        odd = rng.choice([0.0, np.nan, 2.0**-126, 3e38], scales.size)
        scales = np.where((rng.random(scales.size) < 0.2) & (kinds != "ordinary"), odd, scales)
        return Stored(format_, codes, torch.from_numpy(scales.astype(np.float32)))
    values = floats(rng, size, 1e-3 if is_signed else 1e-5, kinds)
    return Stored(format_, (values if is_signed else values.abs_()).to(format_.dtype))


def make_segment(
    seed: int,
    size: int,
    step: str = "adamw",
    master: str = "fp32",
    grad_dtype: torch.dtype = torch.float32,
    format_name: str = "fp32",
    has_ema: bool = False,
    kinds: str = "mixed",
) -> Segment:
    """A segment in host memory. Its key and first element make the sums in the hash pass 2^32."""
    rng = np.random.default_rng(seed)
    rule, scalars = STEPS[step]
    w = floats(rng, size, 1.0, kinds)
    low = torch.from_numpy(rng.integers(-(2**15), 2**15, size, dtype=np.int16)) if master == "split" else None
    return Segment(
        rule=rule,
        scalars=scalars,
        weights=w if master == "fp32" else w.bfloat16(),
        low=low,
        grad=floats(rng, size, 1e-2, kinds).to(grad_dtype),
        states=tuple(moment(rng, format_name, size, state.is_signed, kinds) for state in rule.states),
        ema=Ema(average=floats(rng, size, 1.0, kinds), decay=0.99) if has_ema else None,
        key=(0xFFFFFF80 + seed % 128, int(rng.integers(2**32))),
        first=2**32 - 256 + 128 * (seed % 4),
    )


def with_tensors(segment: Segment, change: Callable[[Tensor], Tensor]) -> Segment:
    return tensors.with_tensors(segment, change)


def copied(segment: Segment, device: str = "cpu") -> Segment:
    return with_tensors(segment, lambda tensor: tensor.detach().clone().to(device))


def by_the_definition(segment: Segment) -> Segment:
    """After one step on the CPU, whole."""
    result = copied(segment)
    definition.update_(result)
    return result


def pattern(tensor: Tensor) -> Tensor:
    """The bits of a tensor; all NaNs are one, since their payload is not promised."""
    tensor = tensor.detach().cpu()
    if not tensor.is_floating_point():
        return tensor
    bits = {2: torch.int16, 4: torch.int32}[tensor.itemsize]
    return torch.where(torch.isnan(tensor), torch.full((), math.nan, dtype=tensor.dtype), tensor).view(bits)


def assert_same_bits(actual: Segment, expected: Segment) -> None:
    for number, (ours, theirs) in enumerate(zip(tensors.tensors_of(actual), tensors.tensors_of(expected), strict=True)):
        different = torch.nonzero(pattern(ours) != pattern(theirs)).view(-1)
        assert not different.numel(), (number, different[:5], ours[different[:5]], theirs[different[:5]])


def variants(step: str, format_name: str) -> list[Segment]:
    """Every master and dtype of gradients, with and without EMA, in sizes with every kind of end."""
    sizes = iter([1, 127, 128, 129, 1024, 1029, 2500, 3333, 5120, 60, 4095, 2049])
    return [
        make_segment(i, next(sizes), step, master, grad, format_name, has_ema, "special" if i % 4 == 3 else "mixed")
        for i, (master, grad, has_ema) in enumerate(
            (master, grad, has_ema)
            for master in MASTERS
            for grad in (torch.float32, torch.bfloat16)
            for has_ema in (False, True)
        )
    ]


# --- in place ---


@in_every_place
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("step", STEPS)
def test_run_is_the_definition(device: str, kernel: str, step: str, format_name: str) -> None:
    segments = variants(step, format_name)
    there = [copied(segment, device) for segment in segments]
    updater = DeviceUpdater(device, kernel)
    assert updater.path == kernel
    assert updater.run(there) == [None] * len(there)
    for segment, updated in zip(segments, there, strict=True):
        assert_same_bits(updated, by_the_definition(segment))


@in_every_place
@pytest.mark.parametrize("format_name", FORMATS)
def test_ten_steps_are_those_of_the_definition(device: str, kernel: str, format_name: str) -> None:
    """Codes that the update itself wrote are what the next one reads."""
    here = make_segment(3, 700, "adamw", "bf16", torch.bfloat16, format_name, kinds="ordinary")
    there, updater = copied(here, device), DeviceUpdater(device, kernel)
    for step in range(1, 11):
        scalars = AdamWScalars.at(step, 1e-3, 0.9, 0.999, 1e-8, 0.1)
        here = replace(here, scalars=scalars, key=(step, 5))
        there = replace(there, scalars=scalars, key=(step, 5))
        definition.update_(here)
        updater.run([there])
    assert_same_bits(there, here)


@in_every_place
@pytest.mark.parametrize("format_name", FORMATS)
def test_no_result_depends_on_the_pieces(
    device: str, kernel: str, format_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = DeviceUpdater(device, kernel)
    monkeypatch.setattr(device_update, "TORCH_PIECE", 256)
    if updater._kernel is not None:
        monkeypatch.setattr(updater._kernel, "MAX_NUMEL", 384)
    segments = [make_segment(i, 1500, "adamw", MASTERS[i], format_name=format_name) for i in range(3)]
    there = [copied(segment, device) for segment in segments]
    updater.run(there, measure=True)
    for segment, updated in zip(segments, there, strict=True):
        assert_same_bits(updated, by_the_definition(segment))


@in_every_place
@pytest.mark.parametrize("format_name", FORMATS)
def test_neighbours_are_left_alone_wherever_a_segment_starts(device: str, kernel: str, format_name: str) -> None:
    updater = DeviceUpdater(device, kernel)
    for seed, margin in enumerate((1, 3, 8, 33)):
        segment = make_segment(seed, 777, "adamw", MASTERS[seed % 3], torch.bfloat16, format_name, has_ema=True)
        rooms: list[Tensor] = []

        def surrounded(tensor: Tensor, margin: int = margin, rooms: list[Tensor] = rooms) -> Tensor:
            rooms.append(torch.nn.functional.pad(tensor, (margin, margin), value=7).to(device))
            return rooms[-1][margin : margin + tensor.numel()]

        updated = with_tensors(segment, surrounded)
        updater.run([updated])
        assert_same_bits(updated, by_the_definition(segment))
        assert all(bool((room[:margin] == 7).all() and (room[-margin:] == 7).all()) for room in rooms)


def true_measure(segment: Segment) -> Measure:
    sums = definition.update_(copied(segment), measure=True)
    assert sums is not None
    return Measure(*sums)


def assert_close(actual: list[Measure | None], expected: list[Measure]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours is not None
        np.testing.assert_allclose(
            (ours.change_squares, ours.weight_squares), (theirs.change_squares, theirs.weight_squares), rtol=1e-12
        )


@in_every_place
def test_measures(device: str, kernel: str) -> None:
    segments = [
        make_segment(i, size, master=MASTERS[i % 3], format_name="4bit", kinds="ordinary")
        for i, size in enumerate((0, 1, 128, 1300, 5000))
    ]
    expected = [true_measure(segment) for segment in segments]
    updater = DeviceUpdater(device, kernel)
    assert_close(updater.run([copied(segment, device) for segment in segments], measure=True), expected)
    assert_close(updater.run_streamed(segments, measure=True), expected)


@in_every_place
def test_a_rule_that_the_kernel_does_not_know_runs_by_the_definition(device: str, kernel: str) -> None:
    """Beside one that it knows, in one run."""
    own = replace(rules.SGD, name="own", step=lambda w, g, s: w.sub_(g.sign().mul_(s.lr)))
    segments = [make_segment(i, 300, "sgd") for i in range(2)]
    segments[0] = replace(segments[0], rule=own)
    there = [copied(segment, device) for segment in segments]
    DeviceUpdater(device, kernel).run(there)
    for segment, updated in zip(segments, there, strict=True):
        assert_same_bits(updated, by_the_definition(segment))


@in_every_place
def test_weights_that_require_grad_are_updated_in_place(device: str, kernel: str) -> None:
    updater = DeviceUpdater(device, kernel)
    for run, place in ((updater.run, device), (updater.run_streamed, "cpu")):
        segment = make_segment(3, 300, master="bf16", kinds="ordinary")
        expected = by_the_definition(segment)
        segment = copied(segment, place)
        segment.weights.requires_grad_(True)
        run([segment])
        assert_same_bits(segment, expected)
        assert segment.weights.is_leaf


# --- streamed ---


@in_every_place
@pytest.mark.parametrize("format_name", FORMATS)
def test_run_streamed_is_the_definition(
    device: str, kernel: str, format_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_update, "STAGING_BYTES", 12_000)  # a few hundred parameters
    segments = [segment for step in ("adamw", "lion", "sgd") for segment in variants(step, format_name)[::2]]
    segments.insert(2, make_segment(0, 0, format_name=format_name))
    expected = [by_the_definition(segment) for segment in segments]
    updater = DeviceUpdater(device, kernel)
    assert updater.run_streamed(segments) == [None] * len(segments)
    assert updater.run_streamed([]) == []
    for segment, truth in zip(segments, expected, strict=True):
        assert_same_bits(segment, truth)
    assert all(one.memory.numel() <= 12_000 for one in updater._staging)


def test_staging_memory_grows_to_the_largest_piece_and_stays() -> None:
    updater = DeviceUpdater("cpu")
    updater.run_streamed([make_segment(0, 100)])
    small = updater._staging
    updater.run_streamed([make_segment(0, 90)])
    assert updater._staging is small and small[0].memory.numel() < 4096
    segment = make_segment(0, 10_000)
    expected = by_the_definition(segment)
    updater.run_streamed([segment])
    assert_same_bits(segment, expected)
    assert updater._staging[0].memory.numel() >= 160_000


def test_a_failed_run_waits_for_what_it_enqueued(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[object] = []

    def fail(segment: Segment, measure: bool) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(torch_update, "update_", fail)
    monkeypatch.setattr(device_update._Staging, "synchronize", lambda one: waits.append(one))
    with pytest.raises(MemoryError):
        DeviceUpdater("cpu").run_streamed([make_segment(0, 100)])
    assert len(waits) == 2


@needs_cuda
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("pinned", [False, True])
def test_copies_and_updates_that_overlap_do_not_mix(
    pinned: bool, format_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of 1 MB in plenty, both staging sets busy, several times over."""
    monkeypatch.setattr(device_update, "STAGING_BYTES", 1 << 20)
    segments = [
        make_segment(i, 1_000_003, "adamw", MASTERS[i], torch.bfloat16, format_name, has_ema=True) for i in range(3)
    ]
    if pinned:
        segments = [with_tensors(segment, Tensor.pin_memory) for segment in segments]
    there, updater = [copied(segment, "cuda") for segment in segments], DeviceUpdater("cuda")
    for step in range(4):
        updater.run_streamed([replace(segment, key=(step, 1)) for segment in segments])
        for segment in there:
            definition.update_(replace(segment, key=(step, 1)))
    for segment, truth in zip(segments, there, strict=True):
        assert_same_bits(segment, truth)


@needs_cuda
def test_run_streamed_is_behind_the_current_stream() -> None:
    """Gradients that a fence of the current stream stands for are still on their way home."""
    segment = with_tensors(make_segment(0, 100_000), Tensor.pin_memory)
    expected, gradient, updater = by_the_definition(segment), segment.grad.cuda(), DeviceUpdater("cuda")
    segment.grad.zero_()
    drain, lane = torch.cuda.Stream(), torch.cuda.Stream()
    drain.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(drain):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        segment.grad.copy_(gradient, non_blocking=True)
    lane.wait_stream(drain)
    with torch.cuda.stream(lane):
        updater.run_streamed([segment])
    assert_same_bits(segment, expected)


# --- which path ---


def test_the_path_is_torch_on_a_cpu() -> None:
    assert DeviceUpdater("cpu").path == "torch"


@needs_cuda
@pytest.mark.skipif(IS_INTERPRETED, reason="interpreted")
def test_the_path_is_triton_on_cuda() -> None:
    assert DeviceUpdater("cuda").path == "triton"


def test_a_kernel_that_does_not_run_is_named() -> None:
    with pytest.raises(UserError, match='device kernel \'fast\': use "auto", "triton" or "torch"'):
        DeviceUpdater("cpu", "fast")
    if not IS_INTERPRETED:
        with pytest.raises(UserError, match="does not run on cpu .*: install PyTorch for CUDA and a C compiler"):
            DeviceUpdater("cpu", "triton")


def test_where_triton_fails_the_definition_runs_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(device: torch.device) -> None:
        raise FileNotFoundError("no C compiler")

    monkeypatch.setattr(device_update, "_load_kernel", fail)
    with caplog.at_level(logging.WARNING):
        assert DeviceUpdater("cuda").path == "torch"
    assert len(caplog.records) == 1 and "FileNotFoundError: no C compiler" in caplog.text
    with pytest.raises(UserError, match="does not run on cuda .*no C compiler"):
        DeviceUpdater("cuda", "triton")
