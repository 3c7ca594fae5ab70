"""Gradients of one home on the host, from their drain until `zero_grad`.

One backward pass fills a slab of exact size, reused from step to step. A second pass before `zero_grad` (a plain loop
with several `backward` calls) adds to an fp32 total; that costs 4 bytes a parameter more and happens only then.
Rule: written by the drain lane, read by others only after `arrived`.
"""

from __future__ import annotations

import torch

from megatrain.base.fence import Fence
from megatrain.spec.layout import Field, GradientLayout
from megatrain.store.memory import HostMemory


class HostGradients:
    def __init__(self, memory: HostMemory, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.arrived = Fence.done()
        self.layout: GradientLayout | None = None
        self.touched: frozenset[Field] = frozenset()
        self.norms: dict[Field, float] | None = None
        self._memory = memory
        self._slab = torch.empty(0, dtype=dtype)
        self._total: torch.Tensor | None = None

    @property
    def slab_bytes(self) -> int:
        total_bytes = 0 if self._total is None else self._total.numel() * self._total.element_size()
        return self._slab.numel() * self._slab.element_size() + total_bytes

    def clear(self) -> None:
        """`zero_grad`: nothing is here any more. The slab stays for the next pass."""
        self.arrived.wait()
        self.touched = frozenset()
        self.norms = None
        self._total = None

    def slab(self, layout: GradientLayout) -> torch.Tensor:
        """Where the drain writes a pass (flat, `layout.numel` elements of `dtype`), zeroed at first use."""
        if self._slab.numel() != layout.numel:
            self._slab = self._memory.empty(layout.numel * self.dtype.itemsize, pinned=True).view(self.dtype)
        return self._slab

    def is_holding(self) -> bool:
        return bool(self.touched)

    def receive(self, layout: GradientLayout, touched: frozenset[Field], norms: dict[Field, float] | None) -> None:
        """The first pass since `clear` has arrived in the slab. `norms` are the L2 norms of the touched fields."""
        self.layout, self.touched, self.norms = layout, touched, norms

    def add(self, layout: GradientLayout, touched: frozenset[Field], incoming: torch.Tensor) -> None:
        """Another pass has arrived in `incoming` (flat, like the slab): add it in fp32, field by field."""
        assert self.layout is not None
        before = {field: self._view(field) for field in self.touched}
        total = torch.zeros(layout.numel, dtype=torch.float32)
        for field, view in before.items():
            assert field in layout.offsets, f"{field.name} was frozen while it held a gradient: call zero_grad first"
            layout.view(total, field).copy_(view)
        for field in touched:
            # Into a field that held nothing it is copied: 0 + x would turn -0 into +0.
            target = layout.view(total, field)
            target.add_(layout.view(incoming, field)) if field in before else target.copy_(layout.view(incoming, field))
        self._total = total
        self.layout, self.touched, self.norms = layout, self.touched | touched, None

    def view(self, field: Field) -> torch.Tensor | None:
        """The field's gradient (its shape; slab dtype, or fp32 after `add`), or None if none came."""
        self.arrived.wait()
        return self._view(field) if field in self.touched else None

    def _view(self, field: Field) -> torch.Tensor:
        # The drain lane itself comes here without waiting: `arrived` is its own fence.
        assert self.layout is not None
        return self.layout.view(self._slab if self._total is None else self._total, field)

    def drop(self, field: Field) -> None:
        """`p.grad = None` for one parameter."""
        self.arrived.wait()
        self.touched = self.touched - {field}

    def set(self, layout: GradientLayout, field: Field, value: torch.Tensor) -> None:
        """`p.grad = value` for one parameter."""
        self.arrived.wait()
        if not self.touched or self.layout is not layout:
            kept = {other: self.view(other).clone() for other in self.touched}
            self.slab(layout)
            self.layout, self._total = layout, None
            for other, grad in kept.items():
                layout.view(self._slab, other).copy_(grad)
        self.touched = self.touched | {field}
        self.norms = None
        self._view(field).copy_(value)

    def forget_norms(self) -> None:
        """Somebody got hold of a gradient and may change it: norms taken during the drain no longer count."""
        self.norms = None
