"""Slabs for gradients that nobody keeps: from their drain until their update has used them up.

A drain takes its slab when it runs, not when it is queued: whichever is free. So an update that is late holds back its
own slab alone. Drains get their turns in the order in which they were queued, one for each slab that comes back.
Rule: a slab is lent again only behind the update of the home that had it before. So their number bounds how far the
backward may run ahead of the updates.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence

import torch

from megatrain.base.fence import Fence
from megatrain.store.home import Home


class Loan:
    """Of a slab, for one drain of a home and its update."""

    def __init__(self) -> None:
        self.turn = Fence()
        """Behind it a slab is free."""
        self.slab: torch.Tensor | None = None


class SlabRing:
    """
    Args:
        slabs: flat uint8, each large enough for the gradients of any home that will be lent one.
    """

    def __init__(self, slabs: Sequence[torch.Tensor]) -> None:
        self._slabs = slabs
        self.reset()

    def reset(self) -> None:
        """All drains and updates are over, and so are all loans."""
        # Several threads are at these: each step of theirs is a single call.
        self._free = deque((slab, Fence.done()) for slab in self._slabs)
        self._turns = deque(Fence.done() for _ in self._slabs)
        self._awaited: deque[Fence] = deque()
        self._lent: dict[Home, Loan] = {}

    @property
    def is_settled(self) -> bool:
        """Every home that was lent a slab has had its update queued. If not, an interrupt came between."""
        return not self._lent

    def lend(self, home: Home) -> Loan:
        """For a drain that is about to be queued behind the loan's `turn`. `take_back` follows before the next loan."""
        loan = self._lent[home] = Loan()
        turn = Fence()
        self._turns.append(turn)
        self._awaited.append(turn)
        loan.turn = self._turns.popleft()
        return loan

    def take(self, loan: Loan, stream: torch.cuda.Stream | None) -> torch.Tensor:
        """The loan's slab, once its turn has come; what is enqueued on `stream` from now on may write it.

        Raises what went wrong in the update before.
        """
        loan.slab, used_up = self._free.popleft()
        used_up.order(stream)
        assert loan.slab is not None
        return loan.slab

    def take_back(self, home: Home, updated: Fence) -> None:
        """Behind an update of `home`, which may have been lent nothing."""
        loan = self._lent.get(home)
        if loan is not None:
            updated.when_recorded(functools.partial(self._receive, loan, updated))
            # Last: whatever an interrupt leaves undone can be seen from `is_settled`.
            self._lent.pop(home, None)

    def _receive(self, loan: Loan, updated: Fence) -> None:
        # Without a slab if the drain failed; then `updated` has failed too, and tells the next.
        self._free.append((loan.slab, updated))
        self._awaited.popleft().record()
