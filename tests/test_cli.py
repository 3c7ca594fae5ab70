"""The command: help, exit codes, a run, its rehearsal, an interrupt."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from command_helpers import command, files_below, write_recipe
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import megatrain as mt
from megatrain import cli
from megatrain.commands.console import print_fact, print_figure, print_warning
from megatrain.data.build import build_datasets
from megatrain.recipe import load_recipe
from megatrain.spec.builtin import BUILTIN
from megatrain.store.tier import PAGE_BYTES, round_up


@pytest.fixture(autouse=True)
def no_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has a folder of its own and leaves megatrain.init as it was."""
    monkeypatch.chdir(tmp_path)
    yield
    mt.init()


def in_own_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatrain.cli", *map(str, arguments)], capture_output=True, text=True, timeout=300
    )


# Help and exit codes


def test_help_is_whole_at_80_columns_and_names_the_built_in_shapes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    verbs = command(capsys, "--help")[1]
    assert "..." not in verbs.partition("Commands:")[2] and max(map(len, verbs.splitlines())) <= 80
    shapes = re.findall(r"([\w.-]+-)\{(.*?)\}", "".join(command(capsys, "plan", "--help")[1].split()))
    named = {family + size for family, sizes in shapes for size in sizes.split(",")}
    assert named == {name for name in BUILTIN if name not in ("command-r-plus", "deepseek-v3", "kimi-k2")}


def test_what_a_terminal_shows_is_whole_and_wraps_beside_its_name() -> None:
    for show in (
        lambda console: print_fact(console, "checkpoint-4", "sound " * 30),
        lambda console: print_warning(console, "sound " * 30),
        lambda console: print_figure(console, "largest context", "sound " * 30, 16),
    ):
        console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
        show(console)
        first, *others = console.file.getvalue().splitlines()
        indent = first.index("sound")
        assert "…" not in first and others
        assert all(line[:indent].isspace() and line[indent:].startswith("sound") for line in others)
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    print_fact(console, "checkpoint-4", "sound " * 30)
    assert console.file.getvalue().startswith("checkpoint-4 sound")


def test_verbs_and_options_change_only_on_purpose() -> None:
    app = cli._app()
    verbs = {command.name: command.callback for command in app.registered_commands}
    assert {name: list(function.__annotations__) for name, function in verbs.items() if function} == {
        "train": ["recipe", "overrides", "dry_run", "return"],
        "plan": [
            *("model", "machine", "tokens", "seq", "rows", "precision", "master", "compression", "clip", "compile"),
            *("exact", "vram_gb", "ram_gb", "no_disk", "what_if", "as_json", "trace", "return"),
        ],
        "bench": [
            *("model", "tokens", "seq", "accumulate", "vs", "steps", "device", "vram_gb", "ram_gb", "offload_dir"),
            *("compression", "master", "clip", "hbm_home_gb", "places", "moments_on_disk", "compile", "exact"),
            *("replan", "attention", "verify_transfers", "link_gb_s", "threads", "unplanned", "limit_minutes"),
            *("as_json", "trace", "return"),
        ],
        "doctor": ["offload_dir", "quick", "as_json", "output", "return"],
        "verify": ["folder", "return"],
        "report": ["folder", "output", "return"],
        "export": ["checkpoint", "folder", "dtype", "return"],
        "resume": ["folder", "overrides", "return"],
    }


def test_help_is_lean() -> None:
    """Neither torch nor transformers is loaded for help or for a recipe that is refused by its keys."""
    script = (
        "import sys\n"
        "from megatrain.cli import run_command\n"
        "assert run_command(['--help']) == 0\n"
        "assert run_command(['train', '--help']) == 0\n"
        "assert run_command(['plan', '--help']) == 0\n"
        "assert run_command(['train', 'nosuch.yaml']) == 2\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout and "--dry-run" in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(capsys, "--version") == (0, f"megatrain {mt.__version__}\n", "")


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    done = in_own_process("train", recipe, "training.learningrate=1")
    assert done.returncode == 2
    assert done.stderr == "error: training.learningrate: unknown key; did you mean training.learning_rate?\n"
    assert done.stdout == ""


def test_an_unknown_verb_or_option_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["fly"], ["train"], ["train", "--fast", "x.yaml"]):
        code, _, err = command(capsys, *arguments)
        assert code == 2 and "Usage: megatrain" in err


def test_a_bug_ends_with_its_traceback_and_exit_code_1(tmp_path: Path) -> None:
    script = (
        "import megatrain.recipe\n"
        "def broken(*_):\n    raise RuntimeError('the bug')\n"
        "megatrain.recipe._read = broken\n"
        "from megatrain.cli import main\n"
        "main(['train', 'x.yaml'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "Traceback" in done.stderr and done.stderr.endswith("RuntimeError: the bug\n")


# Refused before any work


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": {"name": "./no-such-folder"}}, ["model.name", "./no-such-folder", "does not exist"]),
        ({"data": {"path": "no-such-file.jsonl"}}, ["no-such-file.jsonl", "no such file"]),
        ({"data": {"path": "~/no-such-folder"}}, [f"no such file or folder: {Path.home()}/no-such-folder"]),
        ({"engine": {"max_ram_gb": 0.0001}}, ["97.7 KiB are left within the limit engine.max_ram_gb"]),
        ({"data": {"path": "empty.txt"}}, ["empty.txt", "nothing to train on"]),
        ({"data": {"eval_fraction": 0.0}, "training": {"eval_strategy": "epoch"}}, ["eval_strategy", "eval_fraction"]),
        ({"data": {"sequence_length": 128}}, ["sequence_length is 128", "64 positions"]),
        ({"training": {"fp16": True}}, ["training.fp16=true", "training.bf16=true"]),
        ({"training": {"max_steps": -3}}, ["max_steps=-3", "num_train_epochs"]),
        ({"sample": {"max_new_tokens": 100}}, ["sample.max_new_tokens is 100", "64 positions", "or fewer"]),
        ({"engine": {"device": "abacus"}}, ["abacus", "cuda"]),
        ({"output": {"dir": "empty.txt"}}, ["output.dir", "is a file"]),
        ({"output": {"dir": "empty.txt/out"}}, ["output.dir", "cannot write"]),
        ({"output": {"dir": "model"}}, ["output.dir", "earlier run", "output.overwrite=true"]),
    ],
)
def test_what_cannot_work_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], named: list[str]
) -> None:
    (tmp_path / "empty.txt").write_text("")
    recipe = write_recipe(tmp_path, **changes)
    before = files_below(tmp_path)
    code, out, err = command(capsys, "train", recipe)
    assert code == 2
    assert all(word in err for word in named), err
    assert "held out" not in out.replace("held out: ", ""), "a loss was measured before the refusal"
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("mode", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("engine", "named"), [({"max_ram_gb": 1e-4}, "max_ram_gb"), ({"max_vram_gb": 1e-5}, "too small for one layer")]
)
def test_memory_that_is_too_small_is_known_before_the_data_and_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: dict[str, float], named: str, mode: list[str]
) -> None:
    code, out, err = command(capsys, "train", write_recipe(tmp_path, engine=engine), *mode)
    assert code == 2 and named in err
    assert "reading the data" not in out and "loading" not in out


def test_a_disk_that_is_too_small_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatrain.commands import disk

    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    recipe = write_recipe(tmp_path, training={"save_strategy": "steps", "save_steps": 4})
    code, _, err = command(capsys, "train", recipe)
    assert code == 2
    assert "output.dir" in err and "1000 B are free" in err and "3 checkpoints" in err


# A run


def test_a_run_learns_says_so_and_saves_what_plain_transformers_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_file = write_recipe(tmp_path, training={"max_steps": 48, "eval_strategy": "steps", "eval_steps": 24})
    code, out, _ = command(capsys, "train", recipe_file)
    assert code == 0
    before, after = map(float, re.findall(r"held out +loss ([\d.]+) (?:before|after) training", out))
    assert after < before / 2
    assert f"{before:.4f} -> {after:.4f}" in out
    assert re.search(r"step 4/48  loss [\d.]+  \S+ tokens/s  \S+ TFLOPS  stall \d+%", out)
    assert re.search(r"step 24/48  held-out loss", out)
    assert "warning" not in out
    assert f"from local folder {tmp_path}/model" in out
    first_sample, last_sample = re.findall(r"sample (?:before|after): hello 1\n    (.*)\n", out)
    assert first_sample != last_sample and "fine" in last_sample

    recipe = load_recipe(recipe_file)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template
    datasets = build_datasets(recipe.data, tokenizer)
    plain = transformers.Trainer(
        model=saved,
        args=recipe.training_arguments(),
        eval_dataset=datasets.eval,
        data_collator=datasets.collator,
    )
    assert plain.evaluate()["eval_loss"] == pytest.approx(after, abs=6e-5)  # printed with four digits


def test_a_run_shorter_than_its_log_interval_tells_its_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, training={"max_steps": 2, "logging_steps": 500}, sample={"prompts": []})
    code, out, _ = command(capsys, "train", recipe)
    assert code == 0
    (logged,) = re.findall(r"step 2/2  loss ([\d.]+)", out)
    assert re.search(rf"last training loss +{logged}\b", out)
    assert "peak host memory, loading and saving included" in out


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"engine": {"device": "cpu", "optimizer_compression": "4bit"}}, "LOSSY 4-bit moments"),
        ({"engine": {"device": "cpu", "clip": "layer"}}, "gradients clipped layer by layer and not kept"),
        ({"optimizer": {"name": "muon", "adamw_lr": 1e-3}}, "exact fp32 moments"),
    ],
    ids=["4bit", "layer", "muon"],
)
def test_a_recipe_learns_with_other_states_and_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sections: dict[str, Any], told: str
) -> None:
    recipe = write_recipe(tmp_path, sample={"prompts": []}, **sections)
    code, out, _ = command(capsys, "train", recipe)
    assert code == 0
    first_line = next(line for line in out.splitlines() if line.startswith("megatrain: "))
    assert told in first_line
    before, after = map(float, re.findall(r"held out +loss ([\d.]+) (?:before|after) training", out))
    assert after < before


def test_tokens_are_counted_without_padding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One epoch trains on every token once."""
    recipe_file = write_recipe(tmp_path, training={"num_train_epochs": 1, "max_steps": -1}, data={"packing": False})
    code, out, _ = command(capsys, "train", recipe_file)
    assert code == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    datasets = build_datasets(load_recipe(recipe_file).data, tokenizer)
    assert re.search(r"tokens trained on +([\d,]+)", out)[1].replace(",", "") == str(datasets.report.train.num_tokens)


def test_a_run_that_goes_on_from_a_checkpoint_ends_as_the_whole_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, training={"save_strategy": "steps", "save_steps": 6}, sample={"prompts": []})
    assert command(capsys, "train", recipe)[0] == 0
    whole = load_file(tmp_path / "out" / "model.safetensors")
    checkpoint = tmp_path / "out" / "checkpoint-6"
    code, out, _ = command(
        capsys, "train", recipe, f"training.resume_from_checkpoint={checkpoint}", f"output.dir={tmp_path}/again"
    )
    assert code == 0
    assert re.search(r"steps, this run +6\b", out), "only the steps of this run are counted"
    assert re.search(rf"resume +{checkpoint}, step 6 of 12\n", out)
    assert "before training" not in out, "the weights are not the checkpoint's before the training"
    resumed = load_file(tmp_path / "again" / "model.safetensors")
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_it_warns_when_the_held_out_loss_does_not_fall(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, training={"learning_rate": 0.0, "max_steps": 1})
    code, out, _ = command(capsys, "train", recipe)
    assert code == 0
    assert "warning: the held-out loss did not fall" in out


def test_it_warns_when_nothing_is_held_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, data={"eval_fraction": 0.0}, training={"max_steps": 1}, sample={"prompts": []})
    code, out, _ = command(capsys, "train", recipe)
    assert code == 0
    assert "warning: nothing was held out" in out
    assert "sample before" not in out


def test_bf16_needs_no_more_than_its_argument(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers refuses bf16 without a GPU unless it is told use_cpu; the recipe need not say it."""
    recipe = write_recipe(tmp_path, training={"max_steps": 2, "bf16": True}, sample={"prompts": []})
    code, out, _ = command(capsys, "train", recipe)
    assert code == 0 and "bf16 compute" in out


def test_an_earlier_model_is_overwritten_only_when_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, training={"max_steps": 1}, sample={"prompts": []})
    assert command(capsys, "train", recipe)[0] == 0
    code, _, err = command(capsys, "train", recipe)
    assert code == 2 and "earlier run" in err
    assert command(capsys, "train", recipe, "output.overwrite=true")[0] == 0


def test_the_model_is_saved_before_anything_else_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatrain.commands import run

    recipe = write_recipe(tmp_path, training={"max_steps": 1})
    answers = iter([lambda *_: "an answer before the training"])
    monkeypatch.setattr(run, "generate_sample", lambda *arguments: next(answers)(*arguments))
    with pytest.raises(StopIteration):
        cli.run_command(["train", str(recipe)])
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_failure_while_training_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatrain.commands import run

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the step failed")

    monkeypatch.setattr(run.CountingTrainer, "training_step", fail)
    with pytest.raises(RuntimeError, match="the step failed"):
        cli.run_command(["train", str(write_recipe(tmp_path))])


# The rehearsal


def test_a_dry_run_tries_every_path_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatrain.commands import dry_run, run

    called: list[str] = []
    for name in ("train", "evaluate", "save_model", "_save_checkpoint"):
        original = getattr(run.CountingTrainer, name)

        def spy(self: Any, *args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            called.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(run.CountingTrainer, name, spy)
    original_sample = dry_run.generate_sample
    monkeypatch.setattr(dry_run, "generate_sample", lambda *a: called.append("sample") or original_sample(*a))

    recipe = write_recipe(tmp_path, training={"save_strategy": "epoch", "eval_strategy": "epoch"})
    before = files_below(tmp_path)
    code, out, _ = command(capsys, "train", recipe, "--dry-run")
    assert code == 0
    assert called == ["train", "evaluate", "sample", "save_model", "_save_checkpoint"]
    assert files_below(tmp_path) == before
    assert "time, estimated" in out
    assert out.count("tiny step") == 1 and "megatrain: measured" not in out
    for row in ("moments, fp32", "slots", "trained model", "checkpoint", "tokens a step", "evaluation", "total"):
        assert row in out, row
    assert re.search(r"saving the trained model +[\d.]+ s", out)
    assert re.search(r"\d checkpoints?, each [\d.]+ s at most: written beside steps +[\d.]+ s", out), out


def test_the_memory_rows_of_a_dry_run_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path)
    _, out, _ = command(capsys, "train", recipe, "--dry-run")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    # Each moment of a parameter takes whole pages.
    moments_bytes = sum(2 * round_up(4 * parameter.numel(), PAGE_BYTES) for parameter in model.parameters())
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20}
    shown = {
        name.strip(): float(figure) * units[unit]
        for name, figure, unit in re.findall(r"host memory +(.+?) {2,}([\d.]+) (\w+)", out)
        if unit in units
    }
    assert shown["moments, fp32"] == pytest.approx(moments_bytes, rel=0.02)
    parts = sum(num_bytes for name, num_bytes in shown.items() if not name.startswith("total"))
    assert shown["total, activations apart"] == pytest.approx(parts, rel=0.02)
