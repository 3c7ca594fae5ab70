"""A recipe's section `model`: a model with its weights, or a shape with random ones. Importing this loads neither
torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatrain.base.errors import UserError

DTYPES = ("float32", "bfloat16", "auto")
_OF_SHAPES = ("tokenizer", "seed", "config")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to start from: `name`, or `shape` for random weights."""

    name: str | None = None
    """A name on the Hugging Face Hub, or a folder with config, weights and tokenizer."""

    revision: str | None = None
    """Branch, tag or commit on the Hub. Left out: its main branch."""

    dtype: str = "float32"
    """What to load the weights in: `float32`, `bfloat16`, or `auto` (as they were saved). bfloat16 means bf16 compute
    with exact fp32 masters, see `engine.precision`."""

    cache_dir: str | None = None
    """Where a model out of a package is kept once converted. Left out: megatrain's folder in the user's cache."""

    shape: str | None = None
    """Instead of `name`: a new model, whose random weights are made in their homes, a layer at a time. What `megatrain
    plan` takes as MODEL: a built-in shape such as `command-r-plus`, a folder or its config.json, a name on the Hub."""

    tokenizer: str | None = None
    """Of a `shape`, which has none: a folder, or a name on the Hub. Its ids must be within the shape's vocabulary."""

    seed: int | None = None
    """Of a shape's random weights. Left out: 0."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Values that replace those of the shape's config, as in `model.config.max_position_embeddings=524288`."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"model.dtype is {self.dtype!r}; use one of {', '.join(DTYPES)}")
        if self.name is not None and self.shape is not None:
            raise UserError(
                f"model.name is {self.name!r} and model.shape is {self.shape!r}; keep one of them: a name for a model "
                "with its weights, a shape for random ones (model.shape= on the command line takes it back)"
            )
        if self.shape is not None:
            self._check_shape()
            return
        if self.name is None:
            raise UserError(
                "model.name is missing; give a folder or a name on the Hugging Face Hub, or model.shape for a new "
                "model with random weights"
            )
        if not self.name.strip():
            raise UserError(f"model.name is {self.name!r}; give a folder, or a name on the Hugging Face Hub")
        if given := next((key for key in _OF_SHAPES if getattr(self, key) not in (None, {})), None):
            raise UserError(f"model.{given} is for model.shape; a model with a name has its own: leave it out")

    def _check_shape(self) -> None:
        if not self.shape.strip():
            raise UserError(f"model.shape is {self.shape!r}; give what `megatrain plan` takes as MODEL")
        if self.tokenizer is None or not self.tokenizer.strip():
            raise UserError(
                f"model.tokenizer is missing: the shape {self.shape} has none; give a folder, or a name on the Hugging "
                "Face Hub"
            )
        if self.revision is not None:
            raise UserError("model.revision is for model.name; a shape has no revision: leave it out")
        if self.dtype == "auto":
            raise UserError("model.dtype is 'auto', but a shape was never saved; use float32 or bfloat16")

    @property
    def given(self) -> str:
        """Its name or shape."""
        return self.name or self.shape or ""
