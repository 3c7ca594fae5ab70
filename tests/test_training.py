"""Twenty steps of training: weights, moments and norms are those of the definition on a plain model, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from comparing import assert_equal, gradients, stream, the_engine, zero_grad
from model_zoo import make_batch, make_model
from torch import nn

import megatrain as mt
from megatrain.optim.formula import AdamWScalars, adamw_
from megatrain.store.masters import split_

NUM_STEPS = 20
LR, BETAS, DECAY, MAX_NORM = 1e-2, (0.9, 0.98), 0.1, 0.4


def schedule(step: int) -> float:
    """Warm-up over 4 steps, then a cosine."""
    return (step + 1) / 4 if step < 4 else 0.5 * (1 + math.cos(math.pi * (step - 4) / NUM_STEPS))


def decays(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) > 1


def batches(step: int) -> list[dict[str, torch.Tensor]]:
    return [make_batch(length, rows=1, seed=10 * step + length) for length in (5, 8)]


def loss_of(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    return model(**batch).loss / 2


class Reference:
    """The definition on a plain model: fp32 masters, gradients summed in fp32 and rounded once to the wire dtype.

    Args:
        precision: "fp32", or "bf16" for a model that computes with the upper halves of its masters.
    """

    def __init__(self, plain: nn.Module, precision: str, eps: float = 1e-8) -> None:
        self.plain, self.precision, self.eps = plain, precision, eps
        self.masters = {name: p.detach().float().clone() for name, p in plain.named_parameters()}
        self.m = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self.v = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self.num_steps = 0
        self._write()

    def gradients(self, many: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Summed over micro-batches, on the wire."""
        sums: dict[str, torch.Tensor] = {}
        for batch in many:
            zero_grad(self.plain)
            loss_of(self.plain, batch).backward()
            for name, gradient in gradients(self.plain).items():
                sums[name] = sums[name] + gradient if name in sums else gradient.float()
        return {name: total.to(torch.bfloat16) if self.precision == "bf16" else total for name, total in sums.items()}

    def step(self, grads: dict[str, torch.Tensor], lr: float) -> float:
        """Clip and update; returns the norm before clipping."""
        self.num_steps += 1
        squares = [torch.linalg.vector_norm(g, dtype=torch.float32).item() ** 2 for g in grads.values()]
        norm = math.fsum(squares) ** 0.5
        for name, gradient in grads.items():
            scalars = AdamWScalars.at(
                self.num_steps,
                lr=lr,
                beta1=BETAS[0],
                beta2=BETAS[1],
                eps=self.eps,
                weight_decay=DECAY if decays(name, gradient.shape) else 0.0,
                clip=min(1.0, MAX_NORM / (norm + 1e-6)),
            )
            adamw_(self.masters[name], gradient.float(), self.m[name], self.v[name], scalars)
        self._write()
        return norm

    def _write(self) -> None:
        for name, parameter in self.plain.named_parameters():
            master = self.masters[name]
            if self.precision == "fp32":
                parameter.data = master.clone()
                continue
            hi = torch.empty(master.numel(), dtype=torch.bfloat16)
            split_(master.view(-1), hi, torch.empty(master.numel(), dtype=torch.int16))
            parameter.data = hi.view(master.shape)


def make_optimizer(model: nn.Module, eps: float = 1e-8) -> mt.optim.AdamW:
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if decays(n, p.shape)], "weight_decay": DECAY},
        {"params": [p for n, p in named if not decays(n, p.shape)], "weight_decay": 0.0},
    ]
    return mt.optim.AdamW(groups, lr=LR, betas=BETAS, eps=eps)


def train(model: nn.Module, reference: Reference, optimizer: mt.optim.AdamW) -> None:
    """Both, side by side; the norms are compared at every step."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    clipped = 0
    for step in range(NUM_STEPS):
        many = batches(step)
        the_engine(model).accumulate([lambda batch=batch: loss_of(model, batch) for batch in many])
        grads = reference.gradients(many)
        norm = mt.clip_grad_norm_(model, MAX_NORM)
        assert norm.item() == pytest.approx(reference.step(grads, LR * schedule(step)), rel=2.0**-23)
        clipped += norm.item() > MAX_NORM
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert 0 < clipped, "nothing was clipped"


@pytest.mark.parametrize("loaded", ["float32", "bfloat16"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_twenty_steps_are_the_definition(name: str, precision: str, loaded: str) -> None:
    mt.init(device="cpu", precision=precision)
    model = make_model(name)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, loaded))
    plain, model = stream(model)
    reference = Reference(plain, precision)
    before = {name: master.clone() for name, master in reference.masters.items()}
    optimizer = make_optimizer(model)
    train(model, reference, optimizer)
    after = {name: value.float() for name, value in mt.named_parameters(model)}
    assert_equal(reference.masters, after)
    assert all((after[each] != before[each]).float().mean() > 0.9 for each in after), "weights did not move"
    moments = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    assert_equal(reference.m, {name: state["exp_avg"] for name, state in moments.items()})
    assert_equal(reference.v, {name: state["exp_avg_sq"] for name, state in moments.items()})


def test_twenty_steps_are_near_torch_adamw() -> None:
    """torch.optim.AdamW gets the same gradients and rounds otherwise.

    Tolerance a parameter, by the derivation in tests/test_update.py with u = 2^-24, but for a denominator that is at
    least eps = 1e-3 here and not 0.5, and clipped gradients of at most G: m differs by 39u x G corrected for bias, so
    m / denominator by 39u x G / eps. The v part is 110u with beta2 = 0.999; with 0.98 |m / denominator| stays below
    1.2 too. Each step's change differs by at most lr x (39u x G / eps + 110u), and the weight is rounded twice a side.
    """
    eps, u = 1e-3, 2.0**-24
    plain, model = stream(make_model("llama"))
    reference = Reference(plain, "fp32", eps)
    theirs = {name: nn.Parameter(master.clone()) for name, master in reference.masters.items()}
    groups = [
        {"params": [p for n, p in theirs.items() if decays(n, p.shape)], "weight_decay": DECAY},
        {"params": [p for n, p in theirs.items() if not decays(n, p.shape)], "weight_decay": 0.0},
    ]
    torch_adamw = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=eps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch_adamw, schedule)
    optimizer = make_optimizer(model, eps)
    own_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    largest = dict.fromkeys(theirs, 0.0)
    for step in range(NUM_STEPS):
        the_engine(model).accumulate([lambda batch=batch: loss_of(model, batch) for batch in batches(step)])
        grads = gradients(model)
        clip = min(1.0, MAX_NORM / (mt.clip_grad_norm_(model, MAX_NORM).item() + 1e-6))
        for name, parameter in theirs.items():
            parameter.grad = grads[name] * clip
            largest[name] = max(largest[name], parameter.grad.abs().max().item())
        for each in (optimizer, torch_adamw, own_scheduler, scheduler):
            each.step()
        optimizer.zero_grad()
    for name, value in mt.named_parameters(model):
        change = LR * (39 * u * largest[name] / eps + 110 * u)
        bound = NUM_STEPS * (change + 4 * u * theirs[name].abs().max().item())
        assert bound < 1e-3
        assert (value - theirs[name].detach()).abs().max().item() <= bound, name


def test_the_norm_is_the_one_torch_finds() -> None:
    plain, model = stream(make_model("llama"))
    for each in (plain, model):
        each(**make_batch()).loss.backward()
    theirs = torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
    torch.testing.assert_close(mt.clip_grad_norm_(model, MAX_NORM), theirs, rtol=1e-6, atol=0)


def test_numbers_are_taken_when_step_is_called() -> None:
    """A scheduler changes the learning rate while updates are still to run."""
    weights = []
    for delay_seconds in (0.0, 0.01):
        _, model = stream(make_model("llama"), lane_delay_seconds=delay_seconds)
        optimizer = mt.optim.AdamW(model, lr=LR)
        for seed in (1, 2):
            model(**make_batch(seed=seed)).loss.backward()
            mt.clip_grad_norm_(model, MAX_NORM)
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.1
                group["betas"] = (0.5, 0.5)
                group["weight_decay"] = 0.5
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["betas"] = BETAS
        weights.append(dict(mt.named_parameters(model)))
    assert_equal(*weights)


def test_a_parameter_without_a_gradient_keeps_its_weight_and_step_count() -> None:
    model = make_model("llama")
    model.unused = nn.Linear(4, 4)
    plain, model = stream(model)
    optimizer = mt.optim.AdamW(model, lr=LR, weight_decay=DECAY)
    model(**make_batch()).loss.backward()
    optimizer.step()
    unused = model.get_parameter("unused.weight")
    assert torch.equal(unused.master(), plain.unused.weight)
    assert optimizer.state[unused]["step"] == 0
    assert optimizer.state[model.get_parameter("model.norm.weight")]["step"] == 1
