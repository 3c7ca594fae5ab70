"""Ctrl-C and SIGTERM while a Trainer trains: the step is finished, a checkpoint is saved, the process ends with 0.

At the end of an epoch the checkpoint comes behind its evaluation, which draws random numbers: so that the run that goes
on is the same run. A second signal ends the process at once, as without this. Only the main thread gets signals, so
training in another thread is as it was; and a handler that somebody else has put in the place of Python's own stays
theirs.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
_STANDARD_OUTPUT, _STANDARD_ERROR = 1, 2


class StopWhenTold(TrainerCallback):
    """Stops at the end of the step in which a signal came, behind a checkpoint."""

    def __init__(self) -> None:
        self.told: signal.Signals | None = None
        self.is_stopping = False
        """The run ends before its last step, because of a signal."""
        self._pid = os.getpid()

    @property
    def name(self) -> str:
        """Of what came."""
        return "Ctrl-C" if self.told == signal.SIGINT else "SIGTERM"

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if self.told is not None and state.global_step < state.max_steps:
            drop_dead_pipes()  # the log of this step comes before the checkpoint
            args.save_only_model = False  # nobody could go on from it
            self.is_stopping = control.should_training_stop = True
            control.should_save = not _is_epoch_over(state)
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Also called in the middle of one, when the run ends there."""
        if self.is_stopping:
            control.should_save = _is_epoch_over(state)
            control.should_evaluate &= _is_epoch_over(state)
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
        say(
            f"megatrain: {self.name}: this step is finished and a checkpoint saved, then the run ends; again to end it "
            "at once"
        )


def say(line: str) -> None:
    """Where the output has gone (Ctrl-C ends what it was piped into too), nowhere."""
    with contextlib.suppress(OSError, ValueError):
        print(line, flush=True)


def drop_dead_pipes() -> None:
    """What writes to output that nobody reads any more must not fail before the checkpoint is saved."""
    for descriptor in (_STANDARD_OUTPUT, _STANDARD_ERROR):
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(events & select.POLLERR for _, events in poll.poll(0)):
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), descriptor)


def _is_epoch_over(state: TrainerState) -> bool:
    return state.epoch is not None and float(state.epoch).is_integer()
