"""`megatrain train`: a recipe from the first line to the saved model.

check -> get model and data -> held-out loss, samples -> train -> save -> held-out loss, samples -> summary
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatrain.base.errors import InterruptedRunError, StoppedRunError, UserError
from megatrain.base.paths import looking_at
from megatrain.base.units import format_bytes, format_number, format_seconds
from megatrain.commands.console import make_console, print_fact, print_step, print_table, print_warning
from megatrain.commands.memory import peak_device_bytes, peak_host_bytes
from megatrain.commands.record import note_run, note_saved, noted_run, saved_step, start_anew, why_none
from megatrain.commands.resume import KEY, former_checkpoints, how_to_go_on, step_of, when_saved
from megatrain.recipe import Recipe, load_recipe
from megatrain.save.checkpoints import checkpoints_in
from megatrain.save.folder import check_place, holding_output_folder

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import TrainerCallback, TrainingArguments

    from megatrain.commands.progress import Speed
    from megatrain.commands.run import CountingTrainer


class Typed(NamedTuple):
    """The command as the user gave it."""

    verb: str
    what: str
    settings: Sequence[str]


def train(recipe_file: Path, overrides: Sequence[str] = (), *, dry_run: bool = False) -> None:
    """Runs a recipe, or rehearses it.

    Ctrl-C and SIGTERM end it behind a checkpoint. Raises UserError, before any work, for a recipe that cannot run;
    InterruptedRunError after Ctrl-C where nothing trains yet, or a second one.
    """
    typed = Typed("train", f"{recipe_file} --dry-run" if dry_run else str(recipe_file), overrides)
    _start(recipe_file, overrides, typed, dry_run=dry_run)


def _start(recipe_file: Path, overrides: Sequence[str], typed: Typed, *, dry_run: bool = False) -> None:
    recipe = load_recipe(recipe_file, overrides)
    with contextlib.ExitStack() as stack:
        with looking_at("output.dir"):
            is_there = recipe.output_dir.is_dir()
        if is_there and not dry_run:
            # Before anything is looked for in it.
            stack.enter_context(holding_output_folder(recipe.output_dir, "output.dir"))
        _train(recipe, recipe_file, overrides, typed, stack, dry_run=dry_run)


def _train(
    recipe: Recipe,
    recipe_file: Path,
    overrides: Sequence[str],
    typed: Typed,
    held: contextlib.ExitStack,
    *,
    dry_run: bool,
) -> None:
    """held: what is held until the run is over."""
    from megatrain.commands.check import check_before_work  # torch and transformers: only once the recipe is right

    arguments = recipe.training_arguments()
    found = check_before_work(recipe, arguments)
    checkpoint = None if found is None else found.folder
    console = make_console()
    _print_header(console, typed)
    if found is not None and found.passed_by:
        print_warning(console, found.passed_by)
    if dry_run:
        from megatrain.commands.dry_run import rehearse

        if checkpoint is not None:
            print_fact(console, "resume", f"{checkpoint}, step {step_of(checkpoint)}")
        rehearse(recipe, arguments, console)
        return
    start = time.time()
    try:
        _run(recipe, arguments, console, checkpoint, overrides, held)
    except (StoppedRunError, KeyboardInterrupt) as end:
        passed_by = () if found is None else found.damage
        saves = when_saved(arguments)
        told = how_to_go_on(recipe_file, overrides, recipe.output_dir, checkpoint, start, saves, passed_by)
        if isinstance(end, KeyboardInterrupt):
            raise InterruptedRunError(told) from None
        print_fact(console, "stopped", told)


def _print_header(console: Console, typed: Typed) -> None:
    from rich.markup import escape

    console.rule(f"[bold]megatrain {typed.verb}[/] {escape(typed.what)}", align="left")
    if typed.settings:
        print_fact(console, "set", " ".join(typed.settings))


def resume(output_dir: Path, overrides: Sequence[str] = ()) -> None:
    """Goes on with the run whose output folder this is, from its newest sound checkpoint.

    A run that is finished is told to be, and left alone. Raises UserError for a folder without a run or a checkpoint,
    and what `train` raises.
    """
    for override in overrides:
        if override.partition("=")[0].strip() in ("output.dir", KEY):
            raise UserError(f"{override}: DIR says where the run is and goes on; leave it out")
    run = noted_run(output_dir)
    home = run.recipe_file.parent
    with looking_at("DIR"):
        has_checkpoint = bool(checkpoints_in(home))
    if not has_checkpoint:
        step = None if overrides else saved_step(home)
        if step is None:
            raise UserError(why_none(home))
        _print_finished(make_console(), step, home)
        return
    if run.folder.is_dir():
        os.chdir(run.folder)
    _start(run.recipe_file, [*run.overrides, *overrides], Typed("resume", str(output_dir), overrides))


def _print_finished(console: Console, num_steps: int, output_dir: Path) -> None:
    print_fact(console, "finished", f"all {num_steps} steps are done and {output_dir} has the model")


def _run(
    recipe: Recipe,
    arguments: TrainingArguments,
    console: Console,
    checkpoint: Path | None,
    overrides: Sequence[str],
    held: contextlib.ExitStack,
) -> None:
    from megatrain.commands.disk import check_disk, disk_rows
    from megatrain.commands.length import RunLength
    from megatrain.commands.progress import ProgressDisplay, SpeedMeter
    from megatrain.commands.run import closing_engine, prepare, print_samples
    from megatrain.commands.trace_steps import TRACE_NAME, TraceSteps

    ingredients = prepare(recipe, arguments, console)
    report = ingredients.datasets.report.train
    length = RunLength.of(arguments, report.num_rows, report.num_tokens)
    length.settle_intervals(arguments)
    num_steps_done = 0 if checkpoint is None else step_of(checkpoint)
    is_over = checkpoint is not None and num_steps_done >= length.num_steps
    if is_over and saved_step(recipe.output_dir) == num_steps_done:
        _print_finished(console, num_steps_done, recipe.output_dir)
        print_fact(console, "to train on", "set training.max_steps or training.num_train_epochs higher")
        return
    check_disk(recipe.output_dir, disk_rows(recipe, ingredients.model, arguments, length))
    check_place(recipe.output_dir, "output.dir")
    held.enter_context(holding_output_folder(recipe.output_dir, "output.dir"))  # if it was not there before
    begin = _begin(recipe, arguments, console, checkpoint, overrides)
    if checkpoint is not None:
        print_fact(console, "resume", f"{checkpoint}, step {num_steps_done} of {length.num_steps}")
    trainer = ingredients.trainer(arguments)
    meter = SpeedMeter(ingredients.work.num_parameters, trainer.work)
    with closing_engine(trainer), ProgressDisplay(console, meter) as display:
        loss_before = None
        if checkpoint is None:  # else the weights are those of the base model until `train` reads the checkpoint
            loss_before = _held_out_loss(trainer, console, "before")
            print_samples(ingredients, recipe.sample, console, "before")
        trainer.add_callback(begin)
        trainer.add_callback(display)
        if recipe.output.trace_step is not None:
            trainer.add_callback(TraceSteps(recipe.output.trace_step, recipe.output_dir / TRACE_NAME))
        print_step(console, f"training for {format_number(max(0, length.num_steps - num_steps_done), 'step')}")
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        trainer.remove_callback(display)
        if recipe.output.save_model:
            _save(trainer, recipe.output_dir, console)  # first of all: nothing that comes now may lose what was learned
        loss_after = _held_out_loss(trainer, console, "after")
        print_samples(ingredients, recipe.sample, console, "after")
    rows = _speed_rows(meter.total(), is_part=checkpoint is not None)
    if display.last_loss is not None:
        rows["last training loss"] = f"{display.last_loss:.4f}"
    _print_summary(console, recipe, rows, loss_before, loss_after)


def _save(trainer: CountingTrainer, folder: Path, console: Console) -> None:
    print_step(console, "saving the model")
    trainer.save_model()
    note_saved(folder, trainer.state.global_step)
    print_fact(console, "saved", f"{folder} (weights, config, tokenizer)")


def _begin(
    recipe: Recipe, arguments: TrainingArguments, console: Console, checkpoint: Path | None, overrides: Sequence[str]
) -> TrainerCallback:
    """Notes the run. Where it overwrites another, only when all is checked and it begins to train: then the other's
    checkpoints go."""
    from megatrain.commands.beginning import AtBegin

    former: list[Path] = []
    if recipe.output.overwrite:
        former = former_checkpoints(arguments.resume_from_checkpoint, checkpoint, recipe.output_dir)
    if not former:
        note_run(recipe.file, overrides, recipe.output_dir)
        return AtBegin(lambda: None)

    def overwrite() -> None:
        start_anew(recipe.file, overrides, recipe.output_dir, former)
        names = former[0].name if len(former) == 1 else f"{former[0].name} to {former[-1].name}"
        print_fact(console, "removed", f"{names}, of the run that is overwritten")

    return AtBegin(overwrite)


def _held_out_loss(trainer: CountingTrainer, console: Console, when: str) -> float | None:
    """None when nothing is held out."""
    if trainer.eval_dataset is None:
        return None
    print_step(console, f"measuring the held-out loss, {format_number(len(trainer.eval_dataset), 'row')}")
    start = time.perf_counter()
    loss = trainer.evaluate()["eval_loss"]
    seconds = format_seconds(time.perf_counter() - start)
    print_fact(console, "held out", f"loss {loss:.4f} {when} training ({seconds})")
    return loss


def _speed_rows(speed: Speed, *, is_part: bool) -> dict[str, str]:
    """`is_part`: the run went on from a checkpoint, so these are not the figures of the whole training."""
    only = ", this run" if is_part else ""
    return {
        f"steps{only}": f"{speed.num_steps:,}",
        f"tokens trained on{only}": f"{speed.num_tokens:,}",
        f"training time{only}": format_seconds(speed.seconds),
        "tokens/s": f"{speed.tokens_per_second:,.0f}",
        "model TFLOPS (6 x parameters x tokens)": f"{speed.model_tflops:.3g}",
        "counted TFLOPS (without look-ups and padding, with attention)": f"{speed.counted_tflops:.3g}",
        "stall share": f"{speed.stall_share:.1%}",
    }


def _print_summary(
    console: Console, recipe: Recipe, rows: dict[str, str], loss_before: float | None, loss_after: float | None
) -> None:
    rows = {**rows, "peak host memory, loading and saving included": format_bytes(peak_host_bytes())}
    if device_bytes := peak_device_bytes():
        rows["peak device memory"] = format_bytes(device_bytes)
    if loss_after is not None:
        rows["held-out loss"] = f"{loss_after:.4f}" if loss_before is None else f"{loss_before:.4f} -> {loss_after:.4f}"
    print_table(console, "summary", rows)
    if loss_after is None:
        print_warning(console, "nothing was held out, so nobody knows whether this helped; set data.eval_fraction=0.05")
    elif loss_before is not None and not loss_after < loss_before:
        print_warning(
            console,
            f"the held-out loss did not fall ({loss_before:.4f} -> {loss_after:.4f}); try a smaller "
            "training.learning_rate, more data, or fewer epochs",
        )
    if recipe.output.save_model:
        print_fact(console, "load it", f"AutoModelForCausalLM.from_pretrained({str(recipe.output_dir)!r})")
