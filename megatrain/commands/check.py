"""What can be refused before the model is there: the arguments, the checkpoint, the sources, the output folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.argument_ranges import plain
from megatrain.arguments import check_arguments
from megatrain.base.errors import UserError
from megatrain.base.paths import looking_at
from megatrain.commands.resume import KEY, checkpoints_in, find_checkpoint, step_of
from megatrain.data.files import as_sources, check_sources
from megatrain.recipe import Recipe
from megatrain.save.checkpoints import Start

if TYPE_CHECKING:
    from transformers import TrainingArguments

METRICS = ("loss", "eval_loss")
"""What an evaluation measures: a recipe has no compute_metrics."""


def check_before_work(recipe: Recipe, arguments: TrainingArguments) -> Start | None:
    """Everything that can be refused without the model. Returns from what the run goes on, None for a new run.

    Raises UserError.
    """
    check_arguments(arguments)
    recipe.optimizer.choice(arguments)
    _check_evaluation(recipe, arguments)
    start = find_checkpoint(arguments.resume_from_checkpoint, recipe.output_dir)
    if start is not None:
        step_of(start.folder)
    for key, path in (("data.path", recipe.data.path), ("data.eval_path", recipe.data.eval_path)):
        if path is not None:
            check_sources(as_sources(path), key)
    folder = recipe.output_dir
    with looking_at("output.dir"):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"output.dir: {folder} is a file; give a folder")
        if start is None and not recipe.output.overwrite:
            _refuse_earlier_run(folder)
    return start


def _check_evaluation(recipe: Recipe, arguments: TrainingArguments) -> None:
    is_held_out = recipe.data.eval_path is not None or recipe.data.eval_fraction > 0
    wanted = {"eval_strategy": plain(arguments.eval_strategy) != "no", "eval_on_start": arguments.eval_on_start}
    for name, is_wanted in wanted.items():
        if is_wanted and not is_held_out:
            raise UserError(
                f"training.{name} is {plain(getattr(arguments, name))!r} but nothing is held out; set "
                "data.eval_fraction or data.eval_path"
            )
    metric = arguments.metric_for_best_model
    if metric is not None and metric not in METRICS:
        raise UserError(
            f"training.metric_for_best_model is {metric!r}; a recipe measures nothing but the loss: use loss"
        )
    if arguments.label_names not in (None, ["labels"]):
        raise UserError(
            f"training.label_names is {arguments.label_names!r}; the data has its labels under `labels`: leave it out"
        )


def _refuse_earlier_run(folder: Path) -> None:
    if (folder / "config.json").exists():
        raise UserError(
            f"output.dir: {folder} holds the model of an earlier run; choose another, or set output.overwrite=true"
        )
    if checkpoints := checkpoints_in(folder):
        raise UserError(
            f"output.dir: {folder} holds checkpoints of an earlier run, the last is {checkpoints[-1].name}; go on from "
            f"it with {KEY}=true, choose another folder, or set output.overwrite=true"
        )
