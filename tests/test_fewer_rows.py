"""A step that the device's memory does not hold is run with fewer rows at a time: the same loss and gradients, or an
error that says why not and what to set."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rows_helpers import Capacity, Memory, assert_close, batches, mixtral, num_targets
from trainer_helpers import Blocks, Recorder, arguments, llama, rows, train, weights
from transformers import BertConfig, BertForMaskedLM

import megatrain as mt
from megatrain.base.errors import UserError
from megatrain.data.collate import Collator
from megatrain.execute.engine import engine_of
from megatrain.execute.retry import StepTooLargeError
from megatrain.losses import own_loss
from megatrain.micro_batches import MicroBatches
from megatrain.row_loss import measure_row_loss


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    mt.init(device="cpu")
    yield
    mt.init(device="cpu")


def step(model: Any, many: list[dict], num_items: Any, splitter: MicroBatches | None = None) -> dict[str, torch.Tensor]:
    """Losses and gradients."""
    model.train()
    splitter = splitter or splitter_of(model)
    losses = splitter.run(many, num_items)
    found = {name: gradient.clone() for name, gradient in mt.named_gradients(model)}
    model.zero_grad()
    return {**found, "losses": torch.stack(losses)}


def splitter_of(model: Any, obstacle: str = "") -> MicroBatches:
    def loss_of(batch: dict, num_items: Any) -> torch.Tensor:
        extra = {} if num_items is None else {"num_items_in_batch": num_items}
        return own_loss(model(**batch, **extra))

    return MicroBatches(model, engine_of(model), loss_of, lambda: obstacle)


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("most_rows", [4, 2, 1])
@pytest.mark.parametrize("is_mean", [False, True], ids=["sum", "mean"])
def test_fewer_rows_give_the_same_step(
    most_rows: int, in_backward: bool, is_mean: bool, caplog: pytest.LogCaptureFixture
) -> None:
    many = batches((6, 9), (1, 12), (7, 8))
    num_items = None if is_mean else num_targets(many)
    if is_mean:
        many[1]["labels"] = many[1]["input_ids"]  # else its mean is no number, with fewer rows or without
    expected = step(mt.stream(llama()), many, num_items)
    model = mt.stream(llama())
    memory = Memory(model, most_rows, in_backward=in_backward)
    splitter = splitter_of(model)
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        found = step(model, many, num_items, splitter)
    assert memory.num_failures > 1
    assert_close(found, expected)
    # 7 rows, halved until they fit.
    assert splitter.most_rows == {4: 3, 2: 1, 1: 1}[most_rows]
    assert caplog.text.count("from now on they are run") == 1 and "with other random numbers" in caplog.text

    memory.num_failures = 0
    caplog.clear()
    assert_close(step(model, many, num_items, splitter), expected)
    assert memory.num_failures == 0 and not caplog.text


def test_what_has_no_targets_at_all_is_run_whole() -> None:
    """Its mean is no number, and stays none."""
    many = batches((4, 6))
    many[0]["labels"] = torch.full_like(many[0]["labels"], -100)
    model = mt.stream(llama()).train()
    splitter = splitter_of(model)
    splitter.most_rows = 2
    (loss,) = splitter.run(many, None)
    assert loss.isnan()


def test_one_row_that_does_not_fit_is_an_error_that_leaves_nothing() -> None:
    many = batches((4, 9), (2, 7))
    expected = step(mt.stream(llama()), many, num_targets(many))
    model = mt.stream(llama())
    memory = Memory(model, 0)
    splitter = splitter_of(model)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with pytest.raises(StepTooLargeError) as caught:
        step(model, many, num_targets(many), splitter)
    text = str(caught.value)
    for told in ("a single row of 9 tokens", "are free before the step", "max_vram_gb", "hbm_home_gb", "shorter rows"):
        assert told in text
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert caught.value.__cause__ is not None and "(a test)" in str(caught.value.__cause__)

    engine = engine_of(model)
    assert not list(mt.named_gradients(model))
    assert engine.activations.kept_bytes == 0 and engine.activations.buffers.used_bytes == 0
    assert engine.report.num_seen == 0
    assert torch.equal(torch.get_rng_state(), before)
    memory.most_rows = 9
    assert_close(step(model, many, num_targets(many), splitter), expected)


def test_packed_rows_stay_whole() -> None:
    """Positions that restart, masks of four dimensions: each row has its own."""
    collator = Collator(pad_token_id=0, packed=True)
    made = []
    generator = torch.Generator().manual_seed(2)
    for lengths in ((4, 5), (7, 2), (3, 6)):
        ids = torch.randint(1, 64, (sum(lengths),), generator=generator)
        positions = torch.cat([torch.arange(length) for length in lengths])
        labels = ids.masked_fill(positions == 0, -100)
        made.append({"input_ids": ids, "labels": labels, "position_ids": positions})
    ready = Collator(pad_token_id=0, packed=True, mask_config=llama().config)
    for many in ([collator(made)], [ready(made)]):
        expected = step(mt.stream(llama()), many, num_targets(many))
        model = mt.stream(llama())
        Memory(model, 1)
        assert_close(step(model, many, num_targets(many)), expected)


def test_one_row_of_many_samples_is_not_cut() -> None:
    ids = torch.arange(12)[None]
    many = [{"input_ids": ids, "labels": ids, "cu_seq_lens_q": torch.tensor([0, 5, 12], dtype=torch.int32)}]
    model = mt.stream(llama())
    Memory(model, 0)
    with pytest.raises(StepTooLargeError, match="a single row of 12 tokens"):
        step(model, many, num_targets(many))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"pixel_values": torch.ones(4, 3)}, "what 'pixel_values' has for each row is not known"),
        ({"position_ids": torch.arange(9).expand(3, 4, 9)}, "what 'position_ids' has for each row is not known"),
        ({"labels": None}, "it has no labels"),
    ],
)
def test_a_batch_that_is_not_known_is_not_cut(change: dict[str, Any], told: str) -> None:
    many = [batches((4, 9))[0] | change]
    model = mt.stream(llama()).train()
    Memory(model, 2)
    splitter = splitter_of(model)
    splitter._loss_of = lambda batch, _: own_loss(model(input_ids=batch["input_ids"], labels=batch["input_ids"]))
    with pytest.raises(StepTooLargeError) as caught:
        splitter.run(many, None)
    assert told in str(caught.value) and "a micro-batch of 4 rows of 9 tokens" in str(caught.value)
    assert "per_device_train_batch_size=2" in str(caught.value)
    assert splitter.most_rows is None


# What couples rows


def test_the_loss_of_rows_is_measured() -> None:
    told = measure_row_loss(mt.stream(llama(attention_dropout=0.5)).train(), takes_num_items=True)
    assert told.is_shifted and not told.is_mean
    assert measure_row_loss(mt.stream(llama()).train(), takes_num_items=False).is_mean
    plain = measure_row_loss(mixtral(), takes_num_items=True)
    assert plain.is_shifted and not plain.is_mean
    torch.manual_seed(0)
    bert = BertForMaskedLM(
        BertConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    )
    told = measure_row_loss(mt.stream(bert).train(), takes_num_items=False)
    assert told.is_mean and not told.is_shifted


def test_measuring_draws_no_random_numbers() -> None:
    model = mt.stream(llama(attention_dropout=0.5)).train()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    measure_row_loss(model, takes_num_items=True)
    assert torch.equal(torch.get_rng_state(), before)


class Norms(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)


def contrastive() -> Any:
    model = llama()
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs = plain(*args, **kwargs)
        pooled = outputs.logits.mean(1)
        outputs.loss = outputs.loss + 0.01 * (pooled @ pooled.T).logsumexp(1).mean()
        return outputs

    model.forward = forward
    return model


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: mixtral(output_router_logits=True, router_aux_loss_coef=0.001), "an auxiliary loss of a router"),
        (contrastive, "an auxiliary loss of a router"),
        (Norms, "is a batch norm"),
        (lambda: Blocks("dict"), "not of transformers"),
        (lambda: Capacity(llama().config), "when another row changes"),
        (lambda: llama(expert_capacity=4), "experts take a limited number of tokens"),
    ],
    ids=["router", "contrastive", "batch norm", "own module", "rows that see each other", "capacity"],
)
def test_what_couples_rows_is_seen(make: Callable[[], Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        measure_row_loss(make().train(), takes_num_items=False)


def test_coupled_rows_are_not_cut() -> None:
    model = mt.stream(mixtral(output_router_logits=True)).train()
    block = model.model.layers[1].mlp
    block.forward = lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory. (a test)"))
    with pytest.raises(StepTooLargeError, match="a short forward that was to show it failed"):
        step(model, batches((4, 9)), None)
    del block.forward


# mt.Trainer


def trained(folder: Path, most_rows: int | None, **changes: Any) -> tuple[Any, Recorder, Memory | None]:
    recorder = Recorder()
    trainer = mt.Trainer(llama(), arguments(folder, **changes), train_dataset=rows(), callbacks=[recorder])
    memory = None if most_rows is None else Memory(trainer.model, most_rows)
    trainer.train()
    return trainer, recorder, memory


def test_a_trainer_goes_on_with_fewer_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    whole, expected, _ = trained(tmp_path / "whole", None, **changes)
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        cut, found, memory = trained(tmp_path / "cut", 2, **changes)
    # With the inputs of layers in host memory, and then with half of the rows; from then on nothing fails.
    assert memory.num_failures == 2 and set(memory.rows[-8:]) <= {1, 2}
    assert caplog.text.count("from now on they are run 2 rows at a time") == 1
    assert found.events == expected.events
    assert cut.state.total_flos == whole.state.total_flos
    for one, other in zip(found.logs, expected.logs, strict=True):
        assert one.get("loss", 0) == pytest.approx(other.get("loss", 0), rel=1e-5)
    left, right = weights(cut.model), weights(whole.model)
    assert all(torch.allclose(left[name], right[name], atol=1e-4) for name in right)


class OwnLoss(mt.Trainer):
    def compute_loss(self, model: Any, inputs: dict, return_outputs: bool = False, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


@pytest.mark.parametrize(
    ("make", "given", "told"),
    [
        (OwnLoss, {}, "compute_loss is a function of your own"),
        (mt.Trainer, {"compute_loss_func": lambda o, labels, **_: own_loss(o)}, "compute_loss_func is a function"),
    ],
)
def test_a_loss_of_your_own_is_not_cut(make: Any, given: dict[str, Any], told: str, tmp_path: Path) -> None:
    trainer = make(llama(), arguments(tmp_path), train_dataset=rows(), **given)
    Memory(trainer.model, 1)
    with pytest.raises(StepTooLargeError) as caught:
        trainer.train()
    assert told in str(caught.value) and "per_device_train_batch_size=1" in str(caught.value)


def test_label_smoothing_is_not_cut(tmp_path: Path) -> None:
    with pytest.raises(StepTooLargeError, match="label_smoothing_factor"):
        trained(tmp_path, 1, label_smoothing_factor=0.1)


def test_accumulate_names_the_largest_micro_batch() -> None:
    model = mt.stream(llama()).train()
    Memory(model, 2)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        mt.accumulate(model, batches((2, 6), (4, 9)))
    told = "a micro-batch of 4 rows of 9 tokens"
    assert told in str(caught.value) and "smaller micro-batches, more of them" in str(caught.value)


def test_a_plain_trainer_is_the_truth(tmp_path: Path) -> None:
    """The sum of parts is what transformers itself makes of whole micro-batches."""
    plain, _ = train(transformers.Trainer, tmp_path / "plain", per_device_train_batch_size=4)
    cut, _, memory = trained(tmp_path / "cut", 1, per_device_train_batch_size=4)
    assert memory.num_failures > 1
    losses = [[e["loss"] for e in one.state.log_history if "loss" in e] for one in (cut, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
