"""Slabs for gradients that nobody keeps: from their drain until their update has used them up.

Rule: a slab is lent again only behind the update of the home that had it before. So their number bounds how far the
backward may run ahead of the updates.
"""

from __future__ import annotations

import itertools

import torch

from megatrain.base.fence import Fence
from megatrain.store.home import Home


class SlabRing:
    """
    Args:
        slabs: flat uint8, each large enough for the gradients of any home that will be lent one.
    """

    def __init__(self, slabs: list[torch.Tensor]) -> None:
        self._slabs = slabs
        self._holders: list[Home | None] = [None] * len(slabs)
        self._turns = itertools.cycle(range(len(slabs)))

    def lend(self, home: Home) -> tuple[torch.Tensor, Fence]:
        """A slab for `home`, and the fence behind which it is free. The update of `home` is queued before the next call
        that could lend the same slab."""
        turn = next(self._turns)
        before = self._holders[turn]
        self._holders[turn] = home
        return self._slabs[turn], Fence.done() if before is None else before.updated
