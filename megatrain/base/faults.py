"""Faults that pass: what failed is tried again, a few times, after pauses; and is counted.

Rule: only work that may run twice is tried again: a copy, a read, a write. An error that stays is raised as it came.
Not tried again: errors of CUDA, after which every call of the process fails, memory that lacks, and what this library
raises itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from megatrain.base.errors import ChangedInTransitError, one_line

logger = logging.getLogger("megatrain")

Result = TypeVar("Result")

NUM_RETRIES = 3
FIRST_PAUSE_SECONDS = 0.02
"""Before the first retry; each further pause is twice as long."""


class FaultCounts:
    """Of a model's transfers. Any thread may count."""

    def __init__(self) -> None:
        self.num_checks = 0
        """Transfers whose sums were compared."""
        self.num_mismatches = 0
        self.num_retries = 0
        self._lock = threading.Lock()

    def check(self, is_equal: bool) -> None:
        with self._lock:
            self.num_checks += 1
            self.num_mismatches += not is_equal

    def retry(self) -> None:
        with self._lock:
            self.num_retries += 1

    def stats(self) -> dict[str, int]:
        return {
            "num_checks": self.num_checks,
            "num_mismatches": self.num_mismatches,
            "num_retries": self.num_retries,
        }


def retried(work: Callable[[], Result], what: str, counts: FaultCounts) -> Result:
    """`work()`, tried again while it fails with what may pass; then its error.

    Args:
        what: for warnings: what is transferred, with its layer, and where to.
    """
    for number in range(1, NUM_RETRIES + 1):
        try:
            return work()
        except Exception as error:
            if not may_pass(error):
                raise
            is_changed = isinstance(error, ChangedInTransitError)
            outcome = "arrived changed" if is_changed else f"failed ({one_line(error)})"
        counts.retry()
        logger.warning("%s %s: tried again, %d of %d", what, outcome, number, NUM_RETRIES)
        time.sleep(FIRST_PAUSE_SECONDS * 2 ** (number - 1))
    return work()


def may_pass(error: BaseException) -> bool:
    """Whether the same work may succeed a moment later."""
    if isinstance(error, OSError | ChangedInTransitError):
        return True
    # Subclasses are errors of the library's own, missing memory (torch.OutOfMemoryError) or a dead CUDA context
    # (torch.AcceleratorError; in older versions a RuntimeError that names CUDA).
    return type(error) is RuntimeError and "cuda" not in str(error).lower()
