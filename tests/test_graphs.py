"""What else a user does with autograd: gradients of inputs alone, checkpoints, backwards in others, two models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from comparing import (
    assert_equal,
    assert_same_accumulation,
    assert_same_gradients,
    assert_same_step,
    gradients,
    stream,
    the_engine,
)
from model_zoo import VOCAB, Block, Stack, make_batch
from torch import nn
from torch.utils.checkpoint import checkpoint

import megatrain as mt
from megatrain.base.errors import UserError

WIDTH = 16
Way = Callable[[Stack, torch.Tensor], torch.Tensor]


def in_order(stack: Stack, x: torch.Tensor) -> torch.Tensor:
    for block in stack.blocks:
        x = block(x)
    return x


def make_stack(run: Way = in_order, *, is_tied: bool = False, width: int = WIDTH) -> Stack:
    stack = Stack([Block(width) for _ in range(3)], run, width)
    if is_tied:
        stack.head.weight = stack.embed.weight
    return stack


def checkpointed(*, use_reentrant: bool) -> Way:
    def run(stack: Stack, x: torch.Tensor) -> torch.Tensor:
        for block in stack.blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    return run


def shared_around_checkpoint(stack: Stack, x: torch.Tensor) -> torch.Tensor:
    x = stack.blocks[0](x)
    return stack.blocks[0](checkpoint(stack.blocks[1], x, use_reentrant=True))


def loss_of(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    return model(batch["input_ids"], batch["labels"])["loss"]


def batches() -> list[dict[str, torch.Tensor]]:
    return [make_batch(length, seed=length) for length in (7, 12, 9)]


# Gradients of inputs alone


def saliency(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Loss from embeddings."""
    return model.head(model.norm(in_order(model, x)) * model.norm.weight).pow(2).mean()


@pytest.mark.parametrize("how", ["grad", "inputs"])
def test_gradients_of_inputs_leave_those_of_weights_alone(how: str) -> None:
    plain, model = stream(make_stack())
    seen = []
    for each in (plain, model):
        x = torch.linspace(-1, 1, 2 * 5 * WIDTH).reshape(2, 5, WIDTH).requires_grad_()
        loss = saliency(each, x)
        if how == "grad":
            seen += torch.autograd.grad(loss, x, retain_graph=True)
        else:
            loss.backward(inputs=[x], retain_graph=True)
            seen.append(x.grad.clone())
        assert gradients(each) == {}
        loss.backward()
    assert torch.equal(*seen)
    assert_same_gradients(plain, model)


def test_gradients_of_inputs_inside_accumulate() -> None:
    """Adversarial training: the loss looks at the gradient of its batch's embeddings."""
    plain, model = stream(make_stack())

    def loss_of(each: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        x = batch["x"].clone().requires_grad_()
        loss = saliency(each, x)
        (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
        return loss + loss * grad.sum()

    assert_same_accumulation(plain, model, [{"x": torch.randn(2, 5, WIDTH)} for _ in range(3)], loss_of)


def test_freezing_between_forward_and_backward() -> None:
    """What was frozen in the forward, or is frozen in the backward, gets no gradient."""

    def run(model: Any) -> torch.Tensor:
        model.requires_grad_(True)
        model.blocks[0].requires_grad_(False)
        model.blocks[1].inner.weight.requires_grad_(False)
        loss = loss_of(model, make_batch())
        model.requires_grad_(True)
        model.blocks[2].outer.weight.requires_grad_(False)
        return loss

    assert_same_step(*stream(make_stack()), run)


# Checkpoints


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    "run", [checkpointed(use_reentrant=True), checkpointed(use_reentrant=False), shared_around_checkpoint]
)
def test_checkpointed_blocks(run: Way, is_tied: bool) -> None:
    plain, model = stream(make_stack(run, is_tied=is_tied))
    assert_same_step(plain, model, lambda each: loss_of(each, make_batch()))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_blocks_in_accumulate(use_reentrant: bool) -> None:
    plain, model = stream(make_stack(checkpointed(use_reentrant=use_reentrant)))
    assert_same_accumulation(plain, model, batches(), loss_of)


@pytest.mark.parametrize(("num_chunks", "use_reentrant"), [(1, False), (3, False), (1, True)])
def test_checkpointed_head_in_accumulate(num_chunks: int, use_reentrant: bool) -> None:
    """The usual trick against large logits."""

    def loss_of(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        x = model.norm(in_order(model, model.embed(batch["input_ids"])))

        def loss_of_chunk(chunk: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(model.head(chunk).flatten(0, 1), labels.flatten(), reduction="sum")

        chunks = zip(x.chunk(num_chunks, 1), batch["labels"].chunk(num_chunks, 1), strict=True)
        return sum(checkpoint(loss_of_chunk, *chunk, use_reentrant=use_reentrant) for chunk in chunks)

    plain, model = stream(make_stack())
    # The head of several chunks is called more than once in a micro-batch.
    assert_same_accumulation(plain, model, batches(), loss_of, () if num_chunks == 1 else ("head.weight", "head.bias"))


# Others inside a micro-batch


def test_backward_inside_a_micro_batch_is_refused() -> None:
    plain, model = stream(make_stack())

    def loss_of_batch(outputs: Any, _: Any) -> torch.Tensor:
        loss = outputs["logits"].pow(2).mean()
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(UserError, match="inside a micro-batch of accumulate"):
        mt.accumulate(model, [{"input_ids": make_batch()["input_ids"]}] * 2, loss_fn=loss_of_batch)
    model.zero_grad()
    assert_same_accumulation(plain, model, batches(), loss_of)


@pytest.mark.parametrize("width", [WIDTH, 64])
@pytest.mark.parametrize("is_trained", [True, False])
def test_a_second_streamed_model_in_the_loss(width: int, is_trained: bool) -> None:
    """A teacher, or a model that is trained along: it runs through, layer by layer, without pausing."""
    plain, model = stream(make_stack())
    plain_teacher, teacher = stream(make_stack(width=width))
    for each in (plain_teacher, teacher):
        each.requires_grad_(is_trained)

    def loss_of(each: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        target = (plain_teacher if each is plain else teacher)(batch["input_ids"])["logits"]
        return (each(batch["input_ids"])["logits"].log_softmax(-1) * target.softmax(-1)).sum() / VOCAB

    for _ in range(2):
        assert_same_accumulation(plain, model, batches(), loss_of)
        assert_equal(gradients(plain_teacher), gradients(teacher))
        for each in (plain, model, plain_teacher, teacher):
            each.zero_grad()


def test_a_second_streamed_model_that_looks_at_the_first() -> None:
    """A critic of the first one's logits, trained along with it."""
    plain, model = stream(make_stack())
    plain_critic, critic = stream(make_stack(width=64))

    def loss_of(each: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        judge = plain_critic if each is plain else critic
        shares = each(batch["input_ids"])["logits"].softmax(-1)
        return judge.head(in_order(judge, shares @ judge.embed.weight)).square().mean()

    for _ in range(2):
        # What it fetches is not a layer's: one sum a micro-batch.
        assert_same_accumulation(plain, model, batches(), loss_of)
        assert_equal(gradients(plain_critic), gradients(critic))
        for each in (plain, model, plain_critic, critic):
            each.zero_grad()


def test_a_loss_that_cannot_be_followed_is_refused() -> None:
    plain, model = stream(make_stack())
    _, critic = stream(make_stack(width=64))

    def mixed(each: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        first = each.blocks[0](each.embed(batch["input_ids"]))
        logits = each.head(each.blocks[1](first))
        judged = critic.head(in_order(critic, logits.softmax(-1) @ critic.embed.weight)).square().mean()
        return judged + (logits.mean() * first).sum()

    with pytest.raises(UserError, match="mt.accumulate cannot follow.*loss.backward"):
        the_engine(model).accumulate([lambda: mixed(model, make_batch())])
    model.zero_grad()
    assert_same_accumulation(plain, model, batches(), loss_of)


def test_a_leaf_of_the_users_own() -> None:
    """A tensor that is trained along: the layers and the loss look at it."""
    plain, model = stream(make_stack())
    leaves = {id(each): torch.full((WIDTH,), 0.1, requires_grad=True) for each in (plain, model)}

    def loss_of(each: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        own = leaves[id(each)]
        logits = each.head(in_order(each, each.embed(batch["input_ids"]) + own) * own)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + own.square().sum()

    assert_same_accumulation(plain, model, batches()[:1], loss_of)
    torch.testing.assert_close(leaves[id(model)].grad, leaves[id(plain)].grad, rtol=1e-6, atol=0)


def test_the_last_layer_returns_the_loss() -> None:
    class Losing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    stack = make_stack()
    stack.head = Losing(WIDTH, VOCAB)

    def loss_of(each: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        loss = each.head(in_order(each, each.embed(batch["input_ids"])))
        loss.register_hook(lambda grad: 3 * grad)
        return loss

    plain, model = stream(stack)
    for _ in range(2):
        assert_same_accumulation(plain, model, batches(), loss_of)
        plain.zero_grad(), model.zero_grad()


# What a layer comes to do later


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_foreign_tensor_used_later_is_refused(is_compiled: bool) -> None:
    foreign: list[torch.Tensor] = []

    class Closing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * foreign[0] if foreign else x)

    mt.init(device="cpu", compile=is_compiled)
    _, model = stream(Stack([Closing(WIDTH) for _ in range(2)], in_order))
    loss_of(model, make_batch()).backward()
    foreign.append(torch.ones(WIDTH, requires_grad=True))
    with pytest.raises(UserError, match="neither an argument nor a parameter"):
        loss_of(model, make_batch()).backward()
