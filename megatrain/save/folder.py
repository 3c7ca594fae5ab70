"""Folders that appear only when they are complete.

Rule: everything is written beside the target first and takes its place by renaming, so a process that is killed while
it writes leaves a hidden folder and never a target that looks complete. It guards against a killed process; against a
power cut the files would have to be synced too, which is not done here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

ENTRY_NAMES = ("model.safetensors", "model.safetensors.index.json")
"""A folder of weights can be loaded once it has one of these. They come last and go first."""


@contextlib.contextmanager
def whole_folder(target: str | os.PathLike[str], *, keep_others: bool = False) -> Iterator[Path]:
    """Write into the folder that this yields; `target` gets all of it on a clean exit, and nothing on an exception.

    Args:
        target: the folder to create. If it has content already, that is replaced as a whole.
        keep_others: keep what `target` has beside the new files (for an output folder that also holds checkpoints).
    """
    target = Path(target).absolute()
    staging = target.with_name(f".{target.name}.incomplete")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    if not target.exists() or not any(target.iterdir()):
        os.rename(staging, target)
    elif keep_others:
        _merge(staging, target)
    else:
        _replace(staging, target)


def _replace(staging: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    os.rename(target, old)
    os.rename(staging, target)
    shutil.rmtree(old)


def _merge(staging: Path, target: Path) -> None:
    if any((staging / name).exists() for name in ENTRY_NAMES):
        stale = [*(target / name for name in ENTRY_NAMES), *target.glob("model-*-of-*.safetensors")]
        for path in stale:
            path.unlink(missing_ok=True)
    for source in sorted(staging.iterdir(), key=lambda path: path.name in ENTRY_NAMES):
        place = target / source.name
        if place.is_dir():
            shutil.rmtree(place)
        os.replace(source, place)
    staging.rmdir()
