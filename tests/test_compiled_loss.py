"""Compiled losses: how much is compiled, what happens where that is not possible, and their products by hand."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest
import torch
from comparing import gradients, stream
from model_zoo import VOCAB, make_batch, make_model
from pieces_helpers import (
    WAYS,
    WIDTH,
    Scored,
    assert_near_truth,
    batches,
    in_pieces_of_five,
    num_graphs,
    rows_of,
    run,
    step,
)
from test_whole_logits import Largest
from torch.nn import functional

import megatrain as mt
from megatrain.execute import products, templates
from megatrain.execute.compiled_loss import CompiledLossInPieces
from megatrain.execute.loss_code import MOST_KINDS, LossCode
from megatrain.execute.loss_in_pieces import LossRule
from megatrain.execute.steps import Step
from megatrain.plan import cost

GENERATE = templates.generate


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    return in_pieces_of_five(monkeypatch, compiled=True)


# How much is compiled


def test_batches_of_many_lengths_have_two_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for losses and one for their gradients, whatever the lengths; one token has none, and so have no tokens."""
    monkeypatch.setattr(cost, "COMPILED_PIECE", 100)
    plain, model = stream(Scored(lambda logits, targets: rows_of(logits[:, 1:], targets[:, 1:])))
    draws = random.Random(0)
    lengths = [1, 2, 3, VOCAB + 1, WIDTH + 1, *(draws.randint(1, 600) for _ in range(40))]
    for length in lengths:
        many = [make_batch(length, rows=1, seed=length)]
        expected, found = run(plain, many), step(model, "backward", many)
        torch.testing.assert_close(found, expected, equal_nan=True)
    torch.testing.assert_close(gradients(model), gradients(plain))
    assert num_graphs() == 2


def test_numbers_that_change_from_call_to_call_end_compilation(caplog: pytest.LogCaptureFixture) -> None:
    temperature = [0.5]
    plain, model = stream(Scored(lambda logits, targets: rows_of(logits / temperature[0], targets)))
    with caplog.at_level(logging.WARNING):
        for number in range(MOST_KINDS + 3):
            temperature[0] = 1 + number / 8
            expected, found = run(plain, batches(1)), step(model, "backward", batches(1))
            torch.testing.assert_close(found, expected)
    assert num_graphs() == 2 * MOST_KINDS
    told = [record.getMessage() for record in caplog.records if "are not compiled" in record.getMessage()]
    assert len(told) == 1 and told[0].startswith(f"head: losses of more than {MOST_KINDS} kinds")
    torch.testing.assert_close(gradients(model), gradients(plain))


def test_the_same_loss_is_compiled_once_whatever_it_is_summed_to() -> None:
    settings = [{}, {"reduction": "sum"}, {}, {"reduction": "sum"}]
    _, model = stream(Scored(lambda logits, targets: sum(rows_of(logits * 2, targets, **each) for each in settings)))
    for length in (4, 9):
        step(model, "backward", [make_batch(length, seed=length)])
    assert num_graphs() == 2


def test_pieces_are_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "COMPILED_PIECE", 4)
    found = []
    pieces_of = CompiledLossInPieces._pieces

    def seen(self: CompiledLossInPieces, tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        made = list(pieces_of(self, tensors))
        found.append([len(piece[0]) for piece in made])
        return made

    monkeypatch.setattr(CompiledLossInPieces, "_pieces", seen)
    plain, model = stream(Scored(rows_of))
    many = [make_batch(length, rows=1, seed=length) for length in (20, 45)]
    torch.testing.assert_close(step(model, "backward", many), run(plain, many))
    assert found == [[20], [20], [15, 15, 15], [15, 15, 15]]


def test_where_a_compiler_stands_aside_the_loss_runs_uncompiled() -> None:
    """Under a mode that sees all operations."""
    plain, model = stream(Scored(rows_of))
    with Largest():
        found = step(model, "backward", batches())
    torch.testing.assert_close(found, run(plain, batches()))
    torch.testing.assert_close(gradients(model), gradients(plain))
    assert num_graphs() == 0


def test_targets_that_are_no_classes_are_refused() -> None:
    _, model = stream(make_model("llama"))
    for wrong in (VOCAB, -1):
        batch = batches(1)[0]
        batch["labels"][0, 1] = wrong
        with pytest.raises(RuntimeError, match=f"not one of the {VOCAB} classes"):
            model(**batch)


# Its numbers, and memory


SOFT_CAP = (
    Step(torch.Tensor.float, (), {}),
    Step(torch.Tensor.__truediv__, (3.0,), {}),
    Step(torch.tanh, (), {}),
    Step(torch.Tensor.__rmul__, (3.0,), {}),
)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_generated_code_has_the_numbers_of_eager_code(monkeypatch: pytest.MonkeyPatch, smoothing: float) -> None:
    """By inductor's own kernels. Eager, too, computes in fp32 here, and rounds the gradient to bf16 once: a number
    beside a tie falls to the other side, which is one unit in the last of 8 places, up to 2^-7; fp32 sums of 96 terms
    of up to 1 add 96 x 2^-24. The gradient lies where the logits were."""
    monkeypatch.setattr(templates, "generate", GENERATE)
    rule = LossRule(steps=SOFT_CAP, reduction="sum", ignored=-100, smoothing=smoothing, dtype=torch.float32)
    code = LossCode(rule, f"numbers{smoothing}")
    for num_tokens in (7, 33):
        torch.manual_seed(num_tokens)
        logits = (4 * torch.randn(num_tokens, 96)).bfloat16().requires_grad_()
        targets, scale = torch.randint(0, 96, (num_tokens,)), torch.rand(num_tokens)
        targets[2] = -100
        capped = torch.tanh(logits.float() / 3) * 3
        expected = functional.cross_entropy(capped, targets, reduction="none", label_smoothing=smoothing)
        (right,) = torch.autograd.grad(expected, logits, scale)
        given = logits.detach().clone()
        with torch.no_grad():
            torch.testing.assert_close(code.losses(given, targets), expected)
            assert torch.equal(given, logits)
            torch.testing.assert_close(code.with_gradient_(given, targets, scale), expected)
        torch.testing.assert_close(given, right, rtol=2.0**-7, atol=96 * 2.0**-24)
        assert right.any() and not given[2].any()
    assert num_graphs() == 2


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_large_logits_do_not_overflow(smoothing: float) -> None:
    """Losses are differences from the largest logit, before anything is summed."""
    logits, targets = 1e4 + 40 * torch.randn(9, 96), torch.randint(0, 96, (9,))
    rule = LossRule(steps=(), reduction="sum", ignored=-100, smoothing=smoothing, dtype=torch.float32)
    expected = functional.cross_entropy(logits.double(), targets, reduction="none", label_smoothing=smoothing)
    found = LossCode(rule, f"large{smoothing}").losses(logits, targets)
    torch.testing.assert_close(found, expected.float())


# Products that are added to a sum


@pytest.fixture
def adds_wider(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """What `torch.addmm` is asked to add products of bf16 to, which it does here as on a GPU: by shapes."""
    asked: list[tuple[int, ...]] = []

    def addmm(
        total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype, out: torch.Tensor
    ) -> torch.Tensor:
        assert total is out and out_dtype == out.dtype and a.dtype == b.dtype == torch.bfloat16
        asked.append(tuple(out.shape))
        return out.copy_(total + a.to(out_dtype) @ b.to(out_dtype))

    monkeypatch.setattr(torch, "addmm", addmm)
    products._adds_wider.cache_clear()
    yield asked
    products._adds_wider.cache_clear()


def check_product(dtype: torch.dtype) -> None:
    """Of small whole numbers, whose products and sums are exact in bf16."""
    a, b, total = (torch.randint(-3, 4, shape).float() for shape in ((5, 13), (5, 6), (13, 6)))
    expected = total + a.T @ b
    address = total.data_ptr()
    products.add_product_(total, a.to(dtype).T, b.to(dtype))
    assert torch.equal(total, expected) and total.data_ptr() == address


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slab", [1, 40, 1 << 20])
def test_products_are_added_to_a_sum(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, slab: int) -> None:
    monkeypatch.setattr(products, "SLAB_NUMBERS", slab)
    check_product(dtype)


def test_a_device_that_adds_wider_products_is_left_to_it(adds_wider: list[tuple[int, ...]]) -> None:
    for _ in range(2):
        check_product(torch.bfloat16)
        check_product(torch.float32)
    assert adds_wider == [(16, 16), (13, 6), (13, 6)], "tried once"


def test_the_head_s_gradient_goes_into_its_sum(adds_wider: list[tuple[int, ...]]) -> None:
    """Each piece's product, from the tensors and in the dtypes that `torch.addmm` takes for that."""
    mt.init(device="cpu", precision="bf16", logits_in_pieces=True, grad_dtype="fp32", compile=True)
    plain, model = stream(Scored(rows_of).bfloat16())
    for way in WAYS:
        model.zero_grad()
        plain.zero_grad()
        assert_near_truth(plain, model, way, batches())
    # Pieces of five of twice 7, 12 and 9 tokens; the first step under mt.accumulate is done twice.
    assert adds_wider == [(16, 16), *[(VOCAB, WIDTH)] * 3 * (3 + 5 + 4)]
