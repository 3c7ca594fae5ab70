"""A step commits by rolling forward: what a fault stopped is taken up again, and goes on where it was.

    Update     one home's part of a step, with its marks; it keeps the gradients that it reads until it is done
    OpenStep   the updates of a step until every home has its own, and those of earlier steps that failed

An update that raises is tried again a few times; marks (`optim/marks.py`) keep it from doing anything twice. If it
fails for good its home's `updated` fence fails: whoever reads the home gets the error, and no one sees it half done.
The other homes make their step. `optimizer.step()` called again then makes the step whole, with the numbers and
gradients of its first call; so it does after an interrupt. Until then nothing is saved (`check_whole`).

What it gives up: with clip="layer" gradients are used up in the backward, and there is nothing to go on with.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.base.errors import RefusedError, UpdateError, kind_of_update_error
from megatrain.base.fence import Fence
from megatrain.execute.engine import Engine
from megatrain.optim.marks import HalfWrittenError, Marks
from megatrain.store.home import Home

logger = logging.getLogger("megatrain")

NUM_RETRIES = 3
FIRST_PAUSE_SECONDS = 0.1
"""Before the first retry of an update; each further pause is twice as long."""

_AGAIN = "call optimizer.step() again, which makes this step whole on the layers that have not made it, or"
_REFUGE = 'with clip="layer" its gradients are used up, so'


class Update:
    """One home's part of a step.

    Args:
        pairs: the home's parameters, each with its group's numbers as they were when the step was called.
        is_kept: its gradients are, so that it can be done again.
    """

    def __init__(self, home: Home, pairs: list[Any], *, is_kept: bool = True) -> None:
        self.home, self.pairs, self.is_kept = home, pairs, is_kept
        self.is_done = self.is_queued = False
        self.counts: list[tuple[torch.Tensor, int]] = []
        """Step counts, and what they are once it is queued."""
        self.work: Callable[[Marks], None] | None = None
        """Set when it is queued for the first time; goes when it is done, with the gradients that it holds."""
        self.fence = Fence()
        self._marks = Marks()

    @property
    def has_failed(self) -> bool:
        """For good, so far."""
        return not self.is_done and isinstance(self.fence.error, UpdateError)

    def __call__(self) -> None:
        """Run what is left of it, with retries; on its update lane. Raises UpdateError."""
        work = self.work
        assert work is not None
        for number in range(NUM_RETRIES + 1):
            try:
                work(self._marks)
                break
            except Exception as error:
                self._judge(error, is_last=number == NUM_RETRIES)
                pause_seconds = FIRST_PAUSE_SECONDS * 2**number
                logger.warning(
                    "the update of %r failed (%s: %s) and is tried again in %.1f s",
                    self.home.name,
                    type(error).__name__,
                    error,
                    pause_seconds,
                )
            time.sleep(pause_seconds)
        self.finish()

    def finish(self) -> None:
        self.is_done = True
        self.work, self._marks, self.pairs = None, Marks(), []
        self.home.due.discard(self)

    def queue(self, engine: Engine, run: Callable[[], None]) -> None:
        """Again, if it failed. run: what calls it."""
        self.home.due.add(self)
        if self.fence.is_recorded and self.fence.error is None:
            self.fence = Fence()  # of a try that an interrupt took back
        try:
            engine.transport.update(self.home, run, self.fence)
        finally:
            self.is_queued = self.home.updated is self.fence
            if self.is_queued:
                self.count()

    def count(self) -> None:
        """A second time changes nothing: an interrupt may come between."""
        for count, number in self.counts:
            count.fill_(number)

    def _judge(self, error: Exception, *, is_last: bool) -> None:
        """Raise what ends it for good, if anything does."""
        if _is_sticky(error):
            raise error
        if isinstance(error, HalfWrittenError):
            self.home.tear(error.__cause__ or error)
        self.home.check_sound()
        if not is_last:
            return
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # whoever hears of it finds nothing under way
        raise kind_of_update_error(error)(
            f"the update of {self.home.name!r} failed {NUM_RETRIES + 1} times ({type(error).__name__}: {error}). Other "
            f"layers have made their step. Nothing is saved in between: {_AGAIN if self.is_kept else _REFUGE} go on "
            "from the last checkpoint"
        ) from error


def _is_sticky(error: Exception) -> bool:
    """After it nothing works on the device any more in this process."""
    kind = getattr(torch, "AcceleratorError", None)
    is_named = kind is not None and isinstance(error, kind)
    return not isinstance(error, torch.OutOfMemoryError) and (is_named or "CUDA error" in str(error))


@dataclass(frozen=True)
class _Begun:
    """A step whose call has not ended: it runs, or an interrupt stopped it."""

    updates: list[Update]
    gradients: list[tuple[Any, ...]]
    """Which they were, home by home."""
    number: int
    """Of steps that the engine had made."""

    def has_other_gradients(self) -> bool:
        pairs = zip(self.updates, self.gradients, strict=True)
        return any(_gradients(update.home) != of for update, of in pairs if not update.is_done)


class OpenStep:
    """Of one optimizer."""

    def __init__(self) -> None:
        self._begun: _Begun | None = None
        self._left: list[Update] = []
        """Of steps that have ended, and those that were queued outside of `step`."""

    def begin(self, updates: list[Update], number: int) -> None:
        """number: of steps that the engine has made."""
        self._begun = _Begun(updates, [_gradients(update.home) for update in updates], number)
        for update in updates:
            update.home.due.add(update)

    def add(self, update: Update) -> None:
        """One that is queued outside of `step`."""
        self._left.append(update)

    def end(self) -> None:
        """All are queued. What is not done yet is kept, should it fail."""
        self._left = self._undone()
        self._begun = None  # last: after an interrupt on the way here the step is not made a second time

    def roll_forward(self, engine: Engine, queue: Callable[[Update], None]) -> bool:
        """Finish what `step` has still to do before it may begin another one: a step that was interrupted, if gradients
        are what they were, and updates that failed. Returns whether there was anything.

        Raises UpdateError for what failed again, or cannot be done again.
        """
        if self._begun is not None and self._begun.has_other_gradients():
            self.give_up("other gradients came")
        self._left, begun = self._undone(), self._begun
        if begun is None and not any(update.has_failed for update in self._left):
            return False
        for update in self._left:
            if update.has_failed and not update.is_kept:
                update.fence.wait()
        engine.transport.flush()
        _settle(self._left)
        for update in self._left:
            if not update.is_done:
                queue(update)
        for update in self._left:
            update.home.wait()
        for update in [] if begun is None else begun.updates:
            update.count()
        if begun is not None and engine.num_steps == begun.number:
            engine.end_step()
        self.end()
        return True

    def give_up(self, why: str) -> None:
        """Of a step that was interrupted, what was not queued."""
        if self._begun is None:
            return
        _settle(self._begun.updates)
        missing = [update for update in self._begun.updates if not (update.is_done or update.has_failed)]
        for update in missing:
            update.finish()
        if missing:
            logger.warning(
                "optimizer.step() was interrupted and %s: %d layers, the first of them %r, do not make that step, and "
                "others have made it",
                why,
                len(missing),
                missing[0].home.name,
            )
        self.end()

    def _undone(self) -> list[Update]:
        begun = [] if self._begun is None else self._begun.updates
        return [update for update in dict.fromkeys((*self._left, *begun)) if not update.is_done]


def _gradients(home: Home) -> tuple[Any, ...]:
    return home.grads.arrived, home.grads.touched


def _settle(updates: Iterable[Update]) -> None:
    """Wait until nothing that was queued runs any more, whatever became of it."""
    for update in updates:
        with contextlib.suppress(Exception):
            update.home.wait()


def _is_queued(update: object) -> bool:
    return isinstance(update, Update) and update.is_queued


def check_whole(engine: Engine, what: str, *, waits: bool = True) -> None:
    """Refuse `what` (saving) while layers are not at the same step.

    waits: for updates; else those that run may still fail.

    Raises UpdateError that names a layer whose update failed; RefusedError where a step was interrupted.
    """
    if waits:
        engine.wait()
    for home in engine.homes:
        home.check_sound()
        if home.updated.error is not None:
            home.wait()
    behind = [home.name for home in engine.homes if not all(_is_queued(update) for update in tuple(home.due))]
    if behind:
        raise RefusedError(
            f"{what}: optimizer.step() was interrupted, and {len(behind)} layers, the first of them {behind[0]!r}, "
            "have not made the step that others have: call optimizer.step() again, which makes it whole"
        )
    if engine.consumed:
        raise RefusedError(
            f'{what}: clip="layer" has updated {len(engine.consumed)} layers in the backward: call optimizer.step() '
            "first, which ends the step"
        )
