"""The output folder of a run: what stands in the way of its checkpoints, and where one is after a move."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from transformers import TrainerState, TrainingArguments

from megatrain.base.errors import UserError
from megatrain.save.checkpoints import PREFIX
from megatrain.save.folder import check_place, holding_output_folder

logger = logging.getLogger("megatrain")


def check_output_dir(args: TrainingArguments) -> None:
    """Before the model is streamed. transformers makes the folder when a Trainer is made. Raises UserError where that
    cannot be."""
    try:
        os.makedirs(args.output_dir, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"output_dir: {args.output_dir!r} cannot be made a folder ({error.strerror}): choose another one"
        ) from error


@contextlib.contextmanager
def holding_run_folder(args: TrainingArguments) -> Iterator[None]:
    """Around a run: its output folder is its own. Raises UserError where no checkpoint could be written, or where
    another process has the folder; a run that saves none is warned, because Ctrl-C would save one."""
    with contextlib.ExitStack() as stack:
        try:
            check_place(args.output_dir, "output_dir")
            stack.enter_context(holding_output_folder(args.output_dir, "output_dir"))
            _check_nothing_in_the_way(args)
        except UserError as error:
            if args.save_strategy != "no":
                raise
            logger.warning("%s. Nothing will be saved there, but Ctrl-C would save a checkpoint, and now cannot", error)
        yield


def _check_nothing_in_the_way(args: TrainingArguments) -> None:
    files = [path.name for path in Path(args.output_dir).glob(f"{PREFIX}*") if _is_in_the_way(path)]
    if files:
        raise UserError(
            f"output_dir: {sorted(files)[0]} in {args.output_dir!r} is a file, and a checkpoint is a folder of "
            "that name: move it away, or choose another folder"
        )


def _is_in_the_way(path: Path) -> bool:
    return path.name.removeprefix(PREFIX).isdecimal() and os.path.lexists(path) and not path.is_dir()


def find_best_checkpoint(state: TrainerState, run_dir: str) -> None:
    """The best checkpoint is noted with its whole path, and transformers forgets it where that is gone: look for it by
    its step in the folder of the run, which may have been moved."""
    noted = state.best_model_checkpoint
    if state.best_global_step and (noted is None or not os.path.isdir(noted)):
        here = os.path.join(run_dir, f"{PREFIX}{state.best_global_step}")
        if os.path.isdir(here):
            logger.warning("the best checkpoint is now %s", here)
            state.best_model_checkpoint = here
