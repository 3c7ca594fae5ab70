"""The lanes of a step as SVG: a row a track of a trace (`base/trace.py`), a bar a piece.

What is narrower than can be seen is joined with its neighbours of the same kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from megatrain.commands.report_charts import tick_texts, ticks

KINDS = {
    "forward": ("forward",),
    "backward": ("backward", "forward and backward", "sum gradients"),
    "stall": ("stall", "wait", "wait for writes"),
    "to the device": ("fetch", "bring input", "stage states"),
    "from the device": ("drain", "send input", "unstage states"),
    "update": ("update", "queue updates"),
    "disk": ("read weights", "read states", "write states", "write gradients"),
    "Python": ("call", "backward call", "acquire", "release", "model code", "autograd"),
}
"""Colour -> what of a trace has it."""
_KIND_OF = {what: kind for kind, whats in KINDS.items() for what in whats}
WIDTHS = ((1080, "full"), (680, "half"), (340, "narrow"))
"""Of drawings, for wide and narrower pages; paper has the second."""
_ROW, _BAR, _AXIS = 26, 18, 34
_LEAST = 0.6
"""Units below which a bar, or a gap between two, is not seen."""


class Bar(NamedTuple):
    kind: str
    start: float
    end: float
    title: str


def lanes_html(trace: Mapping[str, Any], name: str) -> str:
    """A figure of the trace's last whole step, or of all that it has; empty where it has nothing."""
    pieces = [event for event in trace.get("traceEvents", ()) if _is_piece(event)]
    tracks = {
        event.get("tid"): str(event["args"]["name"])
        for event in trace.get("traceEvents", ())
        if isinstance(event, dict) and event.get("name") == "thread_name"
    }
    steps = [piece for piece in pieces if tracks.get(piece["tid"]) == "steps"]
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for piece in pieces:
        if piece not in steps and piece["tid"] in tracks:
            rows[tracks[piece["tid"]]].append(piece)
    if not rows:
        return ""
    window = max(steps, key=lambda step: step["ts"]) if steps else None
    start = window["ts"] if window else min(piece["ts"] for piece in pieces)
    end = start + window["dur"] if window else max(piece["ts"] + piece["dur"] for piece in pieces)
    if end <= start:
        return ""
    kinds = {_KIND_OF.get(str(piece.get("cat")), "Python") for of in rows.values() for piece in of}
    keys = "".join(
        f'<span class="key"><i class="p{index}"></i>{escape(kind)}</span>'
        for index, kind in enumerate(KINDS)
        if kind in kinds
    )
    what = "the last whole step of" if window else "all of"
    rows = {tracks[track]: rows[tracks[track]] for track in sorted(tracks) if tracks[track] in rows}
    drawings = "".join(_drawing(rows, start, end, width, css) for width, css in WIDTHS)
    return (
        f'<figure class="full"><figcaption>Lanes of a step <span class="unit">{what} {escape(name)}, '
        f'{(end - start) / 1e3:,.1f} ms</span></figcaption><div class="legend">{keys}</div>{drawings}</figure>'
    )


def _is_piece(event: Any) -> bool:
    if not isinstance(event, dict) or event.get("ph") != "X":
        return False
    return all(isinstance(event.get(key), int | float) for key in ("ts", "dur"))


def _drawing(rows: Mapping[str, Sequence[dict[str, Any]]], start: float, end: float, width: int, css: str) -> str:
    left = 96
    scale = (width - left - 8) / (end - start)
    height = _ROW * len(rows) + _AXIS
    parts = [f'<svg class="{css}" viewBox="0 0 {width} {height}" role="img" aria-label="lanes of a step">']
    numbers = ticks(0.0, (end - start) / 1e3, 10 if width > 400 else 4)
    for number, text in zip(numbers, tick_texts(numbers), strict=True):
        x = left + number * 1e3 * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - _AXIS}"/>')
        parts.append(f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{height - _AXIS + 16}">{text}</text>')
    parts.append(f'<text class="tick" text-anchor="end" x="{width - 8}" y="{height - 3}">milliseconds</text>')
    for index, (track, pieces) in enumerate(rows.items()):
        y = index * _ROW
        parts.append(f'<text class="tick" text-anchor="end" x="{left - 8}" y="{y + 17}">{escape(track)}</text>')
        for bar in bars(pieces, start, end, _LEAST / scale):
            x, length = left + (bar.start - start) * scale, max(_LEAST, (bar.end - bar.start) * scale)
            kind = list(KINDS).index(bar.kind)
            parts.append(
                f'<rect class="p{kind}" x="{x:.1f}" y="{y + 4}" width="{length:.1f}" height="{_BAR}">'
                f"<title>{escape(bar.title)}</title></rect>"
            )
    return "".join([*parts, "</svg>"])


def bars(pieces: Sequence[Mapping[str, Any]], start: float, end: float, least: float) -> list[Bar]:
    """The outermost pieces of a track between two times, and stalls in them. All in microseconds.

    least: of a gap that is seen.
    """
    found: list[Bar] = []
    stalls: list[Bar] = []
    until = float("-inf")
    for piece in sorted(pieces, key=lambda piece: (piece["ts"], -piece["dur"])):
        first, last = max(start, piece["ts"]), min(end, piece["ts"] + piece["dur"])
        kind = _KIND_OF.get(str(piece.get("cat")), "Python")
        if last <= first or (piece["ts"] + piece["dur"] <= until and kind != "stall"):
            continue
        bar = Bar(kind, first, last, f"{piece.get('name', '')}, {piece['dur'] / 1e3:,.3f} ms")
        if kind == "stall":
            stalls.append(bar)
            continue
        until = piece["ts"] + piece["dur"]
        found.append(bar)
    return [*_joined(found, least), *_joined([stall for stall in stalls if stall.end - stall.start >= least], least)]


def _joined(bars_: Sequence[Bar], least: float) -> list[Bar]:
    found: list[Bar] = []
    for bar in bars_:
        last = found[-1] if found else None
        is_small = last is not None and min(bar.end - bar.start, last.end - last.start) < 4 * least
        if last is not None and is_small and last.kind == bar.kind and bar.start - last.end < least:
            title = last.title if last.title.endswith(" and more") else f"{last.title} and more"
            found[-1] = Bar(bar.kind, last.start, max(last.end, bar.end), title)
        else:
            found.append(bar)
    return found
