"""Sums of a home's gradients on the device: the same bits whether one micro-batch was expected or several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import stream, the_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from model_zoo import make_batch, make_model

import megatrain as mt
from megatrain.store.home import Home
from megatrain.transport.drain import GradientAccumulator, GradientPacket


@pytest.fixture(scope="module")
def home() -> Home:
    mt.init(precision="bf16")
    _, model = stream(make_model("llama"))
    home = max(the_engine(model).homes, key=lambda one: len(one.fields))
    assert home.grad_dtype == torch.bfloat16
    return home


def packed(home: Home, adds: list[list[int]], seed: int, dtypes: tuple[torch.dtype, ...], **how: Any) -> GradientPacket:
    """adds: numbers of the fields that have a gradient, one list a micro-batch."""
    generator = torch.Generator().manual_seed(seed)
    sums, fields = GradientAccumulator(home, torch.device("cpu"), **how), home.fields
    for number, of_fields in enumerate(adds):
        dtype = dtypes[number % len(dtypes)]
        gradients = [(fields[i], torch.randn(fields[i].shape, generator=generator).to(dtype)) for i in of_fields]
        sums.add(gradients)
    return sums.pack()


@settings(max_examples=60)
@given(data=st.data())
def test_what_was_expected_changes_no_bit(home: Home, data: st.DataObject) -> None:
    """One micro-batch, or more than were expected, in bf16 or fp32, of some parameters or one twice."""
    number = len(home.fields)
    some = st.lists(st.integers(0, number - 1), min_size=1, max_size=number + 1)
    adds = data.draw(st.lists(some, min_size=1, max_size=3))
    dtypes = data.draw(st.sampled_from([(torch.bfloat16,), (torch.float32,), (torch.bfloat16, torch.float32)]))
    several, only = (packed(home, adds, 7, dtypes, is_only=is_only) for is_only in (False, True))
    assert several.fields == only.fields
    assert torch.equal(several.norms, only.norms)
    for field in several.fields:
        views = [several.layout.view(one.wire, field) for one in (several, only)]
        assert torch.equal(*views), field.name


def test_sums_of_several_are_those_of_fp32(home: Home) -> None:
    """The plain truth: each added in fp32, rounded once."""
    adds = [[0, 1], [1, 0], [1]]
    packet = packed(home, adds, 3, (torch.bfloat16,))
    generator, totals = torch.Generator().manual_seed(3), {}
    fields = home.fields
    for of_fields in adds:
        for i in of_fields:
            gradient = torch.randn(fields[i].shape, generator=generator).bfloat16().float()
            totals[fields[i]] = gradient if fields[i] not in totals else totals[fields[i]] + gradient
    for field, total in totals.items():
        assert torch.equal(packet.layout.view(packet.wire, field), total.bfloat16())
        norm = packet.norms[packet.fields.index(field)]
        assert torch.equal(norm, torch.linalg.vector_norm(total.bfloat16(), dtype=torch.float32))


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_one_micro_batch_is_not_summed(num_micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model without tied weights: no home of it makes sums in fp32."""
    mt.init(precision="bf16", exact=True)
    _, model = stream(make_model("llama", tie_word_embeddings=False))
    begun, own = [], GradientAccumulator._empty

    def empty(self: GradientAccumulator, dtype: torch.dtype) -> torch.Tensor:
        begun.append(dtype)
        return own(self, dtype)

    monkeypatch.setattr(GradientAccumulator, "_empty", empty)
    mt.accumulate(model, [make_batch(7 + number) for number in range(num_micro_batches)])
    num_homes = len([home for home in the_engine(model).homes if home.is_trainable])
    assert begun.count(torch.float32) == (0 if num_micro_batches == 1 else num_homes)
