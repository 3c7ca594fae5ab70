"""Which checkpoints a run has, and whether one of them is what was written: sizes and checksums of its files.

The manifest is the last file of a checkpoint. A file that is missing, cut short or changed by as much as a bit is
named. Files that came later, such as those of callbacks, are nobody's business.
Rule: torch is not imported here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatrain.base.errors import UserError

logger = logging.getLogger("megatrain")

MANIFEST_NAME = "megatrain_manifest.json"
PREFIX = "checkpoint-"
_FORMAT = 1
_NUM_THREADS = 8
_BLOCK_BYTES = 8 << 20

_sound: set[tuple] = set()
"""Signatures of what this process has read whole and found sound: a run looks at its checkpoint more than once."""


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a run, the last step last."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.is_dir() and _step_text(path).isdecimal()]
    return sorted(found, key=lambda path: int(_step_text(path)))


def write_manifest(folder: Path) -> None:
    """Note size and SHA-256 of every file in `folder`, which is complete but for this."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        sums = pool.map(_checksum, paths)
        files = {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": checksum}
            for path, checksum in zip(paths, sums, strict=True)
        }
    text = json.dumps({"format": _FORMAT, "files": files}, indent=1)
    (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")


def has_manifest(folder: Path) -> bool:
    """Checkpoints of other programs, and of old versions, have none."""
    return (folder / MANIFEST_NAME).is_file()


def damage_of(folder: Path) -> list[str]:
    """What is wrong with the files of a checkpoint, each with its name; nothing for one without a manifest."""
    if not has_manifest(folder):
        return []
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        if manifest["format"] > _FORMAT:
            return [f"{MANIFEST_NAME} is of a newer version of megatrain"]
        noted = {folder / name: (int(of["bytes"]), str(of["sha256"])) for name, of in manifest["files"].items()}
        signature = _signature(noted)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return [f"{MANIFEST_NAME} cannot be read ({error})"]
    if signature in _sound:
        return []
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        found = pool.map(lambda item: _damage(folder, item[0], *item[1]), noted.items())
        damage = [one for one in found if one]
    if not damage:
        _sound.add(signature)
    return damage


def check_sound(folder: Path, what: str) -> None:
    """Raises UserError that names what is damaged. what: the setting that gave the folder."""
    damage = damage_of(folder)
    if damage:
        raise UserError(
            f"{what}: {folder} is damaged: {_listed(damage)}; choose another checkpoint. If the change was meant, "
            f"delete {MANIFEST_NAME} there"
        )


def newest_sound(checkpoints: Sequence[Path], what: str) -> Path:
    """The last of `checkpoints` (one or more) that is not damaged; those that were passed by are told in a warning.

    Raises UserError where all are.
    """
    told = {}
    for folder in reversed(checkpoints):
        damage = damage_of(folder)
        if not damage:
            for other, its in told.items():
                logger.warning("%s is damaged (%s): going on from %s", other, its, folder.name)
            return folder
        told[folder] = _listed(damage)
    first = next(iter(told))
    raise UserError(f"{what}: every checkpoint is damaged; the last, {first}: {told[first]}")


def _signature(noted: Mapping[Path, tuple[int, str]]) -> tuple:
    """Of files as they are now, and as they should be."""
    stats = ((path, path.stat() if path.is_file() else None, should) for path, should in noted.items())
    return tuple((str(path), of and (of.st_ino, of.st_size, of.st_mtime_ns), should) for path, of, should in stats)


def _damage(folder: Path, path: Path, num_bytes: int, checksum: str) -> str:
    name = path.relative_to(folder).as_posix()
    try:
        now_bytes = path.stat().st_size
        if now_bytes != num_bytes:
            return f"{name} has {now_bytes:,} bytes and should have {num_bytes:,}"
        if _checksum(path) != checksum:
            return f"{name} has changed since it was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return ""


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _listed(damage: Sequence[str]) -> str:
    more = f" and {len(damage) - 3} more" if len(damage) > 3 else ""
    return "; ".join(damage[:3]) + more


def _step_text(path: Path) -> str:
    return path.name.removeprefix(PREFIX)
