"""How long a run is, as transformers counts it: steps, epochs, evaluations, checkpoints.

From arguments and counts of rows and tokens; no model is asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain.arguments import num_times
from megatrain.base.errors import UserError
from megatrain.base.units import format_number

if TYPE_CHECKING:
    from transformers import TrainingArguments


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """How long the run is."""

    num_steps: int
    num_epochs: float
    tokens_per_step: float

    @classmethod
    def of(cls, arguments: TrainingArguments, num_rows: int, num_tokens: int) -> RunLength:
        """From the arguments and what there is to train on. Raises UserError where that makes no batch."""
        batches_per_epoch = _divide(num_rows, arguments.per_device_train_batch_size, arguments.dataloader_drop_last)
        if not batches_per_epoch:
            raise UserError(
                f"training.dataloader_drop_last: {format_number(num_rows, 'row')} do not fill one batch; set it to "
                f"false, or training.per_device_train_batch_size ({arguments.per_device_train_batch_size}) lower"
            )
        steps_per_epoch = max(1, math.ceil(batches_per_epoch / arguments.gradient_accumulation_steps))
        has_steps = arguments.max_steps > 0
        num_steps = arguments.max_steps if has_steps else math.ceil(steps_per_epoch * arguments.num_train_epochs)
        if not num_steps:
            raise UserError("training.num_train_epochs is 0, so nothing would be trained; raise it, or set max_steps")
        rows_per_step = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
        return cls(
            num_steps=num_steps,
            num_epochs=num_steps / steps_per_epoch,
            tokens_per_step=num_tokens / num_rows * min(rows_per_step, num_rows),
        )

    def settle_intervals(self, arguments: TrainingArguments) -> None:
        """Make steps of intervals that are shares of the run, as transformers does when it trains.

        It keeps the steps in checkpoints, and would warn that the same recipe's share differs from them.
        """
        for name in ("logging_steps", "eval_steps", "save_steps"):
            every = getattr(arguments, name)
            if every is not None and 0 < every < 1:
                setattr(arguments, name, math.ceil(every * self.num_steps))

    def num_evals(self, arguments: TrainingArguments) -> int:
        """Evaluations during the training."""
        return num_times(arguments.eval_strategy, arguments.eval_steps, self.num_steps, self.num_epochs)

    def num_saves(self, arguments: TrainingArguments) -> int:
        """Checkpoints that the whole run writes."""
        return num_times(arguments.save_strategy, arguments.save_steps, self.num_steps, self.num_epochs)

    def num_checkpoints(self, arguments: TrainingArguments) -> int:
        """Most checkpoints on the disk at one time. The oldest goes only when the newest is complete."""
        wanted, limit = self.num_saves(arguments), arguments.save_total_limit
        return min(wanted, limit + 1) if limit else wanted


def _divide(num_rows: int, batch_size: int, drop_last: bool) -> int:
    return num_rows // batch_size if drop_last else math.ceil(num_rows / batch_size)
