"""State that a block makes, replaces and deletes in its forward: the recomputation starts from what the forward had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from comparing import assert_equal, assert_same_step, stream, zero_grad
from model_zoo import Block, Stack, make_batch

import megatrain as mt

WIDTH = 16


def in_turn(model: Stack, h: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        h = block(h)
    return h


class Making(Block):
    """Makes a buffer in its first forward and adds to it from then on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean(dim=(0, 1))
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros_like(mean))
        self.mean = 0.9 * self.mean + 0.1 * mean
        return super().forward(x) * (1 + self.mean)


class Filling(Block):
    """Has a place for a buffer, and fills it in its first forward; later it changes it in place."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean(dim=(0, 1))
        if self.mean is None:
            self.mean = mean.clone()
        else:
            self.mean.mul_(0.9).add_(mean, alpha=0.1)
        return super().forward(x) * (1 + self.mean)


class Emptying(Block):
    """Every other forward uses its buffer up: sets it to None, or deletes it."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("gain", torch.full((width,), 2.0))
        self.register_buffer("shift", torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.gain is None:
            self.gain = torch.full((WIDTH,), 3.0)
            self.register_buffer("shift", torch.full((WIDTH,), 0.2))
            return x
        x = x * self.gain + self.shift
        self.gain = None
        del self.shift
        return x


class Deleting(Block):
    """Uses up an attribute, and renames another."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.once = 2.0
        self.before = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if hasattr(self, "once"):
            x = x * self.once
            del self.once
        if hasattr(self, "before"):
            kept = self.before
            del self.before
            self.after = kept
        return x * getattr(self, "after", 1.0)


BLOCKS: dict[str, Callable[[int], Block]] = {cls.__name__: cls for cls in (Making, Filling, Emptying, Deleting)}


def state_of(model: Stack) -> list[dict[str, Any]]:
    kinds = (int, float, str)
    return [{k: v for k, v in vars(block).items() if isinstance(v, kinds)} for block in model.blocks]


@pytest.mark.parametrize("name", BLOCKS)
def test_state_is_what_one_run_leaves(name: str) -> None:
    plain, model = stream(Stack([BLOCKS[name](WIDTH) for _ in range(3)], in_turn))
    for seed in (1, 2, 3):
        batch = make_batch(seed=seed)
        assert_same_step(plain, model, lambda each, batch=batch: each(**batch)["loss"])
        assert_equal(dict(plain.named_buffers()), dict(model.named_buffers()))
        assert state_of(plain) == state_of(model)
        zero_grad(plain, model)
    assert list(plain.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("name", BLOCKS)
def test_state_without_a_graph(name: str) -> None:
    plain, model = stream(Stack([BLOCKS[name](WIDTH) for _ in range(3)], in_turn))
    for seed in (1, 2):
        with torch.no_grad():
            logits = [each(**make_batch(seed=seed))["logits"] for each in (plain, model)]
        assert torch.equal(*logits)
        assert_equal(dict(plain.named_buffers()), dict(model.named_buffers()))
        assert state_of(plain) == state_of(model)


def dynamic_llama() -> transformers.LlamaForCausalLM:
    """Its frequencies depend on the lengths that it has seen, and lie in a buffer before the first block."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, rope_parameters=rope,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Stack([Making(WIDTH), Making(WIDTH)], in_turn), "blocks.0.mean"),
        (dynamic_llama, "model.rotary_emb.inv_freq"),
    ],
)
def test_state_that_one_micro_batch_hands_to_the_next_is_told(
    make: Callable[[], Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, model = stream(make())
    for _ in range(4):
        mt.accumulate(model, [make_batch(8), make_batch(24), make_batch(12)])
    assert [name in message for message in caplog.messages] == [True]
    assert "last to first" in caplog.text


def test_of_one_micro_batch_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    _, model = stream(dynamic_llama())
    for length in (8, 24, 12, 32):
        mt.accumulate(model, [make_batch(length)])
    assert not caplog.messages
