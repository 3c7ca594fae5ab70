"""Small models for gpu_check.py."""

from __future__ import annotations

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)


def llama(dropout: float = 0.0) -> torch.nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=8,
                    num_key_value_heads=4, vocab_size=1000, attention_dropout=dropout, attn_implementation="eager")
    )  # fmt: skip


def gemma() -> torch.nn.Module:
    return Gemma3ForCausalLM(
        Gemma3TextConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
                         head_dim=32,
                         num_key_value_heads=2, vocab_size=500, sliding_window=16, tie_word_embeddings=False,
                         attn_implementation="eager")
    )  # fmt: skip


def mixtral() -> torch.nn.Module:
    return MixtralForCausalLM(
        MixtralConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
                      num_key_value_heads=2, vocab_size=500, num_local_experts=4, output_router_logits=True,
                      attn_implementation="eager")
    )  # fmt: skip
