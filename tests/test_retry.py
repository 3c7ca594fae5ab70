"""A step that the device's memory does not hold is done again with less there: the same bits, or the error as is."""

from __future__ import annotations

import logging
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


def step(model: nn.Module, optimizer: HomeOptimizer) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 96, (2, length), generator=generator) for length in (70, 90, 80)]
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
