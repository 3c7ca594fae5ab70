"""What a step trains on: sequences, their length, and how many of them go through a layer at once. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatrain.base.errors import UserError

MOST = 10**9
"""Sequences of a step, or tokens of one: more is a slip of the pen."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One optimizer step. Raises UserError for counts below 1."""

    num_sequences: int
    length: int
    """Tokens of a sequence."""

    rows: int | None = None
    """Sequences of a micro-batch. None: the plan chooses."""

    masked: bool = False
    """Rows are packed or padded, so that attention is given a mask: its kernel is chosen for one."""

    varied: bool = False
    """Sequences differ in length, so that hardly two micro-batches are of one: the plan merges none."""

    merges: bool = False
    """Several micro-batches may be merged into one: the plan chooses how many. `mt.stream` sets it, where the model and
    `mt.init(exact=)` allow it."""

    reads_logits: bool = False
    """The loss is one of your own that looks at whole logits: memory is planned for these, and not for pieces."""

    def __post_init__(self) -> None:
        for name, value in (("sequences", self.num_sequences), ("length", self.length), ("rows", self.rows)):
            is_count = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST
            if not is_count and not (value is None and name == "rows"):
                raise UserError(f"{name}={value!r} must be a whole number from 1 to {MOST:,}")
        for name, value in (("masked", self.masked), ("varied", self.varied)):
            if not isinstance(value, bool):
                raise UserError(f"{name}={value!r} must be True or False")
        if self.rows is not None and self.rows > self.num_sequences:
            raise UserError(f"rows={self.rows} of a micro-batch are more than the {self.num_sequences} of the step")

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.length

    def row_choices(self) -> list[int]:
        """Sequences of a micro-batch that the plan may choose, most first: so that all are of a size."""
        if self.rows is None:
            return _divisors(self.num_sequences)
        if not self.merges or self.num_sequences % self.rows:
            return [self.rows]
        return [self.rows * count for count in _divisors(self.num_sequences // self.rows)]

    def num_merged(self, rows: int) -> int:
        """Micro-batches as they are given in one of `rows` sequences."""
        return max(1, rows // self.rows) if self.merges and self.rows else 1


def _divisors(number: int) -> list[int]:
    """Largest first."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)}, reverse=True)
