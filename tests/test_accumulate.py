"""Layer-major accumulation: two visits a layer and step, and the bits of plain accumulation."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from comparing import (
    accumulate_plainly,
    assert_equal,
    assert_same_accumulation,
    assert_same_gradients,
    assert_same_step,
    gradients,
    stream,
    the_engine,
    zero_grad,
)
from model_zoo import VOCAB, Block, Stack, make_batch, make_model, padded_batch
from torch import nn

import megatrain as mt
from megatrain.base.errors import UserError

LENGTHS = (7, 12, 9)


def batches(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, torch.Tensor]]:
    return [make_batch(length, seed=length) for length in lengths]


def loss_of(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    return model(**batch).loss / len(LENGTHS)


def step(model: Any, many: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    return the_engine(model).accumulate([lambda batch=batch: loss_of(model, batch) for batch in many])


# Visits and memory.


@pytest.mark.parametrize("num_batches", [1, 3, 8])
def test_two_visits_a_layer_and_step(num_batches: int) -> None:
    """And one for the head. Plain accumulation has two a micro-batch."""
    _, model = stream(make_model("mixtral"))
    many = batches(tuple(range(5, 5 + num_batches)))
    step(model, many)
    visits = mt.stats(model)["visits"]
    assert visits.pop("lm_head") == 1
    assert visits == {"model.embed_tokens": 2, **{f"model.layers.{i}": 2 for i in range(3)}}

    _, model = stream(make_model("mixtral"))
    for batch in many:
        loss_of(model, batch).backward()
    assert mt.stats(model)["visits"]["model.layers.1"] == 2 * num_batches


def test_weights_cross_the_link_twice_a_step() -> None:
    """With a single slot, so that none stays on the device from one visit to the next."""
    _, model = stream(make_model("llama"), num_slots=1)
    step(model, batches())
    mt.optim.AdamW(model).step()
    zero_grad(model)
    before = mt.stats(model)["transferred_bytes"]
    step(model, batches())
    transferred_bytes = mt.stats(model)["transferred_bytes"] - before
    homes = {home.name: home.wire.numel() for home in the_engine(model).homes if home.name != "resident"}
    once_a_step = homes["lm_head"]
    assert transferred_bytes <= 2 * sum(homes.values()) - once_a_step
    assert mt.stats(model)["num_drains"] == 2 * len(the_engine(model).homes)


def test_logits_of_one_micro_batch_live_at_a_time() -> None:
    _, model = stream(make_model("llama"))
    alive: list[int] = []
    seen: list[weakref.ref[torch.Tensor]] = []

    def loss_fn(outputs: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        seen.append(weakref.ref(outputs.logits))
        alive.append(sum(each() is not None for each in seen))
        return outputs.loss

    # The first step has to find out which layer is the last.
    mt.accumulate(model, batches(), loss_fn)
    alive.clear()
    mt.accumulate(model, batches(), loss_fn)
    assert alive == [1, 1, 1]
    assert not any(each() is not None for each in seen)


def test_no_graph_is_left_behind() -> None:
    _, model = stream(make_model("llama"))
    kept: list[weakref.ref[torch.Tensor]] = []
    model.model.norm.register_forward_hook(lambda module, args, output: kept.append(weakref.ref(output)))
    step(model, batches())
    assert len(kept) == 3 and not any(each() is not None for each in kept)


# Sums in the same order.


@pytest.mark.parametrize("lengths", [(9,), (4, 4), (7, 12, 9), (5, 11, 3, 8, 6)])
def test_any_number_of_micro_batches(lengths: tuple[int, ...]) -> None:
    plain, model = stream(make_model("qwen3"))
    if len(lengths) > 1:
        assert_same_accumulation(plain, model, batches(lengths), loss_of)
    else:
        assert_same_step(plain, model, lambda each: loss_of(each, batches(lengths)[0]))
        zero_grad(model)
        step(model, batches(lengths))
        assert_same_gradients(plain, model)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_dropout(name: str) -> None:
    settings = {"dropout_rate": 0.2} if name == "t5" else {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    plain, model = stream(make_model(name, tie_word_embeddings=False, **settings))
    tied = ["shared.weight"] if name == "t5" else []
    for seed in (1, 2):
        assert_same_accumulation(plain, model, batches(), loss_of, except_for=tied, seed=seed)
        zero_grad(plain, model)


def test_a_single_micro_batch_draws_from_the_global_generator() -> None:
    plain, model = stream(make_model("gpt2", tie_word_embeddings=False, resid_pdrop=0.2))
    torch.manual_seed(3)
    loss_of(plain, batches()[0]).backward()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    step(model, batches()[:1])
    assert torch.equal(torch.get_rng_state(), after)
    assert_same_gradients(plain, model)


def test_the_caller_s_random_state_moves_by_the_seeds_alone() -> None:
    _, model = stream(make_model("gpt2", resid_pdrop=0.2))
    torch.manual_seed(3)
    torch.randint(2**62, (3,))
    after = torch.get_rng_state()
    torch.manual_seed(3)
    step(model, batches())
    assert torch.equal(torch.get_rng_state(), after)


def test_padding_and_frozen_parts() -> None:
    model = make_model("llama")
    for part in (model.model.embed_tokens, model.model.layers[1], model.model.layers[2].mlp):
        part.requires_grad_(False)
    plain, model = stream(model)
    assert_same_accumulation(plain, model, [padded_batch(length, seed=length) for length in LENGTHS], loss_of)


def test_autocast_belongs_to_its_micro_batch() -> None:
    plain, model = stream(make_model("llama"))

    def loss_in_turn(each: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=batch["input_ids"].shape[1] == 12):
            loss = loss_of(each, batch)
            assert torch.is_autocast_enabled("cpu") == (batch["input_ids"].shape[1] == 12)
        return loss

    assert_same_accumulation(plain, model, batches(), loss_in_turn)


def test_forwards_without_grad_inside_a_micro_batch() -> None:
    """A target network: the loss compares with what the model says without gradients."""
    plain, model = stream(make_model("llama"))

    def loss_with_target(each: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            target = each(input_ids=batch["input_ids"].flip(0)).logits
        assert torch.is_grad_enabled()
        return (each(input_ids=batch["input_ids"]).logits - target).square().mean()

    assert_same_accumulation(plain, model, batches(), loss_with_target)


def test_a_second_step_adds_to_the_first() -> None:
    """Each step's sum is added to what is there, in fp32."""
    plain, model = stream(make_model("llama"))
    sums = []
    for lengths in ((7, 12), (9, 4)):
        zero_grad(plain)
        accumulate_plainly(plain, batches(lengths), loss_of)
        sums.append(gradients(plain))
        step(model, batches(lengths))
    assert_equal({name: sums[0][name] + sums[1][name] for name in sums[0]}, gradients(model))


# Micro-batches that go other ways.


class Ordered(nn.Module):
    """Runs its blocks in an order that comes with the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, order: list[int]) -> torch.Tensor:
        h = self.embed(input_ids)
        for index in order:
            h = self.blocks[index](h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


ORDERS = [
    ([0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3]),
    ([1, 2], [0, 1, 2], [0, 3]),
    ([3], [], [0, 1, 2]),
    ([3, 0], [0, 1, 2, 3], [2, 1]),
]


@pytest.mark.parametrize("orders", ORDERS)
def test_layers_left_out_in_some_micro_batches(orders: tuple[list[int], ...]) -> None:
    plain, model = stream(Ordered())
    many = [{**batch, "order": order} for batch, order in zip(batches(), orders, strict=True)]
    for seed in (1, 2):
        assert_same_accumulation(plain, model, many, lambda each, batch: each(**batch), seed=seed)
        zero_grad(plain, model)


def test_a_model_without_a_head_ends_where_its_micro_batch_ends() -> None:
    """The last layer is another one in each micro-batch, and the loss uses weights of the model's own."""

    class Headless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Block(16) for _ in range(3))
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))

        def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
            for block in self.blocks[:depth]:
                x = block(x)
            return (x * self.scale).square().mean()

    plain, model = stream(Headless())
    torch.manual_seed(1)
    for depths in ((3, 3, 3), (1, 3, 2), (3, 1, 1), (2, 2, 2)):
        many = [{"x": torch.randn(2, 5, 16), "depth": depth} for depth in depths]
        assert_same_accumulation(plain, model, many, lambda each, batch: each(**batch))
        zero_grad(plain, model)


def test_an_error_in_a_micro_batch_leaves_the_model_usable() -> None:
    plain, model = stream(make_model("llama"))
    assert_same_accumulation(plain, model, batches(), loss_of)
    zero_grad(plain, model)

    def fail(module: nn.Module, args: Any, output: Any) -> None:
        if output[0].shape[-2] == 12:
            raise ArithmeticError("a block fails")

    handle = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(ArithmeticError, match="a block fails"):
        step(model, batches())
    handle.remove()
    assert gradients(model) == {}
    assert not the_engine(model).is_collecting
    assert_same_accumulation(plain, model, batches(), loss_of)


def test_an_error_in_a_backward_leaves_the_model_usable() -> None:
    plain, model = stream(make_model("llama"))

    def loss_that_fails(batch: Mapping[str, Any], fails: bool) -> torch.Tensor:
        loss = loss_of(model, batch)
        if fails:
            loss.register_hook(lambda grad: 1 / 0)
        return loss

    for index in range(3):
        with pytest.raises(ZeroDivisionError):
            the_engine(model).accumulate(
                [lambda b=b, fails=i == index: loss_that_fails(b, fails) for i, b in enumerate(batches())]
            )
        assert_same_accumulation(plain, model, batches(), loss_of)
        zero_grad(plain, model)


# mt.accumulate.


def test_the_model_s_own_loss_is_normalised_by_the_tokens_of_the_step() -> None:
    plain, model = stream(make_model("llama"))
    many = [padded_batch(length, seed=length) for length in LENGTHS]
    num_targets = sum((batch["labels"][:, 1:] != -100).sum() for batch in many)

    def own_loss(each: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        return each(**batch, num_items_in_batch=num_targets, use_cache=False).loss

    torch.manual_seed(0)
    expected = accumulate_plainly(plain, many, own_loss)
    torch.manual_seed(0)
    losses = mt.accumulate(model, many)
    assert all(map(torch.equal, expected, losses))
    assert_same_gradients(plain, model)
    together = make_model("llama")(**whole(many)).loss
    torch.testing.assert_close(sum(losses), together.detach(), rtol=1e-6, atol=0)


def whole(many: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """All micro-batches as one padded batch."""
    longest = max(batch["input_ids"].shape[1] for batch in many)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        key: torch.cat([nn.functional.pad(b[key], (0, longest - b[key].shape[1]), value=value) for b in many])
        for key, value in fill.items()
    }


def test_a_loss_function_of_one_s_own() -> None:
    plain, model = stream(make_model("llama"))

    def loss_fn(outputs: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        return torch.logsumexp(outputs.logits, dim=-1).square().sum() / 100

    torch.manual_seed(0)
    expected = accumulate_plainly(plain, batches(), lambda each, batch: loss_fn(each(**batch, use_cache=False), batch))
    torch.manual_seed(0)
    assert all(map(torch.equal, expected, mt.accumulate(model, batches(), loss_fn)))
    assert_same_gradients(plain, model)


def test_a_model_that_returns_its_loss_in_a_mapping() -> None:
    torch.manual_seed(0)
    plain, model = stream(Stack([Block(16) for _ in range(2)], lambda model, h: model.blocks[1](model.blocks[0](h))))
    torch.manual_seed(0)
    expected = accumulate_plainly(plain, batches(), lambda each, batch: each(**batch)["loss"] / 3)
    torch.manual_seed(0)
    assert all(map(torch.equal, expected, mt.accumulate(model, batches())))
    assert_same_gradients(plain, model)


# What cannot work is refused by name.


def test_what_accumulate_refuses() -> None:
    _, model = stream(make_model("llama"))
    engine = the_engine(model)
    batch = make_batch()
    with pytest.raises(UserError, match="must be a scalar tensor, got a tensor of shape"):
        engine.accumulate([lambda: model(**batch).logits])
    with pytest.raises(UserError, match="must be a scalar tensor, got float"):
        engine.accumulate([lambda: 1.0])
    with pytest.raises(UserError, match="does not depend on any trainable parameter"):
        engine.accumulate([lambda: model(**batch).loss.detach()])
    with pytest.raises(UserError, match="called from inside a micro-batch"):
        engine.accumulate([lambda: engine.accumulate([lambda: model(**batch).loss])[0]])
    with torch.no_grad(), pytest.raises(UserError, match="outside of torch.no_grad"):
        step(model, batches())
    with pytest.raises(UserError, match="returned no loss"):
        mt.accumulate(model, [{"input_ids": batch["input_ids"]}])
    with pytest.raises(UserError, match="no micro-batches"):
        mt.accumulate(model, [])
