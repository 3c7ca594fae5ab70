"""Checkpoints that cannot be written, and what is told of those that can: warnings, interrupts, events."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from saving_helpers import AtStep, Gate, files_of, load_weights, make_trainer
from trainer_helpers import assert_equal_weights, llama, rows
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import megatrain as mt
from megatrain.run_log import LOG_NAME
from megatrain.save.checkpoints import damage_of
from megatrain.save.layers import SavedLayers
from megatrain.save.saving import Saving
from megatrain.save.tensor_files import Shards


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    mt.init(device="cpu")


def fail_to_write(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The disk is full at the group of that number, once."""
    write, calls = Shards.write_group, []

    def failing(shards: Shards, tensors: Any) -> None:
        calls.append(1)
        if len(calls) == at:
            raise OSError(28, "No space left on device")
        write(shards, tensors)

    monkeypatch.setattr(Shards, "write_group", failing)


def test_a_full_disk_is_told_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = make_trainer(tmp_path / "whole")
    whole.train()
    groups = 2 * len(whole.engine.homes) + 1
    fail_to_write(monkeypatch, groups + 3)
    trainer = make_trainer(tmp_path / "run", save_total_limit=1)
    trainer.train()
    assert "checkpoint-4 was not saved (" in caplog.text and "is full" in caplog.text
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoint-6", LOG_NAME}
    assert_equal_weights(mt.full_state_dict(trainer.model), mt.full_state_dict(whole.model))
    assert_equal_weights(files_of(tmp_path / "run" / "checkpoint-6"), files_of(tmp_path / "whole" / "checkpoint-6"))


def test_a_full_disk_ends_the_run_where_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mt.init(device="cpu", on_save_error="stop")
    trainer = make_trainer(tmp_path)
    fail_to_write(monkeypatch, 2 * len(trainer.engine.homes) + 4)
    with pytest.raises(OSError, match="is full"):
        trainer.train()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", LOG_NAME}
    assert damage_of(tmp_path / "checkpoint-2") == []


def test_the_best_checkpoint_is_none_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = make_trainer(tmp_path, None, {"eval_dataset": rows(4)}, **changes)
    fail_to_write(monkeypatch, 2 * (2 * len(trainer.engine.homes) + 1) + 2)
    trainer.train()
    # The loss falls, so the last one would have been the best.
    assert trainer.state.best_global_step == 6
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_drops_what_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    gate = Gate(monkeypatch)

    def interrupt() -> None:
        threading.Timer(0.2, gate.opened.set).start()
        raise error

    trainer = make_trainer(tmp_path, None, {"callbacks": [AtStep(3, interrupt)]})
    with pytest.raises(error):
        trainer.train()
    assert [path.name for path in tmp_path.iterdir()] == [LOG_NAME]
    assert not any(thread.name.startswith(("megatrain-save", "megatrain-capture")) for thread in threading.enumerate())
    assert all(home.captured.is_recorded for home in trainer.engine.homes)


def test_an_error_of_the_run_comes_behind_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)

    def fail() -> None:
        threading.Timer(0.2, gate.opened.set).start()
        raise RuntimeError("a callback of mine")

    with pytest.raises(RuntimeError, match="a callback of mine"):
        make_trainer(tmp_path, None, {"callbacks": [AtStep(3, fail)]}).train()
    assert damage_of(tmp_path / "checkpoint-2") == []


def test_a_lane_that_fails_ends_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = SavedLayers.capture

    def failing(layers: SavedLayers, home: Any, *, copies: bool) -> Any:
        if home is layers.homes[2]:
            raise RuntimeError("the update lane died")
        return capture(layers, home, copies=copies)

    monkeypatch.setattr(SavedLayers, "capture", failing)
    with pytest.raises(RuntimeError, match="the update lane died"):
        make_trainer(tmp_path).train()
    assert [path.name for path in tmp_path.iterdir()] == [LOG_NAME]


@pytest.mark.parametrize("behind", [True, False])
def test_what_fails_behind_a_complete_checkpoint_takes_nothing_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, behind: bool
) -> None:
    def rotate(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    mt.init(device="cpu", save_in_background=behind)
    monkeypatch.setattr("megatrain.trainer_checkpoints.drop_surplus", rotate)
    changes = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = make_trainer(tmp_path, None, {"eval_dataset": rows(4)}, **changes)
    trainer.train()
    assert "checkpoint-6 is complete, but what comes behind it failed" in caplog.text
    assert "was not saved" not in caplog.text
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-6")


@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize("kind", ["own", "of transformers"])
def test_no_event_comes_for_a_checkpoint_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: bool, kind: str
) -> None:
    mt.init(device="cpu", save_in_background=behind)
    looks = Looks() if kind == "own" else OfTransformers()
    trainer = make_trainer(tmp_path, llama(), {"callbacks": [looks]})
    fail_to_write(monkeypatch, 2 * len(trainer.engine.homes) + 4)
    trainer.train()
    assert list(looks.seen) == [2, 6]


def test_an_interrupt_behind_the_start_of_a_save_leaves_nothing_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Saving.start

    def interrupted(saving: Saving, context: Any) -> None:
        start(saving, context)
        raise KeyboardInterrupt

    monkeypatch.setattr(Saving, "start", interrupted)
    trainer = make_trainer(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not any(thread.name.startswith(("megatrain-save", "megatrain-capture")) for thread in threading.enumerate())
    assert all(home.captured.is_recorded for home in trainer.engine.homes)


# Callbacks


class Looks(TrainerCallback):
    """Of the user's own: saves the model beside the checkpoint, as many do."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, torch.Tensor]] = {}

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        assert damage_of(Path(args.output_dir) / f"checkpoint-{state.global_step}") == []
        self.seen[state.global_step] = {name: value.clone() for name, value in model.state_dict().items()}


class OfTransformers(Looks):
    on_save = lambda self, args, state, control, **kwargs: Looks.on_save(self, args, state, control, **kwargs)  # noqa: E731
    on_save.__module__ = "transformers.integrations.integration_utils"


@pytest.mark.parametrize("callback", [Looks, OfTransformers])
def test_callbacks_find_the_checkpoint_complete(tmp_path: Path, callback: type[Looks]) -> None:
    looks = callback()
    make_trainer(tmp_path, llama(), {"callbacks": [looks]}).train()
    assert list(looks.seen) == [2, 4, 6]
    if callback is Looks:
        for step, seen in looks.seen.items():
            assert_equal_weights(load_weights(tmp_path / f"checkpoint-{step}"), seen)
