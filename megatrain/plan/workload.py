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

    reads_logits: bool = False
    """The loss is one of your own that looks at whole logits: memory is planned for these, and not for pieces."""

    def __post_init__(self) -> None:
        for name, value in (("sequences", self.num_sequences), ("length", self.length), ("rows", self.rows)):
            is_count = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST
            if not is_count and not (value is None and name == "rows"):
                raise UserError(f"{name}={value!r} must be a whole number from 1 to {MOST:,}")
        if not isinstance(self.masked, bool):
            raise UserError(f"masked={self.masked!r} must be True or False")
        if self.rows is not None and self.rows > self.num_sequences:
            raise UserError(f"rows={self.rows} of a micro-batch are more than the {self.num_sequences} of the step")

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.length

    def row_choices(self) -> list[int]:
        """Sequences of a micro-batch that the plan may choose, most first: the divisors, so that all are of a size."""
        if self.rows is not None:
            return [self.rows]
        small = [rows for rows in range(1, math.isqrt(self.num_sequences) + 1) if self.num_sequences % rows == 0]
        return sorted({*small, *(self.num_sequences // rows for rows in small)}, reverse=True)
