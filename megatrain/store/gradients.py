"""Gradients of one home, from their drain until `zero_grad` or until their update has used them up.

They lie where the home does: in host memory, or on the device. One backward pass fills a slab of exact size, reused
from step to step. A second pass before `zero_grad` (a plain loop with several `backward` calls) adds to an fp32 total;
that costs 4 bytes a parameter more and happens only then.
Clipping leaves a factor behind, which the update multiplies in; whoever looks at a gradient before sees it multiplied.
Rule: written by the drain lane, read by others only after `arrived`.
"""

from __future__ import annotations

import math

import torch

from megatrain.base.errors import UserError
from megatrain.base.fence import Fence
from megatrain.spec.layout import Field, GradientLayout
from megatrain.store.lending import Lending
from megatrain.store.tier import Tier


class HomeGradients:
    """
    Args:
        is_kept: until they are dropped. Else they are their update's alone, which uses them up, perhaps at this moment:
            there is nothing to drop.
    """

    def __init__(self, memory: Tier, dtype: torch.dtype, *, is_kept: bool = True) -> None:
        self.dtype = dtype
        self.is_kept = is_kept
        self.arrived = Fence.done()
        self.layout: GradientLayout | None = None
        self.touched: frozenset[Field] = frozenset()
        self.scale = 1.0
        """Factor of clipping that is still to be multiplied in."""
        self.arrived_norm = 0.0
        """L2 norm of all that the last pass brought, also after it was used up."""

        self._memory = memory
        self._norms: dict[Field, float] = {}
        self._slab = torch.empty(0, dtype=dtype)
        self._total: torch.Tensor | None = None
        self._lending = Lending()

    @property
    def slab_bytes(self) -> int:
        total_bytes = 0 if self._total is None else self._total.numel() * self._total.element_size()
        return self._slab.numel() * self._slab.element_size() + total_bytes

    def clear(self) -> None:
        """`zero_grad`: nothing is here any more. The slab stays for the next pass, unless somebody still holds a view
        of it: theirs must not change."""
        if not self.is_kept:
            return
        self.arrived.wait()
        self.touched, self.scale = frozenset(), 1.0
        self._norms.clear()
        self._total = None
        if self._lending.is_any_out:
            self._slab = torch.empty(0, dtype=self.dtype)
        self._lending.forget()

    @property
    def device(self) -> torch.device:
        return self._memory.device

    def borrow(self, slab: torch.Tensor, layout: GradientLayout) -> None:
        """Take `slab` (flat uint8, large enough) for the next pass, until `give_back`."""
        self._slab = slab[: layout.numel * self.dtype.itemsize].view(self.dtype)

    def give_back(self) -> None:
        """The update has used the gradients up, and a borrowed slab may be filled by others."""
        self.touched, self.scale = frozenset(), 1.0
        self._norms.clear()
        self._slab = torch.empty(0, dtype=self.dtype)

    def slab(self, layout: GradientLayout) -> torch.Tensor:
        """Where the drain writes a pass (flat, `layout.numel` elements of `dtype`), zeroed at first use."""
        if self._slab.numel() != layout.numel:
            self._slab = self._memory.empty(layout.numel * self.dtype.itemsize, pinned=True).view(self.dtype)
        return self._slab

    def is_holding(self) -> bool:
        return bool(self.touched)

    def receive(self, layout: GradientLayout, norms: dict[Field, float]) -> None:
        """The first pass since `clear` has arrived in the slab. `norms` are the L2 norms of the touched fields."""
        self.layout, self.touched = layout, frozenset(norms)
        self._norms = dict(norms)
        self.arrived_norm = math.sqrt(sum(norm * norm for norm in norms.values()))

    def add(self, layout: GradientLayout, touched: frozenset[Field], incoming: torch.Tensor) -> None:
        """Another pass has arrived in `incoming` (flat, like the slab): add it in fp32, field by field."""
        self._multiply_in()
        held = {field: self._view(field) for field in self.touched}
        # A field that was frozen meanwhile keeps its gradient; the pass has no room for it.
        frozen = [field for field in held if field not in layout.offsets]
        merged = GradientLayout.of([*layout.offsets, *frozen]) if frozen else layout
        total = torch.zeros(merged.numel, dtype=torch.float32, device=self._memory.device)
        for field, view in held.items():
            merged.view(total, field).copy_(view)
        for field in touched:
            # Into a field that held nothing it is copied: 0 + x would turn -0 into +0.
            target = merged.view(total, field)
            target.add_(layout.view(incoming, field)) if field in held else target.copy_(layout.view(incoming, field))
        self._total = total
        self.layout, self.touched = merged, self.touched | touched
        self._norms.clear()

    def view(self, field: Field) -> torch.Tensor | None:
        """The field's gradient (its shape; slab dtype, or fp32 after `add`) without `scale`, or None if none came."""
        self.arrived.wait()
        return self._view(field) if field in self.touched else None

    def lend(self, field: Field) -> torch.Tensor | None:
        """As `view`, with `scale` multiplied in, for somebody who may change it or hold on to it."""
        self.arrived.wait()
        if field not in self.touched:
            return None
        self._multiply_in()
        self._memory.expose()
        self._norms.pop(field, None)
        return self._lending.lend(self._view(field))

    @property
    def is_lent(self) -> bool:
        """Somebody still holds what `lend` returned, and may change it at any time."""
        return self._lending.is_any_out

    def norms(self) -> dict[Field, float]:
        """L2 norm of each gradient without `scale`. Taken during the drain, or now where that has changed."""
        self.arrived.wait()
        if not self.touched:
            return {}
        assert self.layout is not None
        fields = [field for field in self.layout.offsets if field in self.touched]  # in one order: norms are summed
        for field in fields:
            if field not in self._norms:
                self._norms[field] = float(torch.linalg.vector_norm(self._view(field), dtype=torch.float32))
        norms = {field: self._norms[field] for field in fields}
        if self.is_lent:
            # A gradient that somebody holds may change again.
            self._norms.clear()
        return norms

    def drop_all(self, fields: frozenset[Field]) -> None:
        """`zero_grad` of an optimizer that has some of the home's parameters."""
        if not self.is_kept:
            return
        self.arrived.wait()
        if self.touched <= fields:
            self.clear()
        for field in self.touched & fields:
            self.drop(field)

    def drop(self, field: Field) -> None:
        """`p.grad = None` for one parameter."""
        if not self.is_kept:
            return
        self.arrived.wait()
        self.touched = self.touched - {field}
        self._norms.pop(field, None)
        if not self.touched:
            # Factor and total belonged to what was here.
            self.clear()

    def set(self, layout: GradientLayout, field: Field, value: torch.Tensor) -> None:
        """`p.grad = value` for one parameter. Raises UserError where gradients are not kept."""
        if not self.is_kept:
            raise UserError(f'p.grad = value for {field.name}: with clip="layer" gradients are used up in the backward')
        self.arrived.wait()
        self._memory.expose()
        self._multiply_in()
        if not self.touched or self.layout is not layout or self.is_lent:
            kept = {other: self._view(other).clone() for other in self.touched}
            frozen = [other for other in kept if other not in layout.offsets]
            self.layout = GradientLayout.of([*layout.offsets, *frozen])
            self._total = None
            if self.is_lent:
                # Theirs must not change.
                self._slab = torch.empty(0, dtype=self.dtype)
                self._lending.forget()
            self.slab(self.layout)
            for other, grad in kept.items():
                self._view(other).copy_(grad)
        self.touched = self.touched | {field}
        self._norms.pop(field, None)
        self._view(field).copy_(value)

    def _view(self, field: Field) -> torch.Tensor:
        # The drain lane itself comes here without waiting: `arrived` is its own fence.
        assert self.layout is not None
        return self.layout.view(self._slab if self._total is None else self._total, field)

    def _multiply_in(self) -> None:
        if self.scale != 1.0:
            for field in self.touched:
                self._view(field).mul_(self.scale)
            self._norms.clear()
            self.scale = 1.0
