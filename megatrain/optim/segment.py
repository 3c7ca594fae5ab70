"""What an update works on: flat tensors of one parameter, the rule, and its numbers.

Rule: a Segment is checked once, when it is made. Whatever works on it checks nothing any more.

What it gives up: whether tensors overlap is not checked; those of one run must not.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.optim.rules import Rule, Scalars
from megatrain.store.codecs import BLOCK, Stored
from megatrain.store.rounding import Key


@dataclass(frozen=True, kw_only=True)
class Ema:
    """A moving average of the weights, updated after their step."""

    average: Tensor
    """(n,) fp32."""
    decay: float


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Parameters that are updated with the same scalars. All tensors are flat and contiguous, on the host or on one
    device, some here and some there where they are staged."""

    rule: Rule
    scalars: Scalars
    weights: Tensor
    """(n,): fp32 masters, the bf16 upper halves of split masters, or bf16 masters."""
    low: Tensor | None = None
    """(n,) int16 lower halves of split masters; None with others."""
    grad: Tensor
    """(n,) fp32 or bf16, before clipping. Left as it is."""
    states: tuple[Stored, ...] = ()
    """In the rule's order."""
    ema: Ema | None = None
    key: Key = (0, 0)
    """Of the stochastic rounding."""
    first: int = 0
    """Which element of its parameter the segment starts with."""

    def __post_init__(self) -> None:
        n = self.grad.numel()
        masters = (torch.bfloat16,) if self.low is not None else (torch.float32, torch.bfloat16)
        _check("weights", self.weights, masters, n)
        _check("grad", self.grad, (torch.float32, torch.bfloat16), n)
        if self.low is not None:
            _check("low", self.low, (torch.int16,), n)
        if len(self.states) != len(self.rule.states):
            raise ValueError(f"Segment.states: {self.rule.name} keeps {len(self.rule.states)}, got {len(self.states)}")
        for state, stored in zip(self.rule.states, self.states, strict=True):
            _check(state.name, stored.codes, (stored.format.dtype,), stored.format.num_codes(n))
            if stored.format.is_block:
                assert stored.scales is not None
                _check(f"{state.name} scales", stored.scales, (torch.float32,), stored.format.num_scales(n))
        devices = {tensor.device for tensor in self._tensors()} - {torch.device("cpu")}
        if len(devices) > 1 or torch.device("meta") in devices:
            raise ValueError(f"Segment: tensors lie on the host or on one device, not on {sorted(map(str, devices))}")
        if len({stored.format.name for stored in self.states}) > 1:
            raise ValueError("Segment.states must be of one format: a first moment is coded beside its second")
        if self.ema is not None:
            _check("ema", self.ema.average, (torch.float32,), n)

    def _tensors(self) -> list[Tensor]:
        optional = (self.low, None if self.ema is None else self.ema.average)
        stored = [tensor for state in self.states for tensor in state.tensors]
        return [self.weights, self.grad, *stored, *(tensor for tensor in optional if tensor is not None)]

    @property
    def numel(self) -> int:
        return self.grad.numel()

    @property
    def is_rounded(self) -> bool:
        """Whether anything is rounded stochastically."""
        is_bf16_master = self.low is None and self.weights.dtype == torch.bfloat16
        return is_bf16_master or any(not stored.format.is_exact for stored in self.states)

    def part(self, start: int, stop: int) -> Segment:
        """The parameters [start, stop), as views. `start` is a multiple of BLOCK."""
        assert start % BLOCK == 0
        return dataclasses.replace(
            self,
            weights=self.weights[start:stop],
            low=None if self.low is None else self.low[start:stop],
            grad=self.grad[start:stop],
            states=tuple(stored.part(start, min(stop, self.numel)) for stored in self.states),
            ema=None if self.ema is None else dataclasses.replace(self.ema, average=self.ema.average[start:stop]),
            first=self.first + start,
        )


def _check(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], numel: int) -> None:
    """Raise ValueError unless the tensor is what a Segment says."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"Segment.{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"Segment.{name} must be flat and contiguous, got {tuple(tensor.shape)}")
    if tensor.numel() != numel:
        raise ValueError(f"Segment.{name} has {tensor.numel()} elements instead of {numel}")
