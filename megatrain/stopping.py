"""Ctrl-C and SIGTERM while a Trainer trains: the step is finished, a checkpoint is saved, the process ends with 0.

A second signal ends it at once, as without this. Only the main thread gets signals, so training in another thread is
as it was; and a handler that somebody else has put in the place of Python's own stays theirs.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class StopWhenTold(TrainerCallback):
    """Stops at the end of the step in which a signal came, behind a checkpoint."""

    def __init__(self) -> None:
        self.told: signal.Signals | None = None
        self._pid = os.getpid()

    @property
    def name(self) -> str:
        """Of what came."""
        return "Ctrl-C" if self.told == signal.SIGINT else "SIGTERM"

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if self.told is not None:
            args.save_only_model = False  # nobody could go on from it
            control.should_save = control.should_training_stop = True
        return control

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within the block the first signal is noted; the second does what it did before."""
        before = {}
        for number, default in _DEFAULTS.items():
            if signal.getsignal(number) == default:
                with contextlib.suppress(ValueError):  # not in the main thread
                    before[number] = signal.signal(number, self._hear)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        for other, default in _DEFAULTS.items():
            if signal.getsignal(other) == self._hear:
                signal.signal(other, default)
        self.told = signal.Signals(number)
        if os.getpid() != self._pid:
            return  # a data loader's worker, which goes on until its parent has enough
        print(
            f"megatrain: {self.name}: this step is finished and a checkpoint saved, then the run ends; again to end it "
            "at once",
            flush=True,
        )
