"""Boundary activations: the inputs of layers, which the backward recomputes from.

They stay on the device within a budget; what comes later in the forward goes to page-locked host memory and comes back
ahead of its use. The backward takes them in the reverse order of the forward, so that is the order of prefetch.
A tensor that several layers take (the states of an encoder) is counted and sent once.
Rule: which tensors go depends on the budget, no result does: they come back with the strides that they had.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch.utils.weak import WeakIdKeyDictionary

from megatrain.base.errors import UserError
from megatrain.base.fence import Fence
from megatrain.spec.layout import span
from megatrain.store.buffers import BufferPool
from megatrain.store.memory import HostMemory

# Smaller tensors cost more in bookkeeping than they free.
MIN_BYTES = 1 << 16
PREFETCH_DEPTH = 4


class _Kept:
    """One tensor that is kept, for one or several boundaries."""

    def __init__(self, tensor: torch.Tensor, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.version = tensor._version
        # Without bytes, it counts versions with `tensor`, its views and its base, which outlive it perhaps.
        self._counter = tensor.detach()
        self._counter.data = tensor.new_empty(0)
        self.num_boundaries = 0
        self.buffer: torch.Tensor | None = None
        self.host: torch.Tensor | None = None
        self.device: torch.Tensor | None = None
        self.arrived = Fence.done()

    @property
    def has_changed(self) -> bool:
        """Whether the tensor was changed in place since."""
        return self._counter._version != self.version


class Boundary:
    """One layer's use of an activation, kept until its backward. `release` once it is used up or the graph dropped."""

    def __init__(self, store: ActivationStore, kept: _Kept) -> None:
        self.kept = kept
        kept.num_boundaries += 1
        self._store = store
        self._is_live = True

    @property
    def host(self) -> torch.Tensor | None:
        """The tensor on the host, viewing a buffer; None while it stays on the device."""
        return self.kept.host

    def release(self) -> None:
        if self._is_live:
            self._is_live = False
            self._store.forget(self)

    def __del__(self) -> None:
        self.release()


class ActivationStore:
    """
    Args:
        budget_bytes: what may stay on the device.
        send: (device tensor, host tensor) -> fence behind the copy to the host.
        bring: (host tensor, device tensor, fence behind `send`) -> fence behind the copy to the device.
    """

    def __init__(
        self,
        *,
        memory: HostMemory,
        device: torch.device,
        budget_bytes: int,
        send: Callable[[torch.Tensor, torch.Tensor], Fence],
        bring: Callable[[torch.Tensor, torch.Tensor, Fence], Fence],
    ) -> None:
        self.budget_bytes = budget_bytes
        self.kept_bytes = 0
        self.num_offloaded = 0
        self.offloaded_bytes = 0
        self.buffers = BufferPool(memory)
        self._device = device
        self._send, self._bring = send, bring
        self._kept: WeakIdKeyDictionary = WeakIdKeyDictionary()
        # Weak: a graph that is dropped without a backward gives its buffers back.
        self._away: weakref.WeakKeyDictionary[Boundary, None] = weakref.WeakKeyDictionary()
        # Boundaries may be dropped at any moment, also by the garbage collector in the middle of a method here.
        self._returned: deque[_Kept] = deque()

    def keep(self, tensor: torch.Tensor) -> Boundary | None:
        """Take charge of `tensor`. None: it was not worth it. The caller keeps the tensor itself if `host` is None."""
        if tensor.numel() * tensor.element_size() < MIN_BYTES:
            return None
        kept = self._kept.get(tensor)
        if kept is None or kept.num_boundaries == 0 or kept.has_changed:
            kept = self._kept[tensor] = self._keep(tensor)
        boundary = Boundary(self, kept)
        if kept.host is not None:
            self._away[boundary] = None
        return boundary

    def take(self, boundary: Boundary) -> torch.Tensor:
        """The activation on the device, ordered before the caller's next work. It comes again if it is taken again.

        Raises UserError if the tensor was changed after it was kept: when its copy was made, no one knows.
        """
        kept = boundary.kept
        if kept.has_changed:
            raise UserError(
                "the model changes a layer's input in place after the layer has run: write x = x + y for x += y"
            )
        self._fetch(kept)
        tensor, kept.device = kept.device, None
        assert tensor is not None
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        kept.arrived.order(stream)
        for earlier in self._earlier(boundary):
            self._fetch(earlier.kept)
        return tensor

    def forget(self, boundary: Boundary) -> None:
        self._away.pop(boundary, None)
        kept = boundary.kept
        kept.num_boundaries -= 1
        if kept.num_boundaries > 0:
            return
        if kept.host is None:
            self.kept_bytes -= kept.num_bytes
        else:
            self._returned.append(kept)

    def _keep(self, tensor: torch.Tensor) -> _Kept:
        num_elements = span(tensor)
        kept = _Kept(tensor, tensor.untyped_storage().nbytes())
        if num_elements is not None:
            kept.num_bytes = num_elements * tensor.element_size()
        # Elements that share memory (an expanded tensor) would not come back as what they were.
        if num_elements is None or self.kept_bytes + kept.num_bytes <= self.budget_bytes:
            self.kept_bytes += kept.num_bytes
            return kept
        self._collect()
        kept.buffer = self.buffers.take(kept.num_bytes)
        flat = kept.buffer[: kept.num_bytes].view(tensor.dtype)
        kept.host = flat.as_strided(tensor.shape, tensor.stride())
        kept.arrived = self._send(tensor, kept.host)
        self.num_offloaded += 1
        self.offloaded_bytes += kept.num_bytes
        return kept

    def _collect(self) -> None:
        """Take back the buffers of activations that were used up, each behind its last copy."""
        while self._returned:
            kept = self._returned.popleft()
            buffer, kept.buffer, kept.host = kept.buffer, None, None
            assert buffer is not None
            try:
                kept.arrived.wait()
            except Exception:  # was told to whoever took the activation; a dropped one concerns nobody
                self.buffers.discard(buffer)
            else:
                self.buffers.give_back(buffer)
            # Not before: a copy that was on its way back to the device would go into memory that others have.
            kept.device = None

    def _earlier(self, boundary: Boundary) -> Sequence[Boundary]:
        away = list(self._away)
        position = away.index(boundary) if boundary in self._away else len(away)
        return away[max(0, position - PREFETCH_DEPTH) : position][::-1]

    def _fetch(self, kept: _Kept) -> None:
        if kept.device is None:
            assert kept.host is not None
            shape, stride = kept.host.shape, kept.host.stride()
            kept.device = torch.empty_strided(shape, stride, dtype=kept.host.dtype, device=self._device)
            kept.arrived = self._bring(kept.host, kept.device, kept.arrived)
