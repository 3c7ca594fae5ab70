"""A plain model, a streamed copy, and their gradients: for the tests of what `.grad` does."""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain as mt

SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)


def pair() -> tuple[nn.Module, nn.Module]:
    """A plain model and a streamed copy."""
    plain = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **SIZES))
    return plain, mt.stream(copy.deepcopy(plain))


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    ids = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=ids, labels=ids).loss


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    differing = [name for name in left if not torch.equal(left[name], right[name])]
    assert not differing, differing
