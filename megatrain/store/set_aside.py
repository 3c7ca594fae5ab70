"""Weights that are set aside while their homes hold others (an average), and put back in whatever order blocks end.

Rule: while a block is open nobody else writes into a home. What was written would be undone when the block ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch

from megatrain.base.errors import RefusedError
from megatrain.store.home import Home

Writers = Mapping[Home, Callable[[], None]]
"""For each home of a block, what writes the block's values into it."""


class SetAside:
    """The open blocks of one model. Where several hold a home, it has the values of the one that was entered last."""

    def __init__(self) -> None:
        self._open: list[Writers] = []
        self._kept: dict[Home, tuple[torch.Tensor, torch.Tensor]] = {}

    @contextlib.contextmanager
    def holding(self, writers: Writers) -> Iterator[None]:
        """Within the block homes hold what `writers` write; after it their own weights, bit for bit, or what blocks
        that are still open write. Takes a copy of the weights meanwhile."""
        self._open.append(writers)
        try:
            for home, write in writers.items():
                if home not in self._kept:
                    self._kept[home] = home.wire.clone(), home.low.clone()
                write()
            yield
        finally:
            self._open = [other for other in self._open if other is not writers]
            for home in writers:
                self._put_back(home)

    @property
    def is_open(self) -> bool:
        """Homes hold what is not theirs."""
        return bool(self._open)

    def check(self, what: str) -> None:
        """Raises RefusedError for `what` while a block is open."""
        if self._open:
            raise RefusedError(
                f"{what} inside ema_weights(), where weights are their average until the block ends: leave the block "
                "first"
            )

    def _put_back(self, home: Home) -> None:
        if home not in self._kept:
            return
        wire, low = self._kept[home]
        home.expose()
        home.version += 1
        home.wire.copy_(wire)
        home.low.copy_(low)
        others = [writers[home] for writers in self._open if home in writers]
        for write in others:
            write()
        if not others:
            del self._kept[home]
