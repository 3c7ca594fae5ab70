"""Matrices made orthogonal on the device, for Muon: where a direction is kept, how it goes there and comes back.

Rule: a matrix is orthogonalised whole and alone, so no result depends on how anything else is cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatrain.store.tier import Tier
from megatrain.transport.hops import hops_at_hand

NewtonSchulz = tuple[tuple[float, float, float], int, float]
"""Coefficients, number of iterations, eps: of `orthogonalise`."""


class Workspace:
    """Where one update lane keeps a direction, and the stream on which that goes to the device and back.

    Args:
        memory: of the homes.
        device: where matrices are orthogonalised.
        is_streamed: the flat halves copy the direction to the device too.
    """

    def __init__(self, memory: Tier, device: torch.device, is_streamed: bool) -> None:
        self._numel = 0
        self._direction: torch.Tensor | None = None
        """While nothing works on it."""
        self._orthogonal = torch.empty(0, dtype=torch.bfloat16)
        self._memory, self._device, self._is_streamed = memory, device, is_streamed
        # Homes on the device are updated on their lane's stream. The CPU's lane has none, and must not use that of the
        # forward and backward.
        crosses = device.type == "cuda" and memory.device.type == "cpu"
        self._stream = torch.cuda.Stream(device) if crosses else None

    def reserve(self, numel: int) -> None:
        """Room for directions of `numel` numbers."""
        if numel > self._numel:
            self._numel, self._direction = numel, None
            self._direction = self.take()
            self._orthogonal = self._memory.empty(2 * numel, pinned=True).view(torch.bfloat16)

    def take(self) -> Tensor:
        """Memory for a direction, flat fp32, until it is given back: by an update that is over, and no other's before.
        An update that failed keeps its own."""
        direction, self._direction = self._direction, None
        if direction is None:
            direction = self._memory.empty(4 * self._numel, pinned=self._is_streamed).view(torch.float32)
        return direction

    def give_back(self, direction: Tensor) -> None:
        if direction.numel() == self._numel:
            self._direction = direction

    def orthogonalise(self, directions: Tensor, newton_schulz: NewtonSchulz) -> Tensor:
        """Each of `directions` ((matrices, rows, columns) fp32) orthogonalised: flat bf16, where they are, until the
        next call."""
        flat = self._orthogonal[: directions.numel()]
        with torch.no_grad(), self._on_stream():
            for direction, result in zip(directions, flat.view_as(directions), strict=True):
                result.copy_(direction)
                if self._stream is None:
                    result.copy_(orthogonalise(result, *newton_schulz))
                    continue
                matrix = _cross(torch.empty_like(result, device=self._device), result)
                _cross(result, orthogonalise(matrix, *newton_schulz))
        return flat

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """At its end nothing is under way there, also after a fault."""
        if self._stream is None:
            yield
            return
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._stream.synchronize()


def _cross(target: Tensor, source: Tensor) -> Tensor:
    """`target`, with a copy of `source` enqueued."""
    hops, name = hops_at_hand()
    hops.move(target, source, f"a direction of {name} between host and device")
    return target


def orthogonalise(matrix: Tensor, coefficients: Sequence[float], num_steps: int, eps: float) -> Tensor:
    """U S' V^T for a matrix U S V^T, with S' near 1: the quintic Newton-Schulz iteration of Jordan et al. (2024).

    matrix: (rows, columns), any float dtype; left as it is. coefficients: a, b, c of the polynomial
    a x + b x^3 + c x^5 of singular values. Returns (rows, columns) bf16; a matrix of zeros stays zero.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.T if is_tall else x
    # The Frobenius norm bounds the largest singular value.
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        square = x @ x.T
        polynomial = torch.addmm(square, square, square, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return (x.T if is_tall else x).contiguous()
