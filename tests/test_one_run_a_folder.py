"""The output folder of a run is its own until it ends or dies, and a second run is told whose it is."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from command_helpers import command, write_recipe
from disk_helpers import start_python
from trainer_helpers import arguments, llama, rows

import megatrain as mt
from megatrain.base.folder_lock import LOCK_NAME, is_held_elsewhere
from megatrain.save.folder import holding_output_folder, whole_folder

HOLD = """
import sys, pathlib
from megatrain.base.folder_lock import holding_folder
with holding_folder(pathlib.Path(sys.argv[1]), ""):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other_run(tmp_path: Path):
    """A process that trains in tmp_path/out."""
    (tmp_path / "out").mkdir()
    process = start_python(HOLD, tmp_path / "out")
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_run_is_refused_and_breaks_nothing(
    tmp_path: Path, other_run, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    being_written = out / ".checkpoint-3.incomplete"
    being_written.mkdir()
    trainer = mt.Trainer(llama(), arguments(out, save_strategy="steps", save_steps=2), train_dataset=rows())
    names_all = rf"output_dir: {re.escape(str(out))} is in use by process {other_run.pid} on .*another folder"
    with pytest.raises(mt.UserError, match=names_all):
        trainer.train()
    code, _, told = command(capsys, "train", write_recipe(tmp_path))
    assert code == 2 and f"process {other_run.pid}" in told and "output.dir" in told
    with pytest.raises(mt.UserError, match="in use"), whole_folder(out / "checkpoint-9"):
        pass
    trainer.save_model()  # a model is saved for all that: it takes its place in one piece
    assert being_written.is_dir() and (out / "model.safetensors").is_file()

    os.kill(other_run.pid, signal.SIGKILL)
    other_run.wait()
    assert (out / LOCK_NAME).is_file() and not is_held_elsewhere(out)
    trainer.train()
    assert sorted(path.name for path in out.glob(".*")) == []


def test_runs_of_one_process_share_a_folder(tmp_path: Path) -> None:
    with holding_output_folder(tmp_path, "output_dir"):
        for _ in range(2):
            mt.Trainer(llama(), arguments(tmp_path, max_steps=1), train_dataset=rows()).train()
        assert (tmp_path / LOCK_NAME).is_file()
    assert not (tmp_path / LOCK_NAME).exists()


def test_a_run_that_saves_nothing_is_warned_and_one_that_only_evaluates_is_not(
    tmp_path: Path, other_run, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = mt.Trainer(llama(), arguments(tmp_path / "out", max_steps=1), train_dataset=rows(), eval_dataset=rows(2))
    with caplog.at_level("WARNING", logger="megatrain"):
        trainer.evaluate()
        assert not caplog.messages
        trainer.train()
    assert "in use by process" in caplog.text and "Nothing will be saved there" in caplog.text
