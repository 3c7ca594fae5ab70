"""Going on from a checkpoint by the command: what is refused, what `true` means, what Ctrl-C tells."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_helpers import command, files_below, signalled, write_recipe
from safetensors.torch import save_file
from saving_helpers import flip_a_bit
from transformers import TrainingArguments

import megatrain as mt
from megatrain import cli
from megatrain.base.errors import UserError
from megatrain.commands.resume import RECORD_NAME, checkpoints_in, find_checkpoint, how_to_go_on, when_saved

KEY = "training.resume_from_checkpoint"
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


@pytest.fixture(autouse=True)
def no_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    mt.init()


def fake_checkpoint(folder: Path, step: int, *, lacks: str = "") -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    torch.save({}, checkpoint / "scheduler.pt")
    torch.save({}, checkpoint / "rng_state.pth")
    (checkpoint / "optimizer.json").write_text('{"format": 1, "moments": "fp32", "groups": [], "steps": {}}')
    for name in {"model.safetensors", "optimizer.safetensors"} - {lacks}:
        save_file({}, checkpoint / name)
    return checkpoint


def test_the_last_checkpoint_is_that_of_the_last_step(tmp_path: Path) -> None:
    for step in (4, 100, 20):
        fake_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-200").write_text("a file")
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-4", "checkpoint-20", "checkpoint-100"]
    assert find_checkpoint(True, tmp_path) == (tmp_path / "checkpoint-100", {})
    assert find_checkpoint(str(tmp_path / "checkpoint-4"), tmp_path) == (tmp_path / "checkpoint-4", {})
    assert find_checkpoint(None, tmp_path) is None and find_checkpoint(False, tmp_path) is None


@pytest.mark.parametrize("mode", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("nowhere", ["no such folder: nowhere", "checkpoint-2, checkpoint-4"]),
        ("out", ["out has no trainer_state.json", "checkpoint-2, checkpoint-4"]),
        ("other/checkpoint-6", ["has no optimizer.safetensors", "save_only_model", "checkpoint-2, checkpoint-4"]),
        ("other/checkpoint-7", ["checkpoint-7 has no model.safetensors"]),
        ("other/checkpoint-8", ["checkpoint-8", "trainer_state.json cannot be read"]),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_refused_before_the_model_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: list[str], value: str, named: list[str]
) -> None:
    for step in (4, 2):
        fake_checkpoint(tmp_path / "out", step)
    fake_checkpoint(tmp_path / "other", 6, lacks="optimizer.safetensors")
    fake_checkpoint(tmp_path / "other", 7, lacks="model.safetensors")
    (fake_checkpoint(tmp_path / "other", 8) / "trainer_state.json").write_text("{")
    before = files_below(tmp_path)
    recipe = write_recipe(tmp_path)
    made = files_below(tmp_path).keys() - before.keys()
    code, out, err = command(capsys, "train", recipe, *mode, f"{KEY}={value}")
    assert code == 2 and out == ""
    assert all(word in err for word in named), err
    assert files_below(tmp_path).keys() == before.keys() | made


def test_true_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no checkpoint in output\.dir"):
        find_checkpoint(True, tmp_path / "out")


def test_checkpoints_of_an_earlier_run_are_not_mixed_with_new_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_checkpoint(tmp_path / "out", 4)
    code, _, err = command(capsys, "train", write_recipe(tmp_path))
    assert code == 2
    assert "checkpoints of an earlier run, the last is checkpoint-4" in err
    assert f"{KEY}=true" in err and "output.overwrite=true" in err


def test_true_goes_on_from_the_last_one_and_a_rehearsal_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, training=SAVING)
    assert command(capsys, "train", recipe)[0] == 0
    more = ["training.max_steps=6", f"{KEY}=true"]
    code, out, _ = command(capsys, "train", recipe, *more, "--dry-run")
    assert code == 0 and f"{tmp_path}/out/checkpoint-4, step 4\n" in out
    code, out, _ = command(capsys, "train", recipe, *more)
    assert code == 0
    assert f"resume      {tmp_path}/out/checkpoint-4, step 4 of 6\n" in out
    assert f"set         {' '.join(more)}\n" in out
    assert "training for 2 steps ..." in out
    assert "sample before" not in out and "sample after" in out
    assert "warning" not in out, "something is held out, and nothing is known of the loss before"
    assert (tmp_path / "out" / "checkpoint-6").is_dir()


def test_the_same_shares_of_the_run_draw_no_warning(tmp_path: Path) -> None:
    shares = {"save_steps": 0.5, "eval_steps": 0.3, "logging_steps": 0.25, "eval_strategy": "steps"}
    recipe = write_recipe(tmp_path, training={**SAVING, **shares}, sample={"prompts": []})
    for more, num_logs in ([], 4), ([f"{KEY}={tmp_path}/out/checkpoint-2", "output.overwrite=true"], 2):
        done = subprocess.run(
            [sys.executable, "-m", "megatrain.cli", "train", str(recipe), *more], capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.count("/4  loss ") == num_logs
        assert "step 4/4  held-out loss" in done.stdout and "step 3/4  held-out" not in done.stdout


def test_ctrl_c_prints_a_command_that_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, training={**SAVING, "logging_steps": 1}, sample={"prompts": []})
    arguments = ["train", str(recipe), "training.max_steps=1000000", "training.save_total_limit=2"]
    rest, code = signalled(signal.SIGINT, "step 4/", *arguments)
    assert code == 0
    (told,) = [line for line in rest.splitlines() if line.startswith("stopped")]
    last = checkpoints_in(tmp_path / "out")[-1]
    what, line = told.split("; go on with: ")
    assert what == f"stopped     interrupted; the last checkpoint is {last}"
    assert shlex.split(line) == ["megatrain", "resume", str(tmp_path / "out")]
    step = int(last.name.removeprefix("checkpoint-"))
    code, out, _ = command(capsys, *shlex.split(line)[1:], f"training.max_steps={step + 1}")
    assert code == 0 and f"step {step} of {step + 1}\n" in out


def test_resume_tells_of_damaged_checkpoints_below_its_header_and_shows_what_was_typed(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, training={**SAVING, "logging_steps": 1, "max_steps": 8}, sample={"prompts": []})
    more = ["training.save_total_limit=5", "output.save_model=false"]
    assert cli.run_command(["train", str(recipe), *more]) == 0
    out = tmp_path / "out"
    for step in (6, 8):
        flip_a_bit(out / f"checkpoint-{step}" / "model.safetensors")
    longer = ["training.max_steps=1000000", "training.save_strategy=no"]
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "megatrain.cli", "resume", "out", *longer],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        lines = []
        while not lines or not lines[-1].startswith("step 5/"):
            lines.append(process.stdout.readline())
            assert lines[-1], "it ended"
        os.kill(process.pid, signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    printed = "".join(lines) + rest
    lines = printed.splitlines()
    assert lines[0].startswith("megatrain resume out ─") and lines[1] == f"set         {' '.join(longer)}"
    damage = "cannot be resumed from (model.safetensors has changed since it was written)"
    assert lines[2] == f"warning: {out}/checkpoint-8 {damage}; {out}/checkpoint-6 {damage}"
    assert [line for line in lines if line.startswith("resume ")] == [
        f"resume      {out}/checkpoint-4, step 4 of 1000000"
    ]
    assert "resuming from" not in printed and "cannot be resumed" not in errors
    assert printed.count(f"go on with: megatrain resume {out}") == 1


SAVES = "saves one every 5 steps"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"save_strategy": "steps", "save_steps": 5}, SAVES),
        ({"save_strategy": "steps", "save_steps": 0.25}, "saves one every 25% of its steps"),
        ({"save_strategy": "epoch"}, "saves one at the end of each epoch"),
        ({"save_strategy": "no"}, "saves none of itself (training.save_strategy=no); "),
    ],
)
def test_a_run_says_when_it_saves(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    assert when_saved(TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **settings)).startswith(told)


def test_what_an_interrupt_tells_depends_on_what_the_run_left(tmp_path: Path) -> None:
    out = tmp_path / "out"
    old = fake_checkpoint(out, 8)
    os.utime(old, (1, 1))
    recipe, sampling = Path("r.yaml"), "sample.prompts=[Why? How?]"
    assert how_to_go_on(recipe, [], out, None, 100.0, SAVES).endswith(f"before its first checkpoint; this run {SAVES}")
    told = how_to_go_on(recipe, [sampling, f"{KEY}={old}"], out, old, 100.0, SAVES)
    assert told.endswith(f"go on with: megatrain train r.yaml '{sampling}' {KEY}=true"), "it ended before it was noted"
    (out / RECORD_NAME).write_text("{}")
    os.utime(out / RECORD_NAME, (200, 200))
    told = how_to_go_on(recipe, [sampling, f"{KEY}={old}"], out, old, 100.0, SAVES)
    assert told.endswith(f"go on with: megatrain resume {out}")
    damaged = fake_checkpoint(out, 9)
    os.utime(damaged, (1, 1))
    told = how_to_go_on(recipe, [], out, old, 100.0, SAVES, {damaged: "cut short"})
    assert told.endswith(f"go on with: megatrain resume {out}"), "it passes by what is damaged"
    told = how_to_go_on(recipe, [], out, old, 100.0, SAVES)
    assert told.endswith(f"go on with: megatrain train r.yaml {KEY}={old}"), "the later one is of a branch given up"
    os.utime(damaged, (200, 200))
    told = how_to_go_on(recipe, [], out, old, 100.0, SAVES, {damaged: "cut short"})
    assert f"the last checkpoint is {damaged}; go on with: megatrain resume" in told, "it was written anew"
    shutil.rmtree(damaged)
    new = fake_checkpoint(out, 4)
    os.utime(new, (200, 200))
    told = how_to_go_on(recipe, [sampling, f"{KEY}={old}"], out, None, 100.0, SAVES)
    command = f"megatrain train r.yaml '{sampling}' {KEY}={new}"
    assert told.endswith(f"go on with: {command}"), "resuming would mean the older run's"
    (out / "config.json").write_text("{}")
    assert "the model is in" in how_to_go_on(recipe, [], out, None, 100.0, SAVES)
