"""Runs at their end, and runs in the place of others: no step is made twice, no checkpoint of another run goes on."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_helpers import command, files_below, write_recipe
from safetensors.torch import load_file
from saving_helpers import flip_a_bit
from trainer_helpers import Recorder, arguments, assert_equal_weights, llama, rows, train, weights

import megatrain as mt
from megatrain.commands import model, record
from megatrain.models import ResolvedModel, resolve_model
from megatrain.run_log import LOG_NAME
from megatrain.save.checkpoints import MANIFEST_NAME

SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}


def test_a_trainer_at_its_last_step_makes_none(tmp_path: Path) -> None:
    """Its last step is within an epoch (of 3 steps)."""
    settings = dict(max_steps=4, save_strategy="steps", save_steps=2, lr_scheduler_type="constant")
    trainer, _ = train(mt.Trainer, tmp_path, **settings)
    trained = weights(trainer.model)
    seen = Recorder()
    again = mt.Trainer(llama(), arguments(tmp_path, **settings), train_dataset=rows(), callbacks=[seen])
    output = again.train(resume_from_checkpoint=True)
    assert (output.global_step, output.training_loss) == (4, 0.0)
    assert_equal_weights(weights(again.model), trained)
    assert [name for name, _ in seen.events if name != "on_log"] == ["on_init_end", "on_train_begin", "on_train_end"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4", LOG_NAME]


def test_a_finished_run_is_left_alone_and_one_without_its_model_gets_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    recipe = write_recipe(tmp_path, training=SAVING, data={"eval_fraction": 0.0}, sample={"prompts": []})
    assert command(capsys, "train", recipe)[0] == 0
    trained, before = load_file(out / "model.safetensors"), files_below(out)
    times = {name: (out / name).stat().st_mtime_ns for name in before}
    code, told, _ = command(capsys, "resume", out)
    assert code == 0 and "all 4 steps are done" in told and "training for" not in told
    assert files_below(out) == before and {name: (out / name).stat().st_mtime_ns for name in before} == times

    # As when it is killed before its model is saved, whatever lies there.
    record.note_run(recipe, [], out)
    (out / "model.safetensors").unlink()  # not written over: it is mapped
    (out / "model.safetensors").write_bytes(b"of a former run")
    code, told, err = command(capsys, "resume", out)
    assert code == 0 and "training for 0 steps" in told, err
    assert_equal_weights(load_file(out / "model.safetensors"), trained)
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]

    # A run in its place: none of its checkpoints is there any more when it trains, and all are where it is refused.
    anew = ["output.overwrite=true", "training.save_strategy=no", "training.max_steps=1"]
    code, _, err = command(capsys, "train", recipe, *anew, "data.path=nowhere.jsonl")
    assert code == 2 and (out / "checkpoint-4").is_dir() and record.saved_step(out) == 4
    code, told, _ = command(capsys, "train", recipe, *anew)
    assert code == 0 and "checkpoint-2 to checkpoint-4, of the run that is overwritten" in told
    assert not list(out.glob("checkpoint-*")) and not list(out.glob(".*"))
    assert json.loads((out / record.RECORD_NAME).read_text())["overrides"] == anew


def test_the_model_of_a_run_says_where_it_came_from_and_what_it_should_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolved(*given: Any, **options: Any) -> ResolvedModel:
        return dataclasses.replace(resolve_model(*given, **options), note="from a package: coarse")

    monkeypatch.setattr(model, "resolve_model", resolved)
    out = tmp_path / "out"
    training = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    recipe = write_recipe(tmp_path, training=training, data={"eval_fraction": 0.0}, sample={"prompts": []})
    assert command(capsys, "train", recipe)[0] == 0
    assert "| base model's weights | from a package: coarse |" in (out / "README.md").read_text()
    (out / "README.md").write_text("words of mine")
    code, told, _ = command(capsys, "verify", out)
    names = {"model.safetensors", "config.json", "tokenizer.json"}
    assert code == 0 and told.count("sound: every file is what was written") == 2
    manifest = json.loads((out / MANIFEST_NAME).read_text())["files"]
    assert names < manifest.keys() and not {"README.md", LOG_NAME, record.RECORD_NAME} & manifest.keys()
    flip_a_bit(out / "model.safetensors")
    code, told, _ = command(capsys, "verify", out)
    assert code == 1 and "out is damaged: model.safetensors has changed" in " ".join(told.split())

    # What another program saves there is not what the manifest is of.
    trainer, _ = train(mt.Trainer, tmp_path / "other")
    trainer.save_model(str(out))
    assert not (out / MANIFEST_NAME).exists() and (out / "checkpoint-1" / MANIFEST_NAME).exists()


def test_a_run_without_checkpoints_says_whether_it_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    training = {"max_steps": 1, "save_strategy": "no"}
    recipe = write_recipe(tmp_path, training=training, data={"eval_fraction": 0.0}, sample={"prompts": []})
    assert command(capsys, "train", recipe)[0] == 0
    before = files_below(out)
    code, told, _ = command(capsys, "resume", out)
    assert code == 0 and f"all 1 steps are done and {out} has the model" in told
    code, _, err = command(capsys, "resume", out, "training.max_steps=2")
    assert code == 2 and "is finished (step 1) and saved no checkpoint" in err and f"model.name={out}" in err
    assert files_below(out) == before
    (out / "model.safetensors").unlink()
    code, _, err = command(capsys, "resume", out)
    assert code == 2 and "has saved no checkpoint to go on from" in err and "training.save_steps=100" in err
    assert "resume_from_checkpoint" not in err


def test_what_cannot_be_removed_whole_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    former = [tmp_path / f"checkpoint-{step}" for step in (2, 4)]
    for folder in former:
        folder.mkdir()
        (folder / "file").touch()
    (tmp_path / record.RECORD_NAME).write_text('{"a": "run"}')
    (tmp_path / record.RECIPE_NAME).write_text("the former")
    (tmp_path / "recipe.yaml").write_text("the new one")
    rename = os.rename

    def fail(source: Path, target: Path) -> None:
        if Path(source).name == "checkpoint-4":
            raise OSError("a test")
        rename(source, target)

    monkeypatch.setattr("megatrain.save.folder.os.rename", fail)
    with pytest.raises(OSError, match="a test"):
        record.start_anew(tmp_path / "recipe.yaml", [], tmp_path, former)
    monkeypatch.undo()

    def fail_to_write(path: Path, text: str, write: Callable[[Path, str], None] = record._write) -> None:
        if path.name == record.RECORD_NAME and "overrides" in text:
            assert not former[0].exists()
            raise OSError("the disk is full")
        write(path, text)

    monkeypatch.setattr(record, "_write", fail_to_write)
    with pytest.raises(OSError, match="full"):
        record.start_anew(tmp_path / "recipe.yaml", [], tmp_path, former)
    assert all((folder / "file").is_file() for folder in former) and not list(tmp_path.glob(".*"))
    assert (tmp_path / record.RECORD_NAME).read_text() == '{"a": "run"}'
    assert (tmp_path / record.RECIPE_NAME).read_text() == "the former"
