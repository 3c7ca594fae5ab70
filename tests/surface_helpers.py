"""A plain model, its streamed twin, and the check that nothing has happened to the latter."""

from __future__ import annotations

from typing import Any

import torch
from model_zoo import make_batch, make_model
from torch import nn

import megatrain as mt


def plain(name: str = "llama", **changes: Any) -> Any:
    return make_model(name, **changes)


def streamed(name: str = "llama", **changes: Any) -> Any:
    return mt.stream(make_model(name, **changes))


def loss_and_gradients(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Of one batch, from none before; none are left behind."""
    model.zero_grad()
    loss = model(**make_batch()).loss
    loss.backward()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), gradients


def assert_same_state(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and got[name].device.type == "cpu", name
        assert torch.equal(got[name], tensor), name


def assert_same_gradients(got: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> None:
    assert list(got) == list(expected)
    for name, gradient in expected.items():
        if gradient is None:
            assert got[name] is None, name
        else:
            assert torch.equal(got[name], gradient), name


def assert_like(model: nn.Module, twin: nn.Module) -> None:
    """`model` (streamed) has the names, weights, loss and gradients of `twin` (plain), bit for bit."""
    assert [name for name, _ in model.named_modules()] == [name for name, _ in twin.named_modules()]
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in twin.named_parameters()]
    assert_same_state(model.state_dict(), twin.state_dict())
    loss, gradients = loss_and_gradients(model)
    twin_loss, twin_gradients = loss_and_gradients(twin)
    assert torch.equal(loss, twin_loss)
    assert_same_gradients(gradients, twin_gradients)
