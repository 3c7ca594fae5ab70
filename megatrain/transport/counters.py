"""Counts of what the stream did. A visit is one time a layer's weights are in a slot: consecutive uses count once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from megatrain.store.home import Home


@dataclass
class Counters:
    visits: Counter[str] = field(default_factory=Counter)
    """Home name -> visits."""

    num_transfers: int = 0
    transferred_bytes: int = 0
    num_late_transfers: int = 0
    """Those that were begun only when a visit needed them."""

    num_drains: int = 0
    drained_bytes: int = 0
    num_fetches: int = 0
    """Weights used outside their own layer, brought on demand."""

    _last: str | None = None

    def visit(self, home: Home) -> None:
        if home.name != self._last:
            self.visits[home.name] += 1
        self._last = home.name

    def transfer(self, num_bytes: int) -> None:
        self.num_transfers += 1
        self.transferred_bytes += num_bytes

    def drain(self, num_bytes: int) -> None:
        self.num_drains += 1
        self.drained_bytes += num_bytes
