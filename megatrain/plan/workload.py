"""What a step trains on: sequences, their length, and how many of them go through a layer at once. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.base.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One optimizer step. Raises UserError for counts below 1."""

    num_sequences: int
    length: int
    """Tokens of a sequence."""

    rows: int | None = None
    """Sequences of a micro-batch. None: the plan chooses."""

    def __post_init__(self) -> None:
        for name, value in (("sequences", self.num_sequences), ("length", self.length), ("rows", self.rows)):
            if value is not None and value < 1:
                raise UserError(f"{name}={value} must be a whole number and at least 1")
        if self.rows is not None and self.rows > self.num_sequences:
            raise UserError(f"rows={self.rows} of a micro-batch are more than the {self.num_sequences} of the step")

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.length

    def row_choices(self) -> list[int]:
        """Sequences of a micro-batch that the plan may choose, most first: the divisors, so that all are of a size."""
        if self.rows is not None:
            return [self.rows]
        return [rows for rows in range(self.num_sequences, 0, -1) if self.num_sequences % rows == 0]
