"""What a recorder was told, as pieces of lanes with their visits, and as a summary.

A visit of a layer is made of what follows one another on the compute lane with the layer's name: its micro-batches, and
the sums of gradients behind them. So there are as many as `mt.stats` counts, but that a layer with which one step ends
and the next begins has two.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatrain.base.trace import Piece, blamed, chrome_trace, writable, write_trace
from megatrain.execute.engine import Engine
from megatrain.transport.recorder import COMPUTE, HOST, STEPS, Record, Recorder

VISIT = ("forward", "backward")
MICRO_BATCH = "micro-batch"
CALLS = ("call", "backward call")
OF_VISITS = ("acquire", "switch", *CALLS, "release")
"""What the engine does on the host for a visit."""
NOT_THE_ENGINES = ("model code", "autograd", "wait")
"""What lies in that and is none of the engine's: the modules' forwards, PyTorch's backward of them, waits."""


class Trace:
    """Lanes of one model, from `start` to `stop`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._recorder: Recorder | None = None
        self.pieces: list[Piece] = []

    def start(self) -> None:
        self._recorder = Recorder(self._engine.device)
        self._engine.transport.record(self._recorder)

    def stop(self) -> None:
        """Wait until all lanes are done, and take what they did. Raises what went wrong in one."""
        recorder, transport = self._recorder, self._engine.transport
        assert recorder is not None
        try:
            transport.quiesce()
        finally:
            self.abandon()
        self.pieces = _with_visits(_pieces(recorder))

    def abandon(self) -> None:
        """Nothing is recorded any more."""
        self._engine.transport.record(None)
        self._recorder = None

    def summary(self) -> dict[str, Any]:
        """Where the time went, in seconds.

        - `seconds`: from the first piece to the end of the last; `num_steps` that ended in it.
        - `busy_seconds`: lane -> in which it worked; of `compute` without its stalls.
        - `stall_seconds`: cause ("weights", "drain") -> for which the compute lane waited, as `mt.stats` counts them;
          `stall_behind_seconds`: the same by the kind of work that was waited for in the end ("fetch", "update", ...).
        - `host_seconds_per_visit`: Python's own time for a visit of a layer, without the modules' forwards, PyTorch's
          backward of them, and waits: `median`, `max`, and their `sum`; `num_visits`. A visit has a call, or a backward
          call, for each of its micro-batches: `num_calls`.
        """
        pieces = self.pieces
        spans = [piece for piece in pieces if piece.lane not in (STEPS, HOST)]
        starts, ends = [piece.start for piece in spans], [piece.end for piece in spans]
        stalls, behind = _stalls(pieces)
        busy = {lane: _covered(piece for piece in spans if piece.lane == lane) for lane in _lanes(spans)}
        if COMPUTE in busy:
            busy[COMPUTE] -= _covered(piece for piece in spans if piece.lane == COMPUTE and piece.what == "stall")
        of_visits = _host_seconds(pieces)
        return {
            "seconds": max(ends, default=0.0) - min(starts, default=0.0),
            "num_steps": sum(piece.lane == STEPS for piece in pieces),
            "busy_seconds": busy,
            "stall_seconds": stalls,
            "stall_behind_seconds": behind,
            "num_visits": len(of_visits),
            "num_calls": sum(piece.lane == HOST and piece.what in CALLS for piece in pieces),
            "host_seconds_per_visit": {
                "median": statistics.median(of_visits) if of_visits else 0.0,
                "max": max(of_visits, default=0.0),
                "sum": sum(of_visits),
            },
        }

    def chrome_trace(self) -> Mapping[str, Any]:
        """The JSON object that chrome://tracing and Perfetto open, the summary under `otherData`."""
        engine = self._engine
        facts = {"device": str(engine.device), "precision": engine.precision, "summary": self.summary()}
        return chrome_trace(self.pieces, facts)

    def export_chrome_trace(self, file: str) -> None:
        """Write it. Raises UserError for a file that cannot be written."""
        write_trace(self.chrome_trace(), writable(file, "mt.trace"))


def _pieces(recorder: Recorder) -> list[Piece]:
    """Of all that is over, in the order of their beginnings."""
    over = [record for record in recorder.records if record.end is not None]
    seconds = {record: (recorder.seconds(record.begin), recorder.seconds(record.end)) for record in over}
    over.sort(key=lambda record: (seconds[record][0], -seconds[record][1]))
    numbers = {record: number for number, record in enumerate(over)}
    return [_piece(record, *seconds[record], recorder, numbers) for record in over]


def _piece(record: Record, start: float, end: float, recorder: Recorder, numbers: Mapping[Record, int]) -> Piece:
    what, name = record.label
    facts: dict[str, Any] = {}
    if record.micro_batch is not None:
        facts[MICRO_BATCH] = record.micro_batch
    if record.num_bytes:
        facts["bytes"] = record.num_bytes
    if record.begin.event is not None and record.end is not None and what != "stall":
        facts["host_ms"] = round((record.end.host_seconds - record.begin.host_seconds) * 1e3, 3)
    after = tuple(numbers[other] for other in recorder.waited_for(record) if other in numbers)
    return Piece(lane=record.lane, what=what, name=name, start=start, end=max(start, end), after=after, facts=facts)


def _with_visits(pieces: list[Piece]) -> list[Piece]:
    """With a piece around those of each visit that has several. The others keep their numbers."""
    groups: list[list[Piece]] = []
    end = float("-inf")
    for piece in pieces:
        if piece.lane != COMPUTE or piece.what == "stall" or piece.end <= end:
            continue
        end = piece.end
        if groups and _belongs(piece, groups[-1]):
            groups[-1].append(piece)
        elif piece.what in VISIT:
            groups.append([piece])
    visits = [_visit(group) for group in groups if len(group) > 1 or MICRO_BATCH in group[0].facts]
    return [*map(_of_micro_batch, pieces), *visits]


def _belongs(piece: Piece, group: Sequence[Piece]) -> bool:
    """The layer is still on the device, and this is no next step."""
    return piece.name == group[0].name and not (piece.what == "forward" and group[-1].what != "forward")


def _visit(group: Sequence[Piece]) -> Piece:
    what = " and ".join(dict.fromkeys(piece.what for piece in group if piece.what in VISIT))
    return Piece(lane=COMPUTE, what=what, name=group[0].name, start=group[0].start, end=group[-1].end)


def _of_micro_batch(piece: Piece) -> Piece:
    number = piece.facts.get(MICRO_BATCH)
    if piece.lane != COMPUTE or number is None:
        return piece
    return dataclasses.replace(piece, name=f"{MICRO_BATCH} {number}", facts={"layer": piece.name, **piece.facts})


def _stalls(pieces: Sequence[Piece]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds by cause, and by what was waited for in the end."""
    causes: Counter[str] = Counter()
    behind: Counter[str] = Counter()
    for number, piece in enumerate(pieces):
        if piece.what == "stall":
            causes[piece.name] += piece.seconds
            cause = blamed(pieces, number)
            behind["other" if cause is None else pieces[cause].what] += piece.seconds
    return dict(causes), dict(behind)


def _lanes(pieces: Iterable[Piece]) -> list[str]:
    return list(dict.fromkeys(piece.lane for piece in pieces))


def _covered(pieces: Iterable[Piece]) -> float:
    """Seconds in which at least one of them is under way."""
    total, end = 0.0, float("-inf")
    for piece in sorted(pieces, key=lambda piece: piece.start):
        total += max(0.0, piece.end - max(piece.start, end))
        end = max(end, piece.end)
    return total


def _host_seconds(pieces: Sequence[Piece]) -> list[float]:
    """Of each visit: what Python did for it, without the model's own and waits."""
    found: list[float] = []
    layer, end, left_out_until = "", float("-inf"), float("-inf")
    for piece in sorted((one for one in pieces if one.lane == HOST), key=lambda one: (one.start, -one.end)):
        if piece.end > end:
            end = piece.end
            if piece.what not in OF_VISITS:
                layer = layer if piece.what == "wait" else ""
                continue
            if piece.name != layer:
                found.append(0.0)
            layer = piece.name
            found[-1] += piece.seconds
        elif layer and piece.what in NOT_THE_ENGINES and piece.end > left_out_until:
            left_out_until = piece.end
            found[-1] -= piece.seconds
    return found
