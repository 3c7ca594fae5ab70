"""Two steps of a run of a recipe as a trace of its lanes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from megatrain.tracing import trace

TRACE_NAME = "trace.json"
NUM_STEPS = 2
"""So that the update of the first is seen beside the forward of the second."""


class TraceSteps(TrainerCallback):
    """
    Args:
        first: number of the step, counted from 1. file: where it goes.
    """

    def __init__(self, first: int, file: Path) -> None:
        self._first, self._file = first, file
        self._block: contextlib.ExitStack | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step + 1 == self._first:
            self._block = contextlib.ExitStack()
            self._block.enter_context(trace(model, self._file))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._block is not None and state.global_step >= self._first + NUM_STEPS - 1:
            self._end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A run that ends with the first of them has one."""
        self._end()

    def _end(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            block.close()
