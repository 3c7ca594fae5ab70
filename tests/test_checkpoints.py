"""Checkpoints are what was written, or the damage is named; a signal ends a run behind one."""

from __future__ import annotations

import collections
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupting import interrupted
from saving_helpers import cut_short, flip_a_bit
from trainer_helpers import arguments, assert_equal_weights, llama, rows, train, weights
from transformers import TrainerCallback

import megatrain as mt
from megatrain import cli
from megatrain.base.errors import StoppedRunError, UserError
from megatrain.save.checkpoints import MANIFEST_NAME, checkpoints_in, damage_of, write_manifest
from megatrain.save.folder import whole_folder
from megatrain.save.weights import checkpoint_bytes


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with the checkpoints 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("run")
    train(mt.Trainer, folder, save_strategy="steps", save_steps=2)
    assert [path.name for path in checkpoints_in(folder)] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    return folder


@pytest.fixture
def run(run_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_folder, tmp_path / "run"))


DAMAGE = [
    (flip_a_bit, "{} has changed since it was written"),
    (cut_short, "{} has .* bytes and should have "),
    (Path.unlink, "{} is missing"),
]
NAMES = ["model.safetensors", "optimizer.safetensors", "optimizer.json", "scheduler.pt", "rng_state.pth", "config.json"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("harm", "told"), DAMAGE)
def test_damage_is_found_and_named(run: Path, name: str, harm: Callable[[Path], Any], told: str) -> None:
    folder = run / "checkpoint-6"
    assert damage_of(folder) == []
    harm(folder / name)
    (damage,) = damage_of(folder)
    assert damage.startswith(name)
    with pytest.raises(UserError, match=f"resume_from_checkpoint: .*checkpoint-6 is damaged: {told.format(name)}"):
        mt.Trainer(llama(), arguments(run), train_dataset=rows()).train(resume_from_checkpoint=str(folder))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "files": {"a": {}}}', '{"format": 9}'])
def test_a_manifest_that_is_none_is_damage(run: Path, text: str) -> None:
    (run / "checkpoint-6" / MANIFEST_NAME).write_text(text)
    (damage,) = damage_of(run / "checkpoint-6")
    assert damage.startswith(MANIFEST_NAME)


def test_files_that_came_later_are_no_damage(run: Path) -> None:
    (run / "checkpoint-6" / "notes.txt").write_text("the best one so far")
    assert damage_of(run / "checkpoint-6") == []


def test_the_newest_sound_checkpoint_is_resumed_from(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip_a_bit(run / "checkpoint-6" / "model.safetensors")
    (run / "checkpoint-4" / "optimizer.safetensors").unlink()
    trainer = mt.Trainer(llama(), arguments(run), train_dataset=rows())
    trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-6 cannot be resumed from (model.safetensors has changed since it was written)" in caplog.text
    told = "checkpoint-4 cannot be resumed from (it has no optimizer.safetensors): resuming from checkpoint-2"
    assert told in caplog.text and caplog.text.count("resuming from") == 1
    whole, _ = train(mt.Trainer, run / "again")
    assert_equal_weights(weights(trainer.model), weights(whole.model))


def cut_without_manifest(folder: Path) -> None:
    (folder / MANIFEST_NAME).unlink()
    cut_short(folder / "rng_state.pth")


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda folder: [path.unlink() for path in folder.iterdir()], "it has no trainer_state.json"),
        (cut_without_manifest, r"rng_state.pth cannot be read \(its end is missing\)"),
    ],
)
def test_what_has_no_manifest_is_looked_at_too(
    run: Path, harm: Callable[[Path], Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    harm(run / "checkpoint-6")
    trainer = mt.Trainer(llama(), arguments(run), train_dataset=rows())
    trainer.train(resume_from_checkpoint=True)
    assert re.search(f"checkpoint-6 cannot be resumed from .{told}.*resuming from checkpoint-4", caplog.text)
    assert cli.run_command(["verify", str(run)]) == 1


def test_where_all_are_damaged_nothing_is_resumed_from(run: Path) -> None:
    for folder in checkpoints_in(run):
        cut_short(folder / "optimizer.safetensors")
    trainer = mt.Trainer(llama(), arguments(run), train_dataset=rows())
    told = "no checkpoint can be resumed from; the last, .*checkpoint-6: optimizer.*; nor can 2 others; "
    with pytest.raises(UserError, match=rf"{told}`megatrain verify {re.escape(str(run))}` looks at each"):
        trainer.train(resume_from_checkpoint=True)


# Space

Disk = collections.namedtuple("Disk", "total used free")


def with_free(monkeypatch: pytest.MonkeyPatch, num_bytes: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(0, 0, int(num_bytes)))


def test_space_for_checkpoints_is_seen_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = mt.Trainer(llama(), arguments(tmp_path, save_strategy="steps", save_steps=2), train_dataset=rows())
    trainer.create_optimizer()
    each_bytes = checkpoint_bytes(trainer.model, trainer.engine, trainer.optimizer)
    with_free(monkeypatch, 0.9 * each_bytes)
    with pytest.raises(UserError, match=r"output_dir: .* and 1 of its checkpoints need"):
        trainer.train()
    assert trainer.state.global_step == 0
    with_free(monkeypatch, 2.9 * each_bytes)
    trainer.check_space(6)
    assert "has room for 2 of the 3 checkpoints of this run" in caplog.text
    trainer.args.save_total_limit = 2
    with pytest.raises(UserError, match="and 3 of its checkpoints need"):
        trainer.check_space(6)
    with_free(monkeypatch, 3 * each_bytes)
    trainer.check_space(6)
    trainer.args.save_strategy = "no"
    with_free(monkeypatch, 0)
    trainer.check_space(6)


# Power cuts


def test_everything_is_on_the_disk_before_it_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(descriptor: int) -> None:
        events.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def noted_rename(source: Any, target: Any) -> None:
        events.append(("rename", str(source)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    with whole_folder(tmp_path / "target") as staging:
        (staging / "inner").mkdir()
        (staging / "inner" / "a").write_text("a")
        (staging / "b").write_text("b")
        write_manifest(staging)
    renamed = events.index(("rename", str(staging)))
    written = {str(staging), *(f"{staging}/{name}" for name in ("inner", "inner/a", "b", MANIFEST_NAME))}
    assert {path for what, path in events[:renamed] if what == "sync"} == written
    assert ("sync", str(tmp_path)) in events[renamed:]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("options", [{}, {"keep_others": True}])
def test_an_interrupt_leaves_the_old_files_or_the_new(options: dict[str, Any], tmp_path: Path) -> None:
    def save(folder: Path, text: str) -> None:
        with whole_folder(folder, **options) as staging:
            (staging / "a").write_text(text)
            (staging / "model.safetensors").write_text(text)

    save(tmp_path / "0", "old")
    num_places = interrupted(lambda: save(tmp_path / "0", "new"), None, ours=("megatrain/save",))
    assert num_places > 30
    for at in range(1, num_places + 1):
        folder = tmp_path / str(at)
        save(folder, "old")
        interrupted(lambda folder=folder: save(folder, "new"), at, ours=("megatrain/save",))
        found = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
        assert found.keys() == {"a", "model.safetensors"}, at
        assert len(set(found.values())) == 1, at
        save(folder, "newest")
        assert {path.read_text() for path in folder.iterdir() if path.is_file()} == {"newest"}


# Signals


class Signalled(TrainerCallback):
    """Sends a signal in the middle of a step."""

    def __init__(self, number: signal.Signals, at: int) -> None:
        self.number, self.at = number, at

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at:
            os.kill(os.getpid(), self.number)


class SignalledIn(TrainerCallback):
    """Sends a signal in an event, from some step on."""

    def __init__(self, event: str, at: int) -> None:
        self.at = at
        setattr(self, event, self.send)

    def send(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self.at:
            self.at = 10**9
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("event", ["on_step_end", "on_evaluate", "on_log", "on_epoch_end", "on_save", "on_train_end"])
def test_a_signal_at_the_end_changes_nothing(event: str, tmp_path: Path) -> None:
    trainer = mt.Trainer(
        llama(),
        arguments(tmp_path, eval_strategy="epoch"),
        train_dataset=rows(),
        eval_dataset=rows(4),
        callbacks=[SignalledIn(event, at=6)],
    )
    assert trainer.train().global_step == 6
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def evaluating_trainer(folder: Path, *callbacks: TrainerCallback) -> mt.Trainer:
    return mt.Trainer(
        llama(attention_dropout=0.2),
        arguments(folder, eval_strategy="epoch", num_train_epochs=3),
        train_dataset=rows(),
        eval_dataset=rows(4),
        callbacks=list(callbacks),
    )


@pytest.fixture(scope="module")
def of_whole_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    trainer = evaluating_trainer(tmp_path_factory.mktemp("whole"))
    trainer.train()
    return weights(trainer.model)


@pytest.mark.parametrize("event", ["on_step_begin", "on_evaluate", "on_epoch_end", "on_epoch_begin"])
@pytest.mark.parametrize("at", [2, 3])
def test_a_signal_anywhere_leaves_a_run_that_goes_on_bit_for_bit(
    event: str, at: int, of_whole_run: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Step 3 ends the epoch: its evaluation draws random numbers, and is of the run."""
    with pytest.raises(StoppedRunError):
        evaluating_trainer(tmp_path, SignalledIn(event, at)).train()
    resumed = evaluating_trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert_equal_weights(weights(resumed.model), of_whole_run)


def test_the_checkpoint_of_a_signal_stays_though_another_is_the_best(tmp_path: Path) -> None:
    trainer = mt.Trainer(
        llama(),
        arguments(tmp_path, learning_rate=1.0, save_strategy="steps", save_steps=2, eval_strategy="steps",
                  eval_steps=2, load_best_model_at_end=True, save_total_limit=1),
        train_dataset=rows(),
        eval_dataset=rows(4),
        callbacks=[Signalled(signal.SIGINT, at=4)],
    )  # fmt: skip
    with pytest.raises(StoppedRunError):
        trainer.train()
    assert checkpoints_in(tmp_path)[-1].name == "checkpoint-5"


def test_output_that_has_gone_does_not_stop_the_save(tmp_path: Path) -> None:
    """Ctrl-C ends what the output is piped into as well."""
    script = (
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from trainer_helpers import *\n"
        f"settings = arguments({str(tmp_path)!r}, num_train_epochs=100000)\n"
        "trainer = mt.Trainer(llama(), settings, train_dataset=rows())\n"
        "print('go', file=sys.stderr, flush=True)\n"
        "trainer.train()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-u", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        while "'loss'" not in process.stdout.readline():
            pass
        process.stdout.close()
        os.kill(process.pid, signal.SIGINT)
        errors = process.stderr.read()
        assert process.wait(timeout=60) == 0, errors
    assert len(checkpoints_in(tmp_path)) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_was_ended_by_a_signal_goes_on_bit_for_bit(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    whole, _ = train(mt.Trainer, tmp_path / "whole", llama(attention_dropout=0.2))
    before = signal.getsignal(number)
    ended = mt.Trainer(
        llama(attention_dropout=0.2),
        arguments(tmp_path / "ended", save_only_model=True),
        train_dataset=rows(),
        callbacks=[Signalled(number, at=2)],
    )
    with pytest.raises(StoppedRunError) as stopped:
        ended.train()
    assert stopped.value.code == 0
    assert signal.getsignal(number) == before
    assert "after step 3; go on with trainer.train(resume_from_checkpoint=True)" in capsys.readouterr().out
    assert [path.name for path in checkpoints_in(tmp_path / "ended")] == ["checkpoint-3"]
    resumed = mt.Trainer(llama(attention_dropout=0.2), arguments(tmp_path / "ended"), train_dataset=rows())
    resumed.train(resume_from_checkpoint=True)
    assert_equal_weights(weights(resumed.model), weights(whole.model))


def test_somebody_elses_handler_stays_theirs(tmp_path: Path) -> None:
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        trainer = mt.Trainer(
            llama(), arguments(tmp_path), train_dataset=rows(), callbacks=[Signalled(signal.SIGTERM, at=1)]
        )
        trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]
    assert trainer.state.global_step == trainer.state.max_steps
