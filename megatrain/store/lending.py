"""Tensors that are handed out and share the memory of a home, a gradient or a state: is anybody still holding one?

Rule: aliases count. Whatever shares the storage of a lent tensor (a view, a `.detach()`) keeps it lent, on the CPU; on
a device only the very tensor does.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


class Lending:
    """Keeps account of what was lent."""

    def __init__(self) -> None:
        self._out: list[weakref.ref[Any]] = []
        self._prune_at = 64
        self.has_lent_on_device = False
        """Of what was lent there, somebody may hold an alias: the memory must stay theirs and its owner's."""

    def lend(self, tensor: Tensor) -> Tensor:
        """`tensor` (contiguous) with a storage of its own over the same memory, which holds that memory.

        So writers of files take it for a tensor, and not for a view of a larger one.
        """
        if tensor.numel() == 0:
            return torch.empty_like(tensor)
        if tensor.device.type != "cpu":
            # No view: what somebody writes in grad mode joins a graph, and the owner's tensor must stay out of it.
            lent: Tensor = tensor.detach()
            self.has_lent_on_device = True
            holder: Any = lent
        else:
            # The storage holds the array, and nothing else does.
            holder = tensor.detach().view(-1).view(torch.uint8).numpy()
            lent = torch.from_numpy(holder).view(tensor.dtype).view(tensor.shape)
        self._out.append(weakref.ref(holder))
        if len(self._out) > self._prune_at:
            self._out = [reference for reference in self._out if reference() is not None]
            self._prune_at = 64 + 2 * len(self._out)
        return lent

    @property
    def is_any_out(self) -> bool:
        return any(reference() is not None for reference in self._out)

    def forget(self) -> None:
        """What was lent so far is of no interest any more."""
        self._out.clear()
