"""The part of `Trainer` that keeps the log of a run."""

from __future__ import annotations

from typing import Any

from megatrain.run_logger import RunLogger
from megatrain.trainer_checkpoints import CheckpointingTrainer


class LoggedTrainer(CheckpointingTrainer):
    """Tells its `run_logger` of steps and checkpoints."""

    keeps_log: bool = True
    """Append to megatrain_log.jsonl in the output folder at every logging step: what `megatrain report` shows."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.run_logger = RunLogger()
        if self.keeps_log:
            self.add_callback(self.run_logger)

    def train(self, *args: Any, **keywords: Any) -> Any:
        self.saves.note = self.run_logger.note_checkpoint
        return super().train(*args, **keywords)

    def get_batch_samples(self, *args: Any, **keywords: Any) -> tuple[list[dict[str, Any]], Any]:
        self.run_logger.begin_step()
        batches, num_items = super().get_batch_samples(*args, **keywords)
        self.run_logger.see(batches)
        return batches, num_items
