"""Micro-batches of equal length are merged where that is harmless, equal within rounding, and nowhere else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from comparing import gradients
from rows_helpers import assert_close, batches, mixtral, num_targets
from trainer_helpers import Blocks, llama

import megatrain as mt
from megatrain.base.config import StreamOptions
from megatrain.base.errors import UserError
from megatrain.data.collate import Collator
from megatrain.execute.engine import engine_of
from megatrain.losses import own_loss
from megatrain.micro_batches import MicroBatches


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    mt.init(device="cpu", exact=False)
    yield
    mt.init(device="cpu")


MIXED = [(2, 9), (1, 7), (2, 9), (2, 7), (1, 9), (3, 5)]
"""Merged: three of 9 tokens, two of 7; and one that has no equal."""


def result(model: Any, many: list[dict], loss_fn: Any = None) -> dict[str, torch.Tensor]:
    """Losses and gradients of a step."""
    model.train()
    torch.manual_seed(4)
    losses = mt.accumulate(model, many, loss_fn)
    found = {**gradients(model), "losses": torch.stack(losses)}
    model.zero_grad()
    return found


def exactly(make: Callable[[], Any], many: list[dict], loss_fn: Any = None) -> dict[str, torch.Tensor]:
    """Of the step with its micro-batches as they are."""
    mt.init(device="cpu", exact=True)
    found = result(mt.stream(make()), many, loss_fn)
    mt.init(device="cpu", exact=False)
    return found


def plainly(model: Any, many: list[dict]) -> dict[str, torch.Tensor]:
    """In plain PyTorch, one after the other."""
    plain = copy.deepcopy(model).train()
    losses = []
    for batch in many:
        loss = plain(**batch, num_items_in_batch=num_targets(many)).loss
        loss.backward()
        losses.append(loss.detach())
    return {**gradients(plain), "losses": torch.stack(losses)}


def told(model: Any) -> tuple[int, int, str]:
    stats = mt.stats(model)
    return stats["num_micro_batches"], stats["num_micro_batches_run"], stats["unmerged_because"]


def summed(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the loss of the step in place of those of its micro-batches."""
    return {**found, "losses": found["losses"].sum()}


# Equal within rounding


def with_masks(many: list[dict]) -> list[dict]:
    """The last two tokens of each first row are padding."""
    for batch in many:
        batch["attention_mask"][0, -2:] = 0
        batch["labels"][0, -2:] = -100
    return many


@pytest.mark.parametrize("masked", [False, True], ids=["whole rows", "padded rows"])
def test_merged_micro_batches_give_the_same_step(masked: bool) -> None:
    many = with_masks(batches(*MIXED)) if masked else batches(*MIXED)
    expected = plainly(llama(), many)
    model = mt.stream(llama())
    found = result(model, many)
    assert_close(summed(found), summed(expected))
    assert told(model) == (6, 3, "")
    exact = exactly(llama, many)
    assert all(torch.equal(exact[name], expected[name]) for name in expected)


def test_each_micro_batch_has_its_share_of_the_loss() -> None:
    many = batches(*MIXED)
    found = result(mt.stream(llama()), many)["losses"]
    counts = torch.tensor([num_targets([batch]) for batch in many])
    plain = plainly(llama(), many)["losses"]
    for group in ((0, 2, 4), (1, 3), (5,)):
        of = list(group)
        torch.testing.assert_close(found[of], plain[of].sum() * counts[of] / counts[of].sum())


def test_what_has_no_targets_has_no_loss() -> None:
    many = batches((1, 6), (1, 6), (2, 8))
    found = result(mt.stream(llama()), many)["losses"]
    assert found[:2].tolist() == [0.0, 0.0] and found[2] > 0


def test_means_are_merged_where_they_weigh_the_same() -> None:
    """A loss that is not divided by the step's targets: the mean over two is the mean of their means where both have as
    many targets."""
    many = batches((2, 9), (3, 9), (2, 9), (1, 9))
    many[3]["labels"] = many[3]["input_ids"]

    def step(exact: bool) -> tuple[dict[str, torch.Tensor], Any]:
        mt.init(device="cpu", exact=exact)
        model = mt.stream(llama()).train()
        runner = MicroBatches(model, engine_of(model), lambda batch, _: own_loss(model(**batch)) / 4, lambda: "")
        losses = runner.run(many, None)
        return {**gradients(model), "losses": torch.stack(losses).sum()}, told(model)

    expected, _ = step(True)
    found, counts = step(False)
    assert counts == (4, 3, "")
    assert_close(found, expected)
    del many[0]
    assert step(False)[1] == (3, 3, "the loss is a mean over target tokens, of which no two have the same number")


def test_packed_rows_are_merged_and_their_samples_stay_apart() -> None:
    collator = Collator(pad_token_id=0, packed=True)
    many = []
    generator = torch.Generator().manual_seed(2)
    for lengths in ((4, 5), (7, 2), (3, 6)):
        ids = torch.randint(1, 64, (sum(lengths),), generator=generator)
        positions = torch.cat([torch.arange(length) for length in lengths])
        labels = ids.masked_fill(positions == 0, -100)
        many.append(collator([{"input_ids": ids, "labels": labels, "position_ids": positions}]))
    model = mt.stream(llama())
    assert_close(summed(result(model, many)), summed(exactly(llama, many)))
    assert told(model) == (3, 1, "")
    flash = mt.stream(llama())
    flash.config._attn_implementation = "flash_attention_2"  # looks at positions of batches of one row alone
    with pytest.raises(UserError, match="no two have the same length"):
        MicroBatches(flash, engine_of(flash), lambda *_: None, lambda: "")._merged(many, 1)


@pytest.mark.parametrize("kind", ["mixtral", "bf16"])
def test_experts_and_bf16_are_merged(kind: str) -> None:
    make = mixtral if kind == "mixtral" else lambda: llama().bfloat16()
    many = batches((2, 9), (2, 9), (2, 7))
    model = mt.stream(make())
    found, expected = result(model, many), exactly(make, many)
    assert told(model) == (3, 2, "")
    if kind == "mixtral":
        assert_close(summed(found), summed(expected))
    else:
        for name, value in summed(expected).items():
            # Products of other shapes, whose sums may be rounded to bf16 the other way: 2^-8 each.
            torch.testing.assert_close(summed(found)[name], value, rtol=0, atol=3 * 2**-8 * float(value.abs().max()))


def test_lanes_and_places_change_no_bit_of_merged_steps() -> None:
    many = batches(*MIXED)
    serial = result(mt.stream(llama(), options=StreamOptions(serial=True)), many)
    for options in (StreamOptions(num_slots=1, places="hbm"), StreamOptions(poison=True, activation_bytes=0)):
        found = result(mt.stream(llama(), options=options), many)
        assert all(torch.equal(found[name], serial[name]) for name in serial)


# What is not merged


def with_router(**changes: Any) -> Any:
    return mixtral(output_router_logits=True, router_aux_loss_coef=0.001, **changes)


def hidden_router() -> Any:
    """Of whose auxiliary loss the config tells nothing."""
    model = mixtral()
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs = plain(*args, **kwargs)
        outputs.loss = outputs.loss + 1e-3 * outputs.logits.float().mean((0, 1)).square().sum()
        return outputs

    model.forward = forward
    return model


def with_batch_norm() -> Any:
    model = llama()
    model.model.layers[0].mlp.norm = torch.nn.BatchNorm1d(16)
    plain = model.model.layers[0].mlp.forward
    norm = model.model.layers[0].mlp.norm
    model.model.layers[0].mlp.forward = lambda hidden: norm(plain(hidden).transpose(1, 2)).transpose(1, 2)
    return model


def with_noise() -> Any:
    """Drops at random in a way that no module or setting shows."""
    model = llama()
    plain = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: torch.nn.functional.dropout(plain(hidden), 0.1)
    return model


def summed_logits(outputs: Any, batch: dict) -> torch.Tensor:
    return outputs.logits.logsumexp(-1).sum()


@pytest.mark.parametrize(
    ("make", "loss_fn", "reason"),
    [
        (with_router, None, "an auxiliary loss of a router (output_router_logits)"),
        (hidden_router, None, "not the cross entropy of its target tokens alone"),
        (with_batch_norm, None, "is a batch norm"),
        (lambda: llama(attention_dropout=0.3), None, "attention_dropout is 0.3"),
        (with_noise, None, "the model draws random numbers"),
        (lambda: llama(expert_capacity=2), None, "a limited number of tokens"),
        (lambda: Blocks("dict"), None, "not of transformers"),
        (llama, summed_logits, "loss_fn is a function of your own"),
    ],
    ids=["router", "hidden router", "batch norm", "dropout", "hidden dropout", "capacity", "own module", "own loss"],
)
def test_what_may_couple_rows_is_not_merged(make: Callable[[], Any], loss_fn: Any, reason: str) -> None:
    many = batches((2, 9), (2, 9))
    if make().__class__ is Blocks:
        many = [{name: batch[name] for name in ("input_ids", "labels")} for batch in many]
    expected = exactly(make, many, loss_fn)
    model = mt.stream(make())
    found = result(model, many, loss_fn)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    given, run, why = told(model)
    assert (given, run) == (2, 2) and reason in why


def test_what_changes_is_measured_again() -> None:
    many = batches((2, 9), (2, 9))
    model = mt.stream(mixtral())
    result(model, many)
    assert told(model) == (2, 1, "")
    model.config.output_router_logits = True
    result(model, many)
    assert "an auxiliary loss of a router" in told(model)[2]
    model.config.output_router_logits = False
    result(model, many)
    assert told(model) == (6, 4, "")
    model.model.layers[0].register_forward_pre_hook(lambda module, args: args if torch.rand(1) < 2 else None)
    model.eval()  # another mode
    mt.accumulate(model, many)
    assert "draws random numbers" in told(model)[2]


@pytest.mark.parametrize(("dtype", "run"), [(torch.float32, 2), (torch.bfloat16, 1)])
def test_by_default_bf16_is_merged_and_fp32_keeps_its_bits(dtype: torch.dtype, run: int) -> None:
    mt.init(device="cpu")
    many = batches((2, 9), (2, 9))
    model = mt.stream(llama().to(dtype))
    result(model, many)
    assert told(model)[:2] == (2, run)
    with pytest.raises(UserError, match="exact='yes' must be True, False or None"):
        mt.init(exact="yes")


# How it runs


def test_forwards_are_fewer_and_large(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    many = batches(*((1, 8) for _ in range(8)))
    for batch in many:
        batch["labels"] = batch["input_ids"]
    model = mt.stream(llama())
    result(model, many)  # and measures, once
    rows: list[int] = []
    mlp = model.model.layers[1].mlp
    mlp.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    before = mt.stats(model)["visits"]["model.layers.1"]
    result(model, many)
    assert rows == [8, 8], "forward and recomputation of all at once"
    assert mt.stats(model)["visits"]["model.layers.1"] - before == 2
    engine_of(model).merging.most_tokens = 30
    rows.clear()
    result(model, many)
    # At most 30 tokens together, as even as can be; last to first in the forward, first to last in the backward.
    assert rows == [3, 3, 2, 2, 3, 3]
    out = capsys.readouterr().out
    assert "micro-batches of equal length merged up to 16,384 tokens where nothing couples their rows" in out
    line = "megatrain: 8 micro-batches of 1 x 8 tokens of a step are merged into 1 micro-batch of 8 x 8 tokens"
    assert out.count(line) == 1


@pytest.mark.parametrize(("most_tokens", "groups"), [(0, 2), (16, 2), (24, 3), (32, 2)])
def test_groups_of_a_visit_are_of_micro_batches_as_they_were_given(most_tokens: int, groups: int) -> None:
    """Four of eight go together, whether they are merged by two, by four, or not. By three, two and three of them: no
    two of these are four at most."""
    many = batches(*((2, 4) for _ in range(8)))
    model = mt.stream(llama(), options=StreamOptions(micro_batches_a_visit=4))
    engine_of(model).merging.most_tokens = most_tokens
    result(model, many)
    before = mt.stats(model)["visits"]["model.layers.1"]
    result(model, many)
    assert mt.stats(model)["visits"]["model.layers.1"] - before == 2 * groups


def test_nothing_is_measured_where_there_is_nothing_to_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.row_loss.measure_row_loss", lambda *_, **__: pytest.fail("measured"))
    model = mt.stream(llama())
    result(model, batches((2, 9), (2, 8)))
    assert "no two have the same length" in told(model)[2]
