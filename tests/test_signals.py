"""Signals while `megatrain train` runs: the first ends it behind a checkpoint, the second at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_helpers import signalled, write_recipe

from megatrain import cli
from megatrain.commands.record import RECIPE_NAME, RECORD_NAME


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_behind_a_checkpoint(tmp_path: Path, number: signal.Signals) -> None:
    recipe = write_recipe(tmp_path, training={"max_steps": 1_000_000, "logging_steps": 1, "save_strategy": "no"})
    told, code = signalled(number, "step 2/", "train", recipe)
    assert code == 0
    assert "this step is finished and a checkpoint saved" in told
    (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
    assert f"the last checkpoint is {checkpoint}; go on with: megatrain resume {tmp_path / 'out'}" in told
    assert not (tmp_path / "out" / "config.json").exists()
    assert cli.run_command(["verify", str(tmp_path / "out")]) == 0
    step = int(checkpoint.name.removeprefix("checkpoint-"))
    assert cli.run_command(["resume", str(tmp_path / "out"), f"training.max_steps={step + 2}"]) == 0
    assert (tmp_path / "out" / "config.json").exists()


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, training={"max_steps": 1_000_000, "logging_steps": 1})
    script = (
        "import sys, time\n"
        "from megatrain import cli\n"
        "from megatrain.commands import run\n"
        "step = run.CountingTrainer.training_step\n"
        "def slow(self, *args, **kwargs):\n"
        "    if self.state.global_step == 2:\n"
        "        print('waiting', flush=True)\n"
        "        time.sleep(60)\n"
        "    return step(self, *args, **kwargs)\n"
        "run.CountingTrainer.training_step = slow\n"
        f"sys.exit(cli.run_command(['train', {str(recipe)!r}]))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-u", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.startswith("waiting"):
                os.kill(process.pid, signal.SIGINT)
            if "again to end it at once" in line:
                break
        os.kill(process.pid, signal.SIGINT)
        process.stdout.read()
        assert process.wait(timeout=60) == 130
        assert (
            process.stderr.read()
            .splitlines()[-1]
            .startswith("error: interrupted before its first checkpoint; this run saves none of itself")
        )


def test_the_folder_of_a_run_may_have_any_name(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, training={"max_steps": 2, "save_strategy": "epoch"}, sample={"prompts": []})
    folder = tmp_path / "a=b: c #2"
    assert cli.run_command(["train", str(recipe), f"output.dir='{folder}'"]) == 0
    (folder / "config.json").unlink()
    assert cli.run_command(["resume", str(folder), "training.max_steps=3"]) == 0
    assert (folder / "config.json").exists()


def test_resume_refuses_what_says_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.run_command(["resume", str(tmp_path), "output.dir=other"]) == 2
    assert "output.dir=other: DIR says where the run is" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda folder: None, "no such folder"),
        (lambda folder: folder.mkdir(), "no `megatrain train` was started for it"),
        (lambda folder: folder.write_text(""), "is a file, not a folder"),
        (
            lambda folder: (folder / "checkpoint-2").mkdir(parents=True),
            "is not a run of `megatrain train` (it has checkpoints, and no megatrain_run.json and megatrain_recipe"
            ".yaml); your own script goes on with trainer.train(resume_from_checkpoint=True), a recipe with: ",
        ),
        (
            lambda folder: [folder.mkdir(), *((folder / name).write_text("{}") for name in (RECIPE_NAME, RECORD_NAME))],
            "cannot be read ('overrides')",
        ),
    ],
)
def test_resume_of_what_is_no_run(
    make: Callable[[Path], object], told: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    make(tmp_path / "out")
    assert cli.run_command(["resume", str(tmp_path / "out")]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_resume_of_a_checkpoint_names_its_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    for name in (RECIPE_NAME, RECORD_NAME):
        (tmp_path / name).write_text("{}")
    assert cli.run_command(["resume", str(tmp_path / "checkpoint-2")]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert told.endswith(f"is a checkpoint of a run; give the run's folder: megatrain resume {tmp_path}")
