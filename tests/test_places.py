"""Where homes live and are updated, and whether gradients are kept: no bit of a result depends on it."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from update_training import assert_same, batches, result, start, train

import megatrain as mt
from megatrain.base.config import StreamOptions
from megatrain.base.errors import UserError
from megatrain.execute.engine import engine_of
from megatrain.optim.formula import AdamWScalars, adamw_
from megatrain.plan.placement import Place

MIXED = {"model.embed_tokens": "hbm", "model.layers.0": "hbm", "model.layers.1": "stream"}
RACES = {"poison": True, "lane_delay_seconds": 0.002}


def trained(options: StreamOptions, clip: str = "global", **settings) -> dict[str, torch.Tensor]:
    model, optimizer = start(options, clip=clip, **settings)
    train(model, optimizer, batches(4), clip)
    return result(model, optimizer)


@pytest.mark.parametrize("clip", ["global", "layer"])
@pytest.mark.parametrize(
    ("precision", "compression"), [("fp32", False), ("bf16", False), ("fp32", "8bit"), ("bf16", "4bit")]
)
def test_no_result_depends_on_the_place(precision: str, compression: bool | str, clip: str) -> None:
    settings = {"precision": precision, "optimizer_compression": compression, "clip": clip}
    truth = trained(StreamOptions(serial=True), **settings)
    for places in (None, "hbm", "stream", MIXED):
        assert_same(trained(StreamOptions(places=places, **RACES), **settings), truth)
    assert_same(trained(StreamOptions(serial=True, places=MIXED), **settings), truth)


@functools.cache
def in_host_memory(clip: str) -> dict[str, torch.Tensor]:
    return trained(StreamOptions(serial=True), precision="bf16", clip=clip)


@pytest.mark.parametrize("clip", ["global", "layer"])
@pytest.mark.parametrize("place", ["stream", "hbm", Place(moments="hbm", update="device")])
@pytest.mark.parametrize("others", [{}, {"model.layers.1": "hbm"}])
def test_what_is_in_no_layer_is_updated_on_the_device_too(others: dict, place: str | Place, clip: str) -> None:
    settings, truth = {"precision": "bf16", "clip": clip}, in_host_memory(clip)
    places = {"resident": place, **others}
    assert_same(trained(StreamOptions(serial=True, places=places), **settings), truth)
    assert_same(trained(StreamOptions(places=places, **RACES), **settings), truth)


@pytest.mark.parametrize("options", [{"num_slots": 1, "max_drains": 1}, {"num_slots": 5, "max_drains": 4}])
def test_layer_clipping_depends_on_no_buffer(options: dict) -> None:
    settings = {"precision": "bf16", "clip": "layer"}
    assert_same(trained(StreamOptions(**options, **RACES), **settings), in_host_memory("layer"))


def test_layer_clipping_is_its_definition() -> None:
    """One step: each home's gradients times min(1, max_norm / (their norm + 1e-6)), then AdamW."""
    model, optimizer = start(clip="layer", numbers={"max_norm": 0.01})
    before = mt.full_state_dict(model)
    plain, _ = start(numbers={"lr": 0.0})
    (micro_batches,) = batches(1)
    mt.accumulate(plain, micro_batches)
    train(model, optimizer, iter([micro_batches]), "layer")
    after = mt.full_state_dict(model)
    grads = dict(mt.named_gradients(plain))
    num_clipped = 0
    for home in engine_of(plain).homes:
        # Norms are taken a parameter in fp32, and added in the order of the fields.
        norms = [float(torch.linalg.vector_norm(grads[field.name], dtype=torch.float32)) for field in home.fields]
        norm = math.sqrt(sum(n * n for n in norms))
        num_clipped += norm > 0.01
        for field in home.fields:
            w = before[field.name].clone().view(-1)
            clip = min(1.0, 0.01 / (norm + 1e-6))
            scalars = AdamWScalars.at(1, 1e-2, 0.9, 0.999, 1e-8, 0.1, clip)
            adamw_(w, grads[field.name].reshape(-1), torch.zeros_like(w), torch.zeros_like(w), scalars)
            assert torch.equal(after[field.name].view(-1), w), field.name
    assert num_clipped > 2


def test_gradients_are_used_up_in_the_backward() -> None:
    model, optimizer = start(clip="layer")
    (micro_batches,) = batches(1)
    mt.accumulate(model, micro_batches)
    assert dict(mt.named_gradients(model)) == {}
    assert sum(home.grads.slab_bytes for home in engine_of(model).homes) == 0
    with pytest.raises(UserError, match="give max_norm to the optimizer"):
        mt.clip_grad_norm_(model, 1.0)
    with pytest.raises(UserError, match="there was one in this step already"):
        mt.accumulate(model, micro_batches)
    optimizer.step()
    parameter = next(model.parameters())
    with pytest.raises(UserError, match="used up in the backward"):
        parameter.grad = torch.zeros(parameter.shape)


def test_layer_clipping_needs_its_one_optimizer_first() -> None:
    model, optimizer = start(clip="layer")
    with pytest.raises(UserError, match="takes one optimizer a model"):
        mt.optim.AdamW(model)
    del optimizer
    (micro_batches,) = batches(1)
    with pytest.raises(UserError, match="make the optimizer before it"):
        mt.accumulate(model, micro_batches)


def test_max_norm_is_for_layer_clipping() -> None:
    with pytest.raises(UserError, match="max_norm is for clip"):
        start(numbers={"max_norm": 1.0})


def test_homes_on_the_device_take_no_transfer() -> None:
    model, optimizer = start(StreamOptions(places="hbm"))
    before = mt.stats(model)["num_transfers"]
    train(model, optimizer, batches(3))
    stats = mt.stats(model)
    assert stats["num_transfers"] == before == 0
    assert stats["visits"]["model.layers.0"] == 6
    engine = engine_of(model)
    assert engine.transport.total_device_bytes == 0, "no slots are needed"


def test_a_home_on_the_device_is_read_and_written_as_any_other() -> None:
    model, _ = start(StreamOptions(places="hbm"), precision="bf16")
    other, _ = start(precision="bf16")
    state = {name: torch.randn_like(value) for name, value in mt.full_state_dict(other).items()}
    for one in (model, other):
        one.load_state_dict(state)
    assert_same(mt.full_state_dict(model), mt.full_state_dict(other))
    ids = torch.randint(0, 90, (1, 5))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, other(ids).logits)


@pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_cross_the_link_as_asked(precision: str, grad_dtype: str) -> None:
    model, _ = start(precision=precision, grad_dtype=grad_dtype)
    (micro_batches,) = batches(1)
    mt.accumulate(model, micro_batches)
    assert {str(gradient.dtype) for _, gradient in mt.named_gradients(model)} == {
        {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[grad_dtype]
    }
    exact, _ = start(precision=precision, grad_dtype="fp32")
    mt.accumulate(exact, micro_batches)
    wanted = {name: g.to(torch.bfloat16) for name, g in mt.named_gradients(exact)}
    if grad_dtype == "bf16":
        assert_same(dict(mt.named_gradients(model)), wanted)
