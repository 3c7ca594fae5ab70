"""Signals while `megatrain train` runs: the first ends it behind a checkpoint, the second at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_helpers import write_recipe

from megatrain import cli


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_behind_a_checkpoint(tmp_path: Path, number: signal.Signals) -> None:
    recipe = write_recipe(tmp_path, training={"max_steps": 1_000_000, "logging_steps": 1, "save_strategy": "no"})
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "megatrain.cli", "train", str(recipe)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.startswith("step 2/"):
                break
        os.kill(process.pid, number)
        told = process.stdout.read()
        assert process.wait(timeout=60) == 0, process.stderr.read()
    assert "this step is finished and a checkpoint saved" in told
    (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
    assert f"the last checkpoint is {checkpoint}; go on with: megatrain train" in told
    assert not (tmp_path / "out" / "config.json").exists()
    assert cli.run_command(["verify", str(tmp_path / "out")]) == 0


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
        assert process.wait(timeout=30) == 130
        assert process.stderr.read().splitlines()[-1].startswith("error: interrupted; this run saved no checkpoint")
