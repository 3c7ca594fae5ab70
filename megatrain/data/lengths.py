"""How long the sequences of a dataset are, from a few of its rows: enough to plan memory by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TrainingArguments
from transformers.utils import is_datasets_available

from megatrain.plan.workload import Workload

NUM_LOOKED_AT = 64
ROOM = 1.25
"""A longer row than those that were looked at may come, where they are not all of one length."""


def likely_length(dataset: Any) -> int | None:
    """Tokens of a row, at most and by far most likely. None where rows cannot be looked at without side effects.

    Args:
        dataset: of Hugging Face datasets, or a list of dicts, with `input_ids`. Datasets whose rows are made by code of
            the user's own (a transform, `__getitem__`, a stream) are not asked: they may draw random numbers.
    """
    lengths = _lengths(dataset)
    if not lengths:
        return None
    longest = max(lengths)
    return longest if min(lengths) == longest else int(ROOM * longest)


def _lengths(dataset: Any) -> list[int]:
    """Of rows all over the dataset; empty where they cannot be looked at."""
    if _is_of_datasets(dataset):
        if "input_ids" not in dataset.column_names or dataset.format["type"] == "custom" or not len(dataset):
            return []
        rows = dataset.with_format(None).select(_spread(len(dataset)))["input_ids"]
        return [len(row) for row in rows]
    if isinstance(dataset, list | tuple) and dataset and isinstance(dataset[0], dict) and "input_ids" in dataset[0]:
        return [len(dataset[index]["input_ids"]) for index in _spread(len(dataset))]
    return []


def likely_workload(dataset: Any, args: TrainingArguments) -> Workload | None:
    """A step of a Trainer; None where the dataset does not tell the length of its rows."""
    length = likely_length(dataset)
    if not length:
        return None
    rows = min(args.per_device_train_batch_size, len(dataset))
    num_sequences = min(rows * args.gradient_accumulation_steps, len(dataset))
    is_packed = "position_ids" in (dataset.column_names if _is_of_datasets(dataset) else dataset[0])
    varied = len(set(_lengths(dataset))) > 1
    masked = is_packed or (varied and rows > 1)
    return Workload(num_sequences=num_sequences, length=length, rows=rows, masked=masked, varied=varied)


def _is_of_datasets(dataset: Any) -> bool:
    if not is_datasets_available():  # a Trainer does without it, as transformers' does
        return False
    import datasets

    return isinstance(dataset, datasets.Dataset)


def _spread(count: int) -> Sequence[int]:
    """Row numbers all over the dataset, the last one too."""
    num = min(count, NUM_LOOKED_AT)
    return [round(index * (count - 1) / max(1, num - 1)) for index in range(num)]
