"""Looking at gradients changes no bit of training; what is written into one counts, and nothing beside it moves."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from gradient_helpers import SIZES, assert_same, gradients, loss_of, pair
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from update_training import batches, result, start

import megatrain as mt
from megatrain.api import stream
from megatrain.base.config import StreamOptions
from megatrain.store.lending import Lending


def two_passes(precision: str) -> nn.Module:
    """A model with fp32 totals of two passes."""
    model, _ = start(precision=precision)
    for micro_batches in batches(2):
        mt.accumulate(model, micro_batches)
    return model


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_written_total_of_several_passes_stays_fp32(precision: str) -> None:
    model = two_passes(precision)
    before = gradients(model)
    for parameter in model.parameters():
        parameter.grad *= 1.0
    assert_same(gradients(model), before)
    first, *others = model.parameters()
    first.grad = before[next(iter(before))] * 3
    assert torch.equal(first.grad, before[next(iter(before))] * 3)
    held = first.grad
    first.grad = held * 2  # while somebody holds the one before
    assert torch.equal(first.grad, held * 2)
    assert all(torch.equal(p.grad, g) for p, g in zip(others, list(before.values())[1:], strict=True))


LOOKS: dict[str, Callable[[nn.Module], object]] = {
    "one by one": lambda model: [float(gradient.norm()) for _, gradient in mt.named_gradients(model)],
    "all held": lambda model: [parameter.grad for parameter in model.parameters()],
    "put back": lambda model: [setattr(parameter, "grad", parameter.grad) for parameter in model.parameters()],
}


def trained(precision: str, look: Callable[[nn.Module], object]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Norms, weights and states of steps of two passes, each clipped twice. What `look` returns is held."""
    model, optimizer = start(precision=precision)
    norms, held = [], []
    for micro_batches in batches(3):
        for part in micro_batches:
            mt.accumulate(model, [part])
            held.append(look(model))
            norms.append(mt.clip_grad_norm_(model, 0.1).item())
            held.append(look(model))
            norms.append(mt.clip_grad_norm_(model, 0.05).item())
            held.append(look(model))
        optimizer.step()
        held.append(look(model))
        optimizer.zero_grad()
    return norms, result(model, optimizer)


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_looking_at_gradients_changes_no_bit(precision: str, look: Callable[[nn.Module], object]) -> None:
    expected, weights = trained(precision, lambda _: None)
    norms, its_weights = trained(precision, look)
    assert norms == expected
    assert_same(its_weights, weights)


def test_the_norm_of_a_gradient_that_was_only_looked_at_is_the_one_from_its_drain() -> None:
    """A device may take it in another order than the host: the clip factor would depend on who looks."""
    _, streamed = pair()
    loss_of(streamed, 1).backward()
    parameter = streamed.model.layers[0].mlp.up_proj.weight
    gradients_at_home, field = parameter._home.grads, parameter._field
    gradients_at_home.arrived.wait()
    gradients_at_home._norms[field] *= 1 + 2**-20
    taken = gradients_at_home._norms[field]
    held = parameter.grad
    assert gradients_at_home.norms()[field] == taken
    held.mul_(2)
    assert gradients_at_home.norms()[field] == float(torch.linalg.vector_norm(held))
    held.mul_(2)
    del held
    assert gradients_at_home.norms()[field] == float(torch.linalg.vector_norm(parameter.grad))


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("num_passes", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_written_after_clipping_counts_and_its_neighbours_stay(
    precision: str, num_passes: int, holds: bool
) -> None:
    """The truth: the gradient in fp32 times the factor, times two."""
    model, _ = start(precision=precision)
    for micro_batches in batches(num_passes):
        mt.accumulate(model, micro_batches)
    parameter = model.model.layers[0].mlp.up_proj.weight
    before = {name: gradient.float().clone() for name, gradient in mt.named_gradients(model)}
    factor = 0.1 / (mt.clip_grad_norm_(model, 0.1).item() + 1e-6)
    expected = {name: gradient for name, gradient in gradients(model).items()}
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.allclose(expected[name], before[name] * factor, rtol=1e-6)
    held = [parameter.grad] if holds else []
    parameter.grad.mul_(2)
    expected[name] *= 2
    assert_same(gradients(model), expected)
    assert all(torch.equal(gradient, expected[name]) for gradient in held)
    norms = [float(torch.linalg.vector_norm(expected[n].double())) for n in expected]
    total = mt.clip_grad_norm_(model, 1e9).item()
    assert total == pytest.approx(math.sqrt(sum(norm * norm for norm in norms)), rel=1e-5)
    for gradient in held:
        gradient.mul_(2)
        expected[name] *= 2
    assert_same(gradients(model), expected)
    mt.clip_grad_norm_(model, mt.clip_grad_norm_(model, 1e9).item() / 8)
    assert torch.allclose(parameter.grad, expected[name] / 8, rtol=1e-5)


def test_a_gradient_written_after_clipping_reaches_the_update() -> None:
    results = []
    for writes in (False, True):
        model, optimizer = start(optimizer=mt.optim.SGD, precision="bf16", numbers={"weight_decay": 0.0})
        before = mt.full_state_dict(model)
        mt.accumulate(model, next(batches(1)))
        mt.clip_grad_norm_(model, 0.1)
        for parameter in model.parameters() if writes else ():
            parameter.grad.mul_(2)
        optimizer.step()
        results.append({name: before[name] - now for name, now in mt.full_state_dict(model).items()})
    for name, step in results[0].items():
        # Weights below 2 are rounded by up to 2^-24 in each of the two steps, of which one is doubled.
        assert torch.allclose(results[1][name], 2 * step, rtol=1e-6, atol=3 * 2**-24), name


def test_clipping_is_seen_by_who_holds_a_clipped_gradient() -> None:
    _, streamed = pair()
    loss_of(streamed, 1).backward()
    mt.clip_grad_norm_(streamed, 0.1)
    held = [parameter.grad for parameter in streamed.parameters()]
    mt.clip_grad_norm_(streamed, 0.01)
    assert all(torch.equal(h, parameter.grad) for h, parameter in zip(held, streamed.parameters(), strict=True))


def test_looking_at_clipped_gradients_in_turn_keeps_no_copies() -> None:
    model, _ = start(precision="bf16")
    mt.accumulate(model, next(batches(1)))
    mt.clip_grad_norm_(model, 0.1)
    homes = {parameter._home for parameter in model.parameters()}
    before = sum(home.grads.slab_bytes for home in homes)
    most = 0
    for parameter in model.parameters():
        assert parameter.grad is not None
        most = max(most, sum(home.grads.slab_bytes for home in homes) - before)
    assert 0 < most <= 2 * 4 * max(parameter.numel() for parameter in model.parameters())


def test_a_gradient_with_a_graph_is_taken_without_it() -> None:
    _, streamed = pair()
    for parameter in streamed.parameters():
        parameter.grad = torch.ones(parameter.shape, requires_grad=True) * 2
        parameter.grad.mul_(torch.ones(parameter.shape, requires_grad=True))
    assert not any(parameter.grad.requires_grad for parameter in streamed.parameters())
    assert not any(parameter._home.grads._slab.requires_grad for parameter in streamed.parameters())


def test_what_is_lent_on_a_device_keeps_its_owner_out_of_graphs() -> None:
    """A meta tensor stands for one on a device."""
    owned = torch.zeros(4, device="meta")
    Lending().lend(owned).mul_(torch.ones(4, device="meta", requires_grad=True))
    assert not owned.requires_grad


@pytest.mark.parametrize(
    "value", [lambda p: torch.ones(p.shape).to_sparse(), lambda p: torch.ones(p.shape, device="meta")]
)
@pytest.mark.parametrize("is_there", [False, True])
def test_a_gradient_that_cannot_be_taken_changes_nothing(value: Callable, is_there: bool) -> None:
    _, streamed = pair()
    loss_of(streamed, 1).backward()
    before = gradients(streamed)
    parameter = streamed.model.layers[0].mlp.up_proj.weight
    if not is_there:
        streamed.zero_grad()
        before = {}
    with pytest.raises((RuntimeError, NotImplementedError)):
        parameter.grad = value(parameter)
    assert_same(gradients(streamed), before)


def test_neighbours_of_a_gradient_that_is_put_in_place_stay_writable() -> None:
    plain, streamed = pair()
    for model in (plain, streamed):
        loss_of(model, 1).backward()
        mlp = model.model.layers[0].mlp
        held, neighbour = mlp.up_proj.weight.grad, mlp.down_proj.weight.grad
        mlp.up_proj.weight.grad = torch.ones_like(held)
        held.zero_()
        neighbour.mul_(3)
    assert_same(gradients(plain), gradients(streamed))


def test_a_gradient_written_right_after_a_second_backward_is_not_in_the_sum() -> None:
    plain = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **SIZES))
    slow = stream(copy.deepcopy(plain), options=StreamOptions(lane_delay_seconds=0.02))
    loss_of(slow, 1).backward()
    held = [parameter.grad for parameter in slow.parameters()]
    loss_of(slow, 2).backward()
    for gradient in held:
        gradient.zero_()
    for seed in (1, 2):
        loss_of(plain, seed).backward()
    assert_same(gradients(plain), gradients(slow))
