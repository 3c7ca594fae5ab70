"""Packed samples do not see each other: logits and gradients of packed rows against samples run alone, fp32 on CPU."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.base.errors import UserError
from megatrain.data.collate import BatchCounts, Collator, count_batch
from megatrain.data.exactness import fit_collator, packing_is_exact
from megatrain.data.packing import pack
from megatrain.data.rows import RowDataset
from megatrain.data.tokens import TokenStore, TokenWriter

VOCAB = 96
LENGTHS = (9, 4, 12, 2, 7, 3)
PLAIN = Collator(pad_token_id=0, packed=True)
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SMALL_GPT2 = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
    "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Windows shorter than the samples, so that a window counted across a boundary would show.
EXACT = {
    "llama": COMMON,
    "qwen3": COMMON,
    "mistral": {**COMMON, "sliding_window": 4},
    "gemma3_text": {**COMMON, "sliding_window": 4, "num_hidden_layers": 6},
    "gpt2": SMALL_GPT2,
    "mixtral": {**COMMON, **EXPERTS},
}
NEEDS_MASKS = {
    "gpt_oss": {**COMMON, **EXPERTS, "sliding_window": 4},
    "opt": {**COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
}
LEAKS = {
    "qwen3_next": {
        **COMMON, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    },
    "falcon_h1": {**COMMON, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "mamba2": {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8,
        "n_groups": 1, "expand": 2,
    },
    "bloom": {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4},
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore")


def build(kind: str, settings: dict, **options: str) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), **options)


@pytest.fixture(scope="module")
def store() -> TokenStore:
    generator = np.random.default_rng(0)
    writer = TokenWriter()
    for length in LENGTHS:
        writer.add(generator.integers(8, VOCAB, length).tolist(), [True] * length, [length])
    return writer.finish()


def packed_batch(store: TokenStore, collator: Collator) -> tuple[list[list[int]], dict]:
    """Two rows of several samples each, the shorter one padded."""
    rows = pack(store.piece_lengths, 20)
    assert len(rows) == 2 and all(len(row) > 1 for row in rows)
    dataset = RowDataset(store, rows, packed=True)
    return rows, collator([dataset[0], dataset[1]])


def assert_equal_to_alone(model: nn.Module, store: TokenStore, collator: Collator) -> None:
    """Logits of each sample, and the gradients of the summed loss."""
    alone = copy.deepcopy(model)
    rows, batch = packed_batch(store, collator)
    logits = model(**batch).logits
    num_targets = int((batch["labels"] != -100).sum())
    loss = model(**batch).loss
    loss.backward()
    alone_loss = torch.zeros(())
    for number, row in enumerate(rows):
        end = 0
        for piece in row:
            ids = torch.from_numpy(store.ids[slice(*store.piece_offsets[piece : piece + 2])].astype(np.int64))[None]
            out = alone(input_ids=ids, labels=ids, use_cache=False)
            start, end = end, end + ids.shape[1]
            # fp32 eps is 1.2e-7 and the logits are below 1: a few dozen roundings in another order.
            torch.testing.assert_close(logits[number : number + 1, start:end], out.logits, rtol=0, atol=5e-6)
            alone_loss = alone_loss + out.loss * (ids.shape[1] - 1) / num_targets
    torch.testing.assert_close(loss, alone_loss, rtol=1e-5, atol=0)
    alone_loss.backward()
    for (name, got), want in zip(model.named_parameters(), alone.parameters(), strict=True):
        if want.grad is not None:
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", EXACT)
def test_packed_equals_alone(kind: str, attention: str, store: TokenStore) -> None:
    model = build(kind, EXACT[kind], attn_implementation=attention).train()
    collator = fit_collator(PLAIN, model)
    assert collator is PLAIN
    assert_equal_to_alone(model, store, collator)


@pytest.mark.parametrize("kind", NEEDS_MASKS)
def test_models_that_hand_no_positions_to_their_mask_get_masks(kind: str, store: TokenStore) -> None:
    model = build(kind, NEEDS_MASKS[kind]).train()
    assert not packing_is_exact(model, PLAIN)[0]
    collator = fit_collator(PLAIN, model)
    assert collator.mask_config is model.config
    assert_equal_to_alone(model, store, collator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LEAKS)
def test_models_that_leak_are_refused(kind: str, dtype: torch.dtype) -> None:
    model = build(kind, LEAKS[kind]).to(dtype)
    with pytest.raises(UserError, match=rf"{type(model).__name__} mixes samples.*set data\.packing to false"):
        fit_collator(PLAIN, model)
    plain_rows = Collator(pad_token_id=0, packed=False)
    assert fit_collator(plain_rows, model) is plain_rows


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mixtral", "gpt2", "gpt_oss"])
def test_bf16_models_are_not_refused_for_their_rounding(kind: str) -> None:
    model = build(kind, {**EXACT, **NEEDS_MASKS}[kind]).to(torch.bfloat16)
    assert (fit_collator(PLAIN, model) is PLAIN) == (kind in EXACT)


def test_probe_leaves_the_model_as_it_was() -> None:
    model = build("gpt2", {**SMALL_GPT2, "resid_pdrop": 0.5}).train()
    model.transformer.h[0].eval()
    state = torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    assert fit_collator(PLAIN, model) is PLAIN
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_with_a_cache_would_leak_hence_use_cache(store: TokenStore) -> None:
    """Why the collator says use_cache=False: with a cache, transformers derives no mask from positions."""
    model = build("llama", COMMON).eval()
    _, batch = packed_batch(store, PLAIN)
    with torch.no_grad():
        exact = model(**batch).logits
        leaky = model(**{**batch, "use_cache": True}).logits
    assert (exact - leaky).abs().max() > 1e-2


def test_padding_of_plain_rows_changes_nothing(store: TokenStore) -> None:
    model = build("llama", COMMON).eval()
    dataset = RowDataset(store, [[0], [2]], packed=False)
    batch = Collator(pad_token_id=5, packed=False, pad_to_multiple_of=8)([dataset[0], dataset[1]])
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "input_ids": (2, 16), "labels": (2, 16), "attention_mask": (2, 16)
    }  # fmt: skip
    assert batch["input_ids"][0, 9:].tolist() == [5] * 7
    assert batch["labels"][0, 9:].tolist() == [-100] * 7
    with torch.no_grad():
        alone = model(input_ids=dataset[0]["input_ids"][None]).logits
        torch.testing.assert_close(model(**batch).logits[:1, :9], alone, rtol=0, atol=5e-6)


@pytest.mark.parametrize("packed", [True, False])
def test_counts_of_a_batch(packed: bool, store: TokenStore) -> None:
    rows = [[0, 1], [3]] if packed else [[0], [3]]
    lengths = [LENGTHS[piece] for row in rows for piece in row]
    dataset = RowDataset(store, rows, packed)
    batch = Collator(pad_token_id=0, packed=packed, pad_to_multiple_of=4)([dataset[0], dataset[1]])
    assert count_batch(batch) == BatchCounts(
        num_tokens=sum(lengths),
        num_targets=sum(length - 1 for length in lengths),
        num_padding=batch["input_ids"].numel() - sum(lengths),
        num_attended=sum(length * (length + 1) // 2 for length in lengths),
    )


def test_a_failure_of_the_model_is_not_taken_for_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", COMMON)
    monkeypatch.setattr(model.model.layers[1], "forward", _fail)
    with pytest.raises(RuntimeError, match="device is gone"):
        fit_collator(PLAIN, model)


def _fail(*_: object, **__: object) -> None:
    raise RuntimeError("the device is gone")
