"""A few steps of a tiny model in any format and place: for the tests of optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain as mt
from megatrain.api import stream
from megatrain.base.config import StreamOptions
from megatrain.optim.base import HomeOptimizer

MAX_NORM = 0.5
VOCABULARY = 90
COMPRESSIONS = [False, "bf16", "8bit", "4bit", "lossless"]


def tiny_llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=VOCABULARY)  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def batches(num_steps: int, seed: int = 1) -> Iterator[list[dict[str, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        ids = [torch.randint(0, VOCABULARY, (2, length), generator=generator) for length in (6, 9)]
        yield [{"input_ids": one, "labels": one} for one in ids]


def start(
    options: StreamOptions | None = None, optimizer: Any = None, numbers: dict | None = None, **settings: Any
) -> tuple[nn.Module, HomeOptimizer]:
    """A streamed model and its optimizer. settings: of mt.init."""
    mt.init(**{"device": "cpu", **settings})
    model = stream(tiny_llama(), options=options)
    numbers = {"lr": 1e-2, "weight_decay": 0.1, **(numbers or {})}
    if settings.get("clip") == "layer":
        numbers.setdefault("max_norm", MAX_NORM)
    return model, (optimizer or mt.optim.AdamW)(model, **numbers)


def train(model: nn.Module, optimizer: HomeOptimizer, many: Iterator[list[dict]], clip: str = "global") -> None:
    for micro_batches in many:
        mt.accumulate(model, micro_batches)
        if clip == "global":
            mt.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()


def result(model: nn.Module, optimizer: HomeOptimizer) -> dict[str, torch.Tensor]:
    """Weights and states, by name."""
    state = {
        f"{index} {name}": tensor
        for index, of in optimizer.state_dict()["state"].items()
        for name, tensor in of.items()
    }
    return {**mt.full_state_dict(model), **state}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different, different


def spoil(model: torch.nn.Module, name: str, value: float) -> None:
    """Puts `value` into a gradient."""
    parameter = dict(model.named_parameters())[name]
    gradient = parameter.grad
    gradient.view(-1)[3] = value
    parameter.grad = gradient
