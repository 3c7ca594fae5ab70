"""Tiny configs of the architectures that the engine is tested on, and batches for them.

Every model is as small as its architecture allows: two or three layers, a vocabulary of 96.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

VOCAB = 96

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}

_SLIDING = {
    "head_dim": 8,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_NEOX = {key: value for key, value in _COMMON.items() if key != "num_key_value_heads"} | {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}

_DEEPSEEK = _COMMON | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}

_QWEN3_NEXT = (
    _COMMON
    | _MOE
    | {
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 16,
    }
)

_MAMBA2 = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "head_dim": 8,
    "state_size": 8,
    "n_groups": 1,
    "expand": 2,
    "chunk_size": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}

_BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}

_ALBERT = _BERT | {"embedding_size": 16, "num_hidden_groups": 2, "num_hidden_layers": 4, "inner_group_num": 1}

_SHARING = (
    _COMMON
    | _SLIDING
    | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
    }
)

_GEMMA3N = _SHARING | {"laurel_rank": 4, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0]}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _COMMON),
    "qwen2": ("Qwen2", _COMMON),
    "qwen3": ("Qwen3", _COMMON | {"head_dim": 8}),
    "mistral": ("Mistral", _COMMON | {"sliding_window": 4}),
    "gemma2": ("Gemma2", _COMMON | _SLIDING),
    "gemma3_text": ("Gemma3", _COMMON | _SLIDING),
    "gemma3n_text": ("Gemma3n", _GEMMA3N),
    "gemma4_text": ("Gemma4", _SHARING),
    "gpt2": ("GPT2", _GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gpt_neox": ("GPTNeoX", _NEOX),
    "gpt_oss": ("GptOss", _COMMON | _MOE | _SLIDING | {"num_local_experts": 4}),
    "deepseek_v3": ("DeepseekV3", _DEEPSEEK),
    "qwen3_next": ("Qwen3Next", _QWEN3_NEXT),
    "mamba2": ("Mamba2", _MAMBA2),
    "mixtral": ("Mixtral", _COMMON | _MOE | {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3Moe", _COMMON | _MOE | {"head_dim": 8}),
    "t5": ("T5", _T5),
    "bert": ("Bert", _BERT),
    "albert": ("Albert", _ALBERT),
}
"""Architecture -> (prefix of its classes in transformers, settings)."""

ARCHITECTURES = list(CONFIGS)

ROUTED = ["gpt_oss", "mixtral", "qwen3_moe", "qwen3_next"]
"""Those whose loss holds a router's auxiliary loss."""

_CONFIG_CLASS = {
    "gemma3_text": "Gemma3TextConfig",
    "gemma3n_text": "Gemma3nTextConfig",
    "gemma4_text": "Gemma4TextConfig",
}

_MODEL_CLASS = {
    "gpt2": "GPT2LMHeadModel",
    "t5": "T5ForConditionalGeneration",
    "bert": "BertForMaskedLM",
    "albert": "AlbertForMaskedLM",
}


def make_model(name: str, **changes: Any) -> Any:
    """A model in training mode, with the same weights at every call. `changes` go into its config.

    Biases and other parameters that start at zero (or a norm's at one) are moved off it: where all are zero, a gradient
    that was mixed up would not show.
    """
    prefix, settings = CONFIGS[name]
    config_class = getattr(transformers, _CONFIG_CLASS.get(name, f"{prefix}Config"))
    model_class = getattr(transformers, _MODEL_CLASS.get(name, f"{prefix}ForCausalLM"))
    torch.manual_seed(0)
    model = model_class(config_class(**(settings | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.train()


def make_batch(length: int = 11, rows: int = 2, seed: int = 1) -> dict[str, torch.Tensor]:
    """Token ids and labels, without padding."""
    ids = torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def padded_batch(length: int = 11, seed: int = 1) -> dict[str, torch.Tensor]:
    """Two rows, the first padded on the right by four places."""
    batch = make_batch(length, 2, seed)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -4:] = 0
    batch["input_ids"][0, -4:] = 0
    batch["labels"][0, -4:] = -100
    return batch | {"attention_mask": mask}


class Block(nn.Module):
    """A small residual block with a parameter of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.outer(torch.tanh(self.inner(self.norm(x))))


class Stack(nn.Module):
    """An own language model, not from transformers: blocks in a ModuleList, called by `run`."""

    def __init__(self, blocks: list[nn.Module], run: Callable[[Stack, torch.Tensor], torch.Tensor], width: int = 16):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB)
        self._run = run

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.norm(self._run(self, self.embed(input_ids))))
        outputs = {"logits": logits}
        if labels is not None:
            outputs["loss"] = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return outputs
