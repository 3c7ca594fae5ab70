"""Lanes at work as a Chrome trace: what happened (`transport/recorder.py`) and what is predicted (`plan/explain.py`).

The JSON object format of chrome://tracing, which Perfetto opens too: one track a lane, pieces that lie in others below
them, an arrow from the piece that was waited for last. Pure: no clock, no device.
Rule: on one track pieces nest or follow one another. Those of a lane that overlap (reads of a disk) get more tracks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.base.errors import UserError
from megatrain.base.paths import looking_at, user_path

LANES = ("steps", "compute", "h2d", "d2h", "cpu", "update", "disk update", "disk", "host thread")
"""The order of tracks. `steps`: whole steps. `compute`: the device's work, or the caller's on a machine without one.
`host thread`: what Python does to bring it about. The others are lanes of transport/."""
SHORTEST_WAIT_SECONDS = 1e-6
"""What is shorter is no wait but the look whether there is one."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Of a lane's work."""

    lane: str
    what: str
    """`forward`, `backward`, `fetch`, `drain`, `update`, `stall`, ..."""
    name: str
    """Of the layer or home; of a stall, its cause."""
    start: float
    end: float
    """Seconds since the trace began."""
    after: tuple[int, ...] = ()
    """Numbers of the pieces that it waited for."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """More that is known of it; for JSON."""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def title(self) -> str:
        return f"{self.what} {self.name}".rstrip()

    @property
    def is_shown(self) -> bool:
        return self.seconds > (SHORTEST_WAIT_SECONDS if self.what in ("stall", "wait") else 0.0)


def chrome_trace(pieces: Sequence[Piece], facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object. facts: of the whole, under `otherData`."""
    rows = _rows(pieces)
    names = list(dict.fromkeys(rows[number] for number in sorted(rows, key=lambda number: _place(*rows[number]))))
    tracks = {row: index for index, row in enumerate(names)}
    events: list[dict[str, Any]] = []
    for (lane, row), track in tracks.items():
        title = lane if row == 0 else f"{lane} ({row + 1})"
        events.append(_meta("thread_name", track, name=title))
        events.append(_meta("thread_sort_index", track, sort_index=track))
    for number, row in rows.items():
        events.append(_event(pieces, number, tracks[row]))
    for number, row in rows.items():
        events += _arrow(pieces, number, rows, tracks, track=tracks[row])
    return {"traceEvents": events, "displayTimeUnit": "ms", **({} if facts is None else {"otherData": facts})}


def write_trace(trace: Mapping[str, Any], file: Path, setting: str = "mt.trace") -> None:
    """setting: that named the file. Raises UserError for one that cannot be written."""
    with looking_at(setting, file):
        file.write_text(json.dumps(trace), encoding="utf-8")


def writable(file: str | os.PathLike[str], setting: str) -> Path:
    """The path, before any work. Raises UserError where no file can be."""
    text = os.fspath(file) if isinstance(file, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise UserError(f"{setting}: {file!r} is not the path of a file; name a file in a folder that is there")
    file = user_path(text, setting)
    with looking_at(setting):
        folder = file.absolute().parent
        if file.is_dir() or not folder.is_dir():
            raise UserError(f"{setting}: {file} cannot be written; name a file in a folder that is there")
        if not os.access(file if file.exists() else folder, os.W_OK):
            raise UserError(f"{setting}: you may not write {file}; name a file where you may, or change permissions")
    return file


def last_of(pieces: Sequence[Piece], numbers: Sequence[int]) -> int | None:
    """Which of them ended last."""
    return max(numbers, key=lambda number: pieces[number].end, default=None)


def blamed(pieces: Sequence[Piece], number: int) -> int | None:
    """What a stall waited for in the end: a fetch that itself waited for an update is not to blame."""
    stall, found = pieces[number], None
    last = last_of(pieces, stall.after)
    while last is not None and pieces[last].end > stall.start:
        found = last
        last = last_of(pieces, [other for other in pieces[last].after if pieces[other].lane != stall.lane])
    return found


def _rows(pieces: Sequence[Piece]) -> dict[int, tuple[str, int]]:
    """Number of a shown piece -> its lane, and which of the lane's tracks, on which it overlaps none but those that
    hold it whole."""
    open_: dict[tuple[str, int], list[float]] = {}
    found = {}
    shown = [number for number, piece in enumerate(pieces) if piece.is_shown]
    for number in sorted(shown, key=lambda number: (pieces[number].start, -pieces[number].end, number)):
        piece, row = pieces[number], 0
        while True:
            ends = open_.setdefault((piece.lane, row), [])
            while ends and ends[-1] <= piece.start:
                ends.pop()
            if not ends or piece.end <= ends[-1]:
                break
            row += 1
        ends.append(piece.end)
        found[number] = (piece.lane, row)
    return found


def _place(lane: str, row: int) -> tuple[int, str, int]:
    return (LANES.index(lane) if lane in LANES else len(LANES), lane, row)


def _meta(kind: str, track: int, **values: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 0, "tid": track, "args": values}


def _event(pieces: Sequence[Piece], number: int, track: int) -> dict[str, Any]:
    piece = pieces[number]
    facts = dict(piece.facts)
    if piece.after:
        facts["waited for"] = [pieces[other].title for other in piece.after]
    cause = blamed(pieces, number) if piece.what == "stall" else None
    if cause is not None:
        facts["behind"] = pieces[cause].title
    start, end = _microseconds(piece.start), _microseconds(piece.end)
    event = {"name": piece.title, "cat": piece.what, "ph": "X", "pid": 0, "tid": track}
    return event | {"ts": start, "dur": round(end - start, 3), "args": facts}


def _arrow(
    pieces: Sequence[Piece],
    number: int,
    rows: Mapping[int, tuple[str, int]],
    tracks: Mapping[tuple[str, int], int],
    *,
    track: int,
) -> list[dict[str, Any]]:
    """From the piece of another lane that ended last of those that this one waited for. It binds to what is on the
    track at its time, so it stands a little inside of both."""
    piece = pieces[number]
    source = last_of(pieces, [other for other in piece.after if other in rows and pieces[other].lane != piece.lane])
    if source is None:
        return []
    flow = {"name": "waited for", "cat": "fence", "pid": 0, "id": number}
    left = _microseconds(pieces[source].end - pieces[source].seconds / 1000)
    inside = piece.seconds / 1000
    arrived = _microseconds(piece.end - inside if piece.what == "stall" else piece.start + inside)
    return [
        flow | {"ph": "s", "tid": tracks[rows[source]], "ts": left},
        flow | {"ph": "f", "bp": "e", "tid": track, "ts": max(left, arrived)},
    ]


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
