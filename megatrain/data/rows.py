"""The dataset a model trains on: rows of token ids, made on request from the flat arrays.

Rule: a row is made from whole pieces; positions restart and the label is -100 at the first token of each piece.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import Dataset

from megatrain.data.tokens import TokenStore

IGNORED_LABEL = -100


class RowDataset(Dataset):
    """Map-style dataset. Item: `input_ids`, `labels`, and when packed `position_ids`, each (t,) int64 with t tokens."""

    def __init__(self, store: TokenStore, rows: list[list[int]], packed: bool) -> None:
        """`rows`: piece numbers of each row."""
        self.store = store
        self.packed = packed
        # Flat arrays, because a list of lists is copied page by page in every forked worker.
        self.members = np.array([piece for row in rows for piece in row], np.int64)
        self.row_offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.row_offsets) - 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        pieces = self.members[self.row_offsets[index] : self.row_offsets[index + 1]]
        starts, ends = self.store.piece_offsets[pieces], self.store.piece_offsets[pieces + 1]
        parts = [slice(start, end) for start, end in zip(starts, ends, strict=True)]
        ids = np.concatenate([self.store.ids[part] for part in parts]).astype(np.int64)
        supervised = np.concatenate([self.store.supervised[part] for part in parts])
        item = {"input_ids": ids, "labels": np.where(supervised, ids, IGNORED_LABEL)}
        if self.packed:
            item["position_ids"] = np.concatenate([np.arange(length) for length in ends - starts])
        return {name: torch.from_numpy(values) for name, values in item.items()}

    @property
    def num_tokens(self) -> int:
        return int(self.store.piece_lengths[self.members].sum())

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        lengths = self.store.piece_lengths[self.members]
        return int(np.add.reduceat(lengths, self.row_offsets[:-1]).max())

    @property
    def num_targets(self) -> int:
        """Tokens that enter the loss."""
        return self.store.num_targets(self.members)
