"""What a layer hands out of its own weights outlives the slot that they were in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_same_accumulation, assert_same_step, stream, zero_grad
from model_zoo import Block, Stack, make_batch
from torch import nn

import megatrain as mt

WIDTH = 16
LENGTHS = (7, 12, 9)


class Positions(nn.Embedding):
    """Returns rows of its weight as they are."""

    def forward(self, num_rows: int) -> torch.Tensor:  # type: ignore[override]
        return self.weight[:num_rows]


class Positioned(Stack):
    """Adds its positions before the blocks, and behind them."""

    def __init__(self) -> None:
        super().__init__([Block(WIDTH) for _ in range(4)], run_positioned)
        self.positions = Positions(40, WIDTH)


def run_positioned(model: Any, h: torch.Tensor) -> torch.Tensor:
    positions = model.positions(h.shape[1])
    h = h + positions
    for block in model.blocks:
        h = block(h)
    return h + positions


class Returning(Block):
    """Returns its parameter, a view of another with gaps between the rows, and a cut-off one in a dict."""

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        views = {"rows": self.inner.weight[:, :3], "cut off": self.outer.weight.detach().T}
        return super().forward(x), self.scale, views


def run_returning(model: Stack, h: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(())
    for block in model.blocks:
        h, scale, views = block(h)
        total = total + (scale * torch.arange(float(WIDTH))).sum() + views["rows"].square().sum()
        h = h + 0.01 * (h @ views["cut off"].T @ views["cut off"])
    return h + 0.001 * total


class Publishing(Block):
    """Leaves views of its weights on itself, in a buffer, and in a list that it was given."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("held", None)

    def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        self.mixing = self.inner.weight.T
        self.held = self.outer.weight.detach()[:2]
        seen.append(self.scale[None])
        return super().forward(x)


def run_publishing(model: Stack, h: torch.Tensor) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    for block in model.blocks:
        h = block(h, seen)
    for block, scale in zip(model.blocks, seen, strict=True):
        h = h + 0.1 * (h @ block.mixing).mean() + block.held.mean() + scale
    return h


MODELS: dict[str, Callable[[], Stack]] = {
    "positions": Positioned,
    "results": lambda: Stack([Returning(WIDTH) for _ in range(4)], run_returning),
    "attributes": lambda: Stack([Publishing(WIDTH) for _ in range(4)], run_publishing),
}


@pytest.mark.parametrize("options", [{}, {"num_slots": 1}, {"poison": True}, {"serial": True}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_weights_that_a_layer_hands_out_stay(name: str, options: dict[str, Any]) -> None:
    plain, model = stream(MODELS[name](), **options)
    for seed in (1, 2):
        batch = make_batch(seed=seed)
        assert_same_step(plain, model, lambda each, batch=batch: each(**batch)["loss"])
        zero_grad(plain, model)
    batches = [make_batch(length, seed=length) for length in LENGTHS]
    assert_same_accumulation(plain, model, batches, lambda each, batch: each(**batch)["loss"])


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_weights_that_a_layer_hands_out_without_a_graph_stay(name: str, is_frozen: bool) -> None:
    plain, model = stream(MODELS[name](), poison=True)
    logits = []
    for each in (plain, model):
        each.requires_grad_(not is_frozen)
        with torch.set_grad_enabled(is_frozen):
            logits.append(each(**make_batch())["logits"])
    assert torch.equal(*logits)


def test_a_result_is_no_view_of_a_slot_and_keeps_its_strides() -> None:
    _, model = stream(Stack([Returning(WIDTH) for _ in range(4)], run_returning))
    for is_grad_enabled in (True, False):
        with torch.set_grad_enabled(is_grad_enabled):
            h = torch.ones(1, 2, WIDTH)
            _, scale, views = model.blocks[0](h)
            held = scale.clone(), views["rows"].clone()
            for block in model.blocks[1:]:
                block(h)
        assert torch.equal(scale, held[0]) and torch.equal(views["rows"], held[1])
        assert views["rows"].stride() == (WIDTH, 1) and views["cut off"].stride() == (1, 2 * WIDTH)
    assert dict(mt.named_parameters(model))["blocks.0.scale"].equal(held[0])
