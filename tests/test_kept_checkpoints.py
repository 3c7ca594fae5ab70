"""Which checkpoints a run keeps under save_total_limit, and what a run that goes on takes from its arguments."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from saving_helpers import flip_a_bit
from trainer_helpers import arguments, llama, rows, train

import megatrain as mt
from megatrain.save.checkpoints import checkpoints_in, drop_surplus


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with the checkpoints 2, 3, 4, 5 and 6."""
    folder = tmp_path_factory.mktemp("run")
    train(mt.Trainer, folder, save_strategy="steps", save_steps=1)
    shutil.rmtree(folder / "checkpoint-1")
    return folder


def go_on(run: Path, start: str | bool = True, **changes: Any) -> mt.Trainer:
    settings = {"save_strategy": "steps", "save_steps": 1} | changes
    trainer = mt.Trainer(llama(), arguments(run, **settings), train_dataset=rows())
    trainer.train(resume_from_checkpoint=start)
    return trainer


def kept_in(run: Path) -> list[int]:
    return [int(folder.name.removeprefix("checkpoint-")) for folder in checkpoints_in(run)]


@pytest.fixture
def run(run_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_folder, tmp_path / "run"))


def test_a_damaged_checkpoint_goes_before_the_sound_one_that_the_run_went_on_from(run: Path) -> None:
    """And what it says of steps is what it does, not what the checkpoint's run said."""
    for step in (2, 3, 6):
        shutil.rmtree(run / f"checkpoint-{step}")
    flip_a_bit(run / "checkpoint-5" / "model.safetensors")
    trainer = go_on(run, save_steps=3, logging_steps=0.5, save_total_limit=2)
    assert kept_in(run) == [4, 6]
    assert trainer.state.logging_steps == 3
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 3, 4, 6]


def test_checkpoints_of_a_branch_that_was_left_go_first(run: Path) -> None:
    """5 and 6 are of the branch, and 5 is written again: it is of this run then."""
    shutil.rmtree(run / "checkpoint-4")
    go_on(run, str(run / "checkpoint-3"), max_steps=5, save_total_limit=2)
    assert kept_in(run) == [4, 5]


def test_a_new_run_keeps_its_own(run: Path) -> None:
    go_on(run, start=False, max_steps=2, save_total_limit=2)
    assert kept_in(run) == [1, 2]


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [
        (None, None, [2, 3, 4, 5, 6]),
        (5, None, [2, 3, 4, 5, 6]),
        (1, None, [4]),
        (1, 2, [2, 4]),
        (2, 2, [2, 4]),
        (3, 2, [2, 3, 4]),
        (4, 5, [2, 3, 4, 5]),
    ],
)
def test_the_newest_and_the_best_stay(run: Path, limit: int | None, best: int | None, kept: list[int]) -> None:
    """4 is the newest, 5 and 6 are of another branch."""
    best_folder = None if best is None else str(run / f"checkpoint-{best}")
    drop_surplus(run, limit, newest=run / "checkpoint-4", best=best_folder, first={"checkpoint-5", "checkpoint-6"})
    assert kept_in(run) == kept
