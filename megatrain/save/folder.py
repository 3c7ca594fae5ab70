"""Folders that appear only when they are complete.

Rule: everything is written first, on the disk of the target, synced, and takes its place by renaming. What it replaces
is moved aside before and deleted after. So a process that is killed, or a machine that loses power, at any moment
leaves a hidden folder and never a target that looks complete, and an error puts back what was there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatrain.base.errors import UserError
from megatrain.base.folder_lock import holding_folder, is_held_elsewhere
from megatrain.base.units import MIB, format_bytes

WEIGHT_NAMES = ("model.safetensors", "model.safetensors.index.json")
ADAPTER_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
ENTRY_NAMES = (*WEIGHT_NAMES, *ADAPTER_NAMES)
"""A folder of weights can be loaded once it has one of these. They come last and go first."""

MANIFEST_NAME = "megatrain_manifest.json"
"""Sizes and checksums of the other files (megatrain/save/checkpoints.py)."""

_INCOMPLETE, _OLD = "incomplete", "old"
_FORMER = ".former.old"
"""What is being removed from an output folder."""

FULL_BYTES = 16 * MIB
"""A disk with less than this free after a write that failed is taken for full: writers put the last piece back."""

_TORCH_WRITE_ERRORS = ("PytorchStreamWriter", "unexpected pos")


class DiskFullError(OSError):
    """No room for what is saved. Names the disk and what is missing."""


def check_place(target: str | os.PathLike[str], what: str) -> None:
    """Make the folder `target`, through symbolic links, and see that it can be written. Call it before the work.

    Raises UserError that names `what` (the setting).
    """
    try:
        folder = Path(os.path.realpath(target))
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{what}: cannot write in {str(target)!r} ({reason}); choose another folder") from error


@contextlib.contextmanager
def holding_output_folder(folder: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Keep other runs out of `folder`, which is there, as long as the block lasts, and never longer than this process.

    Raises UserError that names `what` (the setting) and the process that has the folder, or why none can have it.
    """
    remedy = f"wait until it ends, stop it, or give {what} another folder"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(holding_folder(Path(os.path.realpath(folder)), remedy))
        except UserError as error:
            raise UserError(f"{what}: {error}") from None
        except OSError as error:
            raise UserError(
                f"{what}: cannot write in {str(folder)!r} ({error.strerror}); choose another folder"
            ) from error
        yield


@contextlib.contextmanager
def whole_folder(target: str | os.PathLike[str], *, keep_others: bool = False, needed_bytes: int = 0) -> Iterator[Path]:
    """Write into the folder that this yields; `target` gets all of it on a clean exit, and nothing on an exception.

    Args:
        target: the folder to create; a symbolic link means the folder that it leads to. If it has content already,
            that is replaced as a whole.
        keep_others: keep what `target` has beside the new files (for an output folder that also holds checkpoints).
        needed_bytes: what will be written, as far as it is known. Raises DiskFullError at once where that is not free.

    Raises UserError for a checkpoint in the output folder of a run of another process.
    """
    target = Path(os.path.realpath(target))
    if _is_checkpoint(target) and is_held_elsewhere(target.parent):
        raise UserError(f"{target.parent} is in use by a run of another process: save {target.name} in another folder")
    # A mount point cannot be renamed, and its neighbours are on another disk.
    is_inside = target.is_dir() and (keep_others or os.path.ismount(target))
    staging, old = _beside(target, _INCOMPLETE, is_inside), _beside(target, _OLD, is_inside)
    if not is_inside:
        _put_back(old, target)  # a process was killed in the moment between two renames
    _remove_leftovers(target, staging)
    staging.mkdir(parents=True)
    try:
        _check_space(staging, needed_bytes)
        with _full_disk_named(staging):
            yield staging
            _share_as_folder(staging)
            _sync(staging)
        if is_inside:
            _merge(staging, target, old, _replaced(staging, target, keep_others))
        else:
            _replace(staging, target, old)
        for folder in (target, target.parent):
            _sync_one(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def removing(folders: Sequence[Path]) -> Iterator[None]:
    """Remove these, all of one folder: they are out of the way in the block, and back where that raises."""
    if not folders:
        yield
        return
    aside = folders[0].parent / _FORMER
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, aside, ignore_errors=True)
        for folder in folders:
            # Noted before it is done: an interrupt may come between.
            undo.callback(_put_back, aside / folder.name, folder)
            os.rename(folder, aside / folder.name)
        yield
        undo.pop_all()
    shutil.rmtree(aside, ignore_errors=True)


def _share_as_folder(staging: Path) -> None:
    """Let those read the files who may read the folder, which follows the umask: safetensors makes its own private."""
    shared = stat.S_IMODE(staging.stat().st_mode) & 0o666
    for path in staging.rglob("*"):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if path.is_file() and not path.is_symlink() and mode | shared != mode:
            with contextlib.suppress(PermissionError):  # file systems that have one mode for all
                path.chmod(mode | shared)


def _sync(folder: Path) -> None:
    """Until the disk has all that was written in `folder`."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if not path.is_symlink():
            _sync_one(path)
    _sync_one(folder)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):  # file systems that sync in their own way
            raise
    finally:
        os.close(descriptor)


def _beside(target: Path, ending: str, is_inside: bool) -> Path:
    return target / f".{ending}" if is_inside else target.with_name(f".{target.name}.{ending}")


def _remove_leftovers(target: Path, staging: Path) -> None:
    """What killed processes left: of this folder, and of the checkpoints in it or beside it."""
    shutil.rmtree(staging, ignore_errors=True)
    for folder in (target, target.parent) if _is_checkpoint(target) else (target,):
        # A model may be saved where another process trains, whose checkpoint is no leftover.
        leftovers = (
            [] if is_held_elsewhere(folder) else [folder / _FORMER, *folder.glob(f".checkpoint-*.{_INCOMPLETE}")]
        )
        for leftover in leftovers:
            shutil.rmtree(leftover, ignore_errors=True)


def _is_checkpoint(target: Path) -> bool:
    return target.name.startswith("checkpoint-")


def _replace(staging: Path, target: Path, old: Path) -> None:
    had_content = target.is_dir() and any(target.iterdir())
    shutil.rmtree(old, ignore_errors=True)
    try:
        if had_content:
            os.rename(target, old)
        os.rename(staging, target)
    except BaseException:
        _put_back(old, target)
        raise


def _put_back(old: Path, target: Path) -> None:
    """What was moved aside, where nothing has taken its place."""
    if os.path.lexists(old) and not os.path.lexists(target):
        os.rename(old, target)


def _replaced(staging: Path, target: Path, keep_others: bool) -> list[Path]:
    """What has to go from `target`, entries first."""
    places = {target / source.name for source in staging.iterdir()}
    if not keep_others:
        places |= set(target.iterdir())
    elif any((staging / name).exists() for name in ENTRY_NAMES):
        # With an old adapter's config beside it, a whole model would load as that adapter; an old manifest is of what
        # was there.
        stale = (*ENTRY_NAMES, "adapter_config.json", MANIFEST_NAME)
        places |= {*(target / name for name in stale), *target.glob("model-*-of-*.safetensors")}
    hidden = {_beside(target, ending, True) for ending in (_INCOMPLETE, _OLD)}
    return sorted((path for path in places - hidden if os.path.lexists(path)), key=_is_entry, reverse=True)


def _merge(staging: Path, target: Path, old: Path, replaced: list[Path]) -> None:
    """Move the files of `staging` into `target`, and `replaced` out of their way into `old`; or leave all as it was."""
    shutil.rmtree(old, ignore_errors=True)
    old.mkdir()
    with contextlib.ExitStack() as undo:
        # Noted before it is done: an interrupt may come between.
        for path in replaced:
            undo.callback(_put_back, old / path.name, path)
            os.rename(path, old / path.name)
        for source in sorted(staging.iterdir(), key=_is_entry):
            undo.callback(_put_back, target / source.name, source)
            os.rename(source, target / source.name)
        staging.rmdir()
        undo.pop_all()


def _is_entry(path: Path) -> bool:
    return path.name in ENTRY_NAMES


def _check_space(staging: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(staging).free
    if needed_bytes > free_bytes:
        missing = format_bytes(needed_bytes - free_bytes)
        raise _full(staging, f"{missing} are missing for the {format_bytes(needed_bytes)} that are to be written")


@contextlib.contextmanager
def _full_disk_named(staging: Path) -> Iterator[None]:
    """Libraries tell of a full disk in their own ways (`torch.save`: "file write failed"); this one says which disk."""
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        could_not_write = any(words in str(error) for words in _TORCH_WRITE_ERRORS)
        is_full = could_not_write and shutil.disk_usage(staging).free < FULL_BYTES
        if not is_full and "No space left" not in str(error):
            raise
        written_bytes = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
        raise _full(staging, f"{format_bytes(written_bytes)} were written and more is needed") from error


def _full(staging: Path, what: str) -> DiskFullError:
    mount = next(folder for folder in (staging, *staging.parents) if os.path.ismount(folder))
    free = format_bytes(shutil.disk_usage(staging).free)
    return DiskFullError(
        errno.ENOSPC, f"the disk at {mount} is full: {what}, {free} are free; make room there or save to another disk"
    )
