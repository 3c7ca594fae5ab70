"""The log of a run, `megatrain_log.jsonl` in its output folder: what `megatrain report` shows.

One JSON object a line, appended as it comes, so a kill loses one line at most. `event` and `step` are in each:

    begin       a process begins to train, behind `step` (0: a new run): model, device, what was planned
    log         a logging step: loss, learning rate, seconds, tokens, memory, stalls and faults since the log before
    eval        an evaluation
    checkpoint  one that is complete, or failed
    measured    what was predicted and measured, once
    said        a line that the run printed of itself
    end         the process trains no more

Rule: neither torch nor transformers is imported here. Bytes and seconds are named so; times are Unix seconds.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger("megatrain")

LOG_NAME = "megatrain_log.jsonl"

Entry = dict[str, Any]


class RunLog:
    """Appends. What cannot be written is told once, and the run goes on."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / LOG_NAME
        self._has_failed = False

    def add(self, event: str, step: int, facts: Mapping[str, Any]) -> None:
        if self._has_failed:
            return
        line = json.dumps({"event": event, "step": step, "time": round(time.time(), 3), **facts})
        try:
            with open(self._file, "ab+") as file:
                # Behind a line that a kill tore.
                is_torn = file.tell() > 0 and _last_byte(file.fileno(), file.tell()) != b"\n"
                file.write((b"\n" if is_torn else b"") + line.encode() + b"\n")
        except OSError as error:
            self._has_failed = True
            logger.warning("%s cannot be written (%s): `megatrain report` will lack what comes now", self._file, error)


def _last_byte(descriptor: int, num_bytes: int) -> bytes:
    return os.pread(descriptor, 1, num_bytes - 1)


class ReadLog(NamedTuple):
    entries: list[Entry]
    """In the order of their steps' last making: what was done again replaces what it was before."""
    num_unreadable: int
    """Lines that are no entry: torn by a kill, or changed by somebody."""
    given_up: list[Entry]
    """Of steps from which no later process went on: their checkpoints may still be there."""


def read_log(file: Path) -> ReadLog:
    """Raises OSError."""
    entries: list[Entry] = []
    given_up: list[Entry] = []
    num_unreadable = 0
    for line in file.read_bytes().splitlines():
        if not line.strip():
            continue
        entry = _entry(line)
        if entry is None:
            num_unreadable += 1
            continue
        if entry["event"] == "begin":
            given_up += [one for one in entries if not _holds(one, entry)]
            entries = [one for one in entries if _holds(one, entry)]
        entries.append(entry)
    return ReadLog(entries, num_unreadable, given_up)


def _entry(line: bytes) -> Entry | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if is_sound(entry) and isinstance(entry.get("event"), str) else None


def is_sound(entry: Any) -> bool:
    """Whether it has a step, and what it says is of the kinds that logs hold: whoever shows it need not look again."""
    if not isinstance(entry, dict) or not _is_count(entry.get("step")):
        return False
    return all(is_one(entry[name]) for name, is_one in _KINDS.items() if entry.get(name) is not None)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_amount(value: Any) -> bool:
    """Of seconds, bytes or things."""
    return is_number(value) and abs(value) <= _MOST


def _is_count(value: Any) -> bool:
    return type(value) is int and _is_amount(value)


def _is_time(value: Any) -> bool:
    return is_number(value) and 0 <= value <= _LAST_TIME


def _is_value(value: Any) -> bool:
    """Of a loss and the like, which may diverge."""
    return is_number(value) and (abs(value) <= _LARGEST_VALUE or value in _INFINITE or value != value)


def _are_amounts(value: Any) -> bool:
    return isinstance(value, dict) and all(one is None or _is_amount(one) for one in value.values())


def _is_outcome(value: Any) -> bool:
    """What was predicted, or measured, of a step."""
    if not isinstance(value, dict):
        return False
    seconds, peaks = value.get("step_seconds"), value.get("bytes")
    return (seconds is None or _is_amount(seconds)) and (peaks is None or _are_amounts(peaks))


_MOST = 10**15
_LAST_TIME = 10**11
"""A date can still be made of it."""
_INFINITE = (math.inf, -math.inf)
_LARGEST_VALUE = 1e100
"""More than any norm of fp32 numbers; a chart can still be made of it."""

_KINDS: dict[str, Callable[[Any], bool]] = {
    "time": _is_time,
    **dict.fromkeys(("loss", "eval_loss", "learning_rate", "grad_norm"), _is_value),
    **dict.fromkeys(("num_steps", "num_tokens", "num_parameters", "max_steps", "num_bytes"), _is_count),
    **dict.fromkeys(("seconds", "pause_seconds", "predicted_pause_seconds"), _is_amount),
    **dict.fromkeys(("memory_bytes", "stall_seconds", "faults"), _are_amounts),
    **dict.fromkeys(("planned", "predicted", "measured"), _is_outcome),
}
"""Of what is computed with; the rest is shown as it is."""


def _holds(entry: Entry, begin: Entry) -> bool:
    """Whether it still does when a process begins: nothing where it begins anew; what came up to the checkpoint from
    which it goes on, and that there were others."""
    return bool(begin.get("is_resumed")) and (entry["step"] <= begin["step"] or entry["event"] == "begin")
