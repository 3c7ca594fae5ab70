"""The rows of micro-batches, cut and joined: which entries of a batch have a row for each of its rows, some of its
rows, several batches as one, and which of a step's may be one. Knows no model.

Rule: what an entry has for each row is known or the batch stays as it is. Nothing is padded.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatrain.base.errors import UserError

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


LENGTHS = ("input_ids", "labels", "decoder_input_ids", "inputs_embeds", "decoder_inputs_embeds")
"""Entries whose tensors have a row for each row and a column for each of its tokens."""


def shape_of(batch: Batch) -> tuple[int, int]:
    """Rows and tokens of a row, of the longer of what is read and what is predicted; zeros where they are not known."""
    tensors = [(name, batch.get(name)) for name in LENGTHS]
    shapes = [
        tuple(tensor.shape[:2])
        for name, tensor in tensors
        if isinstance(tensor, torch.Tensor) and tensor.dim() == (3 if name.endswith("embeds") else 2)
    ]
    return max(shapes, key=lambda shape: shape[1], default=(0, 0))


def num_tokens(batch: Batch) -> int:
    """0 where it is not known."""
    rows, tokens = shape_of(batch)
    return rows * tokens


def num_rows(batch: Batch) -> int:
    """Raises UserError for a batch whose rows are not known."""
    tokens = batch.get("input_ids")
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2:
        raise UserError("it has no input_ids of rows and tokens")
    if not isinstance(batch.get("labels"), torch.Tensor):
        raise UserError("it has no labels")
    return tokens.shape[0]


def cut(batch: Batch, most_rows: int) -> Iterator[Batch]:
    """The rows of a batch, at most `most_rows` at a time, in parts of nearly a size. Raises UserError."""
    rows = num_rows(batch)
    for start, stop in _evenly(rows, -(-rows // most_rows)):
        yield {name: _rows_of(name, value, slice(start, stop), rows) for name, value in batch.items()}


def join(batches: Sequence[Batch]) -> Batch:
    """The rows of batches of one `joint_key`, in their order."""
    return {name: _joined([batch[name] for batch in batches]) for name in batches[0]}


def joint_key(batch: Batch, *, joins_positions: bool) -> Hashable | None:
    """Batches of the same key may be joined: the same entries, of the same length, type and device. None: of no other.

    Args:
        joins_positions: batches with `position_ids` too. Positions that restart within a row tell its samples apart,
            and some attention kernels look at them in batches of one row alone.
    """
    try:
        rows = num_rows(batch)
        key = frozenset((name, _key_of(name, value, rows)) for name, value in batch.items())
    except UserError:
        return None
    return key if joins_positions or batch.get("position_ids") is None else None


def grouped(keys: Sequence[Hashable | None], sizes: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Which micro-batches go together, each by its number: every one once.

    Those of a key go in their order into as few groups as `most` allows, of nearly as many micro-batches each; a key of
    None goes with no other. Groups come in the order of their first micro-batches.

    Args:
        sizes: tokens of each. most: tokens of a group; a micro-batch that has more is a group of its own.
    """
    of_key: dict[Hashable, list[int]] = {}
    for number, key in enumerate(keys):
        of_key.setdefault(("alone", number) if key is None else ("joint", key), []).append(number)
    groups = []
    for numbers in of_key.values():
        together = max(1, most // max(1, *(sizes[number] for number in numbers)))
        groups += [tuple(numbers[a:b]) for a, b in _evenly(len(numbers), -(-len(numbers) // together))]
    return sorted(groups)


def _evenly(count: int, num_parts: int) -> Iterator[tuple[int, int]]:
    """Where each of `num_parts` parts of `count` things starts and stops."""
    yield from itertools.pairwise(count * index // num_parts for index in range(num_parts + 1))


def _rows_of(name: str, value: Any, wanted: slice, rows: int) -> Any:
    if value is None or name in SAME:
        return value
    if name == "attention_mask" and isinstance(value, Mapping):
        return {kind: _rows_of(name, mask, wanted, rows) for kind, mask in value.items()}
    if _has_rows(name, value):
        if value.shape[0] == rows:
            return value[wanted]
        if value.shape[0] == 1 and name in ("position_ids", "attention_mask"):
            return value
    raise UserError(f"what {name!r} has for each row is not known")


def _has_rows(name: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() in DIMENSIONS.get(name, ())


def _key_of(name: str, value: Any, rows: int) -> Hashable:
    """What must be the same of an entry of batches that are joined. Raises UserError for one that cannot be."""
    if name == "attention_mask" and isinstance(value, Mapping):
        return frozenset((kind, _key_of(name, mask, rows)) for kind, mask in value.items())
    if value is None or (name in SAME and isinstance(value, bool)):
        return value
    if _has_rows(name, value) and value.shape[0] == rows:
        return value.shape[1:], value.dtype, value.device
    raise UserError(f"what {name!r} has for each row is not known")


def _joined(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {kind: _joined([value[kind] for value in values]) for kind in first}
    return torch.cat(list(values)) if isinstance(first, torch.Tensor) else first
