"""Boundary activations: the inputs of layers, which the backward recomputes from.

They stay on the device within a budget, in the room that gradients share where there is one, else where they are; what
comes later in the forward goes to page-locked host memory and comes back ahead of its use. The backward takes them in
the reverse order of the forward, so that is the order of prefetch.
A tensor that several layers take (the states of an encoder) is counted and sent once.
Rule: which tensors go depends on the budget, no result does: they come back with the strides that they had.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence

import torch
from torch.utils.weak import WeakIdKeyDictionary

from megatrain.base.errors import UserError
from megatrain.base.fence import Fence
from megatrain.spec.layout import span
from megatrain.store.buffers import BufferPool

# Smaller tensors cost more in bookkeeping than they free.
MIN_BYTES = 1 << 16
PREFETCH_DEPTH = 4


class _Kept:
    """One tensor that is kept, for one or several boundaries."""

    def __init__(self, tensor: torch.Tensor, num_bytes: int, name: str) -> None:
        self.name = name
        self.num_bytes = num_bytes
        self.version = tensor._version
        # Without bytes, it counts versions with `tensor`, its views and its base, which outlive it perhaps.
        self._counter = tensor.detach()
        self._counter.data = tensor.new_empty(0)
        self.num_boundaries = 0
        self.buffer: torch.Tensor | None = None
        self.stored: torch.Tensor | None = None
        """The copy, viewing the buffer."""
        self.is_away = False
        """On the host."""
        self.stream: torch.cuda.Stream | None = None
        """What uses a copy on the device."""
        self.device: torch.Tensor | None = None
        """What came back from the host."""
        self.sent = self.arrived = Fence.done()

    @property
    def has_changed(self) -> bool:
        """Whether the tensor was changed in place since."""
        return self._counter._version != self.version

    def lie_in(self, buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        self.buffer = buffer
        self.stored = buffer[: self.num_bytes].view(like.dtype).as_strided(like.shape, like.stride())
        return self.stored


class Boundary:
    """One layer's use of an activation, kept until its backward. `release` once it is used up or the graph dropped."""

    def __init__(self, store: ActivationStore, kept: _Kept) -> None:
        self.kept = kept
        kept.num_boundaries += 1
        self._store = store
        self._is_live = True

    @property
    def is_stored(self) -> bool:
        """There is a copy of the tensor: nobody else need keep it."""
        return self.kept.stored is not None

    def release(self) -> None:
        if self._is_live:
            self._is_live = False
            self._store.forget(self)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.release()


class ActivationStore:
    """
    Args:
        budget_bytes: what may stay on the device.
        buffers: where the others go.
        device_buffers: where those go that stay, as far as there is room; None: they stay where they are.
        send: (device tensor, host tensor, layer's name) -> fence behind the copy to the host.
        bring: (host tensor, device tensor, fence behind `send`, layer's name) -> fence behind the copy to the device.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        budget_bytes: int,
        buffers: BufferPool,
        device_buffers: BufferPool | None = None,
        send: Callable[[torch.Tensor, torch.Tensor, str], Fence],
        bring: Callable[[torch.Tensor, torch.Tensor, Fence, str], Fence],
    ) -> None:
        self.budget_bytes = budget_bytes
        self.is_reduced = False
        self.kept_bytes = 0
        self.most_kept_bytes = 0
        self.num_offloaded = 0
        self.offloaded_bytes = 0
        self.buffers, self.device_buffers = buffers, device_buffers
        self._device = device
        self._send, self._bring = send, bring
        self._kept: WeakIdKeyDictionary = WeakIdKeyDictionary()
        # Weak: a graph that is dropped without a backward gives its buffers back.
        self._away: weakref.WeakKeyDictionary[Boundary, None] = weakref.WeakKeyDictionary()

    def keep(self, tensor: torch.Tensor, name: str = "a layer") -> Boundary | None:
        """Take charge of `tensor`. None: it was not worth it. The caller keeps the tensor itself if it is not
        `is_stored`. name: of the layer, for messages."""
        if tensor.numel() * tensor.element_size() < MIN_BYTES:
            return None
        kept = self._kept.get(tensor)
        if kept is None or kept.num_boundaries == 0 or kept.has_changed:
            kept = self._kept[tensor] = self._keep(tensor, name)
        boundary = Boundary(self, kept)
        if kept.is_away:
            self._away[boundary] = None
        return boundary

    def reduce(self, budget_bytes: int) -> None:
        """From now on no more than `budget_bytes` stay on the device, and no memory there is held ready for them."""
        self.budget_bytes, self.is_reduced = budget_bytes, True
        if self.device_buffers is not None:
            self.device_buffers.shrink()

    def take(self, boundary: Boundary) -> torch.Tensor:
        """The activation on the device, ordered before the caller's next work. It comes again if it is taken again.

        Raises UserError if the tensor was changed after it was kept: when its copy was made, no one knows.
        """
        kept = boundary.kept
        if kept.has_changed:
            raise UserError(
                "the model changes a layer's input in place after the layer has run: write x = x + y for x += y"
            )
        if not kept.is_away:
            assert kept.stored is not None
            # A copy: whoever holds on to it beyond the backward must not see what comes into the buffer then.
            return _empty_like(kept.stored, self._device).copy_(kept.stored)
        self._fetch(kept)
        tensor, kept.device = kept.device, None
        assert tensor is not None
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        kept.arrived.order(stream)
        for earlier in self._earlier(boundary):
            self._fetch(earlier.kept)
        return tensor

    def forget(self, boundary: Boundary) -> None:
        """At any moment: boundaries are dropped by the garbage collector too, in the middle of a method here."""
        self._away.pop(boundary, None)
        kept = boundary.kept
        kept.num_boundaries -= 1
        if kept.num_boundaries > 0:
            return
        if not kept.is_away:
            self.kept_bytes -= kept.num_bytes
            if kept.buffer is not None and self.device_buffers is not None:
                self.device_buffers.give_back(kept.buffer, behind=Fence.on_stream(kept.stream))
        else:
            assert kept.buffer is not None
            # A copy that is on its way back to the device must not go into memory that others have by then.
            self.buffers.give_back(kept.buffer, behind=kept.arrived, needs=kept.sent, keeps=kept.device)

    def _keep(self, tensor: torch.Tensor, name: str) -> _Kept:
        num_elements = span(tensor)
        kept = _Kept(tensor, tensor.untyped_storage().nbytes(), name)
        if num_elements is not None:
            kept.num_bytes = num_elements * tensor.element_size()
        # Elements that share memory (an expanded tensor) would not come back as what they were.
        if num_elements is None or self.kept_bytes + kept.num_bytes <= self.budget_bytes:
            self.kept_bytes += kept.num_bytes
            self.most_kept_bytes = max(self.most_kept_bytes, self.kept_bytes)
            if self.device_buffers is not None and num_elements is not None:
                buffer = self.device_buffers.take_if_there(kept.num_bytes)
                if buffer is not None:
                    kept.stream = torch.cuda.current_stream(self._device) if tensor.is_cuda else None
                    kept.lie_in(buffer, tensor).copy_(tensor)
            return kept
        kept.is_away = True
        stored = kept.lie_in(self.buffers.take(kept.num_bytes), tensor)
        kept.sent = kept.arrived = self._send(tensor, stored, name)
        self.num_offloaded += 1
        self.offloaded_bytes += kept.num_bytes
        return kept

    def _earlier(self, boundary: Boundary) -> Sequence[Boundary]:
        away = list(self._away)
        position = away.index(boundary) if boundary in self._away else len(away)
        return away[max(0, position - PREFETCH_DEPTH) : position][::-1]

    def _fetch(self, kept: _Kept) -> None:
        if kept.device is None:
            assert kept.stored is not None
            kept.device = _empty_like(kept.stored, self._device)
            kept.arrived = self._bring(kept.stored, kept.device, kept.arrived, kept.name)


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """With its strides, whatever gaps they leave."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
