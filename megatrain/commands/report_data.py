"""What a run's folder tells: its log (`run_log.py`), or what transformers keeps in its newest checkpoint, and a trace.

Rule: torch is not imported here. What is missing or unreadable is said, and the rest is shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.base.errors import UserError
from megatrain.base.paths import check_folder, looking_at, user_path
from megatrain.base.units import format_number
from megatrain.commands.record import RECIPE_NAME, RECORD_NAME
from megatrain.run_log import LOG_NAME, Entry, is_number, is_sound, read_log
from megatrain.save.checkpoints import checkpoints_in

STATE_NAME = "trainer_state.json"
_START_OF_TRACE = b'{"traceEvents"'

Points = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Of one run."""

    folder: Path
    begins: Sequence[Entry] = ()
    logs: Sequence[Entry] = ()
    """Those of what still holds: a step that was done again is there once."""
    evals: Sequence[Entry] = ()
    checkpoints: Sequence[Entry] = ()
    given_up: Sequence[Entry] = ()
    """Checkpoints of steps that the run did not go on from."""
    outcome: Entry | None = None
    """What was predicted and measured; of the last process that says so."""
    said: Sequence[str] = ()
    end: Entry | None = None
    """None: no process has said that it trains no more."""
    saved: Sequence[str] = ()
    """Names of the checkpoints that are there."""
    trace: Mapping[str, Any] | None = None
    trace_name: str = ""
    notes: Sequence[str] = field(default=())
    """What is missing, or could not be read."""

    @property
    def about(self) -> Entry:
        """What the last process said of itself."""
        return self.begins[-1] if self.begins else {}

    @property
    def resumed_at(self) -> list[int]:
        return [entry["step"] for entry in self.begins if entry.get("is_resumed")]

    @property
    def last_step(self) -> int:
        """That is known to be done, be it between two logging steps."""
        ends = [] if self.end is None else [self.end]
        of = (*self.logs, *self.evals, *self.begins, *self.checkpoints, *ends)
        return max((entry["step"] for entry in of), default=0)

    def points(self, of: Sequence[Entry], value: Callable[[Entry], Any]) -> Points:
        """(step, value) where there is one."""
        pairs = [(float(entry["step"]), value(entry)) for entry in of]
        return [(step, float(number)) for step, number in pairs if is_number(number)]

    def total(self, name: str) -> dict[str, float]:
        """The sums of a mapping that every log has: `stall_seconds`, `faults`."""
        sums: dict[str, float] = {}
        for entry in (*self.logs, *([] if self.end is None else [self.end])):
            for key, value in _mapping(entry.get(name)).items():
                if is_number(value):
                    sums[key] = sums.get(key, 0) + value
        return sums

    def plain_sum(self, name: str) -> float:
        return sum(entry[name] for entry in self.logs if is_number(entry.get(name)))


def step_seconds(entry: Entry) -> float | None:
    """Of a log: the mean of the steps since the log before."""
    count, seconds = entry.get("num_steps"), entry.get("seconds")
    return seconds / count if is_number(count) and is_number(seconds) and count else None


def tokens_per_second(entry: Entry) -> float | None:
    count, seconds = entry.get("num_tokens"), entry.get("seconds")
    return count / seconds if is_number(count) and is_number(seconds) and count and seconds else None


def memory_bytes(entry: Entry, tier: str) -> float | None:
    """None where the run has nothing in the tier."""
    return _mapping(entry.get("memory_bytes")).get(tier) or None


def read_run(folder: Path) -> RunData:
    """Raises UserError for a folder that is none, or none of a run."""
    folder = user_path(folder, "DIR")
    with looking_at("DIR"):
        check_folder(folder, "DIR")
        if (folder.parent / LOG_NAME).is_file() and folder in checkpoints_in(folder.parent):
            run = folder.parent
            raise UserError(f"DIR: {folder} is a checkpoint of a run; give the run's folder: megatrain report {run}")
        checkpoints = checkpoints_in(folder)
        has_log = (folder / LOG_NAME).is_file()
        states = [path for path in (folder / STATE_NAME, *(c / STATE_NAME for c in checkpoints)) if path.is_file()]
        if not (has_log or states or checkpoints or (folder / RECORD_NAME).is_file()):
            raise UserError(
                f"DIR: {folder} is not the folder of a run (it has no {LOG_NAME}, no {RECIPE_NAME} and no "
                "checkpoints): give the output folder of a `megatrain train`, or the output_dir of an mt.Trainer"
            )
        notes: list[str] = []
        parts = _from_log(folder / LOG_NAME, notes) if has_log else _from_state(states, notes)
        trace, trace_name = _trace_in(folder, notes)
    if not parts.get("logs"):
        notes.append("no logging step has come yet, so there are no curves (`logging_steps` says how often they come)")
    return RunData(
        folder=folder,
        saved=[path.name for path in checkpoints],
        trace=trace,
        trace_name=trace_name,
        notes=notes,
        **parts,
    )


def _from_log(file: Path, notes: list[str]) -> dict[str, Any]:
    entries, num_unreadable, given_up = read_log(file)
    if num_unreadable:
        notes.append(f"{format_number(num_unreadable, 'line')} of {LOG_NAME} cannot be read and {_is(num_unreadable)}")

    def of(event: str, among: Sequence[Entry] = entries) -> list[Entry]:
        """The last of each step, by step."""
        found = {entry["step"]: entry for entry in among if entry["event"] == event}
        return [found[step] for step in sorted(found)]

    outcome = next((entry for entry in reversed(entries) if entry["event"] == "measured"), None)
    last = next((entry for entry in reversed(entries) if entry["event"] in ("begin", "end")), None)
    if outcome is None:
        notes.append("the run has not compared what was predicted with what it measured: that comes after five steps")
    elif outcome.get("predicted") is None:
        notes.append("nothing was predicted: plans are made for runs on a GPU")
    return {
        "begins": [entry for entry in entries if entry["event"] == "begin"],
        "logs": of("log"),
        "evals": of("eval"),
        "checkpoints": of("checkpoint"),
        "given_up": of("checkpoint", given_up),
        "outcome": outcome,
        "said": [str(entry.get("line", "")) for entry in entries if entry["event"] == "said"],
        "end": last if last is not None and last["event"] == "end" else None,
    }


def _is(count: int) -> str:
    return "is left out (a kill tears the last one)" if count == 1 else "are left out"


def _from_state(states: Sequence[Path], notes: list[str]) -> dict[str, Any]:
    """Loss, learning rate and evaluations, which transformers keeps."""
    notes.append(
        f"there is no {LOG_NAME} (an older run, another Trainer's, or keeps_log = False), so time, throughput, memory, "
        "what was planned, pauses of checkpoints and faults are not known"
    )
    history: list[Entry] = []
    for path in reversed(states):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["log_history"]
            history = [entry for entry in found if is_sound(entry)]
            if len(history) < len(found):
                left_out = format_number(len(found) - len(history), "log")
                notes.append(f"{left_out} of {path.parent.name}/{path.name} cannot be read and are left out")
            break
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            notes.append(f"{path.parent.name}/{path.name} cannot be read ({error}) and is left out")
    return {
        "logs": [entry for entry in history if "loss" in entry],
        "evals": [entry for entry in history if "eval_loss" in entry],
    }


def _trace_in(folder: Path, notes: list[str]) -> tuple[Mapping[str, Any] | None, str]:
    """The newest file that `mt.trace` wrote there."""
    files = [path for path in folder.glob("*.json") if path.is_file() and _starts_as_trace(path)]
    for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            return json.loads(path.read_text(encoding="utf-8")), path.name
        except (ValueError, RecursionError) as error:
            notes.append(f"{path.name} is no whole trace ({error}) and is left out")
    notes.append("there is no trace of lanes in the folder: output.trace_step in a recipe, or mt.trace, writes one")
    return None, ""


def _starts_as_trace(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_START_OF_TRACE)) == _START_OF_TRACE


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
