"""The output folder of a run: files in the way of checkpoints, folders that cannot be written or were moved."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from trainer_helpers import arguments, assert_equal_weights, llama, rows, train, weights

import megatrain as mt
from megatrain.run_log import LOG_NAME


@pytest.mark.parametrize("kind", ["file", "link to nothing"])
def test_a_file_in_the_place_of_a_checkpoint_is_seen_before_the_run(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "checkpoint-6"
    if kind == "file":
        path.write_text("notes")
    else:
        path.symlink_to(tmp_path / "nowhere")
    (tmp_path / "checkpoint-notes.txt").touch()  # no checkpoint has this name
    trainer = mt.Trainer(llama(), arguments(tmp_path, save_strategy="epoch"), train_dataset=rows())
    with pytest.raises(mt.UserError, match="checkpoint-6 in .* is a file"):
        trainer.train()
    assert trainer.state.global_step == 0
    path.unlink()
    trainer.train()
    assert path.is_dir()


def unwritable(tmp_path: Path) -> Path:
    """Root may write anywhere, but not below a file."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "out"


def test_a_run_that_saves_nothing_is_warned_of_a_place_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = mt.Trainer(llama(), arguments(tmp_path / "other"), train_dataset=rows())
    trainer.args.output_dir = str(unwritable(tmp_path))
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        trainer.train()
    assert trainer.state.global_step == 6
    assert caplog.text.count("Ctrl-C would save a checkpoint") == 1
    trainer.args.save_strategy = "steps"
    with pytest.raises(mt.UserError, match="cannot write in"):
        trainer.train()


def test_the_best_checkpoint_of_a_run_that_was_moved_is_found(tmp_path: Path) -> None:
    """Noted with its whole path, it is looked for by its name where that path is gone."""
    given: dict[str, Any] = {"eval_dataset": rows(4)}
    changes = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    # A higher loss counts as better, so the first checkpoint is the best one.
    changes |= {"metric_for_best_model": "loss", "greater_is_better": True}
    old, new = tmp_path / "old", tmp_path / "new"
    trainer, _ = train(mt.Trainer, old, given=given, num_train_epochs=2, **changes)
    best = weights(trainer.model)
    os.rename(old, new)
    shutil.copytree(new, tmp_path / "kept")

    moved = mt.Trainer(llama(), arguments(new, num_train_epochs=2, **changes), train_dataset=rows(), **given)
    moved.train(resume_from_checkpoint=True)  # at its end already: nothing is saved any more
    assert_equal_weights(weights(moved.model), best)
    assert moved.state.best_model_checkpoint == str(new / "checkpoint-3")

    # The one that is best is not given up for newer ones.
    kept = tmp_path / "kept"
    limited = changes | {"save_total_limit": 1}
    longer = mt.Trainer(llama(), arguments(kept, num_train_epochs=4, **limited), train_dataset=rows(), **given)
    longer.train(resume_from_checkpoint=True)
    assert longer.state.best_model_checkpoint == str(kept / "checkpoint-3")
    assert {path.name for path in kept.iterdir()} == {"checkpoint-3", LOG_NAME}
    assert_equal_weights(weights(longer.model), best)


@pytest.mark.parametrize("name", ["a file", "a file/run"])
def test_a_folder_that_cannot_be_made_is_refused_before_the_model_is_streamed(tmp_path: Path, name: str) -> None:
    (tmp_path / "a file").write_text("")
    model = llama()
    with pytest.raises(mt.UserError, match=r"output_dir: .* cannot be made a folder \("):
        mt.Trainer(model, arguments(tmp_path / name))
    assert mt.stream(model) is model  # it was not yet
