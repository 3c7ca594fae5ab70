"""What to train on and how to cut it: the one dataclass of this room.

Rule: a setting that cannot work is refused here, by name, before a file is opened.
"""

from __future__ import annotations

import numbers
import os
import sys
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

_KINDS: dict[str, tuple[type, str]] = {
    "format": (str, "a text"),
    "sequence_length": (numbers.Integral, "a whole number"),
    "packing": (bool, "True or False"),
    "eval_fraction": (numbers.Real, "a number"),
    "eval_samples": (numbers.Integral, "a whole number"),
    "max_samples": (numbers.Integral, "a whole number"),
    "seed": (numbers.Integral, "a whole number"),
}
_OPTIONAL = ("eval_samples", "max_samples")


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
        self._check_kinds()
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
            if value is not None and not 1 <= value <= sys.maxsize:
                raise UserError(f"data.{name} is {value}; use 1 to {sys.maxsize}, or leave it out for all")
        if self.seed < 0:
            raise UserError(f"data.seed is {self.seed}; use 0 or more")
        if self.eval_samples is not None and self.eval_path is None and not self.eval_fraction:
            raise UserError(
                "data.eval_samples is set but nothing is held out; set data.eval_fraction or data.eval_path"
            )

    def _check_kinds(self) -> None:
        for name in ("path", "eval_path"):
            value = getattr(self, name)
            sources = value if isinstance(value, (list, tuple)) else [value]
            if any(isinstance(source, str) and not source.strip() for source in sources):
                raise UserError(f"data.{name} is {value!r}; name a file, a folder or a dataset")
        for name, (kind, wanted) in _KINDS.items():
            value = getattr(self, name)
            is_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
            if not is_kind and not (value is None and name in _OPTIONAL):
                raise UserError(f"data.{name} is {value!r}; use {wanted}")
