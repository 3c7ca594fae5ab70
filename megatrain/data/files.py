"""Sources: a text file, a folder of documents, JSONL, a JSON array, a Hugging Face dataset.

Rule: the order of what is read depends on names only, never on the file system.
Gives up: a folder is read as documents; records in it must be all of it or be named one by one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.base.errors import UserError
from megatrain.base.paths import looking_at, user_path
from megatrain.data.builtin import BUILTIN_SOURCES
from megatrain.data.config import Source
from megatrain.data.hub import HUB_PREFIX, load_hub_dataset

RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json")
LINE_SUFFIXES = (".jsonl", ".ndjson")
BUILTIN_PREFIX = "builtin:"


@dataclass(frozen=True)
class Raw:
    """One sample as it was found: `record` is a dict of keys, `where` says file and line for messages."""

    record: dict[str, Any]
    where: str


@dataclass
class Skipped:
    """Files of a folder that are not text, by relative name; filled while reading."""

    files: list[str] = field(default_factory=list)


def as_sources(path: Source | Sequence[Source]) -> list[Source]:
    """One source or several, as a list."""
    several = isinstance(path, Sequence) and not isinstance(path, str) and not (path and isinstance(path[0], dict))
    return list(path) if several else [path]


def check_sources(sources: list[Source], key: str = "data.path") -> None:
    """Raise UserError for what is no source, before anything is read. `key` is the setting that named them."""
    if not sources:
        raise UserError(f"{key} is an empty list; name a file, a folder or a dataset")
    for source in sources:
        if not isinstance(source, (str, os.PathLike)):
            if not isinstance(source, Iterable):
                raise UserError(f"{key} is a {type(source).__name__}; name a file, a folder or a dataset")
        elif str(source).startswith(BUILTIN_PREFIX):
            _builtin_name(str(source), key)
        elif not str(source).startswith(HUB_PREFIX):
            with looking_at(key):
                _check_path(user_path(source, key), key)


def _check_path(path: Path, key: str) -> None:
    if not path.exists():
        raise UserError(
            f"{key}: no such file or folder: {path} (looked from {Path.cwd()}); "
            f"correct the path, or write {HUB_PREFIX}NAME for a dataset of the Hugging Face Hub"
        )
    if not (path.is_file() or path.is_dir()):
        raise UserError(f"{key}: {path} is neither a file nor a folder; give one of these")
    if path.resolve().parent == path.resolve():
        raise UserError(f"{key}: {path} is the root of the whole file system; name a folder of documents")


def read_source(source: Source, format: str, skipped: Skipped) -> Iterator[Raw]:
    """All samples of one source, in order. `format` is DataConfig.format."""
    if not isinstance(source, (str, os.PathLike)):
        return _read_rows(source, "dataset")
    if str(source).startswith(BUILTIN_PREFIX):
        return _read_rows(BUILTIN_SOURCES[_builtin_name(str(source))](), str(source))
    if str(source).startswith(HUB_PREFIX):
        return _read_rows(load_hub_dataset(str(source)), str(source))
    return _read_path(user_path(source, "data"), format, skipped)


def _read_path(path: Path, format: str, skipped: Skipped) -> Iterator[Raw]:
    with looking_at("data"):
        yield from _read_folder(path, format, skipped) if path.is_dir() else _read_file(path, format)


def _read_file(path: Path, format: str) -> Iterator[Raw]:
    holds_records = path.suffix.lower() in RECORD_SUFFIXES or format in ("prompt_completion", "messages")
    if holds_records:
        return _read_records(path)
    return iter([Raw({"text": _read_text(path)}, str(path))])


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); convert it to UTF-8 first") from error


def _read_records(path: Path) -> Iterator[Raw]:
    """JSONL by lines; a `.json` file that starts with `[` as one array."""
    if path.suffix.lower() not in LINE_SUFFIXES and _first_character(path) == "[":
        yield from _read_array(path)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parse_line(line, f"{path}, line {number}", is_first=number == 1)


def _parse_line(line: bytes, where: str, is_first: bool) -> Raw:
    try:
        record = json.loads(line.decode("utf-8-sig" if is_first else "utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8; convert the file to UTF-8 first") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: not valid JSON ({error.msg} at column {error.colno}); each line must be one whole JSON object"
        ) from error
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, lists within lists
        raise UserError(f"{where}: cannot be read ({error}); remove the record") from error
    return Raw(_expect_object(record, where), where)


def _first_character(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(4096).decode("utf-8-sig", errors="ignore").lstrip()[:1]


def _read_array(path: Path) -> Iterator[Raw]:
    try:
        items = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not valid JSON ({error.msg}); repair the array") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); remove the record that it is about") from error
    for number, record in enumerate(items, start=1):
        where = f"{path}, item {number}"
        yield Raw(_expect_object(record, where), where)


def _expect_object(record: Any, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise UserError(f'{where}: a {type(record).__name__} where an object such as {{"text": "..."}} is needed')
    return record


def _read_folder(root: Path, format: str, skipped: Skipped) -> Iterator[Raw]:
    """Every UTF-8 text file as one document; or, where all are JSONL, their records."""
    paths = _visible_files(root)
    with_lines = [path for path in paths if path.suffix.lower() in LINE_SUFFIXES]
    if with_lines and format != "text":
        if len(with_lines) < len(paths):
            raise UserError(
                f"{root}: holds JSONL ({with_lines[0].name}) beside other documents; name the JSONL files in "
                "data.path, or set data.format to text to read every file as plain text"
            )
        for path in with_lines:
            yield from _read_records(path)
        return
    for path in paths:
        text = _text_or_none(path)
        if text is None:
            skipped.files.append(path.relative_to(root).as_posix())
        else:
            yield Raw({"text": text}, str(path))


def _visible_files(root: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise error  # a folder that cannot be listed is no empty one

    found: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).as_posix())


def _text_or_none(path: Path) -> str | None:
    """The text, or None for a binary file: a NUL byte, or not UTF-8."""
    content = path.read_bytes()
    if b"\0" in content:
        return None
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None


def _builtin_name(source: str, key: str = "data.path") -> str:
    name = source.removeprefix(BUILTIN_PREFIX)
    if name not in BUILTIN_SOURCES:
        raise UserError(
            f"{key}: {source} does not exist; use {BUILTIN_PREFIX} with one of {', '.join(BUILTIN_SOURCES)}"
        )
    return name


def _read_rows(dataset: Any, name: str) -> Iterator[Raw]:
    for number, record in enumerate(dataset, start=1):
        where = f"{name}, row {number}"
        yield Raw(_expect_object(record, where), where)
