"""A tiny shape without weights, and the work of a benchmark on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planning_helpers import llama_config

from megatrain.bench.work import Work

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
             vocab_size=96)  # fmt: skip


def small_model(folder: Path) -> Path:
    """A model's folder without weights, under a name that a terminal could take for markup."""
    llama_config(**SMALL).save_pretrained(folder / "[bold]model")
    return folder / "[bold]model"


def small_work(folder: Path) -> Work:
    return Work(
        config_folder=str(small_model(folder)),
        num_sequences=4,
        length=8,
        num_micro_batches=2,
        num_steps=5,
        device="cpu",
    )


def silent(event: dict[str, Any]) -> None:
    """Takes what a row tells."""
    del event
