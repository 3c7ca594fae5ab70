"""A step that the device's memory does not hold is done again with less there: the same bits, or the error as is."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable

import pytest
import torch
from model_zoo import make_model
from torch import nn
from update_training import assert_same

import megatrain as mt
from megatrain.api import stream
from megatrain.base.config import StreamOptions
from megatrain.execute.engine import engine_of
from megatrain.execute.retry import _Start
from megatrain.optim.base import HomeOptimizer

ROOM = StreamOptions(activation_bytes=10**9)


def started(options: StreamOptions, **settings: object) -> tuple[nn.Module, HomeOptimizer]:
    mt.init(device="cpu", **settings)
    model = stream(make_model("llama", attention_dropout=0.1), options=options).train()
    return model, mt.optim.AdamW(model, lr=1e-2)


def failing(model: nn.Module, at: int, times: int = 1) -> Callable[[], None]:
    """The `at`-th call of the second block from now on, and those after it, find no memory, `times` in all. Returns
    what takes this back."""
    block = model.model.layers[1]
    plain, counts = block.mlp.forward, {"calls": 0, "left": times}

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        counts["calls"] += 1
        if counts["calls"] >= at and counts["left"]:
            counts["left"] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. (a test)")
        return plain(hidden)

    block.mlp.forward = forward
    return lambda: setattr(block.mlp, "forward", plain)


def step(model: nn.Module, optimizer: HomeOptimizer, ids: list[torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = ids or [torch.randint(0, 96, (2, length), generator=generator) for length in (70, 90, 80)]
    torch.manual_seed(4)
    losses = mt.accumulate(model, [{"input_ids": one, "labels": one} for one in ids])
    mt.clip_grad_norm_(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return {**mt.full_state_dict(model), "losses": torch.stack(losses), "random": torch.get_rng_state()}


def truth() -> dict[str, torch.Tensor]:
    model, optimizer = started(ROOM)
    return step(model, optimizer)


@pytest.mark.parametrize("at", [1, 3, 4, 6], ids=["forward", "last forward", "backward", "last backward"])
def test_a_step_that_did_not_fit_is_done_again(at: int, caplog: pytest.LogCaptureFixture) -> None:
    expected = truth()
    model, optimizer = started(ROOM)
    take_back = failing(model, at)
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        again = step(model, optimizer)
    take_back()
    assert_same(again, expected)
    engine = engine_of(model)
    assert engine.activations.budget_bytes == 0
    assert "which is done again" in caplog.text and "mt.Workload" in caplog.text


def large_step(model: nn.Module, optimizer: HomeOptimizer) -> dict[str, torch.Tensor]:
    """Its layers' inputs are large enough to be worth counting: 72 KiB each."""
    ids = torch.randint(0, 96, (8, 72), generator=torch.Generator().manual_seed(2))
    return step(model, optimizer, [ids, ids.flip(0), ids.flip(1)])


@pytest.mark.parametrize("at", [1, 4], ids=["forward", "backward"])
@pytest.mark.parametrize("times", [1, 2])
def test_half_of_the_inputs_stay_first(times: int, at: int, caplog: pytest.LogCaptureFixture) -> None:
    expected = large_step(*started(ROOM))
    model, optimizer = started(ROOM)
    engine = engine_of(model)
    take_back = failing(model, at, times=times)
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        again = large_step(model, optimizer)
    take_back()
    assert_same(again, expected)
    if times == 1:
        assert 0 < engine.activations.budget_bytes <= engine.activations.most_kept_bytes // 2
        assert "of the inputs of layers stay on the device" in caplog.text
        assert engine.activations.num_offloaded > 0
    assert (engine.activations.budget_bytes == 0) == (times == 2)
    assert caplog.text.count("which is done again") == times
    assert engine.activations.kept_bytes == 0 and engine.activations.buffers.used_bytes == 0


@pytest.mark.parametrize("at", [1, 4], ids=["forward", "backward"])
def test_nothing_of_a_failed_try_is_there_when_the_next_begins(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor waits for the garbage collector: its memory is what the next try needs. On the CPU autograd's queue of this
    thread keeps the nodes that were next, one a micro-batch; the thread of a GPU drops its own."""
    model, optimizer = started(ROOM)
    engine = engine_of(model)
    seen: list[weakref.ref[torch.Tensor]] = []
    plain = engine.activations.keep

    def keep(tensor: torch.Tensor, name: str) -> object:
        seen.append(weakref.ref(tensor))
        return plain(tensor, name)

    monkeypatch.setattr(engine.activations, "keep", keep)
    left: list[tuple[int, int]] = []
    reduce = engine.activations.reduce

    def look(budget_bytes: int) -> None:
        left.append((sum(tensor() is not None for tensor in seen), engine.activations.kept_bytes // (72 << 10)))
        reduce(budget_bytes)

    monkeypatch.setattr(engine.activations, "reduce", look)
    take_back = failing(model, at)
    gc.disable()
    try:
        large_step(model, optimizer)
    finally:
        gc.enable()
        take_back()
    num_queued = 0 if at == 1 else 2
    assert len(seen) > 3 and left == [(num_queued, num_queued)]


def test_what_was_planned_for_inputs_is_given_up() -> None:
    """A room on the device that was made for them is of use to others then."""
    options = StreamOptions(activation_bytes=10**9, device_room_bytes=10**7)
    expected = large_step(*started(options))
    model, optimizer = started(options)
    room = engine_of(model).activations.device_buffers
    assert room.total_bytes >= 10**7
    take_back = failing(model, 1)
    again = large_step(model, optimizer)
    take_back()
    assert_same(again, expected)
    assert engine_of(model).activations.budget_bytes == 0 and room.total_bytes == 0


def test_what_a_failed_try_saw_does_not_count() -> None:
    model, optimizer = started(ROOM)
    take_back = failing(model, 4)
    step(model, optimizer)
    take_back()
    assert engine_of(model).report._workload.num_sequences == 6


def test_a_second_time_is_the_users(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = started(ROOM)
    take_back = failing(model, 2, times=2)
    with pytest.raises(torch.OutOfMemoryError, match="a test"):
        step(model, optimizer)
    take_back()
    optimizer.zero_grad()
    assert_same(step(model, optimizer), truth())


def test_gradients_that_were_there_are_not_touched() -> None:
    """The try has added to some of them: which, nobody knows."""
    model, optimizer = started(ROOM)
    ids = torch.arange(70)[None]
    mt.accumulate(model, [{"input_ids": ids, "labels": ids}])
    take_back = failing(model, 4)
    with pytest.raises(torch.OutOfMemoryError):
        step(model, optimizer)
    take_back()


def test_updates_that_have_run_are_not_run_again() -> None:
    model, optimizer = started(ROOM, clip="layer")
    take_back = failing(model, 5)
    with pytest.raises(torch.OutOfMemoryError):
        mt.accumulate(model, [{"input_ids": torch.arange(70)[None], "labels": torch.arange(70)[None]}] * 3)
    take_back()


def test_buffers_that_have_changed_are_not_changed_again() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.linear(x))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    mt.init(device="cpu")
    model = stream(Stack(), options=ROOM).train()
    block = model.blocks[2]
    plain = block.linear.forward
    block.linear.forward = lambda x: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory. (a test)"))
    with pytest.raises(torch.OutOfMemoryError):
        mt.accumulate(model, [{"x": torch.randn(4, 8)}], lambda loss, _: loss)
    block.linear.forward = plain


def test_a_buffer_in_the_place_of_another_has_changed_whatever_its_id() -> None:
    """Ids of those that are gone come again: while a try lasts, none of its first buffers goes."""
    model, _ = started(ROOM)
    module = engine_of(model).layers[1].modules[0]
    module.register_buffer("mean", torch.zeros(4), persistent=False)
    first = weakref.ref(module.mean)
    start = _Start(engine_of(model))
    assert start.obstacle() == ""
    module.mean = module.mean + 1
    assert "changed buffers" in start.obstacle() and first() is not None
