"""Boundary activations: the inputs of layers, which the backward recomputes from.

They stay on the device within a budget; what comes later in the forward goes to page-locked host memory and comes back
ahead of its use. The backward takes them in the reverse order of the forward, so that is the order of prefetch.
Rule: which tensors go depends on the budget, no result does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from megatrain.base.fence import Fence
from megatrain.store.memory import HostMemory

# Smaller tensors cost more in bookkeeping than they free.
MIN_BYTES = 1 << 16
PREFETCH_DEPTH = 4


class Boundary:
    """One activation that is kept until its backward. `release` once it is used up (or the graph is dropped)."""

    def __init__(self, store: ActivationStore, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.num_bytes = shape.numel() * dtype.itemsize
        self.host: torch.Tensor | None = None
        self.device: torch.Tensor | None = None
        self.arrived = Fence.done()
        self._store = store
        self._is_live = True

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
        self._memory, self._device = memory, device
        self._send, self._bring = send, bring
        # Weak: a graph that is dropped without a backward gives its buffers back.
        self._away: weakref.WeakKeyDictionary[Boundary, None] = weakref.WeakKeyDictionary()
        self._free: dict[int, list[torch.Tensor]] = {}

    def keep(self, tensor: torch.Tensor) -> Boundary | None:
        """Take charge of `tensor`. None: it was not worth it. The caller keeps the tensor itself if `host` is None."""
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes < MIN_BYTES:
            return None
        boundary = Boundary(self, tensor.shape, tensor.dtype)
        if self.kept_bytes + num_bytes <= self.budget_bytes:
            self.kept_bytes += num_bytes
            return boundary
        boundary.host = self._buffer(num_bytes).view(tensor.dtype).view(tensor.shape)
        boundary.arrived = self._send(tensor, boundary.host)
        self._away[boundary] = None
        self.num_offloaded += 1
        self.offloaded_bytes += num_bytes
        return boundary

    def take(self, boundary: Boundary) -> torch.Tensor:
        """The activation on the device, ordered before the caller's next work. It comes again if it is taken again."""
        self._fetch(boundary)
        tensor, boundary.device = boundary.device, None
        assert tensor is not None
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        boundary.arrived.order(stream)
        for earlier in self._earlier(boundary):
            self._fetch(earlier)
        return tensor

    def forget(self, boundary: Boundary) -> None:
        if boundary.host is None:
            self.kept_bytes -= boundary.num_bytes
            return
        self._away.pop(boundary, None)
        # The buffer is used again only behind its last copy.
        boundary.arrived.wait()
        self._free.setdefault(boundary.num_bytes, []).append(boundary.host)
        boundary.host = boundary.device = None

    def _earlier(self, boundary: Boundary) -> Sequence[Boundary]:
        away = list(self._away)
        position = away.index(boundary) if boundary in self._away else len(away)
        return away[max(0, position - PREFETCH_DEPTH) : position][::-1]

    def _fetch(self, boundary: Boundary) -> None:
        if boundary.device is None:
            assert boundary.host is not None
            boundary.device = torch.empty(boundary.shape, dtype=boundary.dtype, device=self._device)
            boundary.arrived = self._bring(boundary.host, boundary.device, boundary.arrived)

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        free = self._free.get(num_bytes)
        if free:
            return free.pop().view(-1).view(torch.uint8)
        return self._memory.empty(num_bytes, pinned=True)
