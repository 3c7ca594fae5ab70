"""Sums of what was written to disk, by page, so that a read can tell whether it brings the same bytes.

Kept in host memory: 9 bytes for each page of 4096 that an update has written.
Rule: pages are also written where they are mapped, by whoever `DiskMemory.expose` was called for, at any time as long
as they hold a view. So an exposure forgets all sums, and none is noted until a step has passed without one. What is not
known passes unchecked.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatrain.base.errors import ChangedInTransitError
from megatrain.base.faults import FaultCounts, retried
from megatrain.store.checksum import page_sums
from megatrain.store.tier import PAGE_BYTES, round_up


class PageSums:
    """Of one extent."""

    def __init__(self, num_bytes: int) -> None:
        num_pages = round_up(num_bytes, PAGE_BYTES) // PAGE_BYTES
        self._sums = np.zeros(num_pages, dtype=np.int64)
        self._is_known = np.zeros(num_pages, dtype=np.bool_)

    def note(self, first_page: int, sums: np.ndarray) -> None:
        pages = slice(first_page, first_page + len(sums))
        self._sums[pages], self._is_known[pages] = sums, True

    def forget(self) -> None:
        self._is_known[:] = False

    def compare(self, first_page: int, sums: np.ndarray) -> bool | None:
        """Whether all that are known are the same; None where none is."""
        pages = slice(first_page, first_page + len(sums))
        is_known = self._is_known[pages]
        return bool((self._sums[pages] == sums)[is_known].all()) if is_known.any() else None


class DiskChecks:
    """Of a store. Any thread may note and check."""

    def __init__(self, counts: FaultCounts) -> None:
        self.counts = counts
        self._is_noting = True
        self._was_exposed = False
        self._all: weakref.WeakSet[PageSums] = weakref.WeakSet()
        self._lock = threading.Lock()

    def sums_of(self, num_bytes: int) -> PageSums:
        """For a new extent."""
        sums = PageSums(num_bytes)
        with self._lock:
            self._all.add(sums)
        return sums

    def expose(self) -> None:
        """Somebody may write where pages are mapped from now on."""
        with self._lock:
            self._is_noting, self._was_exposed = False, True
            for sums in self._all:
                sums.forget()

    def end_step(self) -> None:
        """Whoever holds a view has exposed it in this step."""
        with self._lock:
            self._is_noting, self._was_exposed = not self._was_exposed, False

    def note(self, sums: PageSums, start: int, view: memoryview) -> None:
        """`view` is about to be written at `start`, a multiple of 4096, of the extent."""
        written = page_sums(view)
        with self._lock:
            if self._is_noting:
                sums.note(start // PAGE_BYTES, written)

    def check(self, sums: PageSums, start: int, view: memoryview, what: str) -> None:
        """`view` was read from there. Raises ChangedInTransitError where it is not what was written."""
        read = page_sums(view)
        with self._lock:
            is_equal = sums.compare(start // PAGE_BYTES, read)
        if is_equal is None:
            return
        self.counts.check(is_equal)
        if not is_equal:
            raise ChangedInTransitError(what)


@dataclass(frozen=True, slots=True)
class BlockGuard:
    """Of a block that lies at `start` of its extent. checks, sums: None where nothing is checked."""

    owner: str
    """Whose bytes they are, for messages."""

    start: int
    checks: DiskChecks | None
    sums: PageSums | None

    def write(self, move: Callable[[], None], view: memoryview) -> None:
        """Write `view`, which `move` does."""
        if self.checks is not None and self.sums is not None:
            self.checks.note(self.sums, self.start, view)
        move()

    def read(self, move: Callable[[], None], view: memoryview, place: str) -> None:
        """Read `view`, which `move` does; again where it is not what was written. Raises ChangedInTransitError."""
        checks, sums = self.checks, self.sums
        if checks is None or sums is None:
            move()
            return
        what = f"{self.owner} read from {place}"

        def read_and_check() -> None:
            move()
            checks.check(sums, self.start, view, what)

        retried(read_and_check, what, checks.counts)
