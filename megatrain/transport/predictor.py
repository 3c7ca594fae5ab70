"""Predictor: which home is visited next, learned from what followed last time.

The context is the last two visits, which tells the way up from the way down. A prediction that came true the last time
stands when it is wrong once: a model that drops a layer for one step is predicted as before in the next, and one that
has changed for good is learned at its second visit. Pure bookkeeping.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Set
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item", bound=Hashable)


class _Next(NamedTuple):
    item: Hashable
    is_proven: bool
    """It came true the last time."""


class Predictor(Generic[Item]):
    """`observe` each visit; `predict` the following ones. A wrong prediction is counted and corrected."""

    def __init__(self) -> None:
        self.num_hits = 0
        self.num_misses = 0
        self.num_unknown = 0
        """Visits behind two others that had never been seen one after the other."""
        self.seconds = 0.0
        """That all of this took."""
        self._after: dict[tuple[Item | None, Item], _Next] = {}
        self._previous: Item | None = None
        self._current: Item | None = None

    def stats(self, prefix: str) -> dict[str, float]:
        """Counts and seconds since the start, under names that begin with `prefix`."""
        return {
            f"{prefix}_hits": self.num_hits,
            f"{prefix}_misses": self.num_misses,
            f"{prefix}_unknown": self.num_unknown,
            f"{prefix}_seconds": self.seconds,
        }

    def forget(self) -> None:
        """The order is another one from now on."""
        self._after.clear()
        self._previous = self._current = None

    def forget_items(self, gone: Set[Item]) -> None:
        """These are never visited again."""
        if not gone:
            return
        self._after = {
            context: following
            for context, following in self._after.items()
            if following.item not in gone and gone.isdisjoint(context)
        }
        if self._previous in gone or self._current in gone:
            self._previous = self._current = None

    def observe(self, item: Item) -> None:
        """A visit of `item` starts. Repeated visits of the same item count once."""
        started = time.perf_counter()
        if item != self._current:
            if self._current is not None:
                self._learn((self._previous, self._current), item)
            self._previous, self._current = self._current, item
        self.seconds += time.perf_counter() - started

    def predict(self, depth: int) -> list[Item]:
        """The next `depth` distinct items, nearest first; fewer when nothing is known."""
        started = time.perf_counter()
        predicted: dict[Item, None] = {}  # in order, and quickly asked
        previous, current = self._previous, self._current
        # A cycle of known visits may hold fewer distinct items than asked for: bound the walk.
        for _ in range(4 * depth):
            if current is None or len(predicted) == depth or (previous, current) not in self._after:
                break
            previous, current = current, self._after[(previous, current)].item
            if current != self._current:
                predicted[current] = None
        self.seconds += time.perf_counter() - started
        return list(predicted)

    def _learn(self, context: tuple[Item | None, Item], item: Item) -> None:
        expected = self._after.get(context)
        if expected is None:
            self.num_unknown += 1
            self._after[context] = _Next(item, is_proven=False)
            return
        is_hit = expected.item == item
        self.num_hits += is_hit
        self.num_misses += not is_hit
        stays = is_hit or expected.is_proven
        self._after[context] = _Next(expected.item if stays else item, is_proven=is_hit)
