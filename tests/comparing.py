"""Streams a model beside a plain copy of it, and compares the two bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import megatrain as mt
from megatrain.base.config import StreamOptions
from megatrain.execute.engine import Engine, engine_of

_streamed: list[nn.Module] = []


def stream(model: nn.Module, **options: Any) -> tuple[Any, Any]:
    """(a plain copy of the model as it is now, the model streamed). `options` are StreamOptions."""
    plain = copy.deepcopy(model)
    mt.stream(model, options=StreamOptions(**options))
    _streamed.append(model)
    return plain, model


def closed_later(model: Any) -> Any:
    """A streamed model whose lanes end with the test."""
    _streamed.append(model)
    return model


def close_streamed() -> None:
    """End the lanes of all models of a test."""
    while _streamed:
        the_engine(_streamed.pop()).close()


def the_engine(model: nn.Module) -> Engine:
    engine = engine_of(model)
    assert engine is not None
    return engine


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of a model's gradients by name, streamed or not."""
    if engine_of(model) is not None:
        return {name: gradient.clone() for name, gradient in mt.named_gradients(model)}
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    """The same names with the same bits."""
    assert left.keys() == right.keys(), sorted(left.keys() ^ right.keys())
    differing = [name for name in left if not torch.equal(left[name], right[name])]
    assert not differing, f"{len(differing)} of {len(left)} differ: {differing[:5]}"


def assert_same_gradients(plain: nn.Module, model: nn.Module) -> None:
    """Bit-equal gradients for the same parameters, and at least one that is not zero."""
    expected = gradients(plain)
    assert any(gradient.any() for gradient in expected.values())
    assert_equal(expected, gradients(model))


def assert_same_step(plain: Any, model: Any, run: Callable[[Any], torch.Tensor], seed: int = 0) -> None:
    """`run(model)` gives a loss. The losses and all gradients of both models are bit-equal."""
    losses = []
    for each in (plain, model):
        torch.manual_seed(seed)
        loss = run(each)
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses), losses
    assert_same_gradients(plain, model)


def zero_grad(*models: nn.Module) -> None:
    for model in models:
        model.zero_grad()


def accumulate_plainly(
    plain: nn.Module, batches: Sequence[Mapping[str, Any]], loss_of: Callable[[Any, Mapping[str, Any]], torch.Tensor]
) -> list[torch.Tensor]:
    """What `Engine.accumulate` promises: one seed a micro-batch, drawn in one go; then each forward and backward."""
    seeds = torch.randint(2**62, (len(batches),)).tolist()
    losses = []
    for batch, seed in zip(batches, seeds, strict=True):
        torch.manual_seed(seed)
        loss = loss_of(plain, batch)
        loss.backward()
        losses.append(loss.detach())
    return losses


def assert_same_accumulation(
    plain: Any,
    model: Any,
    batches: Sequence[Mapping[str, Any]],
    loss_of: Callable[[Any, Mapping[str, Any]], torch.Tensor],
    except_for: Sequence[str] = (),
    seed: int = 0,
) -> None:
    """Layer-major and plain accumulation are bit-equal, but for the gradients of the parameters in `except_for`."""
    torch.manual_seed(seed)
    expected = accumulate_plainly(plain, batches, loss_of)
    torch.manual_seed(seed)
    losses = the_engine(model).accumulate([lambda batch=batch: loss_of(model, batch) for batch in batches])
    assert all(map(torch.equal, expected, losses)), (expected, losses)
    left, right = gradients(plain), gradients(model)
    assert left.keys() == right.keys(), sorted(left.keys() ^ right.keys())
    assert any(gradient.any() for gradient in left.values())
    for name in except_for:
        del left[name], right[name]
    assert_equal(left, right)
