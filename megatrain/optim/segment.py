"""What an update works on: flat tensors of one format that are updated with the same numbers.

Rule: a Segment is checked once, when it is made. Whatever works on it checks nothing any more.

What it gives up: whether tensors overlap is not checked; those of one run must not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.optim.formula import AdamWScalars


@dataclass(frozen=True)
class Segment:
    """Parameters that are updated with the same scalars. All tensors: (n,), contiguous, on the CPU."""

    weights: Tensor
    """fp32 masters, or the bf16 upper halves of split masters."""
    low: Tensor | None
    """int16 lower halves of split masters; None with fp32 masters."""
    grad: Tensor
    """fp32 or bf16, before clipping. Left as it is."""
    m: Tensor
    """fp32 first moments."""
    v: Tensor
    """fp32 second moments."""
    scalars: AdamWScalars

    def __post_init__(self) -> None:
        split = self.low is not None
        _check("weights", self.weights, (torch.bfloat16,) if split else (torch.float32,), self.grad)
        _check("grad", self.grad, (torch.float32, torch.bfloat16), self.grad)
        _check("m", self.m, (torch.float32,), self.grad)
        _check("v", self.v, (torch.float32,), self.grad)
        if self.low is not None:
            _check("low", self.low, (torch.int16,), self.grad)

    def part(self, start: int, stop: int) -> Segment:
        """The parameters [start, stop), as views."""
        low = None if self.low is None else self.low[start:stop]
        rest = (tensor[start:stop] for tensor in (self.grad, self.m, self.v))
        return Segment(self.weights[start:stop], low, *rest, self.scalars)


def _check(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], like: Tensor) -> None:
    """Raise ValueError unless the tensor is what a Segment says."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"Segment.{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.device.type != "cpu" or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"Segment.{name} must be a flat contiguous CPU tensor, got {tuple(tensor.shape)} on {tensor.device}"
        )
    if tensor.numel() != like.numel():
        raise ValueError(f"Segment.{name} has {tensor.numel()} elements, grad has {like.numel()}")
