"""A small model with a loss of the test's own, in pieces of 5 tokens; what its loss and gradients are measured by."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from comparing import gradients, zero_grad
from model_zoo import VOCAB, Block, make_batch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch.nn import functional

import megatrain as mt
from megatrain.execute import engine, templates
from megatrain.execute.loss_in_pieces import LossInPieces
from megatrain.plan import cost

WIDTH = 16
SIZES = cost.PIECE_TOKENS, cost.PIECE_LOGITS
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}
NEAR = 16
"""A sum of n terms in another order is off by about sqrt(n) roundings; the longest sums here have 96 to 240."""
WAYS = ("accumulate", "backward")

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def in_pieces_of_five(monkeypatch: pytest.MonkeyPatch, *, compiled: bool = False) -> list[bool]:
    """Pieces of 5 tokens, at every size. The list gets, for each loss in pieces, whether its gradients were taken at
    once."""
    monkeypatch.setattr(cost, "PIECE_TOKENS", 5)
    monkeypatch.setattr(cost, "PIECE_LOGITS", 0)
    if compiled:
        compile_losses_alone(monkeypatch)
    mt.init(device="cpu", logits_in_pieces=True, compile=compiled)
    found: list[bool] = []
    forward = LossInPieces.forward

    def recorded(self: LossInPieces, params: Any) -> Any:
        found.append(self.keep_graph)
        return forward(self, params)

    monkeypatch.setattr(LossInPieces, "forward", recorded)
    return found


def compile_losses_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `compile=True` blocks stay as they are. Losses go through all of a compiler but its code generator."""
    compile_ = lookup_backend("aot_eager_decomp_partition")
    monkeypatch.setattr(templates, "generate", lambda graph, inputs: compile_(graph, inputs))
    monkeypatch.setattr(engine, "compile_templates", lambda layers: None)
    monkeypatch.setattr(cost, "COMPILED_PIECE", 1)
    torch._dynamo.reset()
    counters.clear()


def num_graphs() -> int:
    """That were compiled since."""
    assert not counters["graph_break"] and not counters["unimplemented"]
    return counters["stats"]["unique_graphs"]


def rows_of(logits: torch.Tensor, targets: torch.Tensor, **settings: Any) -> torch.Tensor:
    return functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), **settings)


class Scored(nn.Module):
    """Blocks, a head with a bias, and a loss of the test's own."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.loss = loss
        nn.init.normal_(self.head.weight)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"logits": logits} if labels is None else {"loss": self.loss(logits, labels), "logits": logits}


def batches(count: int = 3) -> list[dict[str, torch.Tensor]]:
    """Rows of several lengths, some targets ignored."""
    made = [make_batch(length, seed=length) for length in (7, 12, 9)[:count]]
    for batch in made:
        batch["labels"][0, 2:5] = -100
    return made


def own(outputs: Any, _: Mapping[str, Any]) -> torch.Tensor:
    return outputs["loss"] / 3


def run(model: Any, many: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    losses = []
    for batch in many:
        loss = own(model(**batch), batch)
        loss.backward()
        losses.append(loss.detach())
    return losses


def step(model: nn.Module, way: str, many: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    if way == "backward":
        return run(model, many)
    for _ in range(2):
        # The first step has to find out which layer is the last.
        zero_grad(model)
        losses = mt.accumulate(model, many, own)
    return losses


def assert_near_truth(plain: nn.Module, model: nn.Module, way: str, many: list[dict[str, torch.Tensor]]) -> None:
    """Losses and gradients are at most twice as far from those of float64 as the plain model's, and some roundings."""
    truth = copy.deepcopy(plain).double()
    expected, losses = run(plain, many), step(model, way, many)
    exact = run(truth, many)
    ulp = ULP[next(plain.parameters()).dtype]
    for right, other, found in zip(exact, expected, losses, strict=True):
        assert (found - right).abs() <= 2 * (other - right).abs() + NEAR * ulp * right.abs()
    right, other, found = gradients(truth), gradients(plain), gradients(model)
    assert found.keys() == other.keys() == right.keys()
    assert any(gradient.any() for gradient in found.values())
    for name, gradient in right.items():
        near = 2 * (other[name] - gradient).norm() + NEAR * ulp * gradient.norm()
        assert (found[name] - gradient).norm() <= near, name


def without_key_biases(model: nn.Module) -> nn.Module:
    """They change no score's order, so that their true gradient is zero, and rounding all that there is of it."""
    for key, parameter in model.named_parameters():
        if key.endswith(("key.bias", "k_proj.bias")):
            parameter.requires_grad_(False)
    return model
