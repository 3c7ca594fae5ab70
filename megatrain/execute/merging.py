"""What a run knows of micro-batches that are merged: up to how many tokens, how many there were, why they were not."""

from __future__ import annotations

from typing import Any

from megatrain.base.units import format_number


class Merging:
    """
    Args:
        most_tokens: of a micro-batch that several of the user's are merged into; 0: none are.
        obstacle: why none are, known before the first step; empty where they may be.
    """

    def __init__(self, most_tokens: int, obstacle: str = "") -> None:
        self.most_tokens = most_tokens
        self.example = ""
        """What becomes of a step's, where that is known before: "32 of 1 x 1,024 into 2"."""

        self.reason = obstacle
        """Why the micro-batches of the last step were run as they are; empty where some were merged."""

        self._num_given = self._num_run = 0
        self._has_said = False

    def limit(self, most_tokens: int) -> None:
        """Merge no more than the run before did, which goes on here."""
        if most_tokens < self.most_tokens:
            self.most_tokens = most_tokens
            self.reason = "" if most_tokens else "the run that goes on here merged none"

    def count(self, given: list[tuple[int, int]], run: list[tuple[int, int]], reason: str) -> str:
        """A step is over. Returns what there is to say of it, once a run.

        Args:
            given, run: rows and tokens of a row of each micro-batch, before and after.
            reason: why none were merged, or nothing.
        """
        self._num_given += len(given)
        self._num_run += len(run)
        self.reason = reason
        if reason or self._has_said:
            return ""
        self._has_said = True
        return (
            f"megatrain: {_counted(given)} of a step are merged into {_counted(run)}: equal within rounding, not bit "
            "for bit (mt.init(exact=True) runs them as they are)"
        )

    def describe(self) -> str:
        """For the run's first line; empty where none are merged."""
        if not self.most_tokens:
            return ""
        example = f" ({self.example})" if self.example else ""
        return (
            f"micro-batches of equal length merged up to {format_number(self.most_tokens, 'token')}{example} where "
            "nothing couples their rows (equal within rounding; as they are: exact=True)"
        )

    def stats(self) -> dict[str, Any]:
        """Since the model was streamed, in steps of `mt.accumulate` or `mt.Trainer`: micro-batches that were given,
        those that ran in their place (as many, where none were merged), and why none of the last step were."""
        return {
            "num_micro_batches": self._num_given,
            "num_micro_batches_run": self._num_run,
            "unmerged_because": self.reason,
        }


def _counted(shapes: list[tuple[int, int]]) -> str:
    """As "32 micro-batches of 1 x 1024 tokens"; without a shape where they differ."""
    count = f"{len(shapes):,} micro-batch{'es' if len(shapes) > 1 else ''}"
    if len(set(shapes)) > 1:
        return count
    rows, tokens = shapes[0]
    return f"{count} of {rows} x {tokens:,} tokens"
