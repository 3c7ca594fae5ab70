"""Predictor: which home is visited next, learned from what followed last time.

The context is the last two visits, which tells the way up from the way down. Pure bookkeeping.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class Predictor(Generic[Item]):
    """`observe` each visit; `predict` the following ones. A wrong prediction is counted and corrected."""

    def __init__(self) -> None:
        self.num_hits = 0
        self.num_misses = 0
        self._after: dict[tuple[Item | None, Item], Item] = {}
        self._previous: Item | None = None
        self._current: Item | None = None

    def observe(self, item: Item) -> None:
        """A visit of `item` starts. Repeated visits of the same item count once."""
        if item == self._current:
            return
        if self._current is not None:
            key = (self._previous, self._current)
            if key in self._after:
                hit = self._after[key] == item
                self.num_hits += hit
                self.num_misses += not hit
            self._after[key] = item
        self._previous, self._current = self._current, item

    def predict(self, depth: int) -> list[Item]:
        """The next `depth` distinct items, nearest first; fewer when nothing is known."""
        predicted: dict[Item, None] = {}  # in order, and quickly asked
        previous, current = self._previous, self._current
        # A cycle of known visits may hold fewer distinct items than asked for: bound the walk.
        for _ in range(4 * depth):
            if current is None or len(predicted) == depth or (previous, current) not in self._after:
                break
            previous, current = current, self._after[(previous, current)]
            if current != self._current:
                predicted[current] = None
        return list(predicted)
