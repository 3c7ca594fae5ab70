"""The moving average of the weights: it follows every weight, nobody writes in its place, and files keep it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from update_training import assert_same, batches, result, start, tiny_llama, train

import megatrain as mt
from megatrain.base.config import StreamOptions
from megatrain.base.errors import RefusedError
from megatrain.optim.base import HomeOptimizer
from megatrain.plan.placement import Place

FROZEN = "model.layers.1.mlp.up_proj.weight"


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in mt.full_state_dict(model).items()}


def loss(model: nn.Module) -> torch.Tensor:
    return model(**next(batches(1, 9))[0]).loss


def refused_backward(model: nn.Module, optimizer: HomeOptimizer) -> None:
    before = loss(model)
    with optimizer.ema_weights():
        before.backward()


def refused_write(model: nn.Module, optimizer: HomeOptimizer) -> None:
    with optimizer.ema_weights(), torch.no_grad():
        next(model.parameters()).zero_()


def inside(action: Callable[[nn.Module, HomeOptimizer], object]) -> Callable[[nn.Module, HomeOptimizer], None]:
    def run(model: nn.Module, optimizer: HomeOptimizer) -> None:
        with optimizer.ema_weights():
            action(model, optimizer)

    return run


REFUSED = {
    "accumulate": inside(lambda model, _: mt.accumulate(model, next(batches(1)))),
    "forward and backward": inside(lambda model, _: loss(model).backward()),
    "backward alone": refused_backward,
    "step": inside(lambda _, optimizer: optimizer.step()),
    "write": refused_write,
    "data": inside(lambda model, _: next(model.parameters()).data.zero_()),
    "init": inside(lambda model, _: nn.init.zeros_(model.lm_head.weight)),
    "load_state_dict": inside(lambda model, _: model.load_state_dict(tiny_llama().state_dict())),
    "of the optimizer": inside(lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict())),
    "another average": inside(lambda model, _: mt.optim.AdamW(model.lm_head.parameters(), ema_decay=0.5)),
}


@pytest.mark.parametrize("action", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("clip", ["global", "layer"])
def test_what_would_train_or_write_the_average_is_refused_and_changes_nothing(
    clip: str, action: Callable[[nn.Module, HomeOptimizer], None]
) -> None:
    model, optimizer = start(clip=clip, numbers={"ema_decay": 0.5})
    train(model, optimizer, batches(2), clip)
    before = {name: value.clone() for name, value in result(model, optimizer).items()}
    with pytest.raises(RefusedError, match=r"inside ema_weights\(\)"):
        action(model, optimizer)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_same(result(model, optimizer), before)
    train(model, optimizer, batches(1), clip)


def test_gradients_of_inputs_may_be_taken_in_the_average() -> None:
    model, optimizer = start(numbers={"ema_decay": 0.5})
    train(model, optimizer, batches(1))
    embedded = torch.randn(1, 4, 32, requires_grad=True)
    with optimizer.ema_weights():
        (gradient,) = torch.autograd.grad(model(inputs_embeds=embedded).logits.sum(), embedded)
    assert gradient.any()


@pytest.mark.parametrize("clip", ["global", "layer"])
@pytest.mark.parametrize(("precision", "master"), [("fp32", "fp32"), ("bf16", "split"), ("bf16", "bf16")])
@pytest.mark.parametrize("freezes", ["one", "a home"])
def test_the_average_follows_weights_without_gradients(precision: str, master: str, clip: str, freezes: str) -> None:
    """As torch.optim.swa_utils.AveragedModel: every average moves with every step."""
    options = StreamOptions(lane_delay_seconds=0.005)
    model, optimizer = start(options, clip=clip, precision=precision, master=master, numbers={"ema_decay": 0.5})
    train(model, optimizer, batches(2), clip)
    frozen = [n for n, _ in model.named_parameters() if n == FROZEN or (freezes == "a home" and "layers.1" in n)]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    with optimizer.ema_weights():
        averages = {name: mt.full_state_dict(model)[name].float() for name in frozen}
    states = {name: optimizer.state[model.get_parameter(name)]["ema"].clone() for name in frozen}
    now = {name: value.float() for name, value in weights(model).items()}
    assert any(not torch.equal(averages[name], now[name]) for name in frozen)
    for micro_batches in batches(3):
        train(model, optimizer, iter([micro_batches]), clip)
        for name, average in states.items():
            average.mul_(0.5).add_(now[name].mul(0.5))
            assert torch.equal(optimizer.state[model.get_parameter(name)]["ema"], average), name
    assert all(torch.equal(weights(model)[name].float(), now[name]) for name in frozen)


PLACES = {
    "device": "hbm",
    "streamed": "stream",
    "disk": "disk",
    "moments on disk": Place(moments="disk"),
    "moments on the device": Place(moments="hbm", update="device"),
    "low halves on the device": Place(low="hbm", update="device"),
}


def odd_steps(options: StreamOptions, folder: Path) -> dict[str, torch.Tensor]:
    """Averages, weights and states after steps with frozen parameters and gradients that somebody writes."""
    model, optimizer = start(options, precision="bf16", numbers={"ema_decay": 0.5}, offload_dir=folder)
    head, now_and_then = model.lm_head.weight, model.get_parameter(FROZEN)
    for i, micro_batches in enumerate(batches(8)):
        now_and_then.requires_grad_(i % 4 < 2)
        mt.accumulate(model, micro_batches[:1])
        mt.clip_grad_norm_(model, 0.1)
        head.grad.mul_(2)
        if i % 2:
            mt.accumulate(model, micro_batches[1:])
            head.grad = head.grad / 2
        with optimizer.ema_weights():
            averages = {f"average {name}": value for name, value in weights(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    return {**averages, **result(model, optimizer)}


@pytest.fixture(scope="module")
def of_odd_steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return odd_steps(StreamOptions(serial=True), tmp_path_factory.mktemp("truth"))


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_averages_and_written_gradients_depend_on_no_place(
    place: str | Place, of_odd_steps: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    options = StreamOptions(places=place, poison=True, lane_delay_seconds=0.002)
    assert_same(odd_steps(options, tmp_path), of_odd_steps)


def test_a_skipped_step_leaves_averages() -> None:
    model, optimizer = start(numbers={"ema_decay": 0.5})
    train(model, optimizer, batches(1))
    before = {name: value.clone() for name, value in result(model, optimizer).items()}
    model.lm_head.weight.requires_grad_(False)
    mt.accumulate(model, next(batches(1)), lambda outputs, _: outputs.loss * float("nan"))
    optimizer.step()
    assert optimizer.step_was_skipped
    assert_same(result(model, optimizer), before)


@pytest.mark.parametrize("leaves_first", [0, 1])
def test_blocks_of_two_optimizers_end_in_any_order(leaves_first: int) -> None:
    mt.init(device="cpu")
    model = mt.stream(tiny_llama())
    parameters = list(model.parameters())  # both have parameters in every home
    optimizers = [mt.optim.AdamW(parameters[i::2], lr=1e-2, ema_decay=0.5) for i in (0, 1)]
    for micro_batches in batches(3):
        mt.accumulate(model, micro_batches)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    before, alone = weights(model), []
    for optimizer in optimizers:
        with optimizer.ema_weights():
            alone.append(weights(model))
    assert_same(weights(model), before)
    blocks = [optimizer.ema_weights() for optimizer in optimizers]
    for block in blocks:
        block.__enter__()
    both = weights(model)
    assert all(torch.equal(both[name], alone[i % 2][name]) for i, (name, _) in enumerate(model.named_parameters()))
    blocks[leaves_first].__exit__(None, None, None)
    assert_same(weights(model), alone[1 - leaves_first])
    with pytest.raises(RefusedError):
        mt.accumulate(model, next(batches(1)))
    blocks[1 - leaves_first].__exit__(None, None, None)
    assert_same(weights(model), before)
    mt.accumulate(model, next(batches(1)))


def test_an_average_that_was_not_saved_starts_as_the_weights_are(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = start()
    train(model, optimizer, batches(3))
    saved, now = copy.deepcopy(optimizer.state_dict()), weights(model)
    some = {**saved, "state": {number: state for number, state in saved["state"].items() if number > 3}}
    for state_dict in (saved, some):
        second, other = start(numbers={"ema_decay": 0.9})
        second.load_state_dict(now)
        with caplog.at_level(logging.WARNING, "megatrain"):
            other.load_state_dict(state_dict)
        assert "no average of the weights" in caplog.text
        caplog.clear()
        with other.ema_weights():
            assert_same(weights(second), now)
    other.load_state_dict(copy.deepcopy(other.state_dict()))
    assert not caplog.text


def test_a_saved_average_that_is_dropped_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = start(numbers={"ema_decay": 0.9})
    train(model, optimizer, batches(1))
    _, other = start()
    with caplog.at_level(logging.WARNING, "megatrain"):
        other.load_state_dict(optimizer.state_dict())
    assert "saved average of the weights was dropped" in caplog.text
