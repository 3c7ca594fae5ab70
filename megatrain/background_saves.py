"""The checkpoint of a run that is being written beside its steps: at most one, with what it cost.

Rule: what failed is told at the next step, and never later than the end of the run.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import transformers

from megatrain.base.units import format_bytes
from megatrain.execute.report import say_on_a_line_of_its_own
from megatrain.plan.outcome import Plan
from megatrain.save.failed_writes import said_of_earlier
from megatrain.save.pause import PauseMeter, predicted_pause
from megatrain.save.saving import Saving

logger = logging.getLogger("megatrain")

WORTH_SAYING_SECONDS = 1.0


class BackgroundSaves:
    """
    Args:
        bytes_per_second: at which this machine's profile says that files are written; None: not known.
        clip: of the engine. on_error: "warn" or "stop". is_behind: checkpoints are written beside steps.
    """

    def __init__(
        self,
        *,
        bytes_per_second: float | None,
        clip: str,
        on_error: str,
        is_behind: bool = True,
        say: Callable[[str], None] = say_on_a_line_of_its_own,
    ) -> None:
        self._rate, self._clip, self._on_error, self._say = bytes_per_second, clip, on_error, say
        self._is_behind = is_behind
        self.meter = PauseMeter()
        self._saving: Saving | None = None
        self._target = Path()
        self._predicted: float | None = None
        self._before_seconds = 0.0
        self._when_complete: Callable[[], None] = lambda: None
        self._when_failed: Callable[[], None] = lambda: None
        self.note: Callable[[dict[str, Any]], None] = lambda _: None
        """Is told of each checkpoint that is complete, or failed."""

    @property
    def is_under_way(self) -> bool:
        return self._saving is not None

    def said_before(self, num_bytes: int, spare_bytes: int, plan: Plan | None) -> str:
        """Before the first step: what each checkpoint will take; empty where that is little, or not known."""
        if self._rate is None or num_bytes / self._rate < WORTH_SAYING_SECONDS:
            return ""
        line = f"megatrain: a checkpoint has {format_bytes(num_bytes)} and takes {_seconds(num_bytes / self._rate)}"
        if plan is None:
            return f"{line} (predicted)"
        pause = predicted_pause(
            num_bytes,
            spare_bytes=spare_bytes,
            bytes_per_second=self._rate,
            step_seconds=plan.step_seconds,
            clip=self._clip,
            is_behind=self._is_behind,
        )
        last = "; the last of a run is waited for whole" if self._is_behind else ""
        return f"{line}, of which training waits {_seconds(pause)} (predicted{last})"

    def begin(
        self,
        saving: Saving,
        context: contextlib.ExitStack,
        target: str,
        *,
        is_behind: bool,
        is_last: bool,
        before_seconds: float,
        num_bytes: int,
        spare_bytes: int,
        when_complete: Callable[[], None],
        when_failed: Callable[[], None],
    ) -> None:
        """Write `saving`, the one before being over.

        Args:
            context: puts the folder in the place of `target` when it is left.
            is_behind: beside the next steps; else now. is_last: no step comes behind it, so it is all waited for.
            before_seconds: that went into it already, with training waiting.
            num_bytes: about to be written. spare_bytes: of host memory for copies.
        """
        assert self._saving is None
        self._saving, self._target = saving, Path(target)
        self._when_complete, self._when_failed = when_complete, when_failed
        self._before_seconds = before_seconds
        self.meter.add_foreground(before_seconds)
        self._predicted = self._predict(num_bytes, spare_bytes, is_behind and not is_last)
        if is_behind:
            saving.start(context)
            return
        started = time.perf_counter()
        saving.run(context)
        self.meter.add_foreground(time.perf_counter() - started)
        self._end()

    def poll(self) -> None:
        """Between two steps. Raises what kept a checkpoint from being written, where that ends the run."""
        if self._saving is not None and self._saving.is_over:
            self._end()

    def finish(self, *, must_succeed: bool = False) -> None:
        """Wait for it. must_succeed: nobody goes on without this one."""
        if self._saving is None:
            return
        started = time.perf_counter()
        self._saving.wait()
        self.meter.add_foreground(time.perf_counter() - started)
        self._end(must_succeed=must_succeed)

    def call_off(self) -> None:
        """The run ends at once: the checkpoint that is being written is dropped, those before it stay."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.call_off()

    @contextlib.contextmanager
    def told(self, target: str, when_failed: Callable[[], None], *, must_succeed: bool = False) -> Iterator[None]:
        """What the block does not get onto the disk is told as the run is to be told of it: in a warning, or by ending
        it. Errors of another kind are raised as they are."""
        try:
            yield
        except BaseException as error:
            self.call_off()
            self.meter.take()
            when_failed()
            if isinstance(error, Exception):
                self.note({"name": Path(target).name, "error": f"{type(error).__name__}: {error}"})
            if must_succeed or self._on_error == "stop" or not isinstance(error, OSError):
                raise
            earlier = said_of_earlier(Path(target))
            logger.warning("%s was not saved (%s); training goes on, and %s", target, error, earlier)

    def _end(self, *, must_succeed: bool = False) -> None:
        saving, self._saving = self._saving, None
        assert saving is not None
        with self.told(str(self._target), self._when_failed, must_succeed=must_succeed):
            saving.result()
            self._rate = saving.num_bytes / saving.seconds if saving.num_bytes else self._rate
            pause = self.meter.take()
            self._say(self._line(saving, pause))
            self.note(self._facts(saving, pause))
            self._complete()

    def _complete(self) -> None:
        """What is done behind a checkpoint may fail: the checkpoint is whole for all that."""
        try:
            self._when_complete()
        except OSError as error:
            logger.warning("%s is complete, but what comes behind it failed: %s", self._target, error)

    def _predict(self, num_bytes: int, spare_bytes: int, is_behind: bool) -> float | None:
        step_seconds = self.meter.step_seconds
        if self._rate is None or step_seconds is None:
            return None
        return self._before_seconds + predicted_pause(
            num_bytes,
            spare_bytes=spare_bytes,
            bytes_per_second=self._rate,
            step_seconds=step_seconds,
            clip=self._clip,
            is_behind=is_behind,
        )

    def _facts(self, saving: Saving, pause: float) -> dict[str, Any]:
        seconds = self._before_seconds + saving.seconds
        return {
            "name": self._target.name,
            "num_bytes": saving.num_bytes,
            "seconds": round(seconds, 3),
            "pause_seconds": round(min(pause, seconds), 3),
            "predicted_pause_seconds": self._predicted,
        }

    def _line(self, saving: Saving, pause: float) -> str:
        seconds = self._before_seconds + saving.seconds
        # Steps differ among themselves: none waits for longer than it takes.
        waited = f"training waited {_seconds(min(pause, seconds))} for it"
        if self._predicted is not None:
            waited += f" ({_seconds(self._predicted)} were predicted)"
        size = format_bytes(saving.num_bytes)
        return f"megatrain: {self._target.name} is complete: {size} in {_seconds(seconds)}; {waited}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def has_own_on_save(callback: transformers.TrainerCallback) -> bool:
    """It may look at the model. Those of transformers (integrations) look at files alone."""
    event = getattr(callback.on_save, "__func__", callback.on_save)
    is_of_transformers = getattr(event, "__module__", "").startswith("transformers.")
    return event is not transformers.TrainerCallback.on_save and not is_of_transformers
