"""A small model around one module a block, and what ran in tiles of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_zoo import Stack
from torch import nn

from megatrain.execute.tiles import _TiledCall

WIDTH = 16


class Mlp(nn.Module):
    """Gated, as in most models; without biases."""

    def __init__(self, width: int = WIDTH, times: int = 4) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, times * width, bias=False) for _ in range(2))
        self.down = nn.Linear(times * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Around(nn.Module):
    """A block: the module on its input, beside the input."""

    def __init__(self, inner: nn.Module, call: Call) -> None:
        super().__init__()
        self.inner, self._call = inner, call
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self._call(self.inner, x)


def stack_of(*inner: nn.Module, call: Call = lambda inner, x: inner(x)) -> Stack:
    """call: how blocks call their module."""
    return Stack([Around(module, call) for module in inner], _run, WIDTH)


def _run(stack: Stack, x: torch.Tensor) -> torch.Tensor:
    for block in stack.blocks:
        x = block(x)
    return x


def tiled(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Class of each module that runs in tiles from now on -> number of tiles in forwards."""
    found: Counter[str] = Counter()
    forward = _TiledCall.forward

    def counted(self: _TiledCall, x: torch.Tensor) -> Any:
        output = forward(self, x)
        found[type(self.module).__name__] += len(list(self._tiles(x)))
        return output

    monkeypatch.setattr(_TiledCall, "forward", counted)
    return found
