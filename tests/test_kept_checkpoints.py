"""Which checkpoints a run keeps under save_total_limit, and what a run that goes on takes from its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainer_helpers import arguments, llama, rows, train

import megatrain as mt
from megatrain.save.checkpoints import checkpoints_in


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with the checkpoints 1 to 6."""
    folder = tmp_path_factory.mktemp("run")
    train(mt.Trainer, folder, save_strategy="steps", save_steps=1)
    return folder


def go_on(run: Path, start: str | bool = True, **changes: Any) -> mt.Trainer:
    settings = {"save_strategy": "steps", "save_steps": 1} | changes
    trainer = mt.Trainer(llama(), arguments(run, **settings), train_dataset=rows())
    trainer.train(resume_from_checkpoint=start)
    return trainer


def test_steps_are_those_of_the_run_that_goes_on(run_folder: Path, tmp_path: Path) -> None:
    start = str(run_folder / "checkpoint-4")
    trainer = go_on(tmp_path, start, save_steps=3, logging_steps=0.5)
    assert [folder.name for folder in checkpoints_in(tmp_path)] == ["checkpoint-6"]
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 3, 4, 6]
