"""Drain: a pass's gradients on their way from the device to their home.

`GradientAccumulator` sums a home's gradients on the device; `pack` rounds them to the wire dtype once and takes
their norms; `land` copies them into the home's slab.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatrain.spec.layout import Field, GradientLayout
from megatrain.store.home import Home


class GradientAccumulator:
    """Sums of one home's gradients over one backward pass, flat on the device, in fp32.

    Args:
        is_only: one micro-batch's gradients are expected. They are kept as they came until they are packed: there is
            nothing to sum, and the same bits come out.
    """

    def __init__(self, home: Home, device: torch.device, *, is_only: bool = False) -> None:
        self.home = home
        self.layout = home.gradient_layout()
        self._device = device
        self._only: dict[Field, torch.Tensor] | None = {} if is_only else None
        self._views: dict[Field, torch.Tensor] = {}
        """Of the sums of those that have a gradient."""
        self._sums = self._empty(torch.float32) if self._only is None else None

    def add(self, gradients: list[tuple[Field, torch.Tensor]]) -> None:
        """Add one micro-batch's gradients (each in its field's shape, any float dtype)."""
        if self._only is not None:
            if not self._only and len(dict(gradients)) == len(gradients):
                self._only = dict(gradients)
                return
            self._begin_sums(list(self._only.items()))
        self._add(gradients)

    def pack(self) -> GradientPacket:
        """Round to the wire dtype and take norms, on the compute lane. The accumulator is spent."""
        dtype = self.home.grad_dtype
        if self._only is not None:
            wire = self._empty(dtype)
            self._views = {field: self.layout.view(wire, field) for field in self._only}
            torch._foreach_copy_(list(self._views.values()), list(self._only.values()))
        else:
            wire = self._sums.to(dtype)
        fields = [field for field in self.layout.offsets if field in self._views]
        views = [self.layout.view(wire, field) for field in fields]
        norms = torch.stack(torch._foreach_norm(views, 2, torch.float32))
        return GradientPacket(layout=self.layout, fields=fields, wire=wire, norms=norms)

    def _begin_sums(self, gradients: list[tuple[Field, torch.Tensor]]) -> None:
        self._only, self._sums = None, self._empty(torch.float32)
        self._add(gradients)

    def _add(self, gradients: list[tuple[Field, torch.Tensor]]) -> None:
        fresh, more = [], []
        for field, gradient in gradients:
            view = self._views.get(field)
            if view is None:
                view = self._views[field] = self.layout.view(self._sums, field)
                fresh.append((view, gradient))
            else:
                more.append((view, gradient))
        if fresh:
            torch._foreach_copy_([view for view, _ in fresh], [gradient for _, gradient in fresh])
        # _foreach_add_ of mixed dtypes falls back to a loop; add_ casts inside the kernel, without temporaries.
        for view, gradient in more:
            view.add_(gradient)

    def _empty(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self.layout.numel, dtype=dtype, device=self._device)


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientPacket:
    layout: GradientLayout
    fields: list[Field]
    """The touched fields."""

    wire: torch.Tensor
    """Flat, `layout.numel` elements of the wire dtype, on the device."""

    norms: torch.Tensor
    """(len(fields),) fp32 L2 norms of the wire values, on the device."""

    @property
    def num_bytes(self) -> int:
        return self.wire.numel() * self.wire.element_size()


def land(home: Home, packet: GradientPacket, copy: Callable[[torch.Tensor, torch.Tensor], None]) -> Callable[[], None]:
    """Start the copy into the home's slab; returns what has to run after it is over.

    copy: (target, source), which may return before it is over.

    Between the two a CUDA lane waits for its copy. The home's last update must have ended, which reads the same slab,
    and its last drain.
    """
    is_first = not home.grads.is_holding()
    if is_first:
        slab = home.grads.slab(packet.layout)
    else:
        slab = torch.empty(packet.layout.numel, dtype=packet.wire.dtype, device=home.grads.device)
    copy(slab, packet.wire)
    norms = torch.empty(packet.norms.shape, dtype=torch.float32, pin_memory=packet.norms.is_cuda)
    copy(norms, packet.norms)

    def receive() -> None:
        if is_first:
            home.grads.receive(packet.layout, dict(zip(packet.fields, norms.tolist(), strict=True)))
        else:
            home.grads.add(packet.layout, frozenset(packet.fields), slab)

    return receive
