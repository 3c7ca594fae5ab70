"""Gradients at home do what `.grad` does in plain PyTorch: clipping, several optimizers, held and dropped gradients.

Every test runs the same lines on a plain copy and compares bits, or weights after the same definition of the update.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from gradient_helpers import SIZES, assert_same, gradients, loss_of, pair
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

import megatrain as mt
from megatrain.api import stream
from megatrain.base.config import StreamOptions


def clip_plain(model: nn.Module, max_norm: float) -> float:
    """The definition: norms a parameter in fp32, their squares summed in fp64, the factor rounded to fp32."""
    norms = [float(torch.linalg.vector_norm(p.grad)) for p in model.parameters() if p.grad is not None]
    total = sum(norm * norm for norm in norms) ** 0.5
    factor = max_norm / (total + 1e-6)
    if not factor > 1.0:
        for p in model.parameters():
            p.grad.mul_(factor)
    return total


Action = Callable[[nn.Module, Callable[[nn.Module, float], object]], None]


def clip_twice(model: nn.Module, clip: Callable[[nn.Module, float], object]) -> None:
    loss_of(model, 1).backward()
    clip(model, 0.1)
    clip(model, 1000.0)


def clip_then_add(model: nn.Module, clip: Callable[[nn.Module, float], object]) -> None:
    loss_of(model, 1).backward()
    clip(model, 0.1)
    loss_of(model, 2).backward()


def clip_then_drop(model: nn.Module, clip: Callable[[nn.Module, float], object]) -> None:
    loss_of(model, 1).backward()
    clip(model, 0.1)
    model.zero_grad()
    loss_of(model, 2).backward()


@pytest.mark.parametrize("action", [clip_twice, clip_then_add, clip_then_drop])
def test_clipping_belongs_to_the_gradients_that_were_there(action: Action) -> None:
    plain, streamed = pair()
    action(plain, clip_plain)
    action(streamed, mt.clip_grad_norm_)
    assert_same(gradients(plain), gradients(streamed))


def test_a_norm_of_nan_makes_all_gradients_nan() -> None:
    _, streamed = pair()
    loss_of(streamed, 1).backward()
    streamed.model.norm.weight.grad.fill_(math.nan)
    assert math.isnan(mt.clip_grad_norm_(streamed, 1.0))
    assert all(gradient.isnan().all() for gradient in gradients(streamed).values())


def test_dropped_and_changed_gradients_count_as_they_are() -> None:
    plain, streamed = pair()
    stream_norm = []
    for model in (plain, streamed):
        loss_of(model, 1).backward()
        model.lm_head.weight.grad = None
        model.model.norm.weight.grad.mul_(100)
    stream_norm = float(mt.clip_grad_norm_(streamed, 1e9))
    norms = [float(torch.linalg.vector_norm(p.grad)) for p in plain.parameters() if p.grad is not None]
    assert stream_norm == float(torch.tensor(sum(norm * norm for norm in norms) ** 0.5))


def test_a_gradient_changed_before_its_drain_has_landed_counts_changed() -> None:
    plain = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **SIZES))
    slow = stream(copy.deepcopy(plain), options=StreamOptions(lane_delay_seconds=0.02))
    for model in (plain, slow):
        loss_of(model, 1).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(3)
    norms = [float(torch.linalg.vector_norm(p.grad)) for p in plain.parameters()]
    assert float(mt.clip_grad_norm_(slow, 1e9)) == pytest.approx(sum(n * n for n in norms) ** 0.5, rel=1e-6)


def test_a_gradient_that_is_held_does_not_change() -> None:
    plain, streamed = pair()
    held = []
    for model in (plain, streamed):
        loss_of(model, 1).backward()
        grads = [p.grad for p in model.parameters()]
        model.zero_grad()
        loss_of(model, 2).backward()
        held.append(grads)
    assert all(torch.equal(a, b) for a, b in zip(*held, strict=True))
    assert_same(gradients(plain), gradients(streamed))


def test_an_optimizer_drops_and_clips_for_its_own_parameters() -> None:
    _, streamed = pair()
    head, rest = streamed.lm_head.weight, [p for n, p in streamed.named_parameters() if n != "lm_head.weight"]
    first, second = mt.optim.AdamW([head], lr=0.1), mt.optim.AdamW(rest, lr=0.1)
    loss_of(streamed, 1).backward()
    second.zero_grad()
    assert head.grad is not None and all(p.grad is None for p in rest)
    loss_of(streamed, 2).backward()
    mt.clip_grad_norm_(streamed, 1e-3)
    clipped = gradients(streamed)
    first.step()
    # The second optimizer's gradients are still the clipped ones.
    assert_same(clipped, gradients(streamed))


def test_a_held_optimizer_state_is_never_half_updated() -> None:
    plain = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **SIZES))
    slow = stream(plain, options=StreamOptions(lane_delay_seconds=0.02))
    optimizer = mt.optim.AdamW(slow, lr=0.1)
    held = optimizer.state_dict()["state"]
    loss_of(slow, 1).backward()
    optimizer.step()
    moments = {index: state["exp_avg"].clone() for index, state in held.items()}
    slow.zero_grad()
    optimizer._wait()
    assert all(torch.equal(moments[index], state["exp_avg"]) for index, state in held.items())
    assert all(moment.any() for moment in moments.values())


def test_frozen_after_the_backward_is_still_updated_as_in_plain_pytorch() -> None:
    _, streamed = pair()
    optimizer = mt.optim.AdamW(streamed, lr=0.1)
    loss_of(streamed, 1).backward()
    streamed.lm_head.weight.requires_grad_(False)
    before = streamed.lm_head.weight.master()
    optimizer.step()
    assert not torch.equal(before, streamed.lm_head.weight.master())


def test_frozen_between_two_backwards_keeps_its_gradient() -> None:
    plain, streamed = pair()
    for model in (plain, streamed):
        loss_of(model, 1).backward()
        model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
        loss_of(model, 2).backward()
    assert_same(gradients(plain), gradients(streamed))


# mt.accumulate's own normalisation


def micro_batches(labels: Callable[[torch.Tensor], torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 50, (4, 9))
    made = [{"input_ids": part, "labels": labels(part)} for part in ids.split(1)]
    made[0]["labels"] = made[0]["labels"].clone()
    if made[0]["labels"].dim() > 1:
        made[0]["labels"][..., :5] = -100
    return made


def test_a_causal_lm_is_normalised_by_the_tokens_of_the_step() -> None:
    plain, streamed = pair()
    batches = micro_batches(lambda ids: ids)
    whole = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    # The sum of the parts is rounded four times where the whole is rounded once: 4 x 2^-24 relative, and some for sums.
    assert float(sum(mt.accumulate(streamed, batches))) == pytest.approx(plain(**whole).loss.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("cls", "labels"),
    [(BertForMaskedLM, lambda ids: ids), (BertForSequenceClassification, lambda ids: ids[:, 0] % 2)],
)
def test_a_loss_that_ignores_the_number_of_targets_is_averaged(cls: type[nn.Module], labels: Callable) -> None:
    plain = cls(BertConfig(**SIZES)).eval()
    streamed = mt.stream(copy.deepcopy(plain))
    batches = micro_batches(labels)
    losses = mt.accumulate(streamed, batches)
    for batch, loss in zip(batches, losses, strict=True):
        expected = plain(**batch).loss / len(batches)
        expected.backward()
        assert torch.equal(loss, expected.detach())
    got = gradients(streamed)
    for name, parameter in plain.named_parameters():
        # The tied embedding adds its parts in another order (decisions.md): 4 x 2^-24 of the largest.
        bound = 2**-22 * float(parameter.grad.abs().max()) if "word_embeddings" in name else 0.0
        assert float((got[name] - parameter.grad).abs().max()) <= bound, name
