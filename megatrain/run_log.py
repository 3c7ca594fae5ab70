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
import os
import time
from collections.abc import Iterable, Mapping
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


def read_log(file: Path) -> ReadLog:
    """Raises OSError."""
    entries: list[Entry] = []
    num_unreadable = 0
    for line in file.read_bytes().splitlines():
        if not line.strip():
            continue
        entry = _entry(line)
        if entry is None:
            num_unreadable += 1
            continue
        if entry["event"] == "begin":
            entries = _before(entries, entry)
        entries.append(entry)
    return ReadLog(entries, num_unreadable)


def _entry(line: bytes) -> Entry | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    is_one = isinstance(entry, dict) and isinstance(entry.get("event"), str) and type(entry.get("step")) is int
    return entry if is_one else None


def _before(entries: Iterable[Entry], begin: Entry) -> list[Entry]:
    """What still holds when a process begins: nothing where it begins anew; what came up to the checkpoint from which
    it goes on, and that there were others."""
    if not begin.get("is_resumed"):
        return []
    return [entry for entry in entries if entry["step"] <= begin["step"] or entry["event"] == "begin"]
