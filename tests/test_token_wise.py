"""Which modules run in tiles: those that are seen to do each token alone. Others run whole, with the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_equal, assert_same_step, gradients, stream
from model_zoo import make_batch, make_model
from tiles_helpers import WIDTH, Around, Call, Mlp, stack_of, tiled
from torch import nn
from torch.nn import functional

import megatrain as mt


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    mt.init(device="cpu", tile_tokens=5)
    return tiled(monkeypatch)


class Wide(nn.Module):
    """Keeps enough inside to be of interest; `mix` is done to it in the middle."""

    def __init__(self, mix: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self._mix = mix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.mix(self.first(x))))

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._mix is None else self._mix(x)


class Convolution(Wide):
    """Over this token and the one before; nothing comes from those behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.taps = nn.Conv1d(4 * WIDTH, 4 * WIDTH, 2, groups=4 * WIDTH)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return self.taps(functional.pad(x.transpose(1, 2), (1, 0))).transpose(1, 2)


class Mixer(nn.Module):
    """An MLP over tokens, of which there are always as many."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 40), nn.Linear(40, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x.transpose(1, 2)))).transpose(1, 2)


class OverTheBatch(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4 * WIDTH)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.flatten(0, 1)).view_as(x)


class Counting(Wide):
    num_calls = 0

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return x


class Pair(Wide):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), x


class TwoInputs(Wide):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x + y)


def to_experts(x: torch.Tensor) -> torch.Tensor:
    """Each token to one of two."""
    return x * functional.one_hot(x[..., :2].argmax(-1), 2).repeat(1, 1, 2 * WIDTH)


WHOLE: dict[str, Callable[[], nn.Module]] = {
    "a convolution over tokens": Convolution,
    "an MLP over tokens": Mixer,
    "statistics of the batch": OverTheBatch,
    "rows of a batch": lambda: Wide(lambda x: x - x.mean(0, keepdim=True)),
    "all tokens": lambda: Wide(lambda x: x - x.mean(1, keepdim=True)),
    "tokens before": lambda: Wide(lambda x: x.cumsum(1) / 10),
    "positions": lambda: Wide(lambda x: x + torch.linspace(0, 1, x.shape[1])[:, None]),
    "the number of tokens": lambda: Wide(lambda x: x / x.shape[1]),
    "one scale for all": lambda: Wide(lambda x: x / x.detach().abs().max()),
    "a router": lambda: Wide(to_experts),
    "dropout": lambda: Wide(lambda x: functional.dropout(x, 0.5)),
    "an attribute": Counting,
    "two results": Pair,
    "two inputs": TwoInputs,
    "its input by name": Wide,
    "a linear layer, which keeps nothing": lambda: nn.Linear(WIDTH, WIDTH),
}
CALLS: dict[str, Call] = {
    "two results": lambda inner, x: sum(inner(x)),
    "two inputs": lambda inner, x: inner(x, x),
    "its input by name": lambda inner, x: inner(x=x),
}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", WHOLE)
def test_what_is_not_token_wise_runs_whole(name: str, rows: int, found: Counter[str]) -> None:
    if (name, rows) == ("rows of a batch", 1):
        return
    torch.manual_seed(0)
    call = {"call": CALLS[name]} if name in CALLS else {}
    plain, model = stream(stack_of(*(WHOLE[name]() for _ in range(2)), **call))
    for _ in range(2):
        assert_same_step(plain, model, lambda each: each(**make_batch(12, rows=rows))["loss"])
    assert not found
    assert_equal(dict(plain.named_buffers()), dict(model.named_buffers()))


def test_what_is_around_a_coupling_runs_in_tiles(found: Counter[str]) -> None:
    """Modules inside one that couples tokens are asked in turn."""

    class Summing(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.cumsum(1))

    plain, model = stream(stack_of(Summing(), Mlp()))
    assert_near_step(plain, model)
    assert found.keys() == {"Mlp"}
    assert found["Mlp"] == 2 * 2 * 6  # modules, forward and recomputation, tiles of 2 tokens of 2 rows


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_hooks_see_what_they_would(kind: str, found: Counter[str]) -> None:
    shapes: list[list[tuple[int, ...]]] = []
    built = stack_of(Mlp(), Mlp())
    plain, model = stream(built)
    for each in (plain, model):
        seen: list[tuple[int, ...]] = []
        shapes.append(seen)
        register = getattr(each.blocks[0].inner.down, f"register_{kind}_hook")
        register(lambda module, given, *of, seen=seen: seen.append(tuple(given[0].shape)))
    assert_near_step(plain, model)
    assert set(shapes[0]) == set(shapes[1]) and shapes[0]
    assert found["Mlp"] == 2 * 6


def test_a_probability_that_is_raised_later(found: Counter[str]) -> None:
    """Found out when it draws, and nothing has been drawn twice."""

    class Noisy(Mlp):
        p = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(super().forward(x), self.p, self.training)

    plain, model = stream(stack_of(Noisy(), Noisy()))
    assert_near_step(plain, model)
    assert found["Noisy"] == 2 * 2 * 6
    found.clear()
    for each in (plain, model):
        each.zero_grad()
        for block in each.blocks:
            block.inner.p = 0.5
    assert_same_step(plain, model, lambda each: each(**make_batch(12))["loss"])
    assert not found


@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_training_and_evaluation_are_told_apart(order: tuple[bool, ...], found: Counter[str]) -> None:
    """A batch norm couples tokens in training alone."""
    plain, model = stream(stack_of(OverTheBatch(), OverTheBatch()))
    for is_training in order:
        found.clear()
        plain.train(is_training), model.train(is_training)
        plain.zero_grad(), model.zero_grad()
        assert_near_step(plain, model)
        assert bool(found) != is_training


def test_a_tensor_from_outside_is_not_lost(found: Counter[str]) -> None:
    """A module that looks at its block's input past its own keeps the gradient of it."""

    class Secret(Wide):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.block_input[0]

    class Telling(Around):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # In a list, which is no attribute that changes.
            self.inner.block_input[:] = [x[:, :1]]
            result = x + self.inner(x.detach())
            self.inner.block_input.clear()
            return result

    built = stack_of(Secret(), Mlp())
    built.blocks[0].inner.block_input = []
    built.blocks[0].__class__ = Telling
    plain, model = stream(built)
    assert_near_step(plain, model)
    assert found.keys() == {"Mlp"}


def test_what_runs_in_tiles_is_told(caplog: pytest.LogCaptureFixture) -> None:
    _, model = stream(stack_of(Mlp(), Convolution()))
    with caplog.at_level("INFO", logger="megatrain"):
        model(**make_batch(12))["loss"].backward()
    assert "blocks.0.inner runs in tiles" in caplog.text
    assert "blocks.1.inner runs whole, not in tiles: it couples tokens" in caplog.text


def test_experts_run_whole(found: Counter[str]) -> None:
    plain, model = stream(make_model("mixtral", output_router_logits=False))
    assert_near_step(plain, model)
    assert found.keys() == {"MixtralRMSNorm"}


def assert_near_step(plain: nn.Module, model: nn.Module) -> None:
    losses: list[Any] = []
    for each in (plain, model):
        torch.manual_seed(0)
        output = each(**make_batch(12))
        loss = output["loss"] if isinstance(output, dict) else output.loss
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(gradients(model), gradients(plain))
