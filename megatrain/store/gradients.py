"""Gradients of one home, from their drain until `zero_grad` or until their update has used them up.

They lie where the home does: in host memory, or on the device. One backward pass fills a slab of exact size. In host
memory, and on the device where that was planned, it is cut from the room that inputs of layers share, and leaves it to
them once the update has read it; elsewhere it stays for the next pass. A second pass before `zero_grad` (a plain loop
with several `backward` calls) adds to an fp32 total; that costs 4 bytes a parameter more and happens only then.
Clipping leaves a factor behind, which the update multiplies in; whoever looks at a gradient before gets an fp32 copy
with the factor in it. What is written into the copy is taken over; where nothing was, the gradient is what it was.

Rules: written by the drain lane, read by others only after `arrived`. Reading a gradient changes no bit of any other
result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from megatrain.base.errors import RefusedError, UpdateError, UserError
from megatrain.base.fence import Fence
from megatrain.spec.layout import Field, GradientLayout
from megatrain.store.buffers import BufferPool
from megatrain.store.lending import Lending
from megatrain.store.tier import Tier


class HomeGradients:
    """
    Args:
        is_kept: until they are dropped. Else they are their update's alone, which uses them up, perhaps at this moment:
            there is nothing to drop.
        room: where slabs are cut from; None: from `memory`, to stay.
        owner: name of the home, for messages.
    """

    def __init__(
        self,
        memory: Tier,
        dtype: torch.dtype,
        *,
        is_kept: bool = True,
        room: BufferPool | None = None,
        owner: str = "",
    ) -> None:
        self.dtype = dtype
        self.is_kept = is_kept
        self.arrived = Fence.done()
        self.used = Fence.done()
        """Behind it the last update has read them."""
        self.layout: GradientLayout | None = None
        self.touched: frozenset[Field] = frozenset()
        self.arrived_norm = 0.0
        """L2 norm of all that the last pass brought, also after it was used up."""

        self._memory, self._room, self._owner = memory, room, f"gradients of {owner}"
        self._factors: dict[Field, float] = {}
        self._norms: dict[Field, float] = {}
        self._watched: dict[Field, float] = {}
        """Norms of gradients that were lent, as taken then: one that has another norm now was written."""
        self._slab = torch.empty(0, dtype=dtype)
        self._cut: torch.Tensor | None = None
        """What the slab is of the room."""
        self._total: torch.Tensor | None = None
        self._apart: dict[Field, torch.Tensor] = {}
        """Gradients in a tensor of their own: somebody holds the memory of the one before, or wrote into a copy."""
        self._scaled: dict[Field, torch.Tensor] = {}
        """Copies with the factor in them, which were lent. One that is not gradient times factor now was written."""
        self._lendings: dict[Field, Lending] = {}

    @property
    def slab_bytes(self) -> int:
        others = [*self._apart.values(), *self._scaled.values(), *([] if self._total is None else [self._total])]
        return sum(tensor.nbytes for tensor in (self._slab, *others))

    def clear(self) -> None:
        """`zero_grad`: nothing is here any more. The slab is for others, or the next pass, but not as long as somebody
        still holds a view of it: theirs must not change."""
        if not self.is_kept:
            return
        self.arrived.wait()
        self._forget_all()
        self._total = None
        if self._cut is not None or self.is_lent:
            self._leave_slab()
        self._lendings = {}

    @property
    def device(self) -> torch.device:
        return self._memory.device

    def move(self, memory: Tier, room: BufferPool | None) -> None:
        """Slabs come from there from now on. Nothing is held, and nothing lent."""
        assert not self.touched and not self.is_lent, "gradients are used up before their home moves"
        if memory is self._memory:
            return
        self._leave_slab()
        self._total, self._memory, self._room = None, memory, room

    def borrow(self, slab: torch.Tensor, layout: GradientLayout) -> None:
        """Take `slab` (flat uint8, large enough) for the next pass, until `give_back`."""
        # What an interrupt kept from its update is in a slab that others have now.
        self._forget_all()
        self._slab = slab[: layout.numel * self.dtype.itemsize].view(self.dtype)

    def give_back(self) -> None:
        """The update has used the gradients up, and a borrowed slab may be filled by others."""
        self._forget_all()
        self._slab = torch.empty(0, dtype=self.dtype)

    def slab(self, layout: GradientLayout) -> torch.Tensor:
        """Where the drain writes a pass (flat, `layout.numel` elements of `dtype`), with any content."""
        if self._slab.numel() != layout.numel:
            self._leave_slab()
            num_bytes = layout.numel * self.dtype.itemsize
            if self._room is None:
                slab = self._memory.empty(num_bytes, pinned=True, owner=self._owner)
            else:
                self._cut = self._room.take(num_bytes, at_end=True)
                slab = self._cut[:num_bytes]
            self._slab = slab.view(self.dtype)
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
        self._take_over_written(list(self._scaled))
        held = {field: self._view(field) for field in self.touched}
        # A field that was frozen meanwhile keeps its gradient; the pass has no room for it.
        frozen = [field for field in held if field not in layout.offsets]
        merged = GradientLayout.of([*layout.offsets, *frozen]) if frozen else layout
        total = torch.zeros(merged.numel, dtype=torch.float32, device=self._memory.device)
        for field, view in held.items():
            target = merged.view(total, field).copy_(view)
            if self.factor(field) != 1.0:
                target.mul_(self.factor(field))
        for field in touched:
            # Into a field that held nothing it is copied: 0 + x would turn -0 into +0.
            target = merged.view(total, field)
            target.add_(layout.view(incoming, field)) if field in held else target.copy_(layout.view(incoming, field))
        self._forget_all()
        self._total = total
        self.layout, self.touched = merged, frozenset(held) | touched

    def flat(self, field: Field) -> torch.Tensor | None:
        """The field's gradient (flat; slab dtype, or fp32 after `add`) without `factor`, or None if none came."""
        self.settle()
        if field not in self.touched:
            return None
        if field in self._apart:
            return self._apart[field].view(-1)
        assert self.layout is not None
        return self.layout.flat(self._slab if self._total is None else self._total, field)

    def factor(self, field: Field) -> float:
        """What clipping left to be multiplied into the field's gradient."""
        return self._factors.get(field, 1.0)

    def multiply(self, factor: float) -> None:
        """Clipping: every gradient times `factor`, and so the copies of clipped ones that somebody holds."""
        self.settle()
        for field in self.touched:
            self._factors[field] = self.factor(field) * factor
        for field, scaled in self._scaled.items():
            scaled.copy_(self._multiplied(field))

    def lend(self, field: Field) -> torch.Tensor | None:
        """The gradient with `factor` multiplied in, for somebody who may change it or hold on to it: itself where
        nothing was clipped, else an fp32 copy. None if none came."""
        self.let_go()
        if field not in self.touched:
            return None
        if field not in self._scaled and self.factor(field) == 1.0:
            if field in self._norms and field not in self._watched:
                self._watched[field] = self._measure(field)
            self._memory.expose()
            return self._lendings.setdefault(field, Lending()).lend(self._view(field))
        if field not in self._scaled:
            if self._is_out(field):
                # Theirs is that of before clipping, and from now on theirs alone.
                self._norm(field)
                self._watched.pop(field, None)
                self._apart[field] = self._view(field).clone()
            self._scaled[field] = self._multiplied(field)
        return self._lendings.setdefault(field, Lending()).lend(self._scaled[field])

    def let_go(self) -> None:
        """Of copies that nobody holds any more; what was written into them is taken over."""
        self.arrived.wait()
        self._take_over_written([field for field in self._scaled if not self._is_out(field)])

    def settle(self) -> None:
        """Take over what was written into copies until now."""
        self.arrived.wait()
        self._take_over_written(list(self._scaled))

    @property
    def is_lent(self) -> bool:
        """Somebody still holds what `lend` returned, and may change it at any time."""
        return _is_any_out(self._lendings)

    def norms(self) -> dict[Field, float]:
        """L2 norm of each gradient without `factor`. Taken during the drain, or now where that has changed."""
        self.settle()
        # In one order: norms are summed.
        return {field: self._norm(field) for field in sorted(self.touched, key=lambda field: field.offset)}

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
        self._forget(field)
        if not self.touched:
            # The total belonged to what was here.
            self.clear()

    def set(self, layout: GradientLayout, field: Field, value: torch.Tensor) -> None:
        """`p.grad = value` for one parameter: a copy of it, in the dtype that the home's gradients have now.

        Raises UserError where gradients are not kept, RefusedError for a sparse value; nothing has changed then.
        """
        if not self.is_kept:
            raise UserError(f'p.grad = value for {field.name}: with clip="layer" gradients are used up in the backward')
        if value.layout != torch.strided:
            raise RefusedError(f"p.grad = value for {field.name}: it is {value.layout}: give it value.to_dense()")
        self.settle()
        if field in self.touched and _is_same_memory(value, self._scaled.get(field, self._view(field))):
            # `p.grad *= 2` puts back what it took.
            return
        dtype = self.dtype if self._total is None else torch.float32
        fresh = torch.empty(field.shape, dtype=dtype, device=self.device).copy_(value.detach())
        if not self.touched:
            self.slab(layout)
            self.layout = layout
        assert self.layout is not None
        self._forget(field)
        if field in self.layout.offsets and not self._is_out(field):
            self._memory.expose()
            self._view(field).copy_(fresh)
        else:
            self._apart[field] = fresh
        self.touched = self.touched | {field}

    def _leave_slab(self) -> None:
        if self._cut is not None:
            assert self._room is not None
            lendings, used = self._lendings, self.used

            def is_held() -> bool:
                # An update that failed is done again with them.
                return isinstance(used.error, UpdateError) or _is_any_out(lendings)

            if lendings and self.device.type == "cuda":
                Fence.on_current_stream(self.device).wait()  # what reads those that were dropped
            self._room.give_back(self._cut, behind=used, is_held=is_held)
            self._cut = None
        self._slab = torch.empty(0, dtype=self.dtype)

    def _view(self, field: Field) -> torch.Tensor:
        # The drain lane itself comes here without waiting: `arrived` is its own fence.
        if field in self._apart:
            return self._apart[field]
        assert self.layout is not None
        return self.layout.view(self._slab if self._total is None else self._total, field)

    def _multiplied(self, field: Field) -> torch.Tensor:
        """Gradient times factor in a new fp32 tensor: the bits that an update has before its first addition."""
        return self._view(field).to(torch.float32, copy=True).mul_(self.factor(field))

    def _take_over_written(self, fields: list[Field]) -> None:
        for field in fields:
            scaled, is_out = self._scaled[field], self._is_out(field)
            if _is_same(scaled, self._multiplied(field)):
                if not is_out:
                    del self._scaled[field]
                continue
            view = self._view(field)
            for of_before in (self._scaled, self._factors, self._norms, self._watched):
                of_before.pop(field, None)
            if is_out or view.dtype != torch.float32:
                self._apart[field] = scaled
            else:
                self._memory.expose()
                view.copy_(scaled)

    def _is_out(self, field: Field) -> bool:
        return field in self._lendings and self._lendings[field].is_any_out

    def _norm(self, field: Field) -> float:
        if field in self._watched or field not in self._norms:
            now = self._measure(field)
            # The norm of an unchanged gradient stays the one that was taken on the device: its last bits may differ.
            if field not in self._norms or now != self._watched.get(field):
                self._norms[field] = now
            self._watched.pop(field, None)
            if self._is_out(field):
                self._watched[field] = now
        return self._norms[field]

    def _measure(self, field: Field) -> float:
        return float(torch.linalg.vector_norm(self._view(field), dtype=torch.float32))

    def _forget(self, field: Field) -> None:
        self.touched = self.touched - {field}
        for of_field in (self._apart, self._scaled, self._factors, self._norms, self._watched):
            of_field.pop(field, None)

    def _forget_all(self) -> None:
        self.touched = frozenset()
        for of_fields in (self._apart, self._scaled, self._factors, self._norms, self._watched):
            of_fields.clear()


def _is_any_out(lendings: Mapping[Field, Lending]) -> bool:
    return any(lending.is_any_out for lending in lendings.values())


def _is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit: NaNs too. Both fp32."""
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


def _is_same_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    is_like = (left.device, left.dtype, left.shape, left.stride()) == (
        right.device,
        right.dtype,
        right.shape,
        right.stride(),
    )
    return is_like and left.data_ptr() == right.data_ptr()
