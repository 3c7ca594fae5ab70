"""Modules of blocks in tiles of tokens: results as near to those in float64 as plain PyTorch's, and little memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import peft
import pytest
import torch
from comparing import assert_equal, gradients, stream, the_engine, zero_grad
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes
from model_zoo import make_batch, make_model
from pieces_helpers import NEAR, ULP, WAYS, assert_near_truth, batches, run, step, without_key_biases
from tiles_helpers import WIDTH, Mlp, stack_of, tiled
from torch import nn

import megatrain as mt
from megatrain.base.config import Config
from megatrain.base.errors import UserError
from megatrain.execute.tiles import _TiledCall
from megatrain.plan.cost import tokens_of_tile


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    mt.init(device="cpu", tile_tokens=5)
    return tiled(monkeypatch)


MODELS = {
    "llama": {"LlamaRMSNorm", "LlamaMLP"},
    "qwen3": {"Qwen3RMSNorm", "Qwen3MLP"},  # norms of heads among them
    "gemma2": {"Gemma2RMSNorm", "Gemma2MLP"},  # the output of its MLP goes into a norm
    "gpt2": {"GPT2MLP"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_models_are_as_near_to_the_truth(name: str, way: str, found: Counter[str]) -> None:
    plain, model = stream(without_key_biases(make_model(name)))
    assert_near_truth(plain, model, way, batches(2))
    assert found.keys() == MODELS[name]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_in_bf16(name: str, way: str, found: Counter[str]) -> None:
    mt.init(device="cpu", precision="bf16", tile_tokens=5, grad_dtype="fp32")
    plain, model = stream(make_model(name).bfloat16())
    assert_near_truth(plain, model, way, batches())
    assert found


def test_under_autocast(found: Counter[str]) -> None:
    plain, model = stream(stack_of(Mlp(), Mlp()))
    for each in (plain, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = each(**make_batch(12))["loss"]
        loss.backward()
    right, other = gradients(plain), gradients(model)
    for name, gradient in right.items():
        assert (other[name] - gradient).norm() <= 4 * ULP[torch.bfloat16] * gradient.norm(), name
    assert found["Mlp"] == 2 * 6 * 2  # modules, tiles of 2 tokens of 2 rows, forward and recomputation


@settings(max_examples=25)
@given(rows=st.integers(1, 3), length=st.integers(2, 40), tile=st.integers(1, 50), seed=st.integers(0, 99))
def test_any_lengths_and_tiles(rows: int, length: int, tile: int, seed: int) -> None:
    """fp32: gradients are sums of as many products in another order, each rounded once."""
    mt.init(device="cpu", tile_tokens=tile)
    with pytest.MonkeyPatch.context() as monkeypatch:
        calls = tiled(monkeypatch)
        torch.manual_seed(seed)
        plain, model = stream(stack_of(Mlp(times=2)))
        batch = make_batch(length, rows=rows, seed=seed)
        losses = [each(**batch)["loss"] for each in (plain, model)]
        for loss in losses:
            loss.backward()
        the_engine(model).close()
    torch.testing.assert_close(*losses)
    right, other = gradients(plain), gradients(model)
    for name, gradient in right.items():
        assert (other[name] - gradient).norm() <= NEAR * ULP[torch.float32] * gradient.norm() + 1e-9, name
    of_row = tokens_of_tile(tile, rows, length)
    assert calls["Mlp"] == (0 if of_row is None else 2 * -(-length // of_row))
    assert of_row is None or rows * of_row <= max(tile, rows)


def test_gradients_of_weights_are_summed_in_fp32_and_rounded_once() -> None:
    torch.manual_seed(0)
    module = Mlp().bfloat16()
    x, grad = torch.randn(2, 1, 256, WIDTH, dtype=torch.bfloat16)
    call = _TiledCall(module, 2, torch.device("cpu"))
    of_x, *found = call.backward(x, call.weights, grad, [True] * 4)
    exact = [torch.zeros(weight.shape, dtype=torch.float64) for weight in call.weights]
    for start in range(0, 256, 2):
        piece = x[:, start : start + 2].requires_grad_()
        of_piece, *of_weights = torch.autograd.grad(module(piece), [piece, *call.weights], grad[:, start : start + 2])
        assert torch.equal(of_piece, of_x[:, start : start + 2])
        for total, gradient in zip(exact, of_weights, strict=True):
            total += gradient
    for total, gradient in zip(exact, found, strict=True):
        # A rounding, and what fp32 leaves where terms cancel out.
        torch.testing.assert_close(gradient.double(), total, rtol=ULP[torch.bfloat16], atol=1e-4)


def test_serial_lanes_and_kept_insides_have_the_same_bits(found: Counter[str]) -> None:
    """Slots are filled anew, with poison in between: weights that a tile needs are those of its own layer."""
    results = []
    for options in (
        {"serial": True},
        {"num_slots": 1, "poison": True, "lane_delay_seconds": 0.001},
        {"kept_layers": {f"model.layers.{n}": "all" for n in range(3)}, "num_slots": 1, "poison": True},
    ):
        _, model = stream(make_model("llama"), **options)
        for _ in range(2):
            zero_grad(model)
            torch.manual_seed(0)
            losses = mt.accumulate(model, batches())
        results.append({**gradients(model), **{f"loss {n}": loss for n, loss in enumerate(losses)}})
        store = the_engine(model).insides
        assert (store.num_kept > 0) == ("kept_layers" in options) and all(store._is_fit.values())
    for other in results[1:]:
        assert_equal(results[0], other)
    assert found


def test_frozen_parts_and_weights_that_are_tied(found: Counter[str]) -> None:
    class Tied(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.up.weight = self.gate.weight

    built = stack_of(Tied(), Mlp(), Mlp())
    for name, parameter in built.named_parameters():
        parameter.requires_grad_(name.startswith("blocks.0") or name.endswith(("down.weight", "scale")))
    plain, model = stream(built)
    expected, losses = run(plain, batches()), step(model, "backward", batches())
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(gradients(model), gradients(plain))
    assert found.keys() == {"Tied", "Mlp"}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_adapters_in_an_mlp(dropout: float, found: Counter[str]) -> None:
    """With dropout its masks would be others in tiles, and what draws them runs whole."""
    targets = ["up_proj", "down_proj"]
    config = peft.LoraConfig(target_modules=targets, r=2, lora_dropout=dropout, init_lora_weights=False)
    torch.manual_seed(3)
    plain, model = stream(peft.get_peft_model(make_model("llama"), config))
    for each in (plain, model):
        each.train()
        torch.manual_seed(1)
        each(**make_batch(12)).loss.backward()
    torch.testing.assert_close(gradients(model), gradients(plain))
    assert ("LlamaMLP" in found) == (dropout == 0.0)


def test_what_is_kept_is_bounded(found: Counter[str]) -> None:
    """Of 1024 tokens in tiles of 64: layer inputs and outputs whole, an MLP's insides for a tile (and the trial's)."""
    times, length, tile = 32, 1024, 64
    of_hidden, of_inside = 4 * length * WIDTH, 4 * length * times * WIDTH
    peaks = []
    for setting in (False, tile):
        mt.init(device="cpu", tile_tokens=setting)
        _, model = stream(stack_of(Mlp(times=times)), serial=True)
        ids = torch.zeros((1, length), dtype=torch.int64)
        loss = model.blocks[0](model.embed(ids)).sum()
        weights = sum(parameter.numel() for parameter in model.blocks[0].parameters())
        with LiveBytes() as live:
            loss.backward()
        peaks.append(live.peak)
    # gate, up, act, product and gradients of two of them; beside it 8 hidden states and gradients of the weights.
    assert peaks[0] > 5 * of_inside
    assert peaks[1] < 8 * of_hidden + 8 * of_inside * tile // length + 3 * 4 * weights
    assert found["Mlp"] == 2 * length // tile


def test_a_long_evaluation_runs_in_tiles(found: Counter[str]) -> None:
    plain, model = stream(make_model("llama"))
    for each in (plain, model):
        each.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(**make_batch(12)).logits, plain(**make_batch(12)).logits)
    assert found["LlamaMLP"] == 3 * -(-12 // (5 // 2))


def test_flags_of_the_forward_hold_in_its_backward(found: Counter[str]) -> None:
    """A module that does something else in evaluation."""

    class Moody(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if self.training else 2 * x)

    plain, model = stream(stack_of(Moody(), Moody()))
    for each in (plain, model):
        each.train()
        loss = each(**make_batch(12))["loss"]
        each.eval()
        loss.backward()
    torch.testing.assert_close(gradients(model), gradients(plain))
    assert found["Moody"]


def test_an_input_that_is_changed_in_place_afterwards_is_told() -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.first = Mlp(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            y = self.inner(h)
            h += 1
            return y + x

    _, model = stream(stack_of(Careless()))
    with pytest.raises(UserError, match=r"Mlp, which runs in tiles.*in place.*tile_tokens=False"):
        model(**make_batch(12))["loss"].backward()


def test_rows_of_a_usual_length_have_the_bits_of_plain_pytorch(found: Counter[str]) -> None:
    for setting in (None, False, 1000):
        mt.init(device="cpu", tile_tokens=setting)
        plain, model = stream(make_model("llama"))
        for each in (plain, model):
            each(**make_batch(12)).loss.backward()
        assert_equal(gradients(plain), gradients(model))
    assert not found
    assert tokens_of_tile(None, 4, 32769) == 1024 and tokens_of_tile(None, 4, 32768) is None
    assert tokens_of_tile(4096, 3, 2000) == 1365 and tokens_of_tile(4096, 2, 2048) is None
    assert tokens_of_tile(2, 4, 3) == 1 and tokens_of_tile(2, 4, 1) is None


@pytest.mark.parametrize("value", [True, 0, -1, 2.5, "4096"])
def test_what_is_no_number_of_tokens_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"tile_tokens=.* must be a number of tokens"):
        Config(tile_tokens=value)


def test_compiled_blocks_are_one_piece() -> None:
    with pytest.raises(UserError, match=r"tile_tokens=4096 does not go with compile=True.*leave one of the two out"):
        mt.init(tile_tokens=4096, compile=True)
    mt.init(device="cpu", compile=True)
    _, model = stream(make_model("llama"))
    assert all(layer.tiles is None for layer in the_engine(model).layers)
    assert Config(compile=True, tile_tokens=False).tile_tokens is False
