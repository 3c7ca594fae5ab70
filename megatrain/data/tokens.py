"""Token ids of all samples in three flat arrays.

Rule: a sample is one or more pieces, a piece is what a model may see at once; pieces never overlap and keep order.
Gives up: editing. Five bytes a token in memory (id and flag), nothing on disk.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

# Shapes: T tokens, P pieces, S samples.


@dataclass(frozen=True)
class TokenStore:
    """All tokens, in the order read."""

    ids: np.ndarray  # (T,) int32
    supervised: np.ndarray  # (T,) bool: is this token a target? The first token of a piece never is one
    piece_offsets: np.ndarray  # (P + 1,) int64 into ids
    sample_offsets: np.ndarray  # (S + 1,) int64 into pieces

    @property
    def num_samples(self) -> int:
        return len(self.sample_offsets) - 1

    @property
    def num_pieces(self) -> int:
        return len(self.piece_offsets) - 1

    @property
    def piece_lengths(self) -> np.ndarray:
        """(P,) int64 tokens a piece."""
        return np.diff(self.piece_offsets)

    def pieces_of(self, samples: np.ndarray) -> np.ndarray:
        """(n,) piece numbers of these samples, in ascending order."""
        ranges = [np.arange(self.sample_offsets[s], self.sample_offsets[s + 1]) for s in np.sort(samples)]
        return np.concatenate(ranges) if ranges else np.zeros(0, np.int64)

    def num_targets(self, pieces: np.ndarray) -> int:
        """Tokens that enter the loss, over these pieces."""
        sums = np.concatenate([[0], np.cumsum(self.supervised, dtype=np.int64)])
        return int((sums[self.piece_offsets[pieces + 1]] - sums[self.piece_offsets[pieces]]).sum())


@dataclass
class TokenWriter:
    """Grows a TokenStore sample by sample."""

    ids: array = field(default_factory=lambda: array("i"))
    supervised: array = field(default_factory=lambda: array("b"))
    piece_offsets: array = field(default_factory=lambda: array("q", [0]))
    sample_offsets: array = field(default_factory=lambda: array("q", [0]))

    def add(self, ids: Sequence[int], supervised: Sequence[bool], piece_lengths: Sequence[int]) -> None:
        """One sample, cut into pieces of these lengths."""
        assert len(ids) == len(supervised) == sum(piece_lengths)
        start = len(self.ids)
        self.ids.extend(ids)
        self.supervised.extend(supervised)
        for length in piece_lengths:
            # Nothing precedes the first token of a piece, so nothing predicts it.
            self.supervised[start] = False
            start += length
            self.piece_offsets.append(start)
        self.sample_offsets.append(len(self.piece_offsets) - 1)

    def finish(self) -> TokenStore:
        """The arrays share memory with the writer, which must not be used any more."""
        return TokenStore(
            ids=np.frombuffer(self.ids, np.int32) if self.ids else np.zeros(0, np.int32),
            supervised=np.frombuffer(self.supervised, np.bool_) if self.ids else np.zeros(0, np.bool_),
            piece_offsets=np.frombuffer(self.piece_offsets, np.int64),
            sample_offsets=np.frombuffer(self.sample_offsets, np.int64),
        )
