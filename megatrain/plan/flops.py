"""Floating-point operations of a training step, counted two ways. Pure arithmetic.

`published`: 6 x parameters x tokens, as papers of the field report it. `counted`: what had to be computed and nothing
else: matrix products without embedding look-ups, causal attention, no padding, active experts only, no recomputation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from megatrain.spec.model import active_share, attention_layers, text_config


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """What a token costs."""

    num_parameters: int
    """All parameters, tied ones once."""

    matrix_parameters: int
    """Parameters of the matrix products that one token takes part in."""

    attention_width: int
    """Sum over attention layers of heads x (head dim of keys + head dim of values)."""


def published_flops(work: ModelWork, num_tokens: int) -> int:
    return 6 * work.num_parameters * num_tokens


def counted_flops(work: ModelWork, lengths: Iterable[int]) -> int:
    """
    Args:
        lengths: attended tokens of each sequence, without padding. Attention is causal: a token sees half of them.
    """
    lengths = list(lengths)
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    # 2 FLOPs a multiply-add; the backward costs twice the forward.
    return 3 * (2 * work.matrix_parameters * sum(lengths) + 2 * work.attention_width * pairs)


def model_work(model: nn.Module) -> ModelWork:
    """Counts from the module tree and, where there is one, the transformers config."""
    config = text_config(model)
    share = active_share(config)
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    # A tied embedding is the head's matrix; an untied one is a look-up.
    looked_up = {id(e.weight) for e in embeddings} - ({id(head.weight)} if head is not None else set())
    matrix = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or id(parameter) in looked_up:
            continue
        is_expert = ".experts." in name
        matrix += int(parameter.numel() * share) if is_expert else parameter.numel()
    return ModelWork(
        num_parameters=sum(parameter.numel() for parameter in parameters.values()),
        matrix_parameters=matrix,
        attention_width=sum(attention.width for attention in attention_layers(config) if attention is not None),
    )
