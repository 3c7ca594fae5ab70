"""Cross entropy with the logits of a piece of the tokens at a time: as near to the truth as with whole logits, compiled
and not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import gradients, stream, the_engine, zero_grad
from model_zoo import CONFIGS, VOCAB, make_model, padded_batch
from pieces_helpers import (
    ULP,
    WAYS,
    Loss,
    Scored,
    assert_near_truth,
    batches,
    in_pieces_of_five,
    num_graphs,
    rows_of,
    run,
    step,
    without_key_biases,
)
from torch.nn import functional
from trainer_helpers import Recorder, arguments, llama, rows

import megatrain as mt


@pytest.fixture(params=[False, True], ids=["eager", "compiled"])
def compiled(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> Iterator[list[bool]]:
    yield in_pieces_of_five(monkeypatch, compiled=compiled)
    assert not compiled or 1 <= num_graphs() <= 4, "two for each kind of loss"


LOSSES: dict[str, Loss] = {
    "plain": rows_of,
    "soft-capped": lambda logits, targets: rows_of(torch.tanh(logits / 3.0) * 3.0, targets),
    "scaled": lambda logits, targets: rows_of(-(2 + logits * 0.25) / 0.5, targets),
    "shifted": lambda logits, targets: rows_of(logits[..., :-1, :].contiguous(), targets[..., 1:].contiguous()),
    "flattened": lambda logits, targets: functional.cross_entropy(logits.flatten(0, 1), targets.flatten()),
    "of chosen tokens": lambda logits, targets: functional.cross_entropy(
        logits[targets != -100], targets[targets != -100]
    ),
    "sum": lambda logits, targets: rows_of(logits, targets, reduction="sum") / 11,
    "none": lambda logits, targets: (
        rows_of(logits, targets, reduction="none") * torch.linspace(0, 2, targets.numel(), dtype=logits.dtype)
    ).mean(),
    "smoothed": lambda logits, targets: rows_of(logits, targets, label_smoothing=0.1),
    "ignored": lambda logits, targets: rows_of(logits, targets.where(targets > 40, 7), ignore_index=7),
    "by class": lambda logits, targets: rows_of(
        logits, targets, weight=torch.linspace(0.1, 2, VOCAB, dtype=logits.dtype), label_smoothing=0.1
    ),
    "twice": lambda logits, targets: rows_of(logits, targets) + rows_of(logits * 0.5, targets, reduction="sum") / 7,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_as_near_to_the_truth(name: str, way: str, calls: list[bool]) -> None:
    plain, model = stream(Scored(LOSSES[name]))
    assert_near_truth(plain, model, way, batches())
    num_losses = (2 if name == "twice" else 1) * 3
    assert calls == ([True] * 2 * num_losses if way == "accumulate" else [False] * num_losses)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["plain", "soft-capped", "none"])
def test_in_bf16(name: str, way: str, calls: list[bool], compiled: bool) -> None:
    mt.init(device="cpu", precision="bf16", logits_in_pieces=True, grad_dtype="fp32", compile=compiled)
    plain, model = stream(Scored(LOSSES[name]).bfloat16())
    assert_near_truth(plain, model, way, batches())
    assert calls


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 2.0},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 4.0},
    "bert": {},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_models_are_as_near_to_the_truth(
    name: str, way: str, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied heads among them (gemma2, cohere, bert)."""
    monkeypatch.setitem(CONFIGS, "cohere", ("Cohere", CONFIGS["llama"][1]))
    monkeypatch.setitem(CONFIGS, "granite", ("Granite", CONFIGS["llama"][1]))
    plain, model = stream(without_key_biases(make_model(name, **MODELS[name])))
    assert_near_truth(plain, model, way, batches())
    assert calls


@pytest.mark.parametrize("way", WAYS)
def test_a_router_s_loss_beside_it(way: str, calls: list[bool]) -> None:
    plain, model = stream(make_model("mixtral"))
    expected, losses = run(plain, batches()), step(model, way, batches())
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(gradients(model), gradients(plain))
    assert calls


def test_targets_of_a_step_are_counted_together(calls: list[bool]) -> None:
    """A model's own loss, divided by the number of targets of the whole step; padded rows."""
    plain, model = stream(make_model("llama"))
    many = [padded_batch(), padded_batch(9, seed=2)]
    number = sum(batch["labels"][:, 1:].ne(-100).sum() for batch in many)
    expected = [plain(**batch, num_items_in_batch=number).loss for batch in many]
    sum(expected).backward()
    for _ in range(2):
        zero_grad(model)
        losses = mt.accumulate(model, many)
    torch.testing.assert_close(losses, [loss.detach() for loss in expected])
    torch.testing.assert_close(gradients(model), gradients(plain))
    assert calls == [True] * 4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_micro_batch_without_targets(way: str, reduction: str) -> None:
    """As in plain PyTorch its mean is not a number, and its gradient zero."""
    plain, model = stream(Scored(lambda logits, targets: rows_of(logits, targets, reduction=reduction)))
    many = batches(2)
    many[0]["labels"].fill_(-100)
    expected, losses = run(plain, many), step(model, way, many)
    torch.testing.assert_close(losses, expected, equal_nan=True)
    assert losses[0].isnan() == (reduction == "mean")
    torch.testing.assert_close(gradients(model), gradients(plain))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("chosen", "is_told"),
    [((-100,), False), ((3,), True), ((3, -100), True), ((3, 5, -100), False), ((5, -100), False)],
)
def test_targets_of_weight_zero(chosen: tuple[int, ...], is_told: bool, smoothing: float, way: str) -> None:
    """Where none of them weighs anything their mean is not a number, and neither is its gradient: the step can be seen
    to have failed. Where all are ignored the gradient is zero.
    """
    weight = torch.ones(VOCAB)
    weight[3] = 0
    plain, model = stream(Scored(lambda *of: rows_of(*of, weight=weight, label_smoothing=smoothing)))
    many = batches(1)
    labels = many[0]["labels"]
    many[0]["labels"] = torch.tensor(chosen).repeat(labels.numel())[: labels.numel()].view_as(labels)
    expected, losses = run(plain, many), step(model, way, many)
    torch.testing.assert_close(losses, expected, equal_nan=True)
    right = gradients(plain)
    assert right["head.weight"].isnan().all() == is_told
    torch.testing.assert_close(gradients(model), right, equal_nan=True)


@pytest.mark.parametrize("way", WAYS)
def test_ignored_targets_among_those_of_weight_zero_have_no_gradient(way: str) -> None:
    """Rows of their own, which no other row reads."""
    weight = torch.ones(VOCAB)
    weight[3] = 0
    plain, model = stream(Scored(lambda *of: rows_of(*of, weight=weight)))
    batch = {"input_ids": torch.tensor([[1] * 7, [2] * 7]), "labels": torch.tensor([[3] * 7, [-100] * 7])}
    run(plain, [batch])
    step(model, way, [batch])
    right = gradients(plain)
    assert right["embed.weight"][1].isnan().all() and not right["embed.weight"][2].any()
    torch.testing.assert_close(gradients(model), right, equal_nan=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("frozen", ["head", "all but the head", "head.bias"])
def test_frozen_parts(frozen: str, way: str) -> None:
    built = Scored(rows_of)
    for name, parameter in built.named_parameters():
        parameter.requires_grad_(name.startswith("head.") if frozen[0] == "a" else not name.startswith(frozen))
    plain, model = stream(built)
    expected, losses = run(plain, batches()), step(model, way, batches())
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(gradients(model), gradients(plain))


@pytest.mark.parametrize("way", WAYS)
def test_under_autocast(way: str, calls: list[bool]) -> None:
    """The head computes in the dtype of its call, also where the loss is taken outside of autocast."""
    plain, model = stream(Scored(rows_of))

    def loss_of(each: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = each(**batch)
            logits = each(batch["input_ids"])["logits"]
        assert logits.dtype == torch.bfloat16 and inside["loss"].dtype == torch.float32
        return inside["loss"] + rows_of(logits, batch["labels"]).float()

    for batch in batches():
        loss_of(plain, batch).backward()
        if way == "backward":
            loss_of(model, batch).backward()
    if way == "accumulate":
        the_engine(model).accumulate([lambda batch=batch: loss_of(model, batch) for batch in batches()])
    assert len(calls) == 6
    right, found = gradients(plain), gradients(model)
    for name, gradient in right.items():
        # Rounded to bf16 once more, or once less, in each of a few products in a row.
        assert (found[name] - gradient).norm() <= 4 * ULP[torch.bfloat16] * gradient.norm(), name


def test_the_trainer_trains_and_evaluates_with_it(tmp_path: Path, calls: list[bool], compiled: bool) -> None:
    """Evaluation sees whole logits; losses of the steps are those without pieces, to rounding."""
    logs = []
    for in_pieces in (False, True):
        mt.init(device="cpu", logits_in_pieces=in_pieces, compile=compiled)
        recorder = Recorder()
        trainer = mt.Trainer(
            model=llama(),
            args=arguments(tmp_path, num_train_epochs=1, eval_strategy="epoch"),
            train_dataset=rows(12),
            eval_dataset=rows(4),
            compute_metrics=lambda found: {"mean": float(found.predictions.mean())},
            callbacks=[recorder],
        )
        trainer.train()
        logs.append([{key: log[key] for key in log if key in METRICS} for log in recorder.logs])
        assert len(calls) == (6 if in_pieces else 0)
    assert sum(len(log) for log in logs[0]) > 4
    for whole, found in zip(*logs, strict=True):
        # Each step of Adam divides by the size of the gradient, whose sums are in another order.
        assert found == pytest.approx(whole, rel=1e-4)


METRICS = ("loss", "grad_norm", "eval_loss", "eval_mean", "train_loss")
