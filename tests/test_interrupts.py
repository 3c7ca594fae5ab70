"""Ctrl-C at any place: the model stays usable, and the next step is right."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_equal, gradients, stream, the_engine
from interrupting import interrupted
from model_zoo import Block, Stack, make_batch

import megatrain as mt
from megatrain.base.errors import RefusedError
from megatrain.execute.parameters import HomeParameter
from megatrain.plan.placement import Place


def in_order(stack: Stack, x: torch.Tensor) -> torch.Tensor:
    for block in stack.blocks:
        x = block(x)
    return x


def make_stack() -> Stack:
    return Stack([Block(16) for _ in range(3)], in_order)


def plain_step(model: Any) -> None:
    for seed in (1, 2):
        (model(**make_batch(seed=seed))["loss"] / 2).backward()


def accumulated_step(model: Any) -> None:
    engine = the_engine(model)
    engine.accumulate([lambda seed=seed: model(**make_batch(seed=seed))["loss"] / 2 for seed in (1, 2)])


# Raised in a destructor, it is printed and forgotten.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("step", [plain_step, accumulated_step])
def test_interrupts_at_any_place(step: Callable[[Any], None]) -> None:
    plain, model = stream(make_stack())
    plain_step(plain)
    expected = gradients(plain)
    step(model)
    num_places = interrupted(lambda: step(model), None)
    assert num_places > 1000
    for at in range(1, num_places, 83):
        model.zero_grad()
        interrupted(lambda: step(model), at)
        assert all(isinstance(parameter, HomeParameter) for parameter in model.parameters()), at
        assert torch.is_grad_enabled()
        model.zero_grad()
        step(model)
        assert_equal(expected, gradients(model))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_while_updates_are_queued() -> None:
    """What is read afterwards is what the model computes with, and changes no more."""
    mt.init(device="cpu")
    _, model = stream(make_stack(), num_slots=5, lane_delay_seconds=0.002)
    optimizer = mt.optim.SGD(model, lr=0.5)
    plain_step(model)
    num_places = interrupted(optimizer.step, None)
    optimizer.zero_grad()
    first = {name: value.clone() for name, value in make_stack().state_dict().items()}
    model.load_state_dict(first)
    num_steps = dict.fromkeys(dict(model.named_parameters()), 1)
    for at in range(1, num_places, 5):
        plain_step(model)
        interrupted(optimizer.step, at)
        optimizer.zero_grad()
        weights = {name: value.clone() for name, value in mt.named_parameters(model)}
        plain = make_stack()
        plain.load_state_dict(weights)
        with torch.no_grad():
            assert torch.equal(model(**make_batch())["loss"], plain(**make_batch())["loss"]), at
        the_engine(model).wait()
        assert_equal(weights, dict(mt.named_parameters(model)))
        counted = {name: int(optimizer.state[parameter]["step"]) for name, parameter in model.named_parameters()}
        moved = {name for name, value in first.items() if not torch.equal(value, weights[name])}
        assert moved == {name for name, count in counted.items() if count > num_steps[name]}, at
        num_steps = counted
        model.load_state_dict(first)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_while_weights_come_from_disk(tmp_path: Path) -> None:
    mt.init(device="cpu", offload_dir=tmp_path)
    plain, model = stream(make_stack(), places=Place(weights="disk"), num_slots=2)
    plain_step(plain)
    expected = gradients(plain)
    plain_step(model)
    for at in range(1, interrupted(lambda: plain_step(model), None), 149):
        model.zero_grad()
        interrupted(lambda: plain_step(model), at)
        model.zero_grad()
        plain_step(model)
        assert_equal(expected, gradients(model))


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_between_a_drain_and_its_update() -> None:
    """clip="layer", two slabs: whatever is interrupted, slabs come back, and a gradient that was left is forgotten."""
    mt.init(device="cpu", clip="layer")
    plain, model = stream(make_stack(), max_drains=1)
    optimizer = mt.optim.SGD(model, lr=0.0)

    def step() -> None:
        accumulated_step(model)
        optimizer.step()

    step()
    norms = {home.name: home.grads.arrived_norm for home in the_engine(model).homes}
    for at in range(1, interrupted(step, None), 83):
        interrupted(step, at)
        optimizer.zero_grad()
        step()
        the_engine(model).wait()
        assert norms == {home.name: home.grads.arrived_norm for home in the_engine(model).homes}, at
        assert not any(home.grads.touched for home in the_engine(model).homes), at


def test_calls_from_two_threads_at_once_are_refused() -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Waiting(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            go_on.wait()
            return super().forward(x)

    _, model = stream(Stack([Waiting(16), Block(16)], in_order))
    batch = make_batch()
    outputs = []
    other = threading.Thread(target=lambda: outputs.append(model(**batch)["loss"]))
    other.start()
    inside.wait()
    with pytest.raises(RefusedError, match="two threads"):
        model(**batch)
    go_on.set()
    other.join()
    assert torch.equal(outputs[0], model(**batch)["loss"])
    outputs[0].backward()
    assert gradients(model)
