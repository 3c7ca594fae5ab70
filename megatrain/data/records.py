"""From raw records to checked samples: which format, and is each record well formed.

Rule: every refusal names file and line, and what to change. All records of a run have one format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megatrain.base.errors import UserError
from megatrain.data.files import Raw

KEYS = {"text": ("text",), "prompt_completion": ("prompt", "completion"), "messages": ("messages",)}
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ACCEPTED = "`text`, or `prompt` and `completion`, or `messages`"


@dataclass(frozen=True)
class Sample:
    """One checked record. `format` is a key of KEYS; the fields named there hold what it says."""

    format: str
    record: dict[str, Any]
    where: str


def check_records(raws: Iterable[Raw], format: str) -> Iterator[Sample]:
    """Yield well-formed samples; raise UserError at the first bad one. `format` is DataConfig.format."""
    expected, because = (None, "") if format == "auto" else (format, "data.format says so")
    for raw in raws:
        if expected is None:
            expected = _detect(raw)
            because = f"as {raw.where} has"
        _check_keys(raw, expected, because)
        _CHECKS[expected](raw)
        for key in KEYS[expected]:
            _check_characters(raw.record[key], f"{raw.where}: `{key}`")
        yield Sample(expected, raw.record, raw.where)


def _has_keys(record: dict[str, Any], format: str) -> bool:
    # A column that a dataset library filled with None is a key that this record does not have.
    return all(record.get(key) is not None for key in KEYS[format])


def _detect(raw: Raw) -> str:
    matches = [format for format in KEYS if _has_keys(raw.record, format)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UserError(
            f"{raw.where}: keys fit several formats ({', '.join(matches)}); set data.format to the one to train on"
        )
    raise UserError(f"{raw.where}: found keys {_names(raw)}; rename them to {_ACCEPTED}")


def _check_keys(raw: Raw, expected: str, because: str) -> None:
    if _has_keys(raw.record, expected):
        return
    wanted = " and ".join(f"`{key}`" for key in KEYS[expected])
    raise UserError(
        f"{raw.where}: needs {wanted} ({because}) but has keys {_names(raw)}; "
        "repair this record, or keep one format in a run"
    )


def _names(raw: Raw) -> str:
    return ", ".join(map(str, raw.record)) or "(none)"


def _check_strings(raw: Raw, keys: tuple[str, ...]) -> None:
    for key in keys:
        if not isinstance(raw.record[key], str):
            kind = type(raw.record[key]).__name__
            raise UserError(
                f"{raw.where}: `{key}` is a {kind}, not a string; give plain text (conversations go in `messages`)"
            )


def _check_characters(value: Any, where: str) -> None:
    """Half a surrogate pair (`\\ud83d` alone) passes as JSON but is no text: it has no UTF-8, and no tokens."""
    if isinstance(value, str):
        found = None if value.isascii() else _SURROGATE.search(value)
        if found:
            raise UserError(
                f"{where} has half a character at position {found.start()} (\\u{ord(found[0]):04x}, a lone surrogate); "
                "remove it, or write the file again as UTF-8"
            )
    elif isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            _check_characters(part, where)


def _check_text(raw: Raw) -> None:
    _check_strings(raw, KEYS["text"])


def _check_pair(raw: Raw) -> None:
    _check_strings(raw, KEYS["prompt_completion"])


def _check_messages(raw: Raw) -> None:
    messages = raw.record["messages"]
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{raw.where}: `messages` must be a list of at least one message")
    for number, message in enumerate(messages, start=1):
        _check_message(message, f"{raw.where}, message {number}")
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{raw.where}: no assistant turn, so nothing to learn; remove this record or add the answer")


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict) or "role" not in message:
        raise UserError(f'{where}: must be an object like {{"role": "user", "content": "..."}}')
    if message["role"] not in ROLES:
        raise UserError(f"{where}: role {message['role']!r} is unknown; use one of {', '.join(ROLES)}")
    if message.get("content") is None and message["role"] == "assistant" and message.get("tool_calls"):
        return
    if not isinstance(message.get("content"), str):
        kind = type(message.get("content")).__name__
        raise UserError(f"{where}: `content` is {kind}, not a string; give plain text")


_CHECKS = {"text": _check_text, "prompt_completion": _check_pair, "messages": _check_messages}
