"""What layers compute inside is kept, and micro-batches go a few at a time: no bit depends on either.

Truth is plain PyTorch, and the run that recomputes everything.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from comparing import assert_equal, assert_same_accumulation, assert_same_step, gradients, stream, the_engine
from model_zoo import ARCHITECTURES, ROUTED, Block, Stack, make_batch, make_model
from test_races import the_truth, train
from torch import nn

import megatrain as mt
from megatrain.execute.engine import Engine

DROPOUT = {"attention_dropout": 0.2}
ROUGH = {"num_slots": 1, "poison": True, "lane_delay_seconds": 0.001}
"""Every slot is filled anew, with poison in between, before a backward comes."""


def blocks_of(model: nn.Module) -> list[str]:
    """Names of the layers that a plan may keep."""
    _, streamed = stream(model, serial=True)
    return [layer.name for layer in the_engine(streamed).layers if layer.kind == "block"]


def whole(names: Iterable[str]) -> dict[str, str]:
    """They keep all that they compute inside."""
    return dict.fromkeys(names, "all")


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model(**batch)
    return output["loss"] if isinstance(output, dict) else output.loss


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_kept_layers_give_the_bits_of_plain_pytorch(name: str) -> None:
    names = blocks_of(make_model(name))
    plain, model = stream(make_model(name), kept_layers=whole(names), **ROUGH)
    assert_same_step(plain, model, lambda each: each(**make_batch()).loss)
    store = the_engine(model).insides
    assert store.num_kept > 0 and store.kept_bytes == 0


def counting_stack(calls: Counter[int], **options: Any) -> tuple[nn.Module, nn.Module]:
    class Counted(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls[self.number] += 1
            return super().forward(x)

    torch.manual_seed(0)
    blocks = [Counted(16) for _ in range(4)]
    for number, block in enumerate(blocks):
        block.number = number
    return stream(Stack(blocks, lambda stack, x: _run(stack, x)), **options)


def _run(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def test_a_kept_layer_runs_once() -> None:
    calls: Counter[int] = Counter()
    plain, model = counting_stack(calls, kept_layers=whole(["blocks.1", "blocks.3"]), **ROUGH)
    batches = [make_batch(seed=seed) for seed in range(3)]
    thunks = [lambda batch=batch: loss_of(model, batch) for batch in batches]
    the_engine(model).accumulate(thunks)  # one of their kind is tried, and the last layer found
    model.zero_grad()
    calls.clear()
    the_engine(model).accumulate(thunks)
    assert calls == {0: 6, 1: 3, 2: 6, 3: 3}
    left = gradients(model)
    for batch in batches:
        loss_of(plain, batch).backward()
    assert_equal(gradients(plain), left)


@pytest.mark.parametrize("group", [None, 1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_result_of_training_depends_on_what_is_kept(precision: str, group: int | None) -> None:
    """Routed experts, tied weights, frozen layers, second passes, reads in between."""
    kept = [f"model.layers.{number}" for number in range(3)]
    found, model = train(precision, kept_layers=whole(kept), micro_batches_a_visit=group, **ROUGH)
    truth = the_truth(precision)
    if group is not None:  # embedding and head are one home: their parts are added in another order
        tolerance = {"fp32": 1e-5, "bf16": 2e-2}[precision]
        assert found.keys() == truth.keys()
        for name, value in truth.items():
            scale = value.float().abs().max().item() + 1e-6
            assert (found[name].float() - value.float()).abs().max().item() <= tolerance * scale, name
    else:
        assert_equal(truth, found)
    assert the_engine(model).insides.num_kept > 0


@pytest.mark.parametrize("group", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", *ROUTED[:1]])
def test_groups_of_micro_batches_are_plain_accumulation(name: str, group: int) -> None:
    """Dropout draws the same numbers, and every sum has its order."""
    changes = {"attention_dropout": 0.2} if name == "llama" else {}
    kept = blocks_of(make_model(name, **changes))
    plain, model = stream(
        make_model(name, **changes), micro_batches_a_visit=group, kept_layers=whole(kept[1:]), **ROUGH
    )
    batches = [make_batch(length, seed=length) for length in (7, 12, 9, 5)]
    tied = [n for n, p in plain.named_parameters() if p is plain.get_input_embeddings().weight]
    is_tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    assert_same_accumulation(plain, model, batches, loss_of, except_for=tied if is_tied else ())
    counts = the_engine(model).stats()
    visits = {layer: number for layer, number in counts["visits"].items() if layer.endswith("layers.0")}
    assert set(visits.values()) <= {2 * -(-len(batches) // group)}
    # Each home's gradients leave once, whatever the groups.
    assert counts["num_drains"] <= len(the_engine(model).homes)


def test_the_budget_holds_and_goes_to_the_first_that_ask() -> None:
    calls: Counter[int] = Counter()
    _, free = counting_stack(calls, kept_layers=whole([f"blocks.{number}" for number in range(4)]))
    for _ in range(2):  # in the first, one of their kind is tried
        loss_of(free, make_batch()).backward()
    each = the_engine(free).insides.most_kept_bytes // 4
    assert each > 0
    _, model = counting_stack(
        calls, kept_layers=whole([f"blocks.{number}" for number in range(4)]), kept_bytes=2 * each
    )
    store = the_engine(model).insides
    loss_of(model, make_batch()).backward()
    for _ in range(2):
        calls.clear()
        loss_of(model, make_batch()).backward()
        assert calls == {0: 1, 1: 1, 2: 2, 3: 2}
        assert store.most_kept_bytes == 2 * each and store.kept_bytes == 0
    calls.clear()
    loss_of(model, make_batch(11, rows=5)).backward()  # of which none fits
    assert set(calls.values()) == {2} and store.most_kept_bytes == 2 * each


def test_what_is_dropped_gives_its_bytes_back() -> None:
    _, model = counting_stack(Counter(), kept_layers=whole(["blocks.0", "blocks.2"]))
    store = the_engine(model).insides
    loss_of(model, make_batch()).backward()
    loss = loss_of(model, make_batch())
    assert store.kept_bytes > 0
    del loss
    gc.collect()
    assert store.kept_bytes == 0


class HoldingLinear(torch.autograd.Function):
    """As careless code does: the weight is put on the context, past autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (x,) = ctx.saved_tensors
        return grad @ ctx.weight, torch.einsum("bto,bti->oi", grad, x)


class Holding(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + HoldingLinear.apply(torch.tanh(self.inner(x)), self.outer.weight)


def test_a_layer_that_holds_on_to_its_weights_is_recomputed() -> None:
    torch.manual_seed(0)
    names = [f"blocks.{number}" for number in range(3)]
    plain, model = stream(Stack([Holding(16), Block(16), Holding(16)], _run), kept_layers=whole(names), **ROUGH)
    for _ in range(2):
        assert_same_step(plain, model, lambda each: loss_of(each, make_batch()))
    assert the_engine(model).insides.num_kept == 3, "two of the block in the middle, one on trial"


class TanhBlock(Block):
    """Its last operation saves its result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.outer(self.inner(x)))


def test_a_result_that_was_changed_is_computed_again() -> None:
    def run(model: Stack, x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = block(x)
            with torch.no_grad():
                x.mul_(0.5)
        return x

    torch.manual_seed(0)
    names = [f"blocks.{number}" for number in range(3)]
    _, recomputed = stream(Stack([TanhBlock(16) for _ in range(3)], run), **ROUGH)
    torch.manual_seed(0)
    _, kept = stream(Stack([TanhBlock(16) for _ in range(3)], run), kept_layers=whole(names), **ROUGH)
    outcomes = []
    for model in (recomputed, kept):
        try:
            loss_of(model, make_batch()).backward()
            outcomes.append(gradients(model))
        except (RuntimeError, mt.UserError) as error:
            outcomes.append(str(error))
    assert isinstance(outcomes[0], str) == isinstance(outcomes[1], str)
    if not isinstance(outcomes[0], str):
        assert_equal(*outcomes)


def test_a_second_backward_of_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"model.layers.{number}" for number in range(3)]
    plain, model = stream(make_model("llama"), kept_layers=whole(names), **ROUGH)
    for each in (plain, model):
        loss = each(**make_batch()).loss
        loss.backward(retain_graph=True)
        loss.backward()
    assert_equal(gradients(plain), gradients(model))


def test_gradients_of_inputs_are_asked_for_by_name() -> None:
    names = [f"model.layers.{number}" for number in range(3)]
    plain, model = stream(make_model("llama"), kept_layers=whole(names), **ROUGH)
    found = []
    for each in (plain, model):
        embeds = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(3)).requires_grad_()
        loss = each(inputs_embeds=embeds, labels=make_batch(6)["labels"]).loss
        found += [torch.autograd.grad(loss, embeds, retain_graph=True)[0]]
        loss.backward()
    assert torch.equal(*found)
    assert_equal(gradients(plain), gradients(model))


@pytest.mark.parametrize("places", ["stream", "hbm", "disk"])
def test_homes_anywhere(places: str, tmp_path: Any) -> None:
    mt.init(device="cpu", offload_dir=tmp_path)
    names = [f"model.layers.{number}" for number in range(3)]
    plain, model = stream(make_model("llama"), kept_layers=whole(names), places=places, micro_batches_a_visit=1)
    assert_same_accumulation(plain, model, [make_batch(n, seed=n) for n in (6, 9, 7)], loss_of)


def test_an_optimizer_step_between_forward_and_backward_is_refused_as_ever() -> None:
    names = [f"model.layers.{number}" for number in range(3)]
    _, model = stream(make_model("llama"), kept_layers=whole(names))
    optimizer = mt.optim.AdamW(model, lr=1e-2)
    model(**make_batch()).loss.backward()
    loss = model(**make_batch()).loss
    optimizer.step()
    with pytest.raises(mt.UserError, match="were changed between its forward and its backward"):
        loss.backward()


def test_memory_that_lacks_gives_kept_layers_up_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"model.layers.{number}" for number in range(3)]
    plain, model = stream(make_model("llama"), kept_layers=whole(names))
    engine, visit = the_engine(model), Engine.visit
    failed: list[bool] = []

    def failing(self: Engine, layer: Any, *what: Any) -> Any:
        if not failed and self.insides.kept_bytes and layer.name == "model.layers.2":
            failed.append(True)
            raise torch.OutOfMemoryError("out of memory")
        return visit(self, layer, *what)

    monkeypatch.setattr(Engine, "visit", failing)
    assert_same_accumulation(plain, model, [make_batch(n, seed=n) for n in (6, 9)], loss_of)
    assert failed and engine.insides.is_empty and engine.insides.kept_bytes == 0
    assert "every layer is computed again in the backward" in caplog.text
