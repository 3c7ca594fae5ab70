"""Logits that a head has not made: whole where they are asked for, never where they are not, and the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import gradients, stream
from model_zoo import VOCAB, make_batch, make_model
from pieces_helpers import SIZES, WAYS, WIDTH, Loss, Scored, batches, in_pieces_of_five, rows_of, run, step
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megatrain as mt
from megatrain.base.errors import UserError
from megatrain.execute.logits import Logits
from megatrain.plan import cost


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    return in_pieces_of_five(monkeypatch)


# Whole logits where they are asked for


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, targets: logits.float().log_softmax(-1).flatten(0, 1)[:, 7].mean(),
        lambda logits, targets: functional.cross_entropy(logits.transpose(1, 2), targets),
        lambda logits, targets: functional.cross_entropy(logits.flatten(0, 1), logits.flatten(0, 1).softmax(-1)),
        lambda logits, targets: rows_of(logits, targets) + 0.01 * logits.logsumexp(-1).square().mean(),
        lambda logits, targets: rows_of(torch.cat([logits, logits.view(logits.shape)]), targets.repeat(2, 1)),
        lambda logits, targets: rows_of(logits.mul_(0.5), targets),
    ],
)
def test_other_losses_have_the_bits_of_whole_logits(loss: Loss, way: str) -> None:
    """Where the cross entropy is in pieces all the same, the rest of the loss has."""
    plain, model = stream(Scored(loss))
    expected, losses = run(plain, batches()), step(model, way, batches())
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(gradients(model), gradients(plain))


def test_a_loss_of_whole_logits_has_the_same_bits(calls: list[bool]) -> None:
    plain, model = stream(make_model("llama"))
    smooth = [(each(**batch).logits.float().log_softmax(-1)[..., 3].mean(), each) for each in (plain, model)
              for batch in batches()[:1]]  # fmt: skip
    for loss, _ in smooth:
        loss.backward()
    assert torch.equal(smooth[0][0], smooth[1][0])
    found, right = gradients(model), gradients(plain)
    assert all(torch.equal(found[name], gradient) for name, gradient in right.items())


def test_logits_that_somebody_looks_at_are_the_true_ones() -> None:
    """In the loss, after the backward, after the step's other micro-batches; refused once the weights have changed."""
    plain, model = stream(make_model("llama"))
    batch = batches()[0]
    expected = plain(**batch).logits.detach()
    outputs = model(**batch)
    outputs.loss.backward()
    assert isinstance(outputs.logits, Logits) and outputs.logits.requires_grad
    assert outputs.logits.shape == expected.shape and outputs.logits.dtype == expected.dtype
    assert torch.equal(outputs.logits.detach(), expected)
    kept = []
    mt.accumulate(model, [batch, batch], lambda outputs, _: kept.append(outputs.logits) or outputs.loss)
    with torch.no_grad():
        assert torch.equal(kept[0].argmax(-1), expected.argmax(-1)) and torch.equal(kept[1], expected)
    late = model(**batch)
    optimizer = mt.optim.AdamW(model, lr=1e-2)
    optimizer.step()
    with pytest.raises(UserError, match=r"logits of lm_head were not made.*logits_in_pieces=False"):
        late.logits.sum()


def test_evaluation_and_generation_have_whole_logits(calls: list[bool]) -> None:
    plain, model = stream(make_model("llama"))
    batch = batches()[0]
    with torch.no_grad():
        found, expected = model(**batch), plain(**batch)
    assert type(found.logits) is torch.Tensor
    assert torch.equal(found.logits, expected.logits) and torch.equal(found.loss, expected.loss)
    ids = batch["input_ids"]
    assert torch.equal(model.generate(ids, max_new_tokens=3), plain.generate(ids, max_new_tokens=3))
    assert not calls


class OwnCrossEntropy(torch.autograd.Function):
    """As fused kernels do it: the gradient is taken in the forward, and written over the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        shares = logits.softmax(-1)
        loss = -shares.gather(1, targets[:, None]).log().mean()
        shares[torch.arange(len(targets)), targets] -= 1
        logits.copy_(shares / len(targets))
        ctx.save_for_backward(logits)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0] * grad, None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_functions_that_take_the_very_object(scale: float, way: str) -> None:
    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows = logits.view(-1, VOCAB)
        return OwnCrossEntropy.apply(rows if scale == 1 else rows * scale, targets.reshape(-1))

    plain, model = stream(Scored(loss_of))
    many = [make_batch(length, seed=length) for length in (7, 12)]
    expected, losses = run(plain, many), step(model, way, many)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(gradients(model), gradients(plain))


def test_heads_with_hooks_or_a_forward_of_their_own_run_as_they_are(calls: list[bool]) -> None:
    built = make_model("llama")
    seen: list[type] = []
    built.lm_head.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    plain, model = stream(built)
    expected, losses = run(plain, batches()), step(model, "backward", batches())
    assert losses == expected and set(seen) == {torch.Tensor} and not calls


def test_an_adapter_on_the_head_keeps_logits_whole(calls: list[bool]) -> None:
    peft = pytest.importorskip("peft")
    built = peft.get_peft_model(
        make_model("llama"), peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    )
    plain, model = stream(built)
    expected, losses = run(plain, batches()), step(model, "backward", batches())
    assert losses == expected and not calls
    right, found = gradients(plain), gradients(model)
    assert right and all(torch.equal(found[name], gradient) for name, gradient in right.items())


# Backwards


def test_two_backwards_and_gradients_of_inputs_alone() -> None:
    plain, model = stream(Scored(rows_of))
    batch = batches()[0]
    for each in (plain, model):
        x = each.embed(batch["input_ids"]).detach().requires_grad_()
        loss = rows_of(each.head(each.blocks[0](x)), batch["labels"])
        (of_x,) = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward(retain_graph=True)
        torch.testing.assert_close(x.grad, of_x)
        loss.backward()
    torch.testing.assert_close(gradients(model), gradients(plain))


def test_changed_weights_are_refused() -> None:
    _, model = stream(Scored(rows_of))
    batch = batches()[0]
    loss = model(**batch)["loss"]
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(UserError, match="changed between its forward and its backward"):
        loss.backward()


def test_a_head_that_is_not_the_last_layer(calls: list[bool]) -> None:
    """Two heads, whose losses come after both have run."""

    class Two(Scored):
        def __init__(self) -> None:
            super().__init__(rows_of)
            self.other = nn.Linear(WIDTH, VOCAB)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            x = self.blocks[1](self.blocks[0](self.embed(input_ids)))
            first, second = self.head(x), self.other(x)
            return {"loss": rows_of(first, labels) + rows_of(second, labels.roll(1))}

    plain, model = stream(Two())
    expected, losses = run(plain, batches()), step(model, "accumulate", batches())
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(gradients(model), gradients(plain))
    assert len(calls) == 12


# Memory, and when


class Largest(TorchDispatchMode):
    """Numbers of the largest tensor with a dimension of the vocabulary that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
        for tensor in tensors:
            # One number that is seen in every place takes no memory.
            if VOCAB in tensor.shape and tensor.numel() <= tensor.untyped_storage().size():
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_logits_never_exist_whole(name: str, way: str) -> None:
    _, model = stream(make_model(name, hidden_size=16, head_dim=8, intermediate_size=24))
    many = [make_batch(60, rows=3, seed=seed) for seed in (1, 2)]
    with Largest() as largest:
        step(model, way, many)
    # The weights, and pieces of 5 tokens.
    assert 5 * VOCAB <= largest.numel <= 16 * VOCAB
    with Largest() as largest:
        model(**many[0]).logits.sum()
    assert largest.numel == 3 * 60 * VOCAB


def test_pieces_are_where_there_is_more_than_one(monkeypatch: pytest.MonkeyPatch, calls: list[bool]) -> None:
    ids = make_batch(10, rows=2)
    for most, setting, expected in ((20, None, 0), (19, None, 1), (5, False, 0), (20, True, 1)):
        monkeypatch.setattr(cost, "PIECE_TOKENS", most)
        mt.init(device="cpu", logits_in_pieces=setting)
        _, model = stream(make_model("llama"))
        calls.clear()
        model(**ids).loss.backward()
        assert len(calls) == expected, (most, setting)


def test_sizes_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "PIECE_TOKENS", SIZES[0])
    monkeypatch.setattr(cost, "PIECE_LOGITS", SIZES[1])
    assert cost.tokens_at_once(152_064, compiled=False) == 2048 and cost.tokens_at_once(8192, compiled=False) == 8192
    assert cost.tokens_at_once(152_064, compiled=True) == 8192 and cost.tokens_at_once(8192, compiled=True) == 32_768


def test_a_setting_that_is_none() -> None:
    with pytest.raises(UserError, match="logits_in_pieces=2 must be True, False or None"):
        mt.init(logits_in_pieces=2)
