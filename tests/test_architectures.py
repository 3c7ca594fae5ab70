"""Every architecture trains streamed as it trains plainly: loss and every gradient, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from comparing import assert_same_accumulation, assert_same_step, gradients, stream, the_engine, zero_grad
from model_zoo import ARCHITECTURES, ROUTED, make_batch, make_model
from torch import nn

LENGTHS = (7, 12, 9)
CALLED_OFTEN = {"albert": "albert.encoder.albert_layer_groups."}
"""Architectures that call a layer several times in one forward, and the prefix of its parameters."""


def loss_of(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    return model(**batch).loss / len(LENGTHS)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_loss_and_gradients_are_those_of_plain_pytorch(name: str) -> None:
    plain, model = stream(make_model(name))
    for seed in (1, 2):
        batch = make_batch(seed=seed)
        assert_same_step(plain, model, lambda each, batch=batch: each(**batch).loss)
        zero_grad(plain, model)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layer_major_accumulation_is_plain_accumulation(name: str) -> None:
    """From the very first call on. Parameters that are visited more than once: see test_accumulate_rounding."""
    plain, model = stream(make_model(name))
    batches = [make_batch(length, seed=length) for length in LENGTHS]
    several = visited_several_times(plain, name)
    for seed in (1, 2):
        assert_same_accumulation(plain, model, batches, loss_of, except_for=several, seed=seed)
        zero_grad(plain, model)


def visited_several_times(plain: nn.Module, name: str) -> list[str]:
    """Names of tied parameters, and of parameters of a layer that is called several times."""
    names: dict[int, list[str]] = {}
    for parameter_name, parameter in plain.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(parameter_name)
    tied = [places[0] for places in names.values() if len(places) > 1]
    prefix = CALLED_OFTEN.get(name)
    return tied + [each for each, _ in plain.named_parameters() if prefix is not None and each.startswith(prefix)]


@pytest.mark.parametrize("name", ROUTED)
def test_the_router_loss_reaches_the_routers(name: str) -> None:
    """What the tests above compare holds the auxiliary loss: without it, gradients of routers are others."""
    without = make_model(name, router_aux_loss_coef=0.0)
    _, model = stream(make_model(name))
    batch = make_batch()
    for each in (without, model):
        each(**batch).loss.backward()
    left, right = gradients(without), gradients(model)
    routers = [each for each in left if each.endswith((".gate.weight", ".router.weight"))]
    assert len(routers) == 3
    for each in routers:
        assert not torch.equal(left[each], right[each])


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "t5", "qwen3_next"])
def test_the_serial_twin_is_bit_equal_too(name: str) -> None:
    model = make_model(name)
    plain, twin = stream(copy.deepcopy(model), serial=True)
    batch = make_batch()
    assert_same_step(plain, twin, lambda each: each(**batch).loss)


def test_alternating_layers_are_two_kinds_of_block() -> None:
    """Sliding and full attention have equal shapes and different code."""
    _, model = stream(make_model("gemma2"))
    assert "3 blocks of 2 kinds" in the_engine(model).summary()
