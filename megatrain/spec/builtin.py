"""Shapes that `megatrain plan` knows by name: published configs, as far as sizes and work depend on them."""

from __future__ import annotations

from typing import Any


def _qwen2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool) -> dict:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
    }


def _qwen3(hidden: int, inner: int, layers: int, heads: int, tied: bool) -> dict:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40960,
    }


def _qwen3_moe(hidden: int, layers: int, heads: int, kv_heads: int, inner: int) -> dict:
    return {
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": inner,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "max_position_embeddings": 40960,
    }


def _llama(hidden: int, inner: int, layers: int, heads: int, tied: bool = False, length: int = 131072) -> dict:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": tied,
        "max_position_embeddings": length,
    }


def _mistral(hidden: int, inner: int, layers: int, heads: int, vocabulary: int, **more: Any) -> dict:
    return {
        "model_type": "mistral",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": vocabulary,
        "sliding_window": None,
        "max_position_embeddings": 32768,
        **more,
    }


def _mixtral(hidden: int, inner: int, layers: int, heads: int, vocabulary: int) -> dict:
    return {**_mistral(hidden, inner, layers, heads, vocabulary), "model_type": "mixtral"} | {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }


def _gpt_oss(layers: int, experts: int) -> dict:
    return {"model_type": "gpt_oss", "num_hidden_layers": layers, "num_local_experts": experts}


BUILTIN: dict[str, dict[str, Any]] = {
    # No published model: small enough to see every path in seconds, on a CPU too.
    "qwen2.5-tiny": _qwen2(256, 512, 4, 4, 2, 1024, False),
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, 151936, True),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, 151936, True),
    "qwen2.5-3b": _qwen2(2048, 11008, 36, 16, 2, 151936, True),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4, 152064, False),
    "qwen2.5-14b": _qwen2(5120, 13824, 48, 40, 8, 152064, False),
    "qwen2.5-32b": _qwen2(5120, 27648, 64, 40, 8, 152064, False),
    "qwen2.5-72b": _qwen2(8192, 29568, 80, 64, 8, 152064, False),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, False),
    "qwen3-30b-a3b": _qwen3_moe(2048, 48, 32, 4, 768),
    "qwen3-235b-a22b": _qwen3_moe(4096, 94, 64, 4, 1536),
    "llama-3.2-1b": {**_llama(2048, 8192, 16, 32, tied=True), "head_dim": 64},
    "llama-3.2-3b": {**_llama(3072, 8192, 28, 24, tied=True), "head_dim": 128},
    "llama-3-8b": _llama(4096, 14336, 32, 32, length=8192),
    "llama-3-70b": _llama(8192, 28672, 80, 64, length=8192),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32),
    "llama-3.1-70b": _llama(8192, 28672, 80, 64),
    "llama-3.1-405b": _llama(16384, 53248, 126, 128),
    "mistral-7b": _mistral(4096, 14336, 32, 32, 32768),
    "mistral-large": _mistral(12288, 28672, 88, 96, 32768, max_position_embeddings=131072),
    "mixtral-8x7b": _mixtral(4096, 14336, 32, 32, 32000),
    "mixtral-8x22b": _mixtral(6144, 16384, 56, 48, 32768),
    "command-r-plus": {
        "model_type": "cohere",
        "hidden_size": 12288,
        "intermediate_size": 33792,
        "num_hidden_layers": 64,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "vocab_size": 256000,
        "use_qk_norm": True,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    },
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "deepseek-v3": {"model_type": "deepseek_v3", "max_position_embeddings": 163840},
    # Its own model_type, kimi_k2, is code of its authors' that builds a DeepSeek-V3 with these sizes.
    "kimi-k2": {
        "model_type": "deepseek_v3",
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "vocab_size": 163840,
        "max_position_embeddings": 131072,
    },
}
"""Name -> config. What it leaves out is the default of its architecture in transformers, which is as published."""
