"""Gradient norms and update ratios of layers, in the logs of `megatrain.Trainer`.

Rule: reports wait for nothing. What it gives up: a log that nobody could foresee (a callback of the user's own that
sets `should_log`) has no layers in it.
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn
from transformers.trainer_utils import has_length

from megatrain.execute.engine import engine_of
from megatrain.execute.report import layer_report


class LayerReports(transformers.TrainerCallback):
    """Adds grad_norm/LAYER and update_ratio/LAYER (|dw| / |w|) to the training logs, and the number of steps that were
    skipped for gradients that were not finite, once there are any.

    The logs reach the callbacks in turn as one dict, and this one adds to it; the trainer's own log_history is written
    before and stays small. A logged step reports its own gradients, and the update before it: its own update is
    still running then, and waiting for it would stall the device. Both are taken only for steps that `is_logged`
    foresees; a log that another callback asks for has none.
    """

    def __init__(self) -> None:
        self._report: dict[str, float] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        engine = engine_of(model)
        step = state.global_step + 1
        steps_per_epoch = _steps_per_epoch(args, kwargs["train_dataloader"])
        layers = layer_report(engine) if is_logged(step, args, state, steps_per_epoch) else {}
        self._report = {f"{name}/{layer}": value for layer, values in layers.items() for name, value in values.items()}
        engine.measure_updates = is_logged(step + 1, args, state, steps_per_epoch)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "grad_norm" in logs:
            logs.update(self._report)
            num_skipped = getattr(kwargs.get("optimizer"), "num_skipped_steps", 0)
            if num_skipped:
                logs["skipped_steps"] = num_skipped


def is_logged(step: int, args: transformers.TrainingArguments, state: Any, steps_per_epoch: int | None) -> bool:
    """Whether the arguments ask for a log after optimizer step `step`, counted from 1."""
    if args.logging_first_step and step == 1:
        return True
    if args.logging_strategy == "steps":
        return step % state.logging_steps == 0
    is_epoch_end = steps_per_epoch is not None and step % steps_per_epoch == 0
    return args.logging_strategy == "epoch" and (is_epoch_end or step == state.max_steps)


def _steps_per_epoch(args: transformers.TrainingArguments, dataloader: Any) -> int | None:
    if not has_length(dataloader):
        return None
    return -(-len(dataloader) // args.gradient_accumulation_steps)
