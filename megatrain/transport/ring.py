"""Slabs that are lent to one home after the other: for gradients that nobody keeps, from their drain until their update
has used them up; for weights on their way from disk, until the device has them.

Work takes its slab when it runs, not when it is queued: whichever is free. So one that is late holds back its own slab
alone. Turns come in the order in which they were asked for, one for each slab that comes back.
Rule: a slab is lent again only behind what used it before. So their number bounds how far the backward may run ahead of
the updates, and reads ahead of copies to the device.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence

import torch

from megatrain.base.errors import UpdateError
from megatrain.base.fence import Fence
from megatrain.store.home import Home


class Loan:
    """Of a slab."""

    def __init__(self) -> None:
        self.turn = Fence()
        """Behind it a slab is free."""
        self.slab: torch.Tensor | None = None
        """Once it is taken."""


class SlabRing:
    """
    Args:
        slabs: flat uint8, each large enough for what any home will want one for.
    """

    def __init__(self, slabs: Sequence[torch.Tensor]) -> None:
        self._slabs = slabs
        self.reset()

    def reset(self) -> None:
        """Whatever used a slab is over, and so are all loans."""
        # Several threads are at these: each step of theirs is a single call.
        self._free = deque((slab, Fence.done()) for slab in self._slabs)
        self._turns = deque(Fence.done() for _ in self._slabs)
        self._awaited: deque[Fence] = deque()
        self._lent: dict[Home, Loan] = {}

    @property
    def slab_bytes(self) -> int:
        return min(slab.numel() for slab in self._slabs)

    @property
    def is_settled(self) -> bool:
        """All that was lent will come back. If not, an interrupt came between."""
        return not self._lent

    def lend(self, home: Home) -> Loan:
        """For work that is about to be queued behind the loan's `turn`. `take_back` follows before the next loan."""
        loan = self._lent[home] = Loan()
        turn = Fence()
        self._turns.append(turn)
        self._awaited.append(turn)
        loan.turn = self._turns.popleft()
        return loan

    def take(self, loan: Loan, stream: torch.cuda.Stream | None) -> torch.Tensor:
        """The loan's slab, once its turn has come; what is enqueued on `stream` from now on may write it. Without a
        stream the host waits.

        Raises what went wrong with the use before.
        """
        loan.slab, used_up = self._free.popleft()
        used_up.order(stream)
        assert loan.slab is not None
        return loan.slab

    def take_back(self, home: Home, used_up: Fence) -> None:
        """What `home` was lent, if it was, behind its use."""
        loan = self._lent.get(home)
        if loan is not None:
            used_up.when_recorded(functools.partial(self._receive, loan, used_up))
            # Last: whatever an interrupt leaves undone can be seen from `is_settled`.
            self._lent.pop(home, None)

    def _receive(self, loan: Loan, used_up: Fence) -> None:
        if not isinstance(used_up.error, UpdateError):
            # Without a slab if the work failed before; then `used_up` has failed too, and tells the next.
            self._free.append((loan.slab, used_up))
        elif loan.slab is not None:
            # A failed update is over, and concerns no other home. One that it kept from its turn has left the slab.
            self._free.append((loan.slab, Fence.done()))
        self._awaited.popleft().record()
