"""Going on from a checkpoint: which one, whether training can be resumed from it, and the command that does it.

Rule: torch is not imported here. A path that is wrong is refused before anything that takes long.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.base.errors import UserError
from megatrain.base.paths import check_folder, looking_at, user_path
from megatrain.base.units import format_number
from megatrain.save.checkpoints import STATE_NAME, Start, check_sound, checkpoints_in, missing_in, newest_sound
from megatrain.save.folder import WEIGHT_NAMES

if TYPE_CHECKING:
    from transformers import TrainingArguments

KEY = "training.resume_from_checkpoint"
RECORD_NAME = "megatrain_run.json"
"""In the output folder: what a run was started with (megatrain/commands/record.py)."""


def find_checkpoint(given: str | bool | None, output_dir: Path) -> Start | None:
    """The checkpoint to go on from, and those that were passed by; None for a new run.

    Args:
        given: the value of training.resume_from_checkpoint; true means the last one in `output_dir` that is sound.

    Raises UserError: no such folder, or a folder from which training cannot go on, or whose files are damaged.
    """
    if given is None or given is False:
        return None
    with looking_at("output.dir"):
        known = checkpoints_in(output_dir)
    with looking_at(KEY):
        return _existing(given, known, output_dir)


def _existing(given: str | bool, known: list[Path], output_dir: Path) -> Start:
    """The checkpoint that `given` means, `known` being those in `output_dir`."""
    if given is True:
        if not known:
            raise UserError(
                f"{KEY}: there is no checkpoint in output.dir ({output_dir}); leave it out to start anew, or give "
                "the folder of a checkpoint"
            )
        start = newest_sound(known, KEY)
    else:
        start = Start(user_path(given, KEY))
        check_folder(start.folder, KEY, _remedy(known, output_dir))
    folder = start.folder
    missing = missing_in(folder)
    if not any((folder / name).is_file() for name in WEIGHT_NAMES):
        missing.append(WEIGHT_NAMES[0])
    if missing:
        inside = [path for path in checkpoints_in(folder) if path not in known]
        remedy = _remedy(inside or known, folder if inside else output_dir)
        raise UserError(
            f"{KEY}: {folder} has no {missing[0]}, so training cannot go on from it (it is no checkpoint, or was saved "
            f"with save_only_model); {remedy}, or start a new run with model.name={folder}"
        )
    if given is not True:
        check_sound(folder, KEY)
    return start


def former_checkpoints(given: str | bool | None, start: Path | None, output_dir: Path) -> list[Path]:
    """Those in `output_dir` that a run which overwrites it does not go on from: all, or those behind the one it does.

    given, start: the value of training.resume_from_checkpoint, and the checkpoint that it means.
    """
    if given is True:
        return []
    known = checkpoints_in(output_dir)
    here = next((at for at, one in enumerate(known) if start is not None and one.samefile(start)), -1)
    return known[here + 1 :]


def step_of(checkpoint: Path) -> int:
    """Steps that were done when it was saved. Raises UserError for a file that cannot be read."""
    try:
        return int(json.loads((checkpoint / STATE_NAME).read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{KEY}: {checkpoint / STATE_NAME} cannot be read ({error}); choose another one") from error


def how_to_go_on(
    recipe_file: Path,
    overrides: Sequence[str],
    output_dir: Path,
    start: Path | None,
    since: float,
    saves: str,
    passed_by: Container[Path] = (),
) -> str:
    """What to tell after an interrupt: the last checkpoint of this run and the command that goes on from it.

    Args:
        start: the checkpoint that this run started from, if any.
        since: when this run started, in seconds of the epoch; what is older is of an earlier run.
        saves: when this run saves checkpoints, in words (`when_saved`).
        passed_by: checkpoints that cannot be resumed from, unless this run has written them anew.
    """
    config = output_dir / "config.json"
    if config.is_file() and config.stat().st_mtime >= since:
        return f"interrupted; the training was done and the model is in {output_dir}"
    known = checkpoints_in(output_dir)
    own = [path for path in known if path.stat().st_mtime >= since] or ([start] if start else [])
    if not own:
        return f"interrupted before its first checkpoint; this run {saves}"
    usable = [path for path in known if path not in passed_by or path in own]
    value = "true" if own[-1] == next(reversed(usable), None) else str(own[-1])
    command = _command(recipe_file, overrides, value)
    record = output_dir / RECORD_NAME
    if value == "true" and record.is_file() and record.stat().st_mtime >= since:  # it is of this run
        command = shlex.join(["megatrain", "resume", str(output_dir)])
    return f"interrupted; the last checkpoint is {own[-1]}; go on with: {command}"


def when_saved(arguments: TrainingArguments) -> str:
    """When a run saves checkpoints, in words; for one that saves none, how to have some."""
    strategy = str(getattr(arguments.save_strategy, "value", arguments.save_strategy))
    if strategy == "epoch":
        return "saves one at the end of each epoch"
    if strategy == "best":
        return "saves one when an evaluation is the best so far"
    every = arguments.save_steps
    if strategy == "steps":
        return f"saves one every {format_number(int(every), 'step') if every >= 1 else f'{every:.0%} of its steps'}"
    return (
        "saves none of itself (training.save_strategy=no); training.save_strategy=steps training.save_steps=100 saves "
        "one every 100 steps"
    )


def _command(recipe_file: Path, overrides: Sequence[str], value: str) -> str:
    kept = [override for override in overrides if override.partition("=")[0].strip() != KEY]
    return shlex.join(["megatrain", "train", str(recipe_file), *kept, f"{KEY}={value}"])


def _remedy(known: Sequence[Path], folder: Path) -> str:
    if not known:
        return f"there are no checkpoints in {folder}"
    return f"checkpoints in {folder}: {', '.join(path.name for path in known)}"
