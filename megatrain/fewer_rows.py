"""Steps whose micro-batches the device's memory does not hold are run with fewer rows of each at a time.

The parts of a micro-batch give its loss and its gradients, to rounding: a part's loss is its share of that of the
micro-batch (`row_loss.py` measures how). With dropout the parts draw other random numbers than the whole.
Rule: a batch is cut only where each of its entries is known to have a row for each of its rows, and where nothing
couples rows. Where one of the two is not known, or one row does not fit, StepTooLargeError says what to set.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from megatrain.base.errors import UserError, one_line
from megatrain.base.units import format_bytes, format_number
from megatrain.execute.engine import Engine
from megatrain.execute.retry import REMEDIES, StepTooLargeError
from megatrain.row_loss import RowLoss, measure_row_loss

logger = logging.getLogger("megatrain")

Batch = Mapping[str, Any]

DIMENSIONS = {
    "input_ids": (2,),
    "labels": (2,),
    "attention_mask": (2, 4),
    "position_ids": (2,),
    "token_type_ids": (2,),
    "decoder_input_ids": (2,),
    "decoder_attention_mask": (2,),
}
"""Entries of a batch whose tensors have a row for each of its rows: how many dimensions they have then."""
SAME = ("use_cache", "return_dict")
"""Entries that are those of each part."""


@dataclass(frozen=True)
class Part:
    """Some rows of a micro-batch."""

    batch: Batch
    share: float = 1.0
    """What its loss is multiplied with."""


class FewerRows:
    """Runs the micro-batches of a step.

    Args:
        loss_of: (micro-batch, number of target tokens of the step or None) -> its loss.
        obstacle: why `loss_of` is not what the model's own forward returns, or nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        loss_of: Callable[[Batch, torch.Tensor | int | None], torch.Tensor],
        obstacle: Callable[[], str],
    ) -> None:
        self.most_rows: int | None = None
        """At a time. None: micro-batches are run as they are."""
        self.model, self._engine = model, engine
        self._loss_of, self._obstacle = loss_of, obstacle
        self._row_loss: RowLoss | None = None

    def run(self, batches: Sequence[Batch], num_items: torch.Tensor | int | None) -> list[torch.Tensor]:
        """Forward and backward of all micro-batches. Returns the loss of each, detached.

        Raises StepTooLargeError; the step has not begun then, where it could be undone.
        """
        before = self.most_rows
        while True:
            parts = [self._parts(batch, num_items) for batch in batches]
            thunks = [lambda part=part: self._loss(part, num_items) for of_batch in parts for part in of_batch]
            try:
                losses = iter(self._engine.accumulate(thunks))
                break
            except StepTooLargeError as error:
                if not error.is_undone:
                    raise
                self._halve(batches, num_items, error)
        if self.most_rows != before:
            logger.warning(
                "the device's memory did not hold the micro-batches of this step: from now on they are run %s at a "
                "time, with the same loss and gradients to rounding (with dropout: with other random numbers). "
                "per_device_train_batch_size=%d, with as many more gradient_accumulation_steps, says so from the start",
                format_number(self.most_rows, "row"),
                self.most_rows,
            )
        return [_sum(list(itertools.islice(losses, len(of_batch)))) for of_batch in parts]

    def _loss(self, part: Part, num_items: torch.Tensor | int | None) -> torch.Tensor:
        loss = self._loss_of(part.batch, num_items)
        return loss if part.share == 1.0 else loss * part.share

    def _parts(self, batch: Batch, num_items: torch.Tensor | int | None) -> list[Part]:
        if self.most_rows is None:
            return [Part(batch)]
        row_loss = self._known(num_items)
        try:
            cut = [Part(rows) for rows in _cut(batch, self.most_rows)]
        except UserError:
            # Of another kind than those that did not fit: perhaps it does.
            return [Part(batch)]
        if not row_loss.is_mean:
            return cut
        targets = [row_loss.num_targets(part.batch["labels"]) for part in cut]
        if not any(targets):
            return [Part(batch)]
        # The mean of no targets is no number, and has no part in the whole.
        return [replace(part, share=count / sum(targets)) for part, count in zip(cut, targets, strict=True) if count]

    def _known(self, num_items: torch.Tensor | int | None) -> RowLoss:
        if self._row_loss is None:
            self._row_loss = measure_row_loss(self.model, takes_num_items=num_items is not None)
        return self._row_loss

    def _halve(self, batches: Sequence[Batch], num_items: torch.Tensor | int | None, error: StepTooLargeError) -> None:
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
                next(_cut(batch, 1))
            self._known(num_items)
        except UserError as reason:
            why = f"it is not cut into fewer rows, because {reason}"
            half = max(1, _shape(largest)[0] // 2)
            fewer = f"per_device_train_batch_size={half} with as many more gradient_accumulation_steps"
            raise explained(error, largest, why, fewer) from error.__cause__
        self.most_rows = most // 2


def explained(
    error: StepTooLargeError, batch: Batch, reason: str = "", fewer: str = "smaller micro-batches, more of them"
) -> StepTooLargeError:
    """`error`, in words about the largest micro-batch of its step.

    Args:
        reason: why `batch` is not cut into fewer rows; empty where it is, down to one row.
        fewer: how to run fewer rows at a time.
    """
    rows, tokens = _shape(batch)
    is_one = rows == 1 or not reason
    what = "a single row" if is_one else f"a micro-batch of {format_number(rows, 'row')}" if rows else "a micro-batch"
    of_tokens = f" of {format_number(tokens, 'token')}" if tokens else ""
    error.args = (
        f"the device's memory does not hold {what}{of_tokens} ({format_bytes(error.free_bytes)} are free before the "
        f"step){'' if is_one else f', and {reason}'}. What helps: {'' if is_one else f'{fewer}; '}{REMEDIES}. "
        f"(PyTorch: {one_line(error.__cause__)})",
    )
    return error


def num_rows(batch: Batch) -> int:
    """Raises UserError for a batch whose rows are not known."""
    tokens = batch.get("input_ids")
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2:
        raise UserError("it has no input_ids of rows and tokens")
    return tokens.shape[0]


def _cut(batch: Batch, most_rows: int) -> Iterator[Batch]:
    """The rows of a batch, at most `most_rows` at a time, in parts of nearly a size. Raises UserError."""
    rows = num_rows(batch)
    if not isinstance(batch.get("labels"), torch.Tensor):
        raise UserError("it has no labels")
    num_parts = -(-rows // most_rows)
    stops = [rows * index // num_parts for index in range(num_parts + 1)]
    for start, stop in itertools.pairwise(stops):
        yield {name: _rows_of(name, value, slice(start, stop), rows) for name, value in batch.items()}


def _rows_of(name: str, value: Any, wanted: slice, rows: int) -> Any:
    if value is None or name in SAME:
        return value
    if name == "attention_mask" and isinstance(value, Mapping):
        return {kind: _rows_of(name, mask, wanted, rows) for kind, mask in value.items()}
    if isinstance(value, torch.Tensor) and value.dim() in DIMENSIONS.get(name, ()):
        if value.shape[0] == rows:
            return value[wanted]
        if value.shape[0] == 1 and name in ("position_ids", "attention_mask"):
            return value
    raise UserError(f"what {name!r} has for each row is not known")


def num_tokens(batch: Batch) -> int:
    """0 where it is not known."""
    rows, tokens = _shape(batch)
    return rows * tokens


def _shape(batch: Batch) -> tuple[int, int]:
    """Rows and tokens of a row; zeros where they are not known."""
    tensors = [batch.get(name) for name in ("input_ids", "labels")]
    tensor = next((one for one in tensors if isinstance(one, torch.Tensor) and one.dim() == 2), None)
    return (0, 0) if tensor is None else (tensor.shape[0], tensor.shape[1])


def _sum(losses: list[torch.Tensor]) -> torch.Tensor:
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()
