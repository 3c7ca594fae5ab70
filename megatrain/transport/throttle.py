"""Throttle: holds what crosses the link between host and device down to a rate, each way on its own, so that a machine
with a slower link can be tried on one with a faster link.

Who copies (a lane's thread, mostly) waits until the copy is over and then for the rest of the time that it would have
taken, before it records its fence. So those wait who need the copy, and what is behind it on the same way of the link.
All lanes of a model share both ways, as they would share the link: a copy begins when the last one on its way is over.
Rule: no bit depends on it.

What it gives up: a GPU's stream gets nothing ahead of a copy that it waits for, so it rests for as long as a thread
takes to wake up; and a copy that is held back goes at the link's own speed first, and takes host memory's bandwidth so.
"""

from __future__ import annotations

import threading
import time

TO_DEVICE, TO_HOST = "to device", "to host"
"""The ways."""


class Throttle:
    """
    Args:
        bytes_per_second: each way.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self._free_at = dict.fromkeys((TO_DEVICE, TO_HOST), float("-inf"))
        self._lock = threading.Lock()

    def begin(self, way: str, num_bytes: int) -> float:
        """A copy begins now, or when those are over that began before. Returns the moment when it is over, at best."""
        with self._lock:
            over = max(time.perf_counter(), self._free_at[way]) + num_bytes / self.bytes_per_second
            self._free_at[way] = over
        return over

    def wait(self, over: float) -> None:
        """Until that moment."""
        while (rest := over - time.perf_counter()) > 0:
            time.sleep(rest)
