"""Calls of a streamed model that make no sense: a UserError with the remedy, and the model goes on as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_zoo import make_batch
from surface_helpers import assert_like, plain, streamed
from torch import nn

import megatrain as mt

# mt.accumulate

BATCHES: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "none": (lambda: [], None, "no micro-batches: give it at least one"),
    "a_batch": (make_batch, None, r"a list of micro-batches, got one micro-batch: write .*\[batch\]"),
    "nothing": (lambda: None, None, r"a list of micro-batches, got a NoneType: write .*\[batch\]"),
    "texts": (lambda: ["a"], None, "must be a dict .*got a str.*list of dicts"),
    "tensors": (lambda: [make_batch()["input_ids"]], None, "must be a dict .*got a Tensor"),
    "no_labels": (
        lambda: [{"input_ids": make_batch()["input_ids"]}],
        None,
        "no loss: give the batches `labels`.*loss_fn",
    ),
    "loss_fn": (lambda: [make_batch()], 3, "loss_fn=3 must be a function"),
    "loss_of_outputs": (lambda: [make_batch()], lambda out: out.loss, r"called as loss_fn\(outputs, batch\)"),
    "loss_of_labels": (lambda: [make_batch()], lambda out, *, labels: out.loss, r"does not take these two"),
    "vector": (
        lambda: [make_batch()],
        lambda out, batch: out.logits.mean(-1),
        "scalar tensor, got .* shape \\(2, 11\\)",
    ),
    "loss_none": (lambda: [make_batch()], lambda out, batch: None, "scalar tensor, got NoneType"),
    "number": (lambda: [make_batch()], lambda out, batch: 3.0, "scalar tensor, got float"),
    "detached": (lambda: [make_batch()], lambda out, batch: out.loss.detach(), "does not depend on any trainable"),
    "second_detached": (
        lambda: [make_batch(), make_batch(seed=2)],
        lambda out, batch: out.loss.detach() if batch["input_ids"].equal(make_batch(seed=2)["input_ids"]) else out.loss,
        "does not depend on any trainable",
    ),
}


@pytest.mark.parametrize("case", BATCHES)
def test_micro_batches_and_losses(case: str) -> None:
    make, loss_fn, message = BATCHES[case]
    model = streamed()
    with pytest.raises(mt.UserError, match=message):
        mt.accumulate(model, make(), loss_fn)
    assert_like(model, plain())


@pytest.mark.parametrize("raised", [TypeError, ValueError])
def test_a_loss_function_whose_signature_cannot_be_read_is_called(raised: type[Exception]) -> None:
    class Unreadable:
        @property
        def __signature__(self) -> Any:
            raise raised("there is none")

        def __call__(self, outputs: Any, batch: Any) -> torch.Tensor:
            return outputs.loss

    (loss,) = mt.accumulate(streamed(), [make_batch()], Unreadable())
    assert torch.equal(loss, plain()(**make_batch()).loss)


def test_what_a_loss_function_raises_is_what_one_sees() -> None:
    model = streamed()
    with pytest.raises(ZeroDivisionError):
        mt.accumulate(model, [make_batch(), make_batch()], lambda out, batch: 1 / 0)
    with torch.no_grad(), pytest.raises(mt.UserError, match="outside of torch.no_grad"):
        mt.accumulate(model, [make_batch()])
    assert_like(model, plain())


# Functions of a streamed model


CALLS: dict[str, Callable[[Any], Any]] = {
    "accumulate": lambda m: mt.accumulate(m, [make_batch()]),
    "clip": lambda m: mt.clip_grad_norm_(m, 1.0),
    "named_parameters": lambda m: list(mt.named_parameters(m)),
    "named_gradients": lambda m: list(mt.named_gradients(m)),
    "full_state_dict": mt.full_state_dict,
    "stats": mt.stats,
}


@pytest.mark.parametrize("call", [*CALLS.values(), mt.optim.AdamW], ids=[*CALLS, "AdamW"])
def test_a_model_that_is_not_streamed(call: Callable[[Any], Any]) -> None:
    with pytest.raises(mt.UserError, match="LlamaForCausalLM is not streamed: call mt.stream"):
        call(plain())


@pytest.mark.parametrize("thing", ["gpt2", None, 3, []], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_model(call: str, thing: Any) -> None:
    with pytest.raises(mt.UserError, match=f"this {type(thing).__name__} is not streamed: call mt.stream"):
        CALLS[call](thing)


@pytest.mark.parametrize("max_norm", [-1.0, float("nan"), None, "1"])
def test_a_norm_that_is_none(max_norm: Any) -> None:
    with pytest.raises(mt.UserError, match="max_norm=.*not negative"):
        mt.clip_grad_norm_(streamed(), max_norm)


# mt.optim

OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "plain_parameters": (lambda m: mt.optim.AdamW(plain().parameters()), "Parameter .*not streamed: call mt.stream"),
    "mixed": (
        lambda m: mt.optim.AdamW([*m.parameters(), nn.Parameter(torch.zeros(3))]),
        "shape \\(3,\\).*not streamed",
    ),
    "two_models": (lambda m: mt.optim.AdamW([*m.parameters(), *streamed().parameters()]), "two streamed models"),
    "fused": (lambda m: mt.optim.AdamW(m, fused=True), "fused=True.* refused.*Leave fused out"),
    "foreach": (lambda m: mt.optim.AdamW(m, fused=None, foreach=True), "foreach=True.* refused"),
    "lr": (lambda m: mt.optim.AdamW(m, lr=-1), "lr=-1 .*not negative"),
    "lr_none": (lambda m: mt.optim.AdamW(m, lr=None), "lr=None .*number"),
    "lr_nan": (lambda m: mt.optim.AdamW(m, lr=float("nan")), "lr=nan"),
    "eps": (lambda m: mt.optim.AdamW(m, eps=-1e-8), "eps=-1e-08"),
    "weight_decay": (lambda m: mt.optim.AdamW(m, weight_decay="1"), "weight_decay='1'"),
    "betas": (lambda m: mt.optim.AdamW(m, betas=(0.9, 1.0)), "betas=.*two numbers in \\[0, 1\\)"),
    "one_beta": (lambda m: mt.optim.AdamW(m, betas=0.9), "betas=0.9 .*two numbers"),
    "group": (lambda m: mt.optim.AdamW([{"params": m.parameters(), "lr": -2}]), "lr=-2"),
    "amsgrad": (
        lambda m: mt.optim.AdamW([{"params": m.parameters(), "amsgrad": True}]),
        "amsgrad=True is not supported",
    ),
    "kernel": (lambda m: mt.optim.AdamW(m, kernel="fast"), "kernel.*'fast'.*avx2"),
    "threads": (lambda m: mt.optim.AdamW(m, num_threads=0), "num_threads must be .*1 or more, got 0"),
    "all_frozen": (lambda m: mt.optim.AdamW(m.requires_grad_(False)), "no trainable parameters.*requires_grad_"),
    "zeros": (lambda m: mt.optim.AdamW(m).zero_grad(set_to_none=False), "set_to_none=False"),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_optimizers(case: str) -> None:
    make, message = OPTIMIZERS[case]
    model = streamed()
    with pytest.raises(mt.UserError, match=message):
        make(model)
    assert_like(model.requires_grad_(True), plain())


def test_an_optimizer_made_before_streaming_is_refused_and_not_idle() -> None:
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters())
    mt.stream(model)(**make_batch()).loss.backward()
    with pytest.raises(mt.RefusedError, match="torch.optim.adamw.AdamW was made before mt.stream.*mt.optim.AdamW"):
        optimizer.step()
    model.zero_grad()
    assert_like(model, plain())


def test_modules_put_in_by_the_back_door_are_named() -> None:
    model = streamed()
    model.model.layers._modules["3"] = nn.Linear(2, 2)
    with pytest.raises(mt.UserError, match="model.layers.3.weight was put into the model after mt.stream"):
        model.state_dict()
    del model.model.layers._modules["3"]
    model.model.layers[0]._modules["extra"] = nn.Linear(2, 2)
    with pytest.raises(mt.UserError, match="model.layers.0 was changed after mt.stream"):
        model(**make_batch())
    del model.model.layers[0]._modules["extra"]
    assert_like(model, plain())
