"""Recipes that cannot work are refused in one line that names the key and the remedy, with exit code 2, before work."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from command_helpers import command, files_below, write_recipe
from transformers import TrainingArguments

from megatrain.base.errors import UserError
from megatrain.commands.check import check_before_work
from megatrain.recipe import SECTIONS, load_recipe
from megatrain.typecheck import field_types


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipe")


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Path:
    return write_recipe(folder, training={"max_steps": 2}, sample={"max_new_tokens": 2})


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))


LONG = "x" * 5000
MIN_LR = "training.lr_scheduler_type=cosine_with_min_lr"

REFUSED: list[tuple[str, list[str]]] = [
    # Numbers
    ("training.warmup_steps=.nan", ["warmup_steps=nan", "0 or more"]),
    ("training.warmup_steps=-1", ["training.warmup_steps", ">= 0"]),
    ("training.logging_steps=.inf", ["training.logging_steps", "infinity", "above 0"]),
    ("training.eval_steps=-.inf", ["eval_steps=-inf"]),
    ("training.dataloader_num_workers=-1", ["dataloader_num_workers=-1", "0 to"]),
    ("training.neftune_noise_alpha=-1", ["neftune_noise_alpha=-1", "0 or more"]),
    ("training.neftune_noise_alpha=.nan", ["neftune_noise_alpha=nan", "0 or more"]),
    ("training.neftune_noise_alpha=1e300", ["neftune_noise_alpha=1e+300"]),
    ("training.eval_accumulation_steps=0", ["eval_accumulation_steps=0", "1 or more"]),
    ("training.eval_accumulation_steps=-1", ["eval_accumulation_steps=-1", "1 or more"]),
    ("training.save_total_limit=-1", ["save_total_limit=-1", "1 or more"]),
    ("training.eval_delay=-1", ["eval_delay=-1", "0 or more"]),
    ("training.per_device_eval_batch_size=1180591620717411303424", ["per_device_eval_batch_size="]),
    (f"training.learning_rate={'1' * 400}", ["learning_rate="]),
    (f"training.max_grad_norm={'1' * 400}", ["max_grad_norm="]),
    ("training.max_steps=-1 training.num_train_epochs=1e308", ["num_train_epochs=1e+308"]),
    ("training.max_steps=-1 training.num_train_epochs=0", ["training.num_train_epochs", "nothing would be trained"]),
    # Choices
    ("training.report_to=foo", ["report_to", "'foo'", "tensorboard", "none"]),
    ("training.report_to=[foo]", ["report_to", "'foo'", "tensorboard"]),
    ("training.report_to=null", ["report_to", "none"]),
    ("training.train_sampling_strategy=foo", ["train_sampling_strategy='foo'", "group_by_length"]),
    ("training.include_num_input_tokens_seen=foo", ["include_num_input_tokens_seen='foo'", "non_padding"]),
    ("training.include_for_metrics=[foo]", ["include_for_metrics=['foo']", "inputs"]),
    ("training.log_level=foo", ["log_level='foo'", "warning"]),
    ("training.log_level_replica=foo", ["log_level_replica='foo'", "warning"]),
    ("training.eval_strategy=foo", ["training.eval_strategy", "epoch"]),
    ("training.label_names=[foo]", ["training.label_names", "labels"]),
    ("training.metric_for_best_model=accuracy training.eval_strategy=epoch", ["metric_for_best_model", "loss"]),
    # What goes together
    ("training.dataloader_persistent_workers=true", ["dataloader_persistent_workers", "dataloader_num_workers"]),
    ("training.dataloader_multiprocessing_context=fork", ["multiprocessing_context", "dataloader_num_workers"]),
    (
        "training.dataloader_multiprocessing_context=foo training.dataloader_num_workers=1",
        ["dataloader_multiprocessing_context='foo'", "spawn"],
    ),
    (
        "training.dataloader_prefetch_factor=0 training.dataloader_num_workers=1",
        ["dataloader_prefetch_factor=0", "1 or more"],
    ),
    ("training.save_strategy=best", ["save_strategy='best'", "eval_strategy"]),
    ("training.save_strategy=best training.eval_strategy=epoch", ["save_strategy='best'", "metric_for_best_model"]),
    ("training.load_best_model_at_end=true", ["load_best_model_at_end", "eval_strategy"]),
    ("training.load_best_model_at_end=true training.eval_strategy=epoch", ["training: ", "save and eval strategy"]),
    ("training.eval_on_start=true data.eval_fraction=0", ["eval_on_start", "data.eval_fraction"]),
    (
        "training.dataloader_drop_last=true training.per_device_train_batch_size=1000",
        ["training.dataloader_drop_last", "32 rows", "per_device_train_batch_size (1000)"],
    ),
    ("training.push_to_hub=true", ["push_to_hub", "hf auth login"]),
    (
        "training.push_to_hub=true training.hub_token=x training.hub_model_id=../x",
        ["hub_model_id", "owner/name"],
    ),
    # What transformers judges itself
    (MIN_LR, ["lr_scheduler_kwargs=null", "min_lr", "min_lr_rate"]),
    (f"{MIN_LR} training.lr_scheduler_kwargs={{min_lr: x}}", ["lr_scheduler_kwargs={'min_lr': 'x'}"]),
    (f"{MIN_LR} training.lr_scheduler_kwargs={{min_lr: .nan}}", ["lr_scheduler_kwargs", "min_lr is nan"]),
    ("training.lr_scheduler_type=warmup_stable_decay", ["lr_scheduler_kwargs=null", "num_decay_steps"]),
    ("training.lr_scheduler_type=polynomial training.learning_rate=0", ["lr_scheduler_type='polynomial'", "lr_end"]),
    (
        "training.lr_scheduler_type=reduce_lr_on_plateau training.eval_strategy=epoch "
        "training.lr_scheduler_kwargs={patience: x}",
        ["lr_scheduler_kwargs={'patience': 'x'}"],
    ),
    ("training.lr_scheduler_kwargs={a: 1}", ["lr_scheduler_kwargs={'a': 1}"]),
    ("training.lr_scheduler_kwargs=x", ["lr_scheduler_kwargs='x'"]),
    ("training.lr_scheduler_type=sawtooth", ["training.lr_scheduler_type", "cosine"]),
    ("training.accelerator_config={foo: 1}", ["training.accelerator_config", "foo"]),
    ("training.accelerator_config=x", ["training.accelerator_config", "No such file"]),
    ("training.accelerator_config={even_batches: foo}", ["accelerator_config", "even_batches='foo'"]),
    ("training.accelerator_config={dispatch_batches: true}", ["accelerator_config", "dispatch_batches=true"]),
    (
        "training.accelerator_config={gradient_accumulation_kwargs: x}",
        ["accelerator_config", "gradient_accumulation_kwargs='x'"],
    ),
    ("training.accelerator_config={gradient_accumulation_kwargs: {foo: 1}}", ["accelerator_config", "foo"]),
    ("training.accelerator_config={gradient_accumulation_kwargs: {num_steps: 0}}", ["accelerator_config", "num_steps"]),
    ("training.gradient_checkpointing_kwargs=x", ["checkpointing_kwargs='x'"]),
    # The other sections
    ("data.seed=-1", ["data.seed", "0 or more"]),
    ("data.max_samples=1180591620717411303424", ["data.max_samples"]),
    ("data.path=/", ["data.path", "root"]),
    ("data.path=", ["data.path"]),
    ("data.path=' '", ["data.path", "' '"]),
    ("data.path=~nobody-here/x", ["data.path", "~nobody-here", "whole path"]),
    ("data.path=/dev/null", ["data.path", "neither a file nor a folder"]),
    (f"data.path={LONG}", ["data.path", "too long"]),
    ("data.eval_path=[] data.eval_fraction=0", ["data.eval_path is an empty list"]),
    (f"model.name={LONG}", ["model.name", "too long"]),
    ("model.name=''", ["model.name", "''"]),
    (f"output.dir={LONG}", ["output.dir", "too long"]),
    ("output.dir=''", ["output.dir", "''"]),
    ("output.dir=/dev/null/x", ["output.dir"]),
    (f"training.resume_from_checkpoint={LONG}", ["training.resume_from_checkpoint", "too long"]),
    ("sample.prompts=[''] sample.chat=false", ["sample.prompts", "no token"]),
    (r'sample.prompts=["a\ud800"]', ["sample.prompts", "surrogate"]),
    # YAML
    ("training.max_steps=!!int x", ["training.max_steps", "tag", "plainly"]),
    ("training.run_name=!!timestamp x", ["training.run_name", "tag", "plainly"]),
    ("training.bf16=!!bool x", ["training.bf16", "tag", "plainly"]),
    (f"training.max_steps={'1' * 5000}", ["training.max_steps", "digits"]),
    (f"training.run_name={'[' * 3000}", ["training.run_name", "deep"]),
]


@pytest.mark.parametrize(("overrides", "named"), REFUSED, ids=lambda value: str(value)[:70])
def test_a_recipe_that_cannot_work_is_refused(
    recipe: Path, folder: Path, capsys: pytest.CaptureFixture[str], overrides: str, named: list[str]
) -> None:
    before = files_below(folder)
    code, out, err = command(capsys, "train", recipe, *_split(overrides), "--dry-run")
    assert code == 2, out + err
    assert all(word in err for word in named), err
    assert len(err) < 1500, "the mistake is told, not the whole of what was given"
    assert files_below(folder) == before


def _split(overrides: str) -> list[str]:
    """At the blanks before the names of sections."""
    parts = overrides.replace(" training.", "\ntraining.").replace(" data.", "\ndata.").replace(" sample.", "\nsample.")
    return parts.split("\n")


ACCEPTED = [
    "training.lr_scheduler_type=reduce_lr_on_plateau training.eval_strategy=epoch",
    f"{MIN_LR} training.lr_scheduler_kwargs={{min_lr_rate: 0.1}}",
    "training.lr_scheduler_type=warmup_stable_decay training.lr_scheduler_kwargs={num_decay_steps: 1}",
    "training.save_strategy=best training.eval_strategy=epoch training.metric_for_best_model=eval_loss",
    "training.train_sampling_strategy=group_by_length training.include_num_input_tokens_seen=true",
    "training.accelerator_config={split_batches: true, gradient_accumulation_kwargs: {sync_each_batch: true}}",
    "training.gradient_checkpointing=true training.gradient_checkpointing_kwargs={use_reentrant: false}",
    "training.neftune_noise_alpha=5 training.log_level=error training.eval_accumulation_steps=1",
    "data.seed=18446744073709551616 training.label_names=[labels] training.save_total_limit=2",
]


@pytest.mark.parametrize("overrides", ACCEPTED)
def test_what_works_passes_the_dry_run(recipe: Path, capsys: pytest.CaptureFixture[str], overrides: str) -> None:
    code, out, err = command(capsys, "train", recipe, *_split(overrides), "sample.prompts=[]", "--dry-run")
    assert (code, err) == (0, ""), out + err


KEYS = [f"training.{name}" for name in field_types(TrainingArguments) if name != "output_dir"]
KEYS += [f"{name}.{key}" for name, section in SECTIONS.items() for key in field_types(section)]
ODD_VALUES = [
    "-1",
    "0",
    ".nan",
    "-.inf",
    "1180591620717411303424",
    "foo",
    '""',
    "{a: 1}",
    "[foo]",
    "[]",
    "null",
    "true",
]


@pytest.mark.parametrize("key", KEYS)
def test_no_odd_value_of_any_key_ends_in_another_error(recipe: Path, key: str) -> None:
    for value in ODD_VALUES:
        try:
            loaded = load_recipe(recipe, [f"{key}={value}"])
            check_before_work(loaded, loaded.training_arguments())
        except UserError as error:
            assert key.rpartition(".")[2] in str(error), f"{key}={value}: {error}"


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of POSIX")
@pytest.mark.parametrize("key", ["data.path", "model.name", "output.dir", "training.resume_from_checkpoint"])
def test_a_path_that_may_not_be_looked_at(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    stat = os.stat

    def denied(path: object, *args: object, **kwargs: object) -> os.stat_result:
        if "locked" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", denied)  # root may look at everything, so no folder would do
    code, _, err = command(capsys, "train", recipe, f"{key}=locked/inside", "--dry-run")
    assert code == 2
    assert key in err and "locked/inside" in err and "Permission denied" in err


def test_a_path_that_is_there_and_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder.yaml").mkdir()
    for name, kind in (("pipe.yaml", "a pipe"), ("folder.yaml", "is a folder")):
        code, _, errors = command(capsys, "train", tmp_path / name)
        assert code == 2 and kind in errors and "did you mean" not in errors


def test_a_file_that_may_not_be_read(
    tmp_path: Path, recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "secret.txt").write_text("words and words", encoding="utf-8")

    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    code, _, err = command(capsys, "train", recipe, "data.path=documents", "--dry-run")
    assert code == 2
    assert "data: " in err and "secret.txt" in err and "Permission denied" in err


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_folder_with_a_broken_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    recipe = write_recipe(tmp_path)
    (tmp_path / "model" / name).write_text("{ no more", encoding="utf-8")
    code, _, err = command(capsys, "train", recipe, "--dry-run")
    assert code == 2
    assert "model.name" in err and str(tmp_path / "model") in err
