"""What a block must not do is refused by name, before or at the moment when a gradient would be lost or wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_same_step, stream
from model_zoo import VOCAB, Block, Stack, make_batch
from torch import nn

import megatrain as mt
from megatrain.base.errors import UserError

WIDTH = 16


def blocks(make: type[Block] = Block) -> list[nn.Module]:
    torch.manual_seed(0)
    return [make(WIDTH) for _ in range(3)]


def in_turn(model: Stack, h: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        h = block(h)
    return h


class Escaping(Block):
    """Hands a tensor to a list that is not an argument."""

    kept: list[torch.Tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.kept.append(x.mean())
        return x


def test_a_tensor_that_escapes_a_layer_is_refused_by_name() -> None:
    kept: list[torch.Tensor] = []
    Escaping.kept = kept
    _, model = stream(Stack(blocks(make=Escaping), in_turn))
    outputs = model(**make_batch())
    assert kept[0].item() == kept[0].item()
    with pytest.raises(UserError, match=r"made inside blocks\.\d reached the loss by another way"):
        (outputs["loss"] + sum(kept)).backward()


class Peeking(Block):
    """Uses a tensor that is not an argument."""

    seen: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.seen.mean()


def test_a_tensor_that_slips_into_a_layer_is_refused_by_name() -> None:
    _, model = stream(Stack(blocks(make=Peeking), in_turn))
    Peeking.seen = torch.randn(5, requires_grad=True)
    with pytest.raises(UserError, match=r"blocks\.0 uses a tensor of shape \(5,\) that requires grad"):
        model(**make_batch())["loss"].backward()


class InPlace(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += super().forward(x)
        return x


def test_an_input_changed_in_place_is_refused_by_name() -> None:
    _, model = stream(Stack(blocks(make=InPlace), in_turn))
    with pytest.raises(UserError, match=r"blocks\.0 changes its input in place"):
        model(**make_batch())


def test_an_embedding_that_changes_its_weights_is_refused_by_name() -> None:
    model = Stack(blocks(), in_turn)
    model.embed = nn.Embedding(VOCAB, WIDTH, max_norm=1.0)
    with pytest.raises(UserError, match=r"embed has max_norm=1\.0.*max_norm=None"):
        mt.stream(model)


def test_a_batch_on_another_device_is_refused_by_name() -> None:
    _, model = stream(Stack(blocks(), in_turn))
    with pytest.raises(UserError, match=r"embed got a tensor on meta, and layers run on cpu"):
        model(make_batch()["input_ids"].to("meta"))


def change_the_input(h: torch.Tensor) -> None:
    h.mul_(2)


def change_a_view(h: torch.Tensor) -> None:
    h[0].zero_()


@pytest.mark.parametrize("options", [{}, {"activation_bytes": 0}, {"activation_bytes": 0, "serial": True}], ids=str)
@pytest.mark.parametrize("change", [change_the_input, change_a_view])
def test_an_input_changed_in_place_behind_its_layer_is_refused(
    change: Callable[[torch.Tensor], None], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept on the device or on the host: the recomputation would start from other values."""
    monkeypatch.setattr("megatrain.transport.activations.MIN_BYTES", 1)

    def run(model: Stack, h: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            out = block(h)
            if model.is_changing:
                change(h)
            h = out
        return h

    model = Stack(blocks(), run)
    model.is_changing = True
    plain, model = stream(model, **options)
    with pytest.raises((RuntimeError, UserError), match="in.?place"):
        model(**make_batch())["loss"].backward()
    # And the lanes go on.
    plain.is_changing = model.is_changing = False
    model.zero_grad()
    assert_same_step(plain, model, lambda each: each(**make_batch())["loss"])


def test_a_tensor_changed_in_place_between_two_layers_is_another() -> None:
    """The first layer's result is not used, so that plain PyTorch has nothing to say."""

    def run(model: Stack, h: torch.Tensor) -> torch.Tensor:
        model.unused = model.blocks[0](h)
        h.mul_(2)
        return model.blocks[1](h) + model.blocks[2](h)

    plain, model = stream(Stack(blocks(), run))
    assert_same_step(plain, model, lambda each: each(**make_batch())["loss"])
