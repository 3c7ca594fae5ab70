"""A run changes its own placement: at a step boundary, where that is predicted to pay; it is measured, and undone where
it does not.

    measured steps ──> propose (plan/replan.py) ──> next boundary: homes move, slots are added, one line
        ──> a step that does not count ──> as many steps as were measured before ──> one line; worse: the next boundary

A boundary is the first call of the model, in grad mode, after a step: gradients are used up and updates can be waited
for. Where something is still held or lent (`HomeMover.is_free`) the next one is taken.
Rule: no result changes. There is one change a run, so that what it brought can be told from the rest.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from megatrain.base.errors import UserError
from megatrain.base.units import format_bytes, format_number
from megatrain.plan.calibrate import Measured
from megatrain.plan.outcome import Plan
from megatrain.plan.placement import HBM, STREAM, Place
from megatrain.plan.replan import Change

if TYPE_CHECKING:
    from megatrain.execute.engine import Engine
    from megatrain.store.home import Home

NO_ROOM = (UserError, torch.OutOfMemoryError, MemoryError)


@dataclasses.dataclass(kw_only=True)
class _Trial:
    """A change that was made, and is being measured."""

    change: Change
    before: Sequence[float]
    """Seconds of each step that was measured before it."""
    after: list[float] = dataclasses.field(default_factory=list)
    ended: float | None = None


class StepChanges:
    """
    Attributes:
        propose: the change that pays, if there is one.
        clock: seconds.
    """

    def __init__(self, engine: Engine) -> None:
        self.propose: Callable[[Plan, Measured], Change | None] = lambda *_: None
        self.clock = time.perf_counter
        self._engine = engine
        self._next: Callable[[], None] | None = None
        self._is_due = False
        """There is something to do at the next boundary, and no call has come to it yet."""
        self._trial: _Trial | None = None
        self._undo: Callable[[], None] | None = None
        """Of the change that is in force."""

    def consider(self, plan: Plan, measured: Measured, step_seconds: Sequence[float]) -> None:
        """The first steps have been measured."""
        change = self.propose(plan, measured)
        if change is not None:
            self._next, self._is_due = functools.partial(self._make, change, list(step_seconds)), True

    def end_step(self) -> None:
        """The optimizer has queued its updates."""
        if self._trial is not None:
            self._measure(self._trial)
        self._is_due = self._next is not None

    def at_boundary(self) -> None:
        """The model is about to be called."""
        if not self._is_due or not torch.is_grad_enabled():
            return
        self._is_due = False
        if self._next is not None and self._engine.mover.is_free():
            act, self._next = self._next, None
            act()

    def finish(self) -> None:
        """The run is over: say what was measured of a change so far."""
        trial, self._trial = self._trial, None
        if trial is not None and trial.after:
            self._say(self._outcome(trial))

    def give_way(self) -> bool:
        """The device's memory did not hold a step, of which nothing is left: undo the change at once. Returns whether
        there was one."""
        if self._undo is None or not self._engine.mover.is_free():
            return False
        undo, self._trial, self._next = self._undo, None, None
        self._say(
            "the device's memory did not hold this step, which is done again without the change of homes or slots"
        )
        undo()
        return True

    def _measure(self, trial: _Trial) -> None:
        now = self.clock()
        if trial.ended is not None:
            trial.after.append(now - trial.ended)
        trial.ended = now
        if len(trial.after) < len(trial.before):
            return
        self._trial = None
        spread = max(trial.before) - min(trial.before)
        is_worse = statistics.median(trial.after) > statistics.median(trial.before) + spread
        if is_worse:
            self._next = self._undo
        back = f", more than the spread of {_seconds(spread)}: it is undone at the next step boundary"
        self._say(self._outcome(trial) + (back if is_worse else ""))

    def _outcome(self, trial: _Trial) -> str:
        before, after = statistics.median(trial.before), statistics.median(trial.after)
        return (
            f"over {format_number(len(trial.after), 'step')} after that change {_seconds(after)} a step were measured "
            f"instead of {_seconds(before)}: {_gain(before, after)}, predicted was {_gain(*trial.change.seconds)}"
        )

    def _make(self, change: Change, step_seconds: Sequence[float]) -> None:
        mover, options = self._engine.mover, self._engine.placement.options
        self._undo = functools.partial(self._go_back, mover.places, options.num_slots)
        line = self._describe(change)
        try:
            self._change(change.choice.places, change.choice.num_slots)
        except NO_ROOM as error:
            self._say(f"there was no room for a change of homes or slots ({_first_line(error)})")
            self._undo()
            return
        now, then = change.seconds
        self._say(f"changed at this step boundary: {line}; {_seconds(then)} a step are predicted instead of "
                  f"{_seconds(now)}, {_gain(now, then)}")  # fmt: skip
        self._trial = _Trial(change=change, before=step_seconds)

    def _go_back(self, places: Sequence[Place], num_slots: int) -> None:
        self._undo = None
        try:
            self._change(places, num_slots)
        except NO_ROOM as error:
            self._say(f"the change could not be undone whole, as there was no room ({_first_line(error)})")
        else:
            self._say("undone: homes and slots are as before")

    def _change(self, places: Sequence[Place], num_slots: int) -> None:
        if num_slots < self._engine.placement.options.num_slots:
            self._engine.mover.resize_slots(num_slots)
        self._engine.mover.move(places)
        self._engine.mover.resize_slots(num_slots)

    def _describe(self, change: Change) -> str:
        """What is about to move."""
        engine = self._engine
        moving = [
            (home, place) for home, place in zip(engine.homes, change.choice.places, strict=True) if home.place != place
        ]
        parts = []
        on_device = [home for home, place in moving if place == HBM]
        if on_device:
            num_bytes = format_bytes(sum(map(engine.mover.device_bytes, on_device)))
            parts.append(f"{_names(on_device)} moved from host memory to the device ({num_bytes})")
        streamed = [home for home, place in moving if place == STREAM]
        if streamed:
            parts.append(f"{_names(streamed)} stream through the device for their update")
        num_slots = engine.placement.options.num_slots
        if change.choice.num_slots != num_slots:
            parts.append(f"{format_number(change.choice.num_slots, 'slot')} for blocks instead of {num_slots}")
        return ", ".join(parts)

    def _say(self, line: str) -> None:
        self._engine.report.say(f"megatrain: {line}")


def _names(homes: Sequence[Home]) -> str:
    """The one, or the first and the last."""
    if len(homes) == 1:
        return homes[0].name
    return f"{len(homes)} homes, {homes[0].name} to {homes[-1].name},"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"


def _gain(before: float, after: float) -> str:
    share = 1 - after / before
    return f"{abs(share):.1%} {'less' if share >= 0 else 'more'}".replace("%", " %")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
