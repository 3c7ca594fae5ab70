"""How the micro-batches of a step go through the model: as they are, several merged into one, or cut into fewer rows.

Small ones leave a device idle, so those of one length are merged, where the run's settings allow it (`Merging`). What
the device's memory does not hold is taken apart again: merged ones first, then each into fewer of its rows.
Either way the parts give the losses and gradients of the micro-batches, to rounding: `row_loss.py` measures whether
rows are coupled, and how losses add up. Cut micro-batches draw other random numbers than whole ones (dropout); where a
model draws any, none are merged: a run's numbers do not depend on how much memory there is.
Rule: rows are cut or joined only where each entry of a batch is known to have one for each of its rows, and where
nothing couples rows. Where one of the two is not known, micro-batches run as they are; where memory does not hold them
then, StepTooLargeError says what to set.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from megatrain.base.errors import UserError, one_line
from megatrain.base.units import format_bytes, format_number
from megatrain.batch_rows import Batch, cut, grouped, join, joint_key, num_rows, num_tokens, shape_of
from megatrain.execute.engine import Engine
from megatrain.execute.report import say_on_a_line_of_its_own
from megatrain.execute.retry import REMEDIES, StepTooLargeError
from megatrain.row_loss import RowLoss, row_loss_of

logger = logging.getLogger("megatrain")

NumItems = torch.Tensor | int | None
"""Target tokens of a step, where its losses are divided by them."""


@dataclass(frozen=True)
class Part:
    """Rows that go through the model together."""

    batch: Batch
    of: tuple[int, ...]
    """The numbers of their micro-batches."""
    share: float = 1.0
    """What its loss is multiplied with."""


class MicroBatches:
    """Runs the micro-batches of a step.

    Args:
        loss_of: (micro-batch, number of target tokens of the step or None) -> its loss.
        obstacle: why `loss_of` is not what the model's own forward returns, or nothing.
        cuts: what the device's memory does not hold is cut into fewer rows.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        loss_of: Callable[[Batch, NumItems], torch.Tensor],
        obstacle: Callable[[], str],
        *,
        cuts: bool = True,
    ) -> None:
        self.most_rows: int | None = None
        """At a time. None: micro-batches are not cut."""
        self.model, self._engine, self._merging = model, engine, engine.merging
        self._loss_of, self._obstacle, self._cuts = loss_of, obstacle, cuts

    def run(self, batches: Sequence[Batch], num_items: NumItems) -> list[torch.Tensor]:
        """Forward and backward of all micro-batches. Returns the loss of each, detached.

        Of micro-batches that were merged each has the share of their loss that its target tokens are of theirs.
        Raises StepTooLargeError; the step has not begun then, where it could be undone.
        """
        before = self.most_rows, self._merging.most_tokens
        while True:
            parts, reason = self._parts(batches, num_items)
            thunks = [lambda part=part: self._loss(part, num_items) for part in parts]
            try:
                losses = self._engine.accumulate(thunks, [len(part.of) for part in parts])
                break
            except StepTooLargeError as error:
                self._take_apart(parts, batches, num_items, error)
        self._say_if_smaller(*before)
        shapes = [[shape_of(batch) for batch in of] for of in (batches, [part.batch for part in parts])]
        if said := self._merging.count(*shapes, reason):
            say_on_a_line_of_its_own(said)
        return self._by_micro_batch(parts, losses, batches, num_items)

    def _loss(self, part: Part, num_items: NumItems) -> torch.Tensor:
        loss = self._loss_of(part.batch, num_items)
        return loss if part.share == 1.0 else loss * part.share

    def _by_micro_batch(
        self, parts: list[Part], losses: list[torch.Tensor], batches: Sequence[Batch], num_items: NumItems
    ) -> list[torch.Tensor]:
        """The losses of the parts as those of the micro-batches."""
        found: list[list[torch.Tensor]] = [[] for _ in batches]
        for part, loss in zip(parts, losses, strict=True):
            for number, of in zip(part.of, self._apart(part, loss, batches, num_items), strict=True):
                found[number].append(of)
        return [of[0] if len(of) == 1 else torch.stack(of).sum() for of in found]

    def _apart(
        self, part: Part, loss: torch.Tensor, batches: Sequence[Batch], num_items: NumItems
    ) -> list[torch.Tensor]:
        """A part's loss as those of its micro-batches."""
        if len(part.of) == 1:
            return [loss]
        row_loss = self._known(num_items)
        counts = torch.stack([row_loss.num_targets(batches[number]["labels"]) for number in part.of])
        return [loss * share for share in (counts / counts.sum().clamp(min=1)).unbind()]

    # As they are, or merged.

    def _parts(self, batches: Sequence[Batch], num_items: NumItems) -> tuple[list[Part], str]:
        """What goes through the model, and why no micro-batches are merged, or nothing."""
        as_they_are = [Part(batch, (number,)) for number, batch in enumerate(batches)]
        if self.most_rows is not None:
            reason = "the device's memory does not hold all of their rows"
            return [part for whole in as_they_are for part in self._fewer_rows(whole, num_items)], reason
        try:
            return self._merged(batches, num_items), ""
        except UserError as reason:
            return as_they_are, str(reason)

    def _merged(self, batches: Sequence[Batch], num_items: NumItems) -> list[Part]:
        """Raises UserError with the reason where none can be."""
        if not self._merging.most_tokens:
            raise UserError(self._merging.reason)
        if obstacle := self._obstacle():
            raise UserError(obstacle)
        attention = getattr(getattr(self.model, "config", None), "_attn_implementation", None)
        keys = [joint_key(batch, joins_positions="flash" not in str(attention)) for batch in batches]
        sizes = list(map(num_tokens, batches))
        if all(len(group) == 1 for group in grouped(keys, sizes, self._merging.most_tokens)):
            raise UserError(
                "no two have the same length and the same entries and together are no longer than "
                f"{self._merging.most_tokens:,} tokens"
            )
        row_loss = self._known(num_items)
        if row_loss.draws_random:
            raise UserError("the model draws random numbers (dropout), and merged micro-batches would draw others")
        if row_loss.is_mean:
            # The mean over both is that of their means only where they have as many targets.
            keys = [
                key if key is None else (key, int(row_loss.num_targets(batch["labels"])))
                for key, batch in zip(keys, batches, strict=True)
            ]
        groups = grouped(keys, sizes, self._merging.most_tokens)
        if all(len(group) == 1 for group in groups):
            raise UserError("the loss is a mean over target tokens, of which no two have the same number")
        return [self._joined(group, batches, row_loss) for group in groups]

    def _joined(self, group: tuple[int, ...], batches: Sequence[Batch], row_loss: RowLoss) -> Part:
        if len(group) == 1:
            return Part(batches[group[0]], group)
        batch = join([batches[number] for number in group])
        return Part(batch, group, float(len(group)) if row_loss.is_mean else 1.0)

    # Cut into fewer rows.

    def _fewer_rows(self, whole: Part, num_items: NumItems) -> list[Part]:
        assert self.most_rows is not None
        row_loss = self._known(num_items)
        try:
            parts = [replace(whole, batch=rows) for rows in cut(whole.batch, self.most_rows)]
        except UserError:
            # Of another kind than those that did not fit: perhaps it does.
            return [whole]
        if not row_loss.is_mean:
            return parts
        targets = [int(row_loss.num_targets(part.batch["labels"])) for part in parts]
        if not any(targets):
            return [whole]
        # The mean of no targets is no number, and has no part in the whole.
        return [replace(part, share=count / sum(targets)) for part, count in zip(parts, targets, strict=True) if count]

    def _known(self, num_items: NumItems) -> RowLoss:
        return row_loss_of(self.model, takes_num_items=num_items is not None)

    # What the device's memory does not hold.

    def _take_apart(
        self, parts: list[Part], batches: Sequence[Batch], num_items: NumItems, error: StepTooLargeError
    ) -> None:
        """Smaller parts from now on. Raises `error` where that cannot be, explained where it is known why."""
        merged = [num_tokens(part.batch) for part in parts if len(part.of) > 1]
        if merged and error.is_undone:
            self._merging.most_tokens = max(merged) // 2
        elif merged:
            told = "mt.init(exact=True) merges no micro-batches, which takes less memory"
            error.args = (f"{error} {told}",)
            raise error
        elif error.is_undone and self._cuts:
            self._halve(batches, num_items, error)
        else:
            raise error

    def _halve(self, batches: Sequence[Batch], num_items: NumItems, error: StepTooLargeError) -> None:
        """Half as many rows at a time from now on. Raises `error`, explained, where that cannot be."""
        largest = max(batches, key=num_tokens)
        try:
            most = max(map(num_rows, batches))
            most = min(most, self.most_rows or most)
            if most == 1:
                raise explained(error, largest) from error.__cause__
            if obstacle := self._obstacle():
                raise UserError(obstacle)
            for batch in batches:
                next(cut(batch, 1))
            self._known(num_items)
        except UserError as reason:
            why = f"it is not cut into fewer rows, because {reason}"
            half = max(1, shape_of(largest)[0] // 2)
            fewer = f"per_device_train_batch_size={half} with as many more gradient_accumulation_steps"
            raise explained(error, largest, why, fewer) from error.__cause__
        self.most_rows = most // 2

    def _say_if_smaller(self, most_rows: int | None, most_tokens: int) -> None:
        """most_rows, most_tokens: before the step."""
        now = self._merging.most_tokens
        if now != most_tokens:
            logger.warning(
                "the device's memory did not hold the merged micro-batches of this step: from now on they are merged "
                "up to %s, with the same loss and gradients to rounding",
                format_number(now, "token"),
            )
        if self.most_rows != most_rows:
            logger.warning(
                "the device's memory did not hold the micro-batches of this step: from now on they are run %s at a "
                "time, with the same loss and gradients to rounding (with dropout: with other random numbers). "
                "per_device_train_batch_size=%d, with as many more gradient_accumulation_steps, says so from the start",
                format_number(self.most_rows, "row"),
                self.most_rows,
            )


def explained(
    error: StepTooLargeError, batch: Batch, reason: str = "", fewer: str = "smaller micro-batches, more of them"
) -> StepTooLargeError:
    """`error`, in words about the largest micro-batch of its step.

    Args:
        reason: why `batch` is not cut into fewer rows; empty where it is, down to one row.
        fewer: how to run fewer rows at a time.
    """
    rows, tokens = shape_of(batch)
    is_one = rows == 1 or not reason
    what = "a single row" if is_one else f"a micro-batch of {format_number(rows, 'row')}" if rows else "a micro-batch"
    of_tokens = f" of {format_number(tokens, 'token')}" if tokens else ""
    error.args = (
        f"the device's memory does not hold {what}{of_tokens} ({format_bytes(error.free_bytes)} are free before the "
        f"step){'' if is_one else f', and {reason}'}. What helps: {'' if is_one else f'{fewer}; '}{REMEDIES}. "
        f"(PyTorch: {one_line(error.__cause__)})",
    )
    return error
