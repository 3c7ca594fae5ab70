"""Paths that settings name: what the file system refuses, and folders that do not exist yet."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from megatrain.base.errors import UserError

_SHOWN_CHARACTERS = 200


@contextlib.contextmanager
def looking_at(setting: str, file: Path | None = None) -> Iterator[None]:
    """Around every look at a path that `setting` named: no permission, a name too long, a disk that fails.

    file: that is written, which an error in the middle of it does not name.
    Raises UserError that names the setting, the path and the reason.
    """
    try:
        yield
    except OSError as error:
        name = str(error.filename or file or "its file")
        shown = name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}..."
        raise UserError(
            f"{setting}: {shown} cannot be used ({error.strerror or error}); correct the path, or its permissions"
        ) from error


def user_path(text: str | os.PathLike[str], setting: str) -> Path:
    """The path with `~` as the user's home. Raises UserError for a home that is not known."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"{setting}: {text} names the home of nobody here; write the whole path") from error


def fixed_path(text: str | os.PathLike[str], setting: str) -> Path:
    """The whole path, as it is now: what changes the working directory afterwards moves it no more.

    Raises UserError for one that is relative to nothing, or to the home of nobody.
    """
    path = user_path(text, setting)
    try:
        return path if path.is_absolute() else Path.cwd() / path
    except FileNotFoundError as error:
        raise UserError(
            f"{setting}={os.fspath(text)!r} is relative to a working directory that is gone: give the whole path"
        ) from error


def check_folder(path: Path, setting: str, remedy: str = "") -> None:
    """Raises UserError where `path` is no folder: a file, or nothing. remedy: what to say behind it."""
    if path.is_dir():
        return
    wrong = f"{path} is a file, not a folder" if path.exists() else f"no such folder: {path}"
    looked = "" if path.exists() or path.is_absolute() else f" (looked from {Path.cwd()})"
    raise UserError(f"{setting}: {wrong}{looked}" + (f"; {remedy}" if remedy else ""))


def dead_link(path: Path) -> str:
    """`PATH is a symbolic link (to TARGET) that leads nowhere`, for `path` or what is above it; else empty."""
    for link in (path, *path.parents):
        if os.path.islink(link) and _leads_nowhere(link):
            return f"{link} is a symbolic link (to {os.readlink(link)}) that leads nowhere"
    return ""


def _leads_nowhere(link: Path) -> bool:
    try:
        os.stat(link)
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ELOOP)
    return False


def existing_parent(folder: Path) -> Path:
    """`folder`, or the nearest folder above it that exists. Symbolic links are followed."""
    folder = Path(os.path.realpath(folder))
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def write_whole(file: Path, text: str) -> None:
    """Write a small file, whole or not at all; its folder is made. Raises OSError."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        os.replace(part, file)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def machine_profile_path() -> Path:
    """Where `megatrain doctor` keeps what it measured."""
    return cache_folder("the profile") / "machine.json"


def cache_folder(what: str) -> Path:
    """$MEGATRAIN_CACHE, or ~/.cache/megatrain. what: is kept there, for messages."""
    cache = os.environ.get("MEGATRAIN_CACHE")
    return user_path(cache, "MEGATRAIN_CACHE") if cache else user_path("~/.cache/megatrain", what)


def attention_profile_path() -> Path:
    """Rates of attention kernels by shape, which runs measure."""
    return cache_folder("the profile") / "attention.json"
