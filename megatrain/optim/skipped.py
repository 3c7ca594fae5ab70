"""Steps that were skipped because gradients were not finite: counted, named, and too many in a row end the run."""

from __future__ import annotations

import logging
import threading

from megatrain.base.errors import NonFiniteError

logger = logging.getLogger("megatrain")


class SkippedSteps:
    """
    Args:
        max_in_row: steps in a row that may be skipped; one more raises.
    """

    def __init__(self, max_in_row: int) -> None:
        self.was_skipped = False
        self.num_skipped = 0
        self._max_in_row = max_in_row
        self._num_in_row = 0
        self._noted: dict[int, str] = {}
        self._lock = threading.Lock()

    def note(self, step: int, layer: str) -> None:
        """From an update lane: gradients of `layer` in `step` were not finite. The first note of a step counts."""
        with self._lock:
            self._noted.setdefault(step, layer)

    def noted(self, step: int) -> str | None:
        """The layer that was noted for `step`, once."""
        with self._lock:
            return self._noted.pop(step, None)

    def judge(self, bad_layer: str | None, consequence: str) -> None:
        """A step whose first layer with bad gradients is `bad_layer`, or a good one (None).

        Raises NonFiniteError when it was one too many in a row.
        """
        self.was_skipped = bad_layer is not None
        if bad_layer is None:
            self._num_in_row = 0
            return
        self.num_skipped += 1
        self._num_in_row += 1
        if self._num_in_row > self._max_in_row:
            raise NonFiniteError(
                f"gradients were not finite in {self._num_in_row} steps in a row, this time first in {bad_layer!r}: "
                "lower the learning rate, look at the data of these steps, or raise max_skipped_steps="
                f"{self._max_in_row} of the optimizer. The weights took nothing from them"
            )
        logger.warning("gradients of %r are not finite: %s (%d so far)", bad_layer, consequence, self.num_skipped)
