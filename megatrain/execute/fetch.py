"""Weights outside of streamed layers: the resident leftovers, and any weight used where its layer is not running.

Both are handed out as tensors on the device whose backward adds to the home's gradients. Resident weights are copied
once an update; others at every use, which is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megatrain.execute.passes import wants_gradient
from megatrain.execute.runs import current_run
from megatrain.spec.layout import Field, view_field
from megatrain.store.home import Home

if TYPE_CHECKING:
    from megatrain.execute.engine import Engine


class Fetcher:
    """
    Args:
        resident: the home whose weights stay on the device, or None.
    """

    def __init__(self, engine: Engine, resident: Home | None) -> None:
        self.resident = resident
        self._engine = engine
        self._copy = torch.empty(0, dtype=torch.uint8)
        self._copy_version = -1

    def fetch(self, home: Home, field: Field) -> torch.Tensor:
        """The weight (the field's shape and wire dtype) on the device, differentiable if grad mode and it are."""
        if not home.trainable[field]:
            return self.weights(home, field)
        if not torch.is_grad_enabled():
            # PyTorch picks some kernels by `requires_grad` alone.
            return self.weights(home, field).detach().requires_grad_()
        run = current_run(self._engine)
        if run is None:
            return self._differentiable(home, field)
        # One alias a micro-batch, so that its uses are summed before they are added to those of the others.
        if field not in run.aliases:
            run.aliases[field] = self._differentiable(home, field)
        return run.aliases[field]

    def weights(self, home: Home, field: Field) -> torch.Tensor:
        with self._engine.transport.waiting("weights"):
            home.wait()
        if home is not self.resident:
            self._engine.transport.counters.num_fetches += 1
            return self._engine.transport.hops.fetch(home, home.weights(field), self._engine.device)
        if self._copy_version != home.version:
            # A new tensor and not an overwrite: a graph may still hold the old one.
            self._copy = self._engine.transport.hops.fetch(home, home.wire, self._engine.device)
            self._copy_version = home.version
        return view_field(self._copy, field)

    def _differentiable(self, home: Home, field: Field) -> torch.Tensor:
        return _FetchFunction.apply(self._engine, home, field, self._engine._anchor, self.weights(home, field).detach())


class _FetchFunction(torch.autograd.Function):
    """Returns its last input as it is: autograd then refuses to change it in place, which would not reach the home."""

    @staticmethod
    def forward(
        ctx: Any, engine: Engine, home: Home, field: Field, anchor: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.engine, ctx.home, ctx.field = engine, home, field
        ctx.use = engine.passes.use(home)
        ctx.set_materialize_grads(False)
        return weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, ...]:
        if grad is not None and wants_gradient(ctx):
            passes = ctx.engine.passes
            ctx.engine.join_autograd()
            passes.add(ctx.home, [(ctx.field, grad)])
            passes.settle(ctx.home, ctx.use)
        return (None,) * 5
