"""Attention kernels: the one that was named runs, in the forward and in its recomputation; the fastest is found."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_equal, gradients, stream
from planning_helpers import predicted, wide_llama
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from trainer_helpers import arguments, assert_equal_weights, llama, rows, train

import megatrain as mt
from megatrain import attention_choice
from megatrain.base.config import Config
from megatrain.base.errors import UserError
from megatrain.base.paths import attention_profile_path
from megatrain.data.lengths import likely_workload
from megatrain.execute import templates
from megatrain.execute.attention import KERNELS, AttentionKernels, AttentionState
from megatrain.execute.engine import engine_of
from megatrain.plan.cost import ATTENTION_SHARE, attention_rate
from megatrain.plan.machine import Machine
from megatrain.plan.machines import H200
from megatrain.plan.workload import Workload
from megatrain.probe import attention as probe
from megatrain.probe.attention import AttentionShape
from megatrain.probe.facts import Rate
from megatrain.spec.homes import Formats
from megatrain.spec.model import Attention

CPU = torch.device("cpu")
FLASH, MATH = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH
SHAPE = AttentionShape(
    attention=Attention(num_heads=4, num_kv_heads=2, key_dim=8, value_dim=8, window=None),
    rows=2,
    length=16,
    dtype=torch.float32,
)


def batch(*, is_packed: bool = False) -> dict[str, Any]:
    ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(3))
    packed = {"position_ids": torch.arange(12).repeat(2, 2), "use_cache": False} if is_packed else {}
    return {"input_ids": ids, "labels": ids, **packed}


def wide() -> nn.Module:
    return llama(hidden_size=32, num_attention_heads=4)


def plain_gradients(model: nn.Module, data: dict[str, Any], kernel: SDPBackend) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model)
    with sdpa_kernel(kernel):
        model(**data).loss.backward()
    return gradients(model)


def differs(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(value, right[name]) for name, value in left.items())


def attention_operations(run: Callable[[], object]) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    return {event.key for event in profiled.key_averages() if "_scaled_dot_product" in event.key}


@pytest.mark.parametrize("is_packed", [False, True], ids=["causal", "packed"])
def test_the_kernel_that_was_named_runs(is_packed: bool) -> None:
    model, data = wide(), batch(is_packed=is_packed)
    expected = {name: plain_gradients(model, data, KERNELS[name]) for name in ("flash", "math")}
    assert differs(expected["flash"], expected["math"]), "else this shows nothing"
    outside = AttentionState.get()
    for name, of_plain in expected.items():
        mt.init(device="cpu", attention=name)
        _, streamed = stream(copy.deepcopy(model))
        streamed(**data).loss.backward()
        assert_equal(of_plain, gradients(streamed))
        assert AttentionState.get() == outside


def test_a_recomputation_takes_the_kernel_of_its_forward() -> None:
    """What somebody put around the forward alone holds for both, and what they switched off stays off."""
    model, data = wide(), batch()
    expected = plain_gradients(model, data, MATH)
    for settings in ({}, {"attention": "flash"}):
        mt.init(device="cpu", **settings)
        _, streamed = stream(copy.deepcopy(model))
        with sdpa_kernel(MATH):
            loss = streamed(**data).loss
        loss.backward()
        assert_equal(expected, gradients(streamed))


class Choosing(nn.Module):
    """Its own forward names the kernel, by what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = wide()

    def forward(self, kernel: SDPBackend, **data: Any) -> torch.Tensor:
        with sdpa_kernel(kernel):
            return self.inner(**data).loss


def test_kernels_belong_to_each_micro_batch() -> None:
    plain, streamed = stream(Choosing())
    outside = AttentionState.get()
    micro_batches = [{"kernel": kernel, **batch()} for kernel in (MATH, FLASH, MATH)]
    for each in micro_batches:
        plain(**each).backward()
    mt.accumulate(streamed, micro_batches, lambda loss, _: loss)
    assert_equal(gradients(plain), gradients(streamed))
    assert AttentionState.get() == outside


def test_a_preference_is_an_order_and_ends_with_its_block() -> None:
    outside = AttentionState.get()
    with pytest.raises(ValueError, match="a test"), AttentionKernels(("cudnn", "flash")).preferred():
        inside = AttentionState.get()
        assert inside.enabled == outside.enabled
        assert inside.order[:2] == (int(KERNELS["cudnn"]), int(KERNELS["flash"]))
        assert sorted(inside.order) == sorted(outside.order)
        raise ValueError("a test")
    assert AttentionState.get() == outside


def test_compiled_layers_have_the_kernel_and_a_cache_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    tags: list[str] = []
    compile_ = torch.compile

    def traced(function: Any, **_: Any) -> Any:
        def backend(graph: Any, inputs: Any) -> Any:
            tags.append(torch.compiler.config.cache_key_tag)
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        return compile_(function, backend=backend)

    monkeypatch.setattr(templates.torch, "compile", traced)
    torch._dynamo.reset()
    mt.init(device="cpu", attention="math", compile=True)
    _, streamed = stream(wide())
    run = lambda: streamed(**batch(), use_cache=False).loss.backward()  # noqa: E731
    run()
    assert not any("flash" in name for name in attention_operations(run))
    assert set(tags) == {"attention math"} and not torch.compiler.config.cache_key_tag
    templates.prefer_attention(engine_of(streamed), AttentionKernels(("flash",)))
    run()
    names = attention_operations(run)
    assert any("flash" in name and "backward" in name for name in names)
    assert set(tags) == {"attention math", "attention flash"}
    torch._dynamo.reset()


# The choice


def told(monkeypatch: pytest.MonkeyPatch, values: dict[str, float | None]) -> list[AttentionShape]:
    """Measurements give these; returns the shapes that were measured."""
    asked: list[AttentionShape] = []

    def measure(device: torch.device, shape: AttentionShape, seconds: float) -> list[Rate]:
        asked.append(shape)
        keys = {name: f"attention.causal.2x16.{name}" for name in values}
        return [Rate(key=keys[name], label="", unit="flop/s", value=value) for name, value in values.items()]

    monkeypatch.setattr(probe, "measure_attention", measure)
    return asked


def test_the_fastest_is_taken_and_kept_for_the_next_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path))
    asked = told(monkeypatch, {"flash": 2e12, "cudnn": 3e12, "efficient": None, "math": 1e12})
    for _ in range(2):
        kernels = attention_choice.fastest(SHAPE, CPU)
        assert kernels.order == ("cudnn", "flash", "math")
        assert kernels.describe().startswith("cuDNN attention (the fastest of 3 kernels at 4/2 heads of 8, 2 x 16")
    assert asked == [SHAPE]
    for spoilt in ("no JSON", "[]", '{"a": {"none": 1}}'):
        attention_profile_path().write_text(spoilt)
        assert attention_choice.fastest(SHAPE, CPU).order == kernels.order
    assert len(asked) == 4 and len(json.loads(attention_profile_path().read_text())) == 1
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert attention_choice.fastest(SHAPE, CPU).order == kernels.order and len(asked) == 5
    attention_profile_path().unlink()
    told(monkeypatch, {"flash": None})
    assert not attention_choice.fastest(SHAPE, CPU).order


def test_what_a_planned_run_measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path))
    asked = told(monkeypatch, {"cudnn": 2.0, "flash": 1.0})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: H200.name)
    plan = predicted(wide_llama(), Workload(num_sequences=8, length=512, rows=4, masked=True))

    def choose(implementation: str | None = "sdpa", plan: Any = plan, **settings: Any) -> tuple[str, ...]:
        return attention_choice.choose_attention(Config(**settings), plan, implementation).order

    assert choose() == ("cudnn", "flash")
    (shape,) = asked
    assert (shape.rows, shape.length, shape.dtype, shape.is_masked) == (4, 512, torch.bfloat16, True)
    assert (shape.attention.num_heads, shape.attention.num_kv_heads, shape.attention.key_dim) == (24, 8, 128)
    exact = dataclasses.replace(plan.spec, formats=Formats(precision="fp32", master="fp32"))
    assert choose(plan=dataclasses.replace(plan, spec=exact)) == ()
    assert choose("eager") == choose(plan=None) == choose(attention="torch") == ()
    checked: list[str] = []
    monkeypatch.setattr(probe, "check_kernel", lambda device, shape, name: checked.append(name))
    assert choose(attention="flash") == choose(attention="flash", plan=None) == ("flash",)
    assert checked == ["flash"]

    def refuse(*_: Any) -> None:
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    monkeypatch.setattr(probe, "check_kernel", refuse)
    with pytest.raises(UserError, match=r"attention='flash' cannot compute .*masked.* \(No available kernel"):
        choose(attention="flash")


@pytest.mark.parametrize("is_masked", [False, True], ids=["causal", "masked"])
def test_each_kernel_is_a_row(monkeypatch: pytest.MonkeyPatch, is_masked: bool) -> None:
    monkeypatch.setattr(probe, "kernels_of", lambda _: KERNELS)
    shape = AttentionShape(attention=SHAPE.attention, rows=2, length=16, dtype=torch.float32, is_masked=is_masked)
    taken: list[set[str]] = []
    rates = {}
    taken.append(attention_operations(lambda: rates.update(_by_name(probe.measure_attention(CPU, shape, 0.0)))))
    assert any("flash" in name and "backward" in name for name in taken[0])
    assert any(name.endswith("attention_math") for name in taken[0])
    assert rates["flash"].value > 0 and rates["math"].value > 0
    for name in ("cudnn", "efficient"):
        assert rates[name].value is None and "No viable backend" in rates[name].note
    assert ("masked" if is_masked else "causal") in rates["math"].key


@pytest.mark.parametrize("wrong", [math.nan, 1.2])
def test_a_kernel_that_is_wrong_is_not_fast(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    right = probe.scaled_dot_product_attention

    def spoilt(*args: Any, **kwargs: Any) -> torch.Tensor:
        is_math = not torch.backends.cuda.flash_sdp_enabled()
        return right(*args, **kwargs) * (wrong if is_math else 1.0)

    monkeypatch.setattr(probe, "scaled_dot_product_attention", spoilt)
    rates = _by_name(probe.measure_attention(CPU, SHAPE, 0.0))
    assert rates["flash"].value and rates["math"].value is None
    assert "its results differ from those of another kernel by" in rates["math"].note


def _by_name(rates: Sequence[Rate]) -> dict[str, Rate]:
    return {rate.key.rpartition(".")[2]: rate for rate in rates}


def test_a_device_is_timed_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds of rounds: the first ones are of a device that wakes up."""
    elapsed = iter([300.0, 100.0, 40.0, 44.0, 48.0, 52.0, 200.0])
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(elapsed))
    calls: list[int] = []
    seconds = probe._device_seconds(lambda: calls.append(1), 0.62)
    assert seconds == pytest.approx(0.048 / probe.NUM_CALLS)
    assert len(calls) == 1 + 6 * probe.NUM_CALLS, "no round begins that would end after the time that there is"


class FakeEvent:
    def __init__(self, elapsed: Iterator[float]) -> None:
        self._elapsed = elapsed

    def record(self) -> None:
        pass

    synchronize = record

    def elapsed_time(self, _: FakeEvent) -> float:
        return next(self._elapsed)


def test_what_counts_as_a_flop() -> None:
    """Forward 2 x 2 a pair and number of a head; the backward two and a half times that; pairs within samples."""
    assert SHAPE.flops == 3.5 * 2 * 2 * (4 * 8) * (2 * 16 * 17 / 2)
    masked = AttentionShape(attention=SHAPE.attention, rows=2, length=16, dtype=torch.float32, is_masked=True)
    assert masked.flops == 3.5 * 2 * 2 * (4 * 8) * (2 * 4 * 4 * 5 / 2)


def test_which_work_has_masks(tmp_path: Path) -> None:
    def is_masked(lengths: list[int], batch_size: int = 2, **more: Any) -> bool:
        data = [{"input_ids": [1] * length, **more} for length in lengths]
        workload = likely_workload(data, arguments(tmp_path, per_device_train_batch_size=batch_size))
        assert workload is not None
        return workload.masked

    assert not is_masked([8, 8, 8])
    assert is_masked([8, 8, 8], position_ids=[0])
    assert is_masked([8, 5, 8]) and not is_masked([8, 5, 8], batch_size=1)


# What plans make of rates


def test_the_rate_at_the_nearest_length_is_planned_with() -> None:
    spec = wide_llama()
    machine = dataclasses.replace(H200, attention_flops_per_second={"1024": 200e12, "8192": 500e12})
    rates = [attention_rate(machine, spec, length, 700e12) for length in (128, 1024, 2800, 3000, 100_000)]
    assert rates == [200e12, 200e12, 200e12, 500e12, 500e12]
    fp32 = dataclasses.replace(spec, formats=Formats(precision="fp32", master="fp32"))
    assert attention_rate(machine, fp32, 1024, 40e12) == attention_rate(H200, spec, 1024, 40e12) == 20e12

    work = Workload(num_sequences=2, length=32_768, rows=1)
    seconds = [
        predicted(spec, work, machine=dataclasses.replace(H200, attention_flops_per_second=of)).simulation
        for of in ({}, {"8192": ATTENTION_SHARE * H200.matmul_flops_per_second}, {"8192": 760e12})
    ]
    as_before, same, faster = (simulation.busy_seconds()["compute"] for simulation in seconds)
    assert as_before == pytest.approx(same) and faster < as_before


def test_a_profile_keeps_the_best_of_each_length() -> None:
    values = {"causal.16x1024.flash": 3e12, "causal.16x1024.math": 1e12, "causal.1x8192.cudnn": 4e12}
    values |= {"causal.1x8192.flash": None, "masked.16x1024.flash": 9e12}
    rates = [Rate(key=f"attention.{key}", label="", unit="flop/s", value=value) for key, value in values.items()]
    best = probe.best_by_length([*rates, Rate(key="ram", label="", unit="bytes/s", value=1.0)])
    assert best == {"1024": 3e12, "8192": 4e12}
    machine = dataclasses.replace(H200, attention_flops_per_second=best)
    assert Machine.from_json(machine.to_json()) == machine
    old = json.loads(H200.to_json())
    del old["attention_flops_per_second"]
    assert Machine.from_json(json.dumps(old)) == H200
    for bad in ({"long": 1e12}, {"0": 1e12}, {"8": "fast"}, [1]):
        with pytest.raises(UserError, match="attention_flops_per_second is"):
            Machine.from_json(json.dumps({**old, "attention_flops_per_second": bad}))


# What is refused, and what goes on


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="attention='fast' is not known"):
        mt.init(attention="fast")
    mt.init(device="cpu", attention="cudnn")
    with pytest.raises(UserError, match="attention='cudnn' is a kernel for GPUs: on the CPU use 'flash' or 'math'"):
        mt.stream(wide())
    mt.init(device="cpu", attention="math")
    with pytest.raises(UserError, match="computes its attention by 'eager'"):
        mt.stream(llama(attn_implementation="eager"))


def test_a_resumed_run_keeps_its_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = dict(max_steps=4, save_strategy="steps", save_steps=2)
    mt.init(device="cpu", attention="math")
    whole, _ = train(mt.Trainer, tmp_path, wide(), **settings)
    assert "math attention (as asked for)" in capsys.readouterr().out
    expected = mt.full_state_dict(whole.model)

    def resumed(**given: Any) -> tuple[dict[str, torch.Tensor], str]:
        mt.init(device="cpu", **given)
        trainer = mt.Trainer(wide(), arguments(tmp_path, **settings), train_dataset=rows())
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        return mt.full_state_dict(trainer.model), capsys.readouterr().out

    state, said = resumed()
    assert_equal_weights(state, expected)
    assert "bit for bit" in said and "Attention kernels are those of checkpoint-2: math (first chosen: torch)" in said
    state, said = resumed(attention="flash")
    assert "attention kernels was math, is flash" in said and differs(state, expected)
