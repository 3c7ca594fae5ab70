"""What measures a model leaves it and all random numbers as they were; nothing is merged where a forward changes it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from rows_helpers import Capacity, batches
from trainer_helpers import llama
from transformers import (
    BertConfig,
    BertForTokenClassification,
    BigBirdConfig,
    BigBirdForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import megatrain as mt
from megatrain.base.errors import UserError
from megatrain.row_loss import measure_row_loss, why_not_merged


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    mt.init(device="cpu", exact=False)
    yield
    mt.init(device="cpu")


SMALL = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)


def big_bird() -> BigBirdForMaskedLM:
    """Switches itself to another attention at rows of less than 28 tokens, for good."""
    torch.manual_seed(0)
    config = BigBirdConfig(
        **SMALL, block_size=4, num_random_blocks=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return BigBirdForMaskedLM(config).train()


def test_a_model_that_adapts_to_short_rows_stays_as_it_is() -> None:
    plain = big_bird()
    modules, attention = list(plain.modules()), plain.bert.attention_type
    with pytest.raises(UserError, match="a forward changes bert.attention_type"):
        measure_row_loss(plain, takes_num_items=True)
    assert [id(module) for module in plain.modules()] == [id(module) for module in modules]
    assert plain.bert.attention_type == plain.bert.encoder.layer[1].attention_type == attention == "block_sparse"

    streamed = mt.stream(big_bird()).train()
    many = batches((1, 64), (1, 64))
    many[0]["labels"] = many[0]["input_ids"]
    mt.accumulate(streamed, many)
    assert streamed.bert.attention_type == "block_sparse"
    assert mt.stats(streamed)["num_micro_batches_run"] == 2


def changing(change: Callable[[Any], None]) -> LlamaForCausalLM:
    """`change` is made to its first MLP by each forward."""
    model = llama()
    mlp = model.model.layers[0].mlp
    mlp.register_buffer("table", torch.zeros(3))
    mlp.extra = torch.nn.Identity()
    mlp.known = torch.zeros(1)
    mlp.seen = {}
    mlp.register_forward_pre_hook(lambda module, args: (change(module), None)[1])
    return model


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("table", lambda mlp: mlp.register_buffer("table", torch.zeros(3))),
        ("table", lambda mlp: mlp.table.add_(1)),
        ("known", lambda mlp: setattr(mlp, "known", torch.zeros(1))),
        ("new", lambda mlp: setattr(mlp, "new", 1)),
        ("extra", lambda mlp: setattr(mlp, "extra", torch.nn.Identity())),
        ("extra", lambda mlp: mlp._modules.pop("extra", None)),
        ("12", lambda mlp: mlp.seen.update({12: None})),
        ("", lambda mlp: mlp.register_forward_hook(lambda *_: None)),
    ],
    ids=["buffer replaced", "buffer changed", "attribute", "new attribute", "module", "module gone", "cache", "hook"],
)
@pytest.mark.parametrize("fails", [False, True])
def test_changes_are_undone_and_a_reason(name: str, change: Callable[[Any], None], fails: bool) -> None:
    model = changing(change)
    if fails:
        model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    mlp = model.model.layers[0].mlp
    places = [vars(mlp), mlp._buffers, mlp._modules, mlp._forward_hooks, mlp.seen]
    before = list(map(dict, places))
    reason = "a short forward that was to show it failed" if fails else f"a forward changes model.layers.0.mlp.{name}"
    with pytest.raises(UserError, match=reason):
        measure_row_loss(model.train(), takes_num_items=True)
    for kept, place in zip(before, places, strict=True):
        assert kept.keys() == place.keys() and all(kept[key] is place[key] for key in kept)
    assert mlp.table.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: torch.rand(1)], ids=["Python", "NumPy", "PyTorch"]
)
def test_random_numbers_are_left_and_seen(draw: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama().train()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda *_: pytest.fail("generators of other devices are seeded"))
    assert not measure_row_loss(model, takes_num_items=True).draws_random
    model.model.layers[0].register_forward_pre_hook(lambda *_: (draw(), None)[1])
    before = random.getstate(), np.random.get_state()[1:], torch.get_rng_state()
    assert measure_row_loss(model, takes_num_items=True).draws_random
    model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(UserError, match="a short forward that was to show it failed"):
        measure_row_loss(model, takes_num_items=True)
    assert random.getstate() == before[0]
    for one, other in zip(np.random.get_state()[1:], before[1], strict=True):
        assert np.array_equal(one, other)
    assert torch.equal(torch.get_rng_state(), before[2])


# What is refused before a forward


def narrow_head() -> LlamaForCausalLM:
    model = llama()
    model.lm_head = torch.nn.Linear(16, 3, bias=False)
    return model


def without_words() -> LlamaForCausalLM:
    model = llama()
    del model.config.vocab_size
    return model


def with_rope(rope: dict[str, Any], in_another: bool = False) -> LlamaForCausalLM:
    model = llama()
    if in_another:
        model.config.decoder = LlamaConfig(**SMALL)
    (model.config.decoder if in_another else model.config).rope_parameters = rope
    return model


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: BertForTokenClassification(BertConfig(**SMALL, num_labels=3)), "causal or masked language modelling"),
        (narrow_head, "a head as wide as its vocabulary"),
        (without_words, "a head as wide as its vocabulary"),
        (lambda: with_rope(DYNAMIC), "the frequencies of dynamic RoPE"),
        (lambda: with_rope({"full_attention": DYNAMIC | {"rope_type": "longrope"}}), "the frequencies of longrope"),
        (lambda: with_rope(DYNAMIC, in_another=True), "the frequencies of dynamic RoPE"),
    ],
    ids=["classes of tokens", "narrow head", "no vocabulary", "rope", "rope of a layer type", "rope of another model"],
)
def test_is_refused_without_a_forward(make: Callable[[], Any], reason: str) -> None:
    model = make().train()
    model.forward = lambda *_, **__: pytest.fail("a forward")
    with pytest.raises(UserError, match=reason):
        measure_row_loss(model, takes_num_items=False)
    assert reason in why_not_merged(model)


def test_rows_that_see_each_other_a_little_are_seen_in_16_bits() -> None:
    torch.manual_seed(0)
    with pytest.raises(UserError, match="when another row changes"):
        measure_row_loss(Capacity(llama().config).bfloat16().train(), takes_num_items=False)
    assert measure_row_loss(llama().bfloat16().train(), takes_num_items=True)
