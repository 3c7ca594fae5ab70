"""Floating-point operations of a training step, counted two ways. Pure arithmetic.

`published`: 6 x parameters x tokens, as papers of the field report it. `counted`: what had to be computed and nothing
else: matrix products without embedding look-ups, causal attention, no padding, active experts only, no recomputation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn


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
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    active_share = _active_share(config)
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
        matrix += int(parameter.numel() * active_share) if is_expert else parameter.numel()
    return ModelWork(
        num_parameters=sum(parameter.numel() for parameter in parameters.values()),
        matrix_parameters=matrix,
        attention_width=_attention_width(config),
    )


def _active_share(config: object) -> float:
    num_active = getattr(config, "num_experts_per_tok", None)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        num_experts = getattr(config, name, None)
        if num_active and num_experts:
            return num_active / num_experts
    return 1.0


def _attention_width(config: object) -> int:
    num_heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    if not num_heads or not hidden:
        return 0
    layer_types = getattr(config, "layer_types", None)
    num_layers = getattr(config, "num_hidden_layers", 0)
    if layer_types:
        num_layers = sum("attention" in kind and "linear" not in kind for kind in layer_types)
    head_dim = getattr(config, "head_dim", None) or hidden // num_heads
    key_dim = getattr(config, "qk_head_dim", None) or head_dim
    value_dim = getattr(config, "v_head_dim", None) or head_dim
    return num_layers * num_heads * (key_dim + value_dim)
