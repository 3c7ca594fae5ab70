"""Which checkpoints a run has, and whether one of them is what was written: sizes and checksums of its files.

The manifest is the last file of a checkpoint, and none is written where a file lacks that its kind must have. A file
that is missing, cut short or changed by as much as a bit is named. Files that came later, such as those of callbacks,
are nobody's business.
Rule: torch is not imported here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import zipfile
from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatrain.base.errors import UserError
from megatrain.base.units import MIB, format_number
from megatrain.save.folder import ENTRY_NAMES, MANIFEST_NAME

CARD_NAME = "README.md"
"""For people, who may change it: no manifest holds it."""
PREFIX = "checkpoint-"
OPTIMIZER_STEM = "optimizer"
SETTINGS_NAME = "optimizer.json"
"""Numbers of the optimizer; its states are tensors in `optimizer.safetensors`, or in shards with an index."""
FOREIGN_OPTIMIZER_NAME = "optimizer.pt"
"""The optimizer of a checkpoint that plain transformers saved."""

STATE_NAME = "trainer_state.json"
JSON_NAMES = {
    *(STATE_NAME, SETTINGS_NAME, "config.json", "generation_config.json", "adapter_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
}
"""Of checkpoints and models, as far as their names tell: other files may hold whatever they like."""
_NEEDED_KEYS = {STATE_NAME: {"global_step"}, SETTINGS_NAME: {"format", "moments", "groups", "steps"}}

PIECE_BYTES = 16 * MIB
"""Files are read, written and hashed in pieces of this size, by several threads."""

TRAINING, WEIGHTS = "training", "weights"
"""Kinds of checkpoints: those from which training goes on, and those of weights alone."""

_FORMAT = 2
_NUM_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class Written:
    """What is known of a file that is complete."""

    num_bytes: int
    checksum: str
    """Hexadecimal: the SHA-256 of its only piece, or of the SHA-256 of all pieces, one behind the other."""


class Start(NamedTuple):
    """Of a run that goes on."""

    folder: Path
    """The checkpoint that it goes on from."""
    damage: Mapping[Path, str] = {}
    """What is wrong with the later ones that were passed by."""

    @property
    def passed_by(self) -> str:
        """In words; empty where there are none."""
        return "; ".join(f"{folder} cannot be resumed from ({its})" for folder, its in self.damage.items())


_sound: set[tuple] = set()
"""Signatures of what this process has read whole and found sound: a run looks at its checkpoint more than once."""


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a run, the last step last."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.is_dir() and _step_text(path).isdecimal()]
    return sorted(found, key=lambda path: int(_step_text(path)))


def write_manifest(folder: Path, known: Mapping[str, Written] | None = None, *, kind: str | None = None) -> None:
    """Note size and SHA-256 of every file in `folder`, which is complete but for this; of its card none.

    Args:
        known: of files whose checksums were taken while they were written, by name.
        kind: TRAINING or WEIGHTS. Raises OSError where a file lacks that it must have.
    """
    if kind is not None and (lacking := _lacking_in(folder, kind)):
        raise OSError(f"{folder} lost files while it was written: {_listed(lacking)}")
    written = dict(known or {})
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / CARD_NAME]
    others = [path for path in paths if path.relative_to(folder).as_posix() not in written]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for path in others:
            name = path.relative_to(folder).as_posix()
            written[name] = Written(num_bytes=path.stat().st_size, checksum=_checksum(path, pool))
    files = {name: {"bytes": one.num_bytes, "sha256": one.checksum} for name, one in sorted(written.items())}
    text = json.dumps({"format": _FORMAT, "kind": kind, "files": files}, indent=1)
    (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")


def missing_in(folder: Path) -> list[str]:
    """Files that going on from a checkpoint takes, besides weights, and that it lacks."""
    needed = [STATE_NAME, SETTINGS_NAME, f"{OPTIMIZER_STEM}.safetensors", "scheduler.pt", "rng_state.pth"]
    if (folder / FOREIGN_OPTIMIZER_NAME).is_file():
        needed = [STATE_NAME, "scheduler.pt"]
    elif (folder / f"{OPTIMIZER_STEM}.safetensors.index.json").is_file():
        del needed[2]
    return [name for name in needed if not (folder / name).is_file()]


def has_manifest(folder: Path) -> bool:
    """Checkpoints of other programs, and of old versions, have none."""
    return (folder / MANIFEST_NAME).is_file()


def noted_bytes(folder: Path) -> list[int]:
    """Of each file that the manifest of a sound folder names."""
    manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    return [int(of["bytes"]) for of in manifest["files"].values()]


def damage_of(folder: Path) -> list[str]:
    """What is wrong with the files of a checkpoint, each with its name. Without a manifest: as far as they tell."""
    if not has_manifest(folder):
        return _unreadable_in(folder)
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT:
            return [f"{MANIFEST_NAME} is of another version of megatrain"]
        noted = {folder / name: (int(of["bytes"]), str(of["sha256"])) for name, of in manifest["files"].items()}
        signature = _signature(noted)
        lacking = _lacking_in(folder, manifest.get("kind") or _kind_by(manifest["files"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return [f"{MANIFEST_NAME} cannot be read ({error})"]
    if lacking:
        return lacking  # what it has is of no use then
    if signature in _sound:
        return []
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        found = (_damage(folder, path, *should, pool) for path, should in noted.items())
        damage = [one for one in found if one]
    if not damage:
        _sound.add(signature)
    return damage


def check_sound(folder: Path, what: str) -> None:
    """Raises UserError that names what is damaged. what: the setting that gave the folder."""
    damage = damage_of(folder)
    if damage:
        meant = f". If the change was meant, delete {MANIFEST_NAME} there" if has_manifest(folder) else ""
        raise UserError(f"{what}: {folder} is damaged: {_listed(damage)}; choose another checkpoint{meant}")


def newest_sound(checkpoints: Sequence[Path], what: str) -> Start:
    """The last of `checkpoints` (one or more) from which training can go on: it has all that takes, and is not damaged.

    Raises UserError where there is none.
    """
    told = {}
    for folder in reversed(checkpoints):
        damage = [f"it has no {name}" for name in missing_in(folder)] or damage_of(folder)
        if not damage:
            return Start(folder, told)
        told[folder] = _listed(damage)
    first = next(iter(told))
    others = f"; nor can {format_number(len(told) - 1, 'other')}" if len(told) > 1 else ""
    raise UserError(
        f"{what}: no checkpoint can be resumed from; the last, {first}: {told[first]}{others}; "
        f"`megatrain verify {shlex.quote(str(first.parent))}` looks at each"
    )


def later_than(step: int, run_dir: Path) -> set[str]:
    """Names of the checkpoints of later steps."""
    return {folder.name for folder in checkpoints_in(run_dir) if int(_step_text(folder)) > step}


def drop_surplus(
    run_dir: Path, limit: int | None, *, newest: Path, best: str | None, first: Container[str] = ()
) -> None:
    """Delete checkpoints of a run until `limit` are left (None, 0: all stay), the earliest steps before later ones.

    Args:
        newest: is whole and stays, whatever its step. best: stays too.
        first: names of those that go before all others: damaged, or of a branch that the run does not go on.
    """
    if not limit:
        return
    known = checkpoints_in(run_dir)
    kept = {os.path.realpath(folder) for folder in (newest, best) if folder is not None}
    others = [folder for folder in known if os.path.realpath(folder) not in kept]
    others.sort(key=lambda folder: folder.name not in first)  # stable: by step among equals
    num_surplus = max(0, min(len(known) - limit, len(others)))
    for folder in others[:num_surplus]:
        shutil.rmtree(folder, ignore_errors=True)


def _kind_by(names: Iterable[str]) -> str | None:
    """Of a checkpoint whose manifest does not tell. None where there is nothing to go by."""
    names = set(names)
    own = {SETTINGS_NAME, "scheduler.pt", *(name for name in names if name.startswith((OPTIMIZER_STEM, "rng_state")))}
    return TRAINING if names & own else WEIGHTS if "trainer_state.json" in names else None


def _lacking_in(folder: Path, kind: str | None) -> list[str]:
    """What a checkpoint of this kind must have and has not. Of its shards, each that an index names is there."""
    if kind is None:
        return []
    needed = missing_in(folder) if kind == TRAINING else ["trainer_state.json"]
    # peft keeps an adapter of another name than its default in a folder of that name.
    if not any((place / name).is_file() for place in _with_folders_in(folder) for name in ENTRY_NAMES):
        needed.append(ENTRY_NAMES[0])
    lacking = [f"{name} is missing" for name in needed if not (folder / name).is_file()]
    for index in sorted(folder.glob("*.safetensors.index.json")):
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        lacking += [f"{name} is missing" for name in sorted(shards) if not (folder / name).is_file()]
    return lacking


def _with_folders_in(folder: Path) -> list[Path]:
    return [folder, *(path for path in folder.iterdir() if path.is_dir())]


def _signature(noted: Mapping[Path, tuple[int, str]]) -> tuple:
    """Of files as they are now, and as they should be."""
    stats = ((path, path.stat() if path.is_file() else None, should) for path, should in noted.items())
    return tuple((str(path), of and (of.st_ino, of.st_size, of.st_mtime_ns), should) for path, of, should in stats)


def _unreadable_in(folder: Path) -> list[str]:
    """What is wrong as far as files tell themselves: cut short, not what their names say, shards or tensors that
    lack."""
    from safetensors import SafetensorError, safe_open

    damage: list[str] = []
    names: dict[str, set[str]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                names[path.name] = set(file.keys())
        except (SafetensorError, OSError) as error:
            damage.append(f"{path.name} cannot be read ({error})")
    damage += [
        f"{path.name} cannot be read (its end is missing)"
        for path in sorted((*folder.glob("*.pt"), *folder.glob("*.pth"), *folder.glob("training_args.bin")))
        if path.is_dir() or not zipfile.is_zipfile(path)
    ]
    damage += [told for name in sorted(JSON_NAMES) if (told := _damage_of_json(folder / name))]
    for index in sorted(folder.glob("*.safetensors.index.json")) if not damage else ():
        try:
            places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            lacking = sorted(name for name, shard in places.items() if name not in names.get(shard, ()))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            return [f"{index.name} cannot be read ({error})"]
        if lacking:
            damage.append(f"{lacking[0]} and {len(lacking) - 1} more tensors of {index.name} are in no file")
    return damage


def _damage_of_json(path: Path) -> str:
    """Of a file without which there is none, what is wrong with it. Bytes that have become others of the same kind are
    not seen."""
    if not path.exists():
        return ""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return (
            f"{path.name} cannot be read ({error})" if path.is_dir() or path.stat().st_size else f"{path.name} is empty"
        )
    if not isinstance(values, dict):
        return f"{path.name} is not what its name says: it holds no {{...}}"
    lacking = sorted(_NEEDED_KEYS.get(path.name, set()) - values.keys())
    return f"{path.name} has no {lacking[0]!r}" if lacking else ""


def _damage(folder: Path, path: Path, num_bytes: int, checksum: str, pool: Executor) -> str:
    name = path.relative_to(folder).as_posix()
    try:
        now_bytes = path.stat().st_size
        if now_bytes != num_bytes:
            return f"{name} has {now_bytes:,} bytes and should have {num_bytes:,}"
        if _checksum(path, pool) != checksum:
            return f"{name} has changed since it was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return ""


def checksum_of_piece(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def checksum_of_pieces(digests: Sequence[bytes]) -> str:
    """Of a file, out of those of its pieces in order."""
    return (digests[0] if len(digests) == 1 else checksum_of_piece(b"".join(digests))).hex()


def _checksum(path: Path, pool: Executor) -> str:
    starts = range(0, max(1, path.stat().st_size), PIECE_BYTES)
    return checksum_of_pieces(list(pool.map(lambda start: _checksum_of_piece_at(path, start), starts)))


def _checksum_of_piece_at(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return checksum_of_piece(file.read(PIECE_BYTES))


def _listed(damage: Sequence[str]) -> str:
    more = f" and {len(damage) - 3} more" if len(damage) > 3 else ""
    return "; ".join(damage[:3]) + more


def _step_text(path: Path) -> str:
    return path.name.removeprefix(PREFIX)
