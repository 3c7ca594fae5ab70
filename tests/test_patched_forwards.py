"""Blocks whose own `forward` was replaced on the instance are streamed as they are."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_same_accumulation, assert_same_step, the_engine, zero_grad
from comparing import stream as stream_copy
from model_zoo import Block, Stack, make_batch
from torch import nn

import megatrain as mt
from megatrain.execute.templates import group_templates

WIDTH = 16


def in_turn(model: Stack, h: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        h = block(h)
    return h


def wrap(block: Any) -> None:
    """Around the forward that was there."""
    forward = block.forward
    block.forward = lambda x: forward(x) + 0.1 * torch.tanh(block.inner(x)[..., :WIDTH])


def replace(block: Any) -> None:
    block.forward = lambda x: x + block.outer(torch.relu(block.inner(x)))


def bind(block: Any) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * Block.forward(self, x)

    block.forward = types.MethodType(forward, block)


def call_its_class(block: Any) -> None:
    block.forward = lambda x: 3 * type(block).forward(block, x)


def hold_a_part(block: Any) -> None:
    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        return module.norm(x) * module.scale

    block.forward = functools.update_wrapper(functools.partial(forward, block), block.forward)


PATCHES = {patch.__name__: patch for patch in (wrap, replace, bind, call_its_class, hold_a_part)}


def stream(patch: Callable[[Any], None], indices: list[int]) -> tuple[Any, Any]:
    """A patch holds on to its block: a copy of the model needs its own."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Stack([Block(WIDTH) for _ in range(3)], in_turn))
        for index in indices:
            patch(models[-1].blocks[index])
    mt.stream(models[1])
    return models[0], models[1]


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return model(**batch)["loss"]


@pytest.mark.parametrize("name", PATCHES)
def test_a_patched_forward_is_streamed(name: str) -> None:
    plain, model = stream(PATCHES[name], [0, 2])
    assert_same_step(plain, model, lambda each: loss_of(each, make_batch()))
    zero_grad(plain, model)
    batches = [make_batch(length, seed=length) for length in (7, 12)]
    assert_same_accumulation(plain, model, batches, loss_of)
    with torch.no_grad():
        logits = [each(**make_batch())["logits"] for each in (plain, model)]
    assert torch.equal(*logits)
    assert mt.stats(model)["num_fetches"] == 0
    assert {"blocks.0", "blocks.1", "blocks.2"} <= mt.stats(model)["visits"].keys()
    the_engine(model).close()


def test_a_patched_forward_is_a_template_of_its_own() -> None:
    plain, model = stream(replace, [0, 2])
    templates = group_templates(the_engine(model).layers)
    assert sorted([layer.name for layer in layers] for layers in templates.values()) == [
        ["blocks.0"],
        ["blocks.1"],
        ["blocks.2"],
    ]
    del plain
    the_engine(model).close()


def test_a_forward_that_only_the_instance_has() -> None:
    def make() -> nn.Module:
        block = nn.Module()
        block.linear = nn.Linear(WIDTH, WIDTH)
        block.forward = lambda x: x + block.linear(x).tanh()
        return block

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Stack([make() for _ in range(3)], in_turn))
    plain, model = models
    mt.stream(model)
    assert [layer.name for layer in the_engine(model).layers] == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert_same_step(plain, model, lambda each: loss_of(each, make_batch()))
    the_engine(model).close()


def test_a_forward_that_is_patched_after_streaming_is_called() -> None:
    plain, model = stream_copy(Stack([Block(WIDTH) for _ in range(3)], in_turn))
    for each in (plain, model):
        call_its_class(each.blocks[1])
    assert_same_step(plain, model, lambda each: loss_of(each, make_batch()))
