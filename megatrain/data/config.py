"""What to train on and how to cut it: the one dataclass of this room.

Rule: a setting that cannot work is refused here, by name, before a file is opened.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from megatrain.base.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

Source = Union[str, "os.PathLike[str]", "Dataset", Sequence[dict]]
"""A file, a folder, `hf:NAME[:CONFIG[:SPLIT]]`, `builtin:NAME`, or records at hand: a `datasets.Dataset`, a list of
dicts."""

FORMATS = ("auto", "text", "prompt_completion", "messages")
MIN_SEQUENCE_LENGTH = 8


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where samples come from and how they become rows of tokens."""

    path: Source | Sequence[Source]
    """What to train on: one source or several. See docs/data.md."""

    format: str = "auto"
    """`auto` takes the format from the keys of the first record; or `text`, `prompt_completion`, `messages`."""

    sequence_length: int
    """Most tokens in a row."""

    packing: bool = True
    """Put several samples in one row. They do not attend to each other."""

    eval_path: Source | Sequence[Source] | None = None
    """Held-out samples from a source of their own."""

    eval_fraction: float = 0.0
    """Hold out this share of the samples (0 to 1), chosen by `seed`. One single text gives its last part."""

    eval_samples: int | None = None
    """Evaluate at most this many rows. What else was held out is not trained on either."""

    max_samples: int | None = None
    """Read only this many samples (documents, records) of `path`, the first ones."""

    seed: int = 0
    """Chooses the held-out samples."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UserError(f"data.format is {self.format!r}; use one of {', '.join(FORMATS)}")
        if self.sequence_length < MIN_SEQUENCE_LENGTH:
            raise UserError(f"data.sequence_length is {self.sequence_length}; use {MIN_SEQUENCE_LENGTH} or more")
        if not 0.0 <= self.eval_fraction < 1.0:
            raise UserError(f"data.eval_fraction is {self.eval_fraction}; use 0 (nothing held out) or a share below 1")
        if self.eval_path is not None and self.eval_fraction:
            raise UserError("data.eval_path and data.eval_fraction are both set; keep one of them")
        for name in ("max_samples", "eval_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"data.{name} is {value}; use 1 or more, or leave it out for all")
        if self.eval_samples is not None and self.eval_path is None and not self.eval_fraction:
            raise UserError(
                "data.eval_samples is set but nothing is held out; set data.eval_fraction or data.eval_path"
            )
