"""What a run was started with, kept in its output folder: so that `megatrain resume DIR` needs nothing else.

Rule: torch is not imported here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatrain.base.errors import UserError
from megatrain.base.paths import check_folder, looking_at, user_path
from megatrain.commands.resume import KEY, RECORD_NAME
from megatrain.save.checkpoints import checkpoints_in, damage_of
from megatrain.save.folder import WEIGHT_NAMES, removing

RECIPE_NAME = "megatrain_recipe.yaml"
SAVED = "saved_step"
"""Key of the step whose model is saved in the output folder itself."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that can be started again."""

    recipe_file: Path
    """A copy, as the recipe was."""
    overrides: list[str]
    folder: Path
    """Where the run was started, from which relative paths of the recipe lead."""


def note_run(recipe_file: Path, overrides: Sequence[str], output_dir: Path) -> None:
    """Keep what the run is started with. The copy of a run that goes on from it is the same file."""
    copy = output_dir / RECIPE_NAME
    if not (copy.exists() and copy.samefile(recipe_file)):
        _write(copy, recipe_file.read_text(encoding="utf-8"))
    record = {"overrides": list(overrides), "folder": os.getcwd()}
    _write(output_dir / RECORD_NAME, json.dumps(record, indent=1))


def note_saved(output_dir: Path, step: int) -> None:
    """The model in `output_dir` is that of this step of the run."""
    record = json.loads((output_dir / RECORD_NAME).read_text(encoding="utf-8"))
    _write(output_dir / RECORD_NAME, json.dumps({**record, SAVED: step}, indent=1))


def saved_step(output_dir: Path) -> int | None:
    """The step of its run whose model is in `output_dir`, whole as far as its files tell; None if there is none."""
    try:
        step = json.loads((output_dir / RECORD_NAME).read_text(encoding="utf-8")).get(SAVED)
    except (OSError, ValueError, AttributeError):
        return None
    has_weights = any((output_dir / name).is_file() for name in WEIGHT_NAMES)
    return step if step is not None and has_weights and not damage_of(output_dir) else None


def start_anew(recipe_file: Path, overrides: Sequence[str], output_dir: Path, former: Sequence[Path]) -> None:
    """Note the run that takes the place of another, whose checkpoints `former` go: all, or on an error none. Where the
    process dies in the middle no run is noted, so that nobody goes on from half of them."""
    paths = [output_dir / name for name in (RECIPE_NAME, RECORD_NAME)]
    kept = {path: path.read_text(encoding="utf-8") for path in paths if path.is_file()}
    (output_dir / RECORD_NAME).unlink(missing_ok=True)
    try:
        with removing(former):
            note_run(recipe_file, overrides, output_dir)
    except BaseException:
        for path, text in kept.items():
            _write(path, text)
        raise


def _write(path: Path, text: str) -> None:
    """Whole, or what was there before."""
    beside = path.with_name(f".{path.name}.incomplete")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def noted_run(output_dir: Path) -> Run:
    """Raises UserError for a folder in which no `megatrain train` was started, or whose record cannot be read."""
    output_dir = user_path(output_dir, "DIR").absolute()
    with looking_at("DIR"):
        check_folder(output_dir, "DIR")
        if not _has_run(output_dir):
            raise UserError(_of_no_run(output_dir))
    try:
        record = json.loads((output_dir / RECORD_NAME).read_text(encoding="utf-8"))
        overrides, folder = [str(override) for override in record["overrides"]], Path(record["folder"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"DIR: {output_dir / RECORD_NAME} cannot be read ({error}); give the recipe: megatrain train FILE.yaml "
            f"output.dir={output_dir} {KEY}=true"
        ) from error
    kept = [override for override in overrides if override.partition("=")[0].strip() not in (KEY, "output.dir")]
    # Overrides are YAML, in which a name may mean something; in quotes it does not.
    overrides = [*kept, f"output.dir={json.dumps(str(output_dir), ensure_ascii=False)}", f"{KEY}=true"]
    return Run(recipe_file=output_dir / RECIPE_NAME, overrides=overrides, folder=folder)


def why_none(output_dir: Path) -> str:
    """What to tell of a run without a checkpoint that is to go on."""
    step = saved_step(output_dir)
    saves = "training.save_strategy=steps training.save_steps=100 saves one every 100 steps"
    if step is None:
        return f"DIR: the run in {output_dir} has saved no checkpoint to go on from; start it anew ({saves})"
    return (
        f"DIR: the run in {output_dir} is finished (step {step:,}) and saved no checkpoint to go on from; a new run "
        f"with model.name={output_dir} and another output.dir trains its model on ({saves})"
    )


def _has_run(folder: Path) -> bool:
    return (folder / RECORD_NAME).is_file() and (folder / RECIPE_NAME).is_file()


def _of_no_run(folder: Path) -> str:
    """What to tell of a folder that exists and has no record."""
    if _has_run(folder.parent) and folder in checkpoints_in(folder.parent):
        return f"DIR: {folder} is a checkpoint of a run; give the run's folder: megatrain resume {folder.parent}"
    with_recipe = f"megatrain train FILE.yaml output.dir={folder} {KEY}=true"
    if checkpoints_in(folder):
        return (
            f"DIR: {folder} is not a run of `megatrain train` (it has checkpoints, and no {RECORD_NAME} and "
            f"{RECIPE_NAME}); your own script goes on with trainer.train(resume_from_checkpoint=True), a recipe "
            f"with: {with_recipe}"
        )
    return (
        f"DIR: {folder} has no {RECORD_NAME} and {RECIPE_NAME}, so no `megatrain train` was started for it; give the "
        f"recipe: {with_recipe}"
    )
