"""Disk space that a run needs, counted before it starts: a full disk after hours of training helps nobody.

Rule: an estimate may be a little high, never low. Config and tokenizer are counted with a flat allowance.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatrain.base.errors import UserError
from megatrain.base.paths import existing_parent, looking_at
from megatrain.base.units import MIB, format_bytes
from megatrain.plan.placement import NUM_MOMENTS
from megatrain.save.layers import LOW_HALF_BYTES
from megatrain.spec.formats import most_moment_bytes

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainingArguments

    from megatrain.commands.length import RunLength
    from megatrain.recipe import Recipe

SMALL_FILES_BYTES = 32 * MIB


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the model's weights as they are saved."""
    return sum(parameter.numel() * parameter.dtype.itemsize for parameter in model.parameters())


def disk_rows(recipe: Recipe, model: nn.Module, arguments: TrainingArguments, length: RunLength) -> dict[str, int]:
    """Bytes by name of what the run has in its folder at its fullest. Shapes only: the model may be streamed."""
    model_bytes = weight_bytes(model) + SMALL_FILES_BYTES
    rows = {"trained model": model_bytes} if recipe.output.save_model else {}
    num_checkpoints = length.num_checkpoints(arguments)
    if num_checkpoints:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        moments_bytes = 0
        if not arguments.save_only_model:
            moments_bytes = NUM_MOMENTS * sum(most_moment_bytes(recipe.engine.moments, p.numel()) for p in trained)
            # A master that is saved as bf16 lacks its low half.
            moments_bytes += sum(LOW_HALF_BYTES * p.numel() for p in trained if p.dtype == torch.bfloat16)
        name = f"{num_checkpoints} checkpoints" if num_checkpoints > 1 else "1 checkpoint"
        rows[name] = num_checkpoints * (model_bytes + moments_bytes)
    return rows


def check_disk(folder: Path, rows: dict[str, int]) -> int:
    """Free bytes where `folder` will be.

    Raises UserError when they are fewer than the rows add up to.
    """
    with looking_at("output.dir"):
        free_bytes = shutil.disk_usage(existing_parent(folder)).free
    needed_bytes = sum(rows.values())
    if needed_bytes > free_bytes:
        parts = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in rows.items())
        raise UserError(
            f"output.dir: {folder} needs {format_bytes(needed_bytes)} ({parts}), but {format_bytes(free_bytes)} are "
            "free; free some, choose a folder on another disk, or keep fewer checkpoints (training.save_total_limit)"
        )
    return free_bytes
