"""Saved weights that are not those of the model: refused by name, and nothing of the model has changed then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from trainer_helpers import Blocks, assert_equal_weights, llama, weights
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import megatrain as mt
from megatrain.save.weights import read_weights

SIZES: dict[str, int] = dict(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2,
)  # fmt: skip


def mixtral(**changes: Any) -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**(SIZES | {"num_local_experts": 4} | changes)))


def qwen2(**changes: Any) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(Qwen2Config(**(SIZES | changes)))


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2))


def resized(model: PreTrainedModel) -> PreTrainedModel:
    model.resize_token_embeddings(70)
    return model


def change(folder: Path, how: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(how(load_file(path)), path, {"format": "pt"})


def without(tensors: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if part not in name}


def check_refused(model: nn.Module, folder: Path, told: str) -> None:
    before = weights(model)
    with pytest.raises(mt.UserError, match=told):
        read_weights(model, folder)
    assert_equal_weights(weights(model), before)


NAME = "model.layers.1.mlp.down_proj.weight"
BIAS = NAME.replace("weight", "bias")
EXPERTS = r"model\.layers\.0\.mlp\.experts\.\w+"


@pytest.mark.parametrize(
    ("make", "how", "told"),
    [
        (llama, lambda x: without(x, NAME), rf"lacks 1 weights of this model, such as {NAME}:"),
        (llama, lambda x: {f"foo.{k}": v for k, v in x.items()}, r"lacks 21 .* and 18 more, and has 21 of another"),
        (llama, lambda x: x | {BIAS: torch.ones(16)}, rf"1 weights that this model does not have, such as {BIAS}:"),
        (llama, lambda x: x | {NAME: x[NAME].to(torch.int8)}, rf"{NAME} was saved as I8, which is no dtype of weights"),
        (mixtral, lambda x: without(x, "w2"), r"lacks 2 weights .*model\.layers\.0\.mlp\.experts\.down_proj"),
    ],
    ids=["one", "all", "more", "quantised", "experts"],
)  # fmt: skip
def test_weights_that_lack_are_never_made_up(tmp_path: Path, make: Any, how: Any, told: str) -> None:
    make().save_pretrained(tmp_path)
    change(tmp_path, how)
    check_refused(mt.stream(make()), tmp_path, told)


@pytest.mark.parametrize(
    ("saved", "make", "told"),
    [
        (qwen2, gpt2, r"is of a qwen2 model \(Qwen2ForCausalLM\), and this one is a gpt2 \(GPT2LMHeadModel\)"),
        (llama, mixtral, r"is of a llama model .* this one is a mixtral"),
        (lambda: llama(num_hidden_layers=4), llama, r"18 weights that this model does not have, .*layers\.2"),
        (lambda: llama(tie_word_embeddings=True), llama, r"lacks 1 weights of this model, such as lm_head\.weight"),
        (llama, lambda: llama(tie_word_embeddings=True), r"other values for \S+ than for \S+, which are one weight"),
        (lambda: resized(llama()), llama, r"shape \(70, 16\), and this model's is \(64, 16\), and 1 more differ"),
        (lambda: llama(intermediate_size=48), llama, r"down_proj\.weight was saved .*\(16, 48\).* and 5 more differ"),
        (lambda: mixtral(intermediate_size=48), mixtral, rf"{EXPERTS} was saved with .*48.* and 3 more differ"),
        (lambda: mixtral(num_local_experts=3), mixtral, rf"{EXPERTS} was saved with .*\(3, .* and 5 more differ"),
    ],
    ids=["gpt2", "mixtral", "layers", "tied", "untied", "vocabulary", "width", "experts' width", "experts"],
)  # fmt: skip
def test_other_models_are_refused_by_name(tmp_path: Path, saved: Any, make: Any, told: str) -> None:
    saved().save_pretrained(tmp_path)
    check_refused(mt.stream(make()), tmp_path, told)


def test_a_tied_weight_may_be_saved_under_both_names(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    change(tmp_path, lambda x: x | {"lm_head.weight": x["model.embed_tokens.weight"].clone()})
    streamed = mt.stream(llama(tie_word_embeddings=True))
    with torch.no_grad():
        for parameter in streamed.parameters():
            parameter.zero_()
    read_weights(streamed, tmp_path)
    assert_equal_weights(weights(streamed), weights(model))


def test_what_models_are_known_to_leave_or_to_lack_is_no_fault(tmp_path: Path) -> None:
    """Frequencies of rotations were in files once."""
    model = llama()
    model.save_pretrained(tmp_path)
    change(tmp_path, lambda x: x | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    streamed = mt.stream(llama())
    read_weights(streamed, tmp_path)
    assert_equal_weights(weights(streamed), weights(model))


class WithBuffer(Blocks):
    def __init__(self) -> None:
        super().__init__("dict")
        self.register_buffer("scale", torch.ones(3))


@pytest.mark.parametrize("lacking", ["scale", "head.bias"])
def test_a_module_of_the_users_own(tmp_path: Path, lacking: str) -> None:
    saved = {name: torch.full_like(value, 0.5) for name, value in WithBuffer().state_dict().items()}
    model = mt.stream(WithBuffer())
    save_file({name: value for name, value in saved.items() if name != lacking}, tmp_path / "model.safetensors")
    check_refused(model, tmp_path, f"lacks 1 weights of this model, such as {lacking}")
    save_file(saved, tmp_path / "model.safetensors")
    read_weights(model, tmp_path)
    assert_equal_weights(weights(model), saved)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    llama().save_pretrained(tmp_path, max_shard_size="8KB" if "index" in name else "1GB")
    (tmp_path / name).write_text("{")
    check_refused(mt.stream(llama()), tmp_path, rf"{name} cannot be read")
