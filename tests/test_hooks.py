"""Hooks on tensors between layers and on modules: called as often as in plain PyTorch, with the same gradients."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_same_accumulation, assert_same_step, stream, the_engine, zero_grad
from model_zoo import Block, Stack, make_batch, make_model
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16
LENGTHS = (7, 12, 9)


class Straight(Block):
    """Uses its input once, so that a sum with what the loss sends there has one order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.outer(torch.tanh(self.inner(x)))


def stack(run: Callable[[Any, torch.Tensor], torch.Tensor], make: type[Block] = Block) -> Stack:
    torch.manual_seed(0)
    return Stack([make(WIDTH) for _ in range(4)], run)


def in_turn(model: Stack, h: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        h = block(h)
    return h


class Watching:
    """A hook that notes the gradients it sees and clamps them: neither linear, nor made for None."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        self.seen.append(grad.clone())
        return grad.clamp(-1e-4, 1e-4)


def hooked(model: Stack, h: torch.Tensor) -> torch.Tensor:
    """Hooks on what a layer returns, on what is made of it, and on what a layer is given."""
    h.register_hook(model.watching)
    for block in model.blocks:
        h = block(h)
        h.register_hook(model.watching)
        h = h * 2
        h.register_hook(model.watching)
    return h


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return model(**batch)["loss"]


def check(
    plain: Any,
    model: Any,
    loss_of: Callable[[Any, Any], torch.Tensor],
    num_batches: int,
    is_called_as_often: bool = True,
) -> None:
    batches = [make_batch(length, seed=length) for length in LENGTHS[:num_batches]]
    for each in (plain, model):
        each.watching = Watching()
    # Twice: the first step finds out which layer is the last.
    for _ in range(2):
        assert_same_accumulation(plain, model, batches, loss_of)
        zero_grad(plain, model)
    # Layer-major and micro-batch-major: the same gradients in another order.
    left, right = (sorted(grad.flatten().tolist() for grad in each.watching.seen) for each in (plain, model))
    assert left == right or not is_called_as_often
    assert_same_step(plain, model, lambda each: loss_of(each, make_batch()))


@pytest.mark.parametrize("num_batches", [1, 3])
def test_hooks_on_tensors_between_layers(num_batches: int) -> None:
    check(*stream(stack(hooked)), loss_of, num_batches)


def step_by_step(each: Any, batch: Any, call: Callable[..., torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(what the blocks return, the loss of the logits)."""
    hidden = [each.embed(batch["input_ids"])]
    for block in each.blocks:
        hidden.append(call(block, hidden[-1]))
        hidden[-1].register_hook(each.watching)
    logits = each.head(each.norm(hidden[-1]))
    return hidden, nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def with_hidden_states(each: Any, batch: Any) -> torch.Tensor:
    hidden, loss = step_by_step(each, batch, lambda block, h: block(h))
    part = hidden[1].square().mean()
    return loss * (1 + hidden[2].mean()) + 0.1 * part + part * hidden[4].mean()


def with_the_first_beside_the_last(each: Any, batch: Any) -> torch.Tensor:
    """One sum takes in what an early block returns and what the last one does."""
    hidden, _ = step_by_step(each, batch, lambda block, h: block(h))
    return (hidden[1] + hidden[-1]).square().mean()


@pytest.mark.parametrize("num_batches", [1, 3])
@pytest.mark.parametrize("loss_of", [with_hidden_states, with_the_first_beside_the_last])
def test_hooks_on_what_the_loss_looks_at_itself(loss_of: Callable[[Any, Any], torch.Tensor], num_batches: int) -> None:
    """A hook is called once, with the sum of what comes from the loss and from the next layer."""
    check(*stream(stack(in_turn, Straight)), loss_of, num_batches)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("with_head", [True, False])
def test_checkpointed_blocks_that_the_loss_looks_at(with_head: bool, use_reentrant: bool) -> None:
    def loss_of(each: Any, batch: Any) -> torch.Tensor:
        hidden, loss = step_by_step(each, batch, lambda b, h: checkpoint(b, h, use_reentrant=use_reentrant))
        if not with_head:
            return (hidden[1] + hidden[-1]).square().mean()
        return loss + sum(h.square().mean() for h in hidden)

    # What a reentrant checkpoint returns is asked for by name, and hooks on it see a part before they see all.
    check(*stream(stack(in_turn, Straight)), loss_of, 3, is_called_as_often=not use_reentrant)


@pytest.mark.parametrize("num_batches", [1, 3])
def test_hooks_beside_an_auxiliary_loss(num_batches: int) -> None:
    plain, model = stream(make_model("qwen3_moe"))
    for each in (plain, model):
        for layer in each.model.layers:
            layer.register_forward_hook(lambda module, args, h, each=each: h.register_hook(each.watching) and None)
    check(plain, model, lambda each, batch: each(**batch).loss, num_batches)


MODULE_HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "backward": lambda m: m.register_full_backward_hook(lambda m, gi, go: (gi[0] * 7 + go[0].mean(),)),
    "backward, watching": lambda m: m.register_full_backward_hook(lambda m, gi, go: None),
    "pre": lambda m: m.register_full_backward_pre_hook(lambda m, go: (go[0].clamp(-1e-3, 1e-3) * 1.5,)),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("num_batches", [1, 3])
@pytest.mark.parametrize("place", ["embed", "blocks.0", "blocks.3", "norm", "head"])
@pytest.mark.parametrize("hook", MODULE_HOOKS)
def test_backward_hooks_of_modules(hook: str, place: str, num_batches: int) -> None:
    if place == "embed" and hook == "backward":
        pytest.skip("token ids have no gradient")
    plain, model = stream(stack(in_turn))
    for each in (plain, model):
        MODULE_HOOKS[hook](each.get_submodule(place))
    check(plain, model, loss_of, num_batches)


def test_a_hook_on_the_logits_and_on_the_loss() -> None:
    def loss_of(each: Any, batch: Any) -> torch.Tensor:
        outputs = each(batch["input_ids"])
        outputs["logits"].register_hook(each.watching)
        loss = nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), batch["labels"].flatten())
        loss.register_hook(lambda grad: grad * 3)
        return loss

    check(*stream(stack(in_turn)), loss_of, 3)


def test_a_hook_that_fails_leaves_no_graph_behind() -> None:
    class Held:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    held: list[weakref.ref[Held]] = []

    def pack(tensor: torch.Tensor) -> Held:
        one = Held(tensor.detach())
        held.append(weakref.ref(one))
        return one

    def loss_of(each: Any, batch: Any) -> torch.Tensor:
        logits = each(batch["input_ids"])["logits"]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.register_hook(lambda grad: 1 / 0)
        return loss

    _, model = stream(stack(in_turn))
    with pytest.raises(ZeroDivisionError):
        the_engine(model).accumulate([lambda: loss_of(model, make_batch())])
    gc.collect()
    assert held and not any(one() for one in held)
