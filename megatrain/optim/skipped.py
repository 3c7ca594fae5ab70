"""Steps that were skipped because gradients were not finite: counted, named, and too many in a row end the run."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from megatrain.base.errors import NonFiniteError
from megatrain.execute.parameters import HomeParameter
from megatrain.store.home import Home

logger = logging.getLogger("megatrain")


def first_bad_layer(members: Mapping[Home, Sequence[tuple[HomeParameter, int]]], homes: Sequence[Home]) -> str | None:
    """Name of the first home whose gradients an update would read as not finite.

    members: the homes of an optimizer with its parameters, in the order of the forward. homes: all of the model: the
    clip factor is of all gradients, also of those that are not this optimizer's.
    """
    is_clipped_badly = False
    for home, of_home in members.items():
        mine = {parameter._field for parameter, _ in of_home}
        norms = [norm for field, norm in home.grads.norms().items() if field in mine]
        if not all(map(math.isfinite, norms)):
            return home.name
        is_clipped_badly |= not all(math.isfinite(home.grads.factor(field)) for field in mine)
    if not is_clipped_badly:
        return None
    return next(
        (home.name for home in homes if not all(map(math.isfinite, home.grads.norms().values()))), "other layers"
    )


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

    def judge(self, bad_layer: str | None, *, is_whole_step: bool) -> None:
        """A step whose first layer with bad gradients is `bad_layer`, or a good one (None).

        is_whole_step: the whole step is left out, and not only the updates of bad layers.

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
                f"the norm of gradients was not finite in {self._num_in_row} steps in a row, this time first in "
                f"{bad_layer!r}: lower the learning rate, look at the data of these steps, or raise max_skipped_steps="
                f"{self._max_in_row} of the optimizer. No weight took anything from gradients that were not finite"
            )
        consequence = "the step is skipped" if is_whole_step else "the update of such layers was left out"
        logger.warning(
            "the norm of the gradients of %r is not finite: %s (%d so far)", bad_layer, consequence, self.num_skipped
        )
