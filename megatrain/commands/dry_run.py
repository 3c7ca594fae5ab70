"""`megatrain train --dry-run`: reads everything, prints what the run will take, and tries every path once.

Rule: nothing is left on the disk but what fetching the model leaves in its cache. The model is saved to a folder
beside the output, looked at, and deleted.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch.utils.data import Subset
from transformers import TrainerCallback

from megatrain.base.errors import UserError
from megatrain.base.paths import existing_parent
from megatrain.base.units import format_bytes, format_number, format_seconds
from megatrain.commands.console import print_fact, print_table
from megatrain.commands.disk import check_disk, disk_rows
from megatrain.commands.length import RunLength
from megatrain.commands.run import CountingTrainer, Ingredients, closing_engine, generate_sample, prepare
from megatrain.models import missing_files
from megatrain.plan.rows import memory_rows
from megatrain.recipe import OutputConfig, Recipe

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import TrainingArguments

TINY_STEPS = 2
"""The first one learns the order of the layers; the second is timed."""

TINY_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds that the tiny pieces took."""

    step_seconds: float
    step_tokens: int
    eval_seconds: float
    eval_rows: int
    sample_seconds: float
    save_seconds: float
    """Of the trained model: weights, config, tokenizer."""
    checkpoint_seconds: float


def rehearse(recipe: Recipe, arguments: TrainingArguments, console: Console) -> None:
    """Prints the plan and runs one tiny step through every path. Raises UserError for what will not fit."""
    ingredients = prepare(recipe, arguments, console)
    report = ingredients.datasets.report
    length = RunLength.of(arguments, report.train.num_rows, report.train.num_tokens)
    needed = disk_rows(recipe, ingredients.model, arguments, length)
    free_bytes = check_disk(recipe.output_dir, needed)
    with _scratch_folder(recipe.output_dir) as scratch:
        trainer = ingredients.trainer(_tiny_arguments(recipe, scratch))
        trainer.engine.report.silence()  # a tiny step's time is told below, with what follows from it
        with closing_engine(trainer):
            _print_memory(console, trainer)
            _print_disk(console, recipe.output_dir, needed, free_bytes)
            saves = recipe.output.save_model or length.num_saves(arguments) > 0
            timings = _try_every_path(recipe, ingredients, trainer, Path(scratch), saves=saves)
    _print_time(console, recipe, arguments, length, timings, report.eval.num_rows if report.eval else 0)
    saving = ", saving, a checkpoint" if saves else "; saving was not tried, because nothing is to be saved"
    print_fact(
        console, "dry run", f"every path works: a training step, evaluation, a sample{saving}. Nothing was kept."
    )


def _scratch_folder(output_dir: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder beside the output, so that the very disk is tried. It goes when the context ends."""
    parent = existing_parent(output_dir)
    try:
        return tempfile.TemporaryDirectory(prefix=".megatrain-dry-run-", dir=parent)
    except OSError as error:
        raise UserError(f"output.dir: cannot write in {parent} ({error.strerror}); choose another folder") from error


def _tiny_arguments(recipe: Recipe, scratch: str) -> TrainingArguments:
    """The recipe's arguments, but for two steps of one row."""
    tiny = {
        "max_steps": TINY_STEPS,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",  # check_arguments has tried the recipe's, which may follow evaluations
        "lr_scheduler_kwargs": None,
        "eval_strategy": "no",
        "save_strategy": "no",
        "load_best_model_at_end": False,
        "push_to_hub": False,
        "report_to": "none",
    }
    training = {**recipe.training, **tiny}
    output = OutputConfig(dir=scratch, overwrite=True)
    return dataclasses.replace(recipe, training=training, output=output).training_arguments()


class _StepTimer(TrainerCallback):
    """Seconds and tokens of each step, its update included."""

    def __init__(self, trainer: CountingTrainer) -> None:
        self._trainer = trainer
        self.steps: list[tuple[float, int]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._step_tokens = self._trainer.num_tokens

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.engine.wait()
        self.steps.append((time.perf_counter() - self._start, self._step_tokens))


def _try_every_path(
    recipe: Recipe, ingredients: Ingredients, trainer: CountingTrainer, scratch: Path, *, saves: bool
) -> Timings:
    """saves: the run saves something. Of a model that is as large as the disk not even one checkpoint may fit."""
    timer = _StepTimer(trainer)
    trainer.add_callback(timer)
    trainer.train()
    (_, tokens_before), (step_seconds, tokens_after) = timer.steps
    eval_rows = 0
    start = time.perf_counter()
    if trainer.eval_dataset is not None:
        eval_rows = min(trainer.args.per_device_eval_batch_size, len(trainer.eval_dataset))
        trainer.evaluate(Subset(trainer.eval_dataset, range(eval_rows)))
    eval_seconds = time.perf_counter() - start
    start = time.perf_counter()
    for prompt in recipe.sample.prompts[:1]:
        generate_sample(ingredients, prompt, recipe.sample, TINY_TOKENS)
    sample_seconds = time.perf_counter() - start
    save_seconds, checkpoint_seconds = _try_saving(trainer, scratch) if saves else (0.0, 0.0)
    return Timings(
        step_seconds=step_seconds,
        step_tokens=tokens_after - tokens_before,
        eval_seconds=eval_seconds,
        eval_rows=eval_rows,
        sample_seconds=sample_seconds,
        save_seconds=save_seconds,
        checkpoint_seconds=checkpoint_seconds,
    )


def _try_saving(trainer: CountingTrainer, scratch: Path) -> tuple[float, float]:
    """Seconds that the trained model and a checkpoint took."""
    start = time.perf_counter()
    trainer.save_model(str(scratch / "model"))
    missing = missing_files(scratch / "model")
    assert not missing, f"the saved model lacks {missing}"
    saved = time.perf_counter()
    trainer._save_checkpoint(trainer.model, None)
    return saved - start, time.perf_counter() - saved


def _print_memory(console: Console, trainer: CountingTrainer) -> None:
    engine = trainer.engine
    rows = memory_rows(engine.placement)
    places = {"ram": "host memory", "hbm": f"device ({engine.device})"}
    lines = [(places[row.tier], row.name, format_bytes(row.num_bytes)) for row in rows]
    for tier, place in places.items():
        total_bytes = sum(row.num_bytes for row in rows if row.tier == tier)
        lines.append((place, "total, activations apart", format_bytes(total_bytes)))
    lines.append(("host memory", "free now", format_bytes(psutil.virtual_memory().available)))
    if engine.device.type == "cuda":
        lines.append((places["hbm"], "free now", format_bytes(torch.cuda.mem_get_info(engine.device)[0])))
    print_table(console, "memory", lines)


def _print_disk(console: Console, output_dir: Path, needed: dict[str, int], free_bytes: int) -> None:
    rows = {name: format_bytes(num_bytes) for name, num_bytes in needed.items()}
    rows["free"] = format_bytes(free_bytes)
    print_table(console, f"disk, {output_dir}", rows)


def _print_time(
    console: Console,
    recipe: Recipe,
    arguments: TrainingArguments,
    length: RunLength,
    timings: Timings,
    num_eval_rows: int,
) -> None:
    """Estimated from the tiny pieces: proportional to tokens, rows and prompts."""
    training_seconds = length.num_steps * length.tokens_per_step * timings.step_seconds / timings.step_tokens
    eval_seconds = timings.eval_seconds * num_eval_rows / timings.eval_rows if timings.eval_rows else 0.0
    num_evals = 2 + length.num_evals(arguments)
    prompts = len(recipe.sample.prompts)
    sample_seconds = timings.sample_seconds * prompts * recipe.sample.max_new_tokens / TINY_TOKENS
    num_saves = length.num_saves(arguments)
    saves_seconds = num_saves * timings.checkpoint_seconds
    total_seconds = training_seconds + eval_seconds * num_evals + 2 * sample_seconds
    total_seconds += timings.save_seconds if recipe.output.save_model else 0.0
    rows = {
        "steps": f"{length.num_steps:,} ({length.num_epochs:.2f} epochs)",
        "tokens a step": f"{length.tokens_per_step:,.0f}",
        f"training (a tiny step of {timings.step_tokens:,} tokens took {format_seconds(timings.step_seconds)})": (
            format_seconds(training_seconds)
        ),
        f"evaluation, {num_evals} times": format_seconds(eval_seconds * num_evals),
        "samples, before and after": format_seconds(2 * sample_seconds),
    }
    if recipe.output.save_model:
        rows["saving the trained model"] = format_seconds(timings.save_seconds)
    if num_saves:
        each = f"{format_number(num_saves, 'checkpoint')}, each {format_seconds(timings.checkpoint_seconds)}"
        rows[each + (" at most: written beside steps" if recipe.engine.save_in_background else "")] = format_seconds(
            saves_seconds
        )
    rows["total"] = format_seconds(total_seconds + saves_seconds)
    print_table(console, "time, estimated (a full step is faster by the token than a tiny one)", rows)
