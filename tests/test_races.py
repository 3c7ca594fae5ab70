"""No result depends on slots, drains, prefetch or the speed of a lane; what fails in a lane ends the run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_equal, gradients, stream, the_engine
from model_zoo import make_batch, make_model, padded_batch
from torch import nn

import megatrain as mt
from megatrain.optim import commit
from megatrain.optim.update import CpuUpdater
from megatrain.store.home import Home
from megatrain.store.masters import split_
from megatrain.transport import serial
from megatrain.transport import stream as lanes

pytestmark = pytest.mark.timeout(180)

DELAY_SECONDS = 0.003


def make_tied() -> nn.Module:
    """Routed experts, a home shared by embedding and head, a frozen layer and a partly frozen one."""
    model = make_model("qwen3_moe", tie_word_embeddings=True)
    model.model.layers[1].requires_grad_(False)
    model.model.layers[2].self_attn.requires_grad_(False)
    return model


def train(precision: str = "fp32", num_steps: int = 3, **options: Any) -> tuple[dict[str, torch.Tensor], nn.Module]:
    """Steps of every sort, with reads in between; returns all that came out of it."""
    mt.init(device="cpu", precision=precision)
    _, model = stream(make_tied(), **options)
    optimizer = mt.optim.AdamW(model, lr=1e-2, weight_decay=0.1)
    found: dict[str, torch.Tensor] = {}
    torch.manual_seed(0)
    for step in range(num_steps):
        found[f"{step} losses"] = torch.stack(
            mt.accumulate(model, [padded_batch(n, seed=n + step) for n in (7, 12, 9)])
        )
        if step == 1:
            # A second pass adds to the first.
            model(**make_batch(6, seed=step)).loss.backward()
        found[f"{step} norm"] = mt.clip_grad_norm_(model, 0.5)
        found |= {f"{step} gradient {name}": gradient for name, gradient in gradients(model).items()}
        optimizer.step()
        optimizer.zero_grad()
        if step != 1:
            # Read while updates run; other visits than those of a step.
            with torch.no_grad():
                found[f"{step} logits"] = model(**make_batch(4, seed=step)).logits
            found[f"{step} weight"] = model.get_parameter("model.norm.weight").master()
    found |= dict(mt.named_parameters(model))
    return found, model


@functools.cache
def the_truth(precision: str = "fp32") -> dict[str, torch.Tensor]:
    return train(precision, serial=True)[0]


@pytest.mark.parametrize("max_drains", [1, 2, 3])
@pytest.mark.parametrize("num_slots", [1, 2, 3, 4, 5])
def test_no_result_depends_on_slots_drains_or_lanes(num_slots: int, max_drains: int) -> None:
    found, _ = train(num_slots=num_slots, max_drains=max_drains, lane_delay_seconds=DELAY_SECONDS, poison=True)
    assert_equal(the_truth(), found)


@pytest.mark.parametrize("options", [{}, {"num_slots": 2, "lane_delay_seconds": DELAY_SECONDS}])
def test_slots_that_keep_their_weights_give_the_same(options: dict[str, Any]) -> None:
    """Without poison a slot serves the next visit too, unless its home has changed."""
    found, model = train(**options)
    assert_equal(the_truth(), found)
    assert mt.stats(model)["prediction_hits"] > 0


@pytest.mark.parametrize("num_slots", [1, 3])
def test_bf16_with_split_masters_does_not_depend_on_them_either(num_slots: int) -> None:
    found, _ = train("bf16", num_slots=num_slots, lane_delay_seconds=DELAY_SECONDS, poison=True)
    assert_equal(the_truth("bf16"), found)


def test_activations_on_the_host_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.transport.activations.MIN_BYTES", 1)
    found, model = train(activation_bytes=0, lane_delay_seconds=DELAY_SECONDS, poison=True)
    assert mt.stats(model)["offloaded_activation_bytes"] > 0
    assert_equal(the_truth(), found)


@pytest.mark.parametrize("slow", ["_h2d", "_d2h", "_cpu"])
def test_one_slow_lane_changes_nothing(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = lanes.LaneStream.__init__

    def init(self: lanes.LaneStream, *args: Any) -> None:
        original(self, *args)
        getattr(self, slow)._delay_seconds = 0.01

    monkeypatch.setattr(lanes.LaneStream, "__init__", init)
    found, _ = train(num_steps=2, poison=True)
    assert_equal({name: value for name, value in train(num_steps=2, serial=True)[0].items()}, found)


def test_a_gradient_may_be_set_while_its_update_runs() -> None:
    """`p.grad = value` right after a step must not reach the update that is still reading the slab."""
    weights = []
    for options in ({"serial": True}, {"lane_delay_seconds": 0.02}):
        _, model = stream(make_model("llama"), **options)
        optimizer = mt.optim.AdamW(model, lr=1e-2)
        model(**make_batch()).loss.backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = torch.full(parameter.shape, 7.0)
        weights.append(dict(mt.named_parameters(model)))
    assert_equal(*weights)


# Errors.


class LaneError(Exception):
    """Raised inside a lane by these tests."""


def fail_at(call: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, but raising at the call of this number."""
    count = 0

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            raise LaneError("the lane fails")
        return original(*args, **kwargs)

    return run


class FailingWire(torch.Tensor):
    """A home's wire section that cannot be copied from."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.copy_:
            raise LaneError("the lane fails")
        return super().__torch_function__(func, types, args, kwargs or {})


def run_until_it_fails(model: nn.Module) -> None:
    optimizer = mt.optim.AdamW(model, lr=1e-2)
    for _ in range(3):
        mt.accumulate(model, [make_batch(n, seed=n) for n in (7, 9)])
        mt.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    the_engine(model).wait()


@pytest.mark.parametrize("options", [{}, {"num_slots": 1, "max_drains": 1}, {"serial": True}])
@pytest.mark.parametrize("call", [1, 3, 6, 13])
def test_a_drain_that_fails_ends_the_run(call: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module = serial if options.get("serial") else lanes
    monkeypatch.setattr(module, "land", fail_at(call, module.land))
    _, model = stream(make_model("llama"), **options)
    with pytest.raises(LaneError, match="the lane fails"):
        run_until_it_fails(model)


def fail_for_good(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Updates fail from the call of this number on, at every retry."""
    run, count = CpuUpdater.run, 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count >= call:
            raise LaneError("the lane fails")
        return run(*args, **kwargs)

    monkeypatch.setattr(commit, "FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(CpuUpdater, "run", failing)


@pytest.mark.parametrize("options", [{}, {"num_slots": 1, "max_drains": 1}, {"serial": True}])
@pytest.mark.parametrize("call", [1, 4, 6, 9])
def test_an_update_that_fails_ends_the_run(call: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for_good(monkeypatch, call)
    _, model = stream(make_model("llama"), **options)
    with pytest.raises(mt.UpdateError, match="the lane fails"):
        run_until_it_fails(model)


@pytest.mark.parametrize("options", [{}, {"num_slots": 1, "max_drains": 1}])
@pytest.mark.parametrize("name", ["model.embed_tokens", "model.layers.1", "lm_head"])
def test_weights_that_cannot_be_copied_end_the_run(name: str, options: dict[str, Any]) -> None:
    _, model = stream(make_model("llama"), **options)
    home = next(home for home in the_engine(model).homes if home.name == name)
    home.wire = home.wire.as_subclass(FailingWire)
    with pytest.raises(LaneError, match="the lane fails"):
        run_until_it_fails(model)


def test_a_failed_update_is_raised_to_whoever_reads_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = stream(make_model("llama"))
    optimizer = mt.optim.AdamW(model)
    model(**make_batch()).loss.backward()
    fail_for_good(monkeypatch, 1)
    with contextlib.suppress(mt.UpdateError):  # the first update may fail while the others are still being queued
        optimizer.step()
    with pytest.raises(mt.UpdateError):
        dict(mt.named_parameters(model))
    with pytest.raises(mt.UpdateError):
        model.state_dict()
    with pytest.raises(mt.UpdateError):
        model(**make_batch())


def test_what_is_read_between_steps_is_whole() -> None:
    """Masters read while their halves are being written must be of one step."""
    mt.init(device="cpu", precision="bf16")
    _, model = stream(make_model("llama"), lane_delay_seconds=DELAY_SECONDS)
    optimizer = mt.optim.AdamW(model, lr=1e-2)
    for seed in range(3):
        model(**make_batch(seed=seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for _, parameter in model.named_parameters():
            master = parameter.master()
            hi = torch.empty(master.numel(), dtype=torch.bfloat16)
            split_(master.view(-1), hi, torch.empty(master.numel(), dtype=torch.int16))
            home: Home = parameter._home
            assert torch.equal(hi, home.weights(parameter._field).view(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_that_is_held_changes_with_the_step_and_not_after_it(dtype: torch.dtype) -> None:
    mt.init(device="cpu", precision="bf16" if dtype == torch.bfloat16 else "fp32")
    _, model = stream(make_model("llama").to(dtype), lane_delay_seconds=DELAY_SECONDS)
    optimizer = mt.optim.AdamW(model, lr=1e-2)
    held = model.state_dict()
    before = {name: weight.clone() for name, weight in held.items()}
    model(**make_batch()).loss.backward()
    optimizer.step()
    seen = {name: weight.clone() for name, weight in held.items()}
    for name, weight in model.state_dict().items():
        assert torch.equal(seen[name], weight), name
        assert not torch.equal(before[name], weight), name
