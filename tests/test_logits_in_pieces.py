"""Cross entropy with the logits of a piece of the tokens at a time: as near to the truth as with whole logits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import gradients, stream, the_engine, zero_grad
from model_zoo import CONFIGS, VOCAB, Block, make_batch, make_model, padded_batch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer_helpers import Recorder, arguments, llama, rows

import megatrain as mt
from megatrain.base.errors import UserError
from megatrain.execute.logits import Logits
from megatrain.execute.loss_in_pieces import LossInPieces
from megatrain.plan import cost

WIDTH = 16
SIZES = cost.PIECE_TOKENS, cost.PIECE_LOGITS
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}
NEAR = 16
"""A sum of n terms in another order is off by about sqrt(n) roundings; the longest sums here have 96 to 240."""
WAYS = ("accumulate", "backward")

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Pieces of 5 tokens, at every size. Yields, for each loss in pieces, whether its gradients were taken at once."""
    monkeypatch.setattr(cost, "PIECE_TOKENS", 5)
    monkeypatch.setattr(cost, "PIECE_LOGITS", 0)
    mt.init(device="cpu", logits_in_pieces=True)
    found: list[bool] = []
    forward = LossInPieces.forward

    def recorded(self: LossInPieces, params: Any) -> Any:
        found.append(self.keep_graph)
        return forward(self, params)

    monkeypatch.setattr(LossInPieces, "forward", recorded)
    yield found


def rows_of(logits: torch.Tensor, targets: torch.Tensor, **settings: Any) -> torch.Tensor:
    return functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), **settings)


class Scored(nn.Module):
    """Blocks, a head with a bias, and a loss of the test's own."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.loss = loss
        nn.init.normal_(self.head.weight)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"logits": logits} if labels is None else {"loss": self.loss(logits, labels), "logits": logits}


def batches(count: int = 3) -> list[dict[str, torch.Tensor]]:
    """Rows of several lengths, some targets ignored."""
    made = [make_batch(length, seed=length) for length in (7, 12, 9)[:count]]
    for batch in made:
        batch["labels"][0, 2:5] = -100
    return made


def own(outputs: Any, _: Mapping[str, Any]) -> torch.Tensor:
    return outputs["loss"] / 3


def run(model: Any, many: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    losses = []
    for batch in many:
        loss = own(model(**batch), batch)
        loss.backward()
        losses.append(loss.detach())
    return losses


def step(model: nn.Module, way: str, many: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    if way == "backward":
        return run(model, many)
    for _ in range(2):
        # The first step has to find out which layer is the last.
        zero_grad(model)
        losses = mt.accumulate(model, many, own)
    return losses


def assert_near_truth(plain: nn.Module, model: nn.Module, way: str, many: list[dict[str, torch.Tensor]]) -> None:
    """Losses and gradients are at most twice as far from those of float64 as the plain model's, and some roundings."""
    truth = copy.deepcopy(plain).double()
    expected, losses = run(plain, many), step(model, way, many)
    exact = run(truth, many)
    ulp = ULP[next(plain.parameters()).dtype]
    for right, other, found in zip(exact, expected, losses, strict=True):
        assert (found - right).abs() <= 2 * (other - right).abs() + NEAR * ulp * right.abs()
    right, other, found = gradients(truth), gradients(plain), gradients(model)
    assert found.keys() == other.keys() == right.keys()
    assert any(gradient.any() for gradient in found.values())
    for name, gradient in right.items():
        near = 2 * (other[name] - gradient).norm() + NEAR * ulp * gradient.norm()
        assert (found[name] - gradient).norm() <= near, name


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
def test_in_bf16(name: str, way: str, calls: list[bool]) -> None:
    mt.init(device="cpu", precision="bf16", logits_in_pieces=True, grad_dtype="fp32")
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


def without_key_biases(model: nn.Module) -> nn.Module:
    """They change no score's order, so that their true gradient is zero, and rounding all that there is of it."""
    for key, parameter in model.named_parameters():
        if key.endswith(("key.bias", "k_proj.bias")):
            parameter.requires_grad_(False)
    return model


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


def test_the_trainer_trains_and_evaluates_with_it(tmp_path: Path, calls: list[bool]) -> None:
    """Evaluation sees whole logits; losses of the steps are those without pieces, to rounding."""
    logs = []
    for in_pieces in (False, True):
        mt.init(device="cpu", logits_in_pieces=in_pieces)
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
    assert cost.tokens_at_once(152_064) == 2048 and cost.tokens_at_once(8192) == 8192


def test_a_setting_that_is_none() -> None:
    with pytest.raises(UserError, match="logits_in_pieces=2 must be True, False or None"):
        mt.init(logits_in_pieces=2)
