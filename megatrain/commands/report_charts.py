"""Charts of a report as SVG in the page: lines over steps. No library, no script; colours are the page's own.

Each chart is drawn twice, for wide and for narrow pages, so that its words have the same size on both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Points = Sequence[tuple[float, float]]

WIDE, NARROW = (560, 250), (340, 230)
"""Units of a drawing, which are pixels of a page where it has its own width."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 12, 40
MOST_POINTS = 600
"""Of a line: more are shown as means of as many neighbours as needed."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Of a chart."""

    title: str
    points: Points
    colour: int
    """1 to 5: of the page's colours."""
    has_dots: bool = False
    """For values that are few."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """A dashed line at one value, such as what was predicted."""

    title: str
    value: float
    colour: int


@dataclass(frozen=True, kw_only=True)
class Chart:
    """
    Args:
        unit: of the values, behind the title.
        marks: steps at which the run went on from a checkpoint.
        has_zero: the axis begins at 0.
    """

    title: str
    unit: str = ""
    lines: Sequence[Line]
    levels: Sequence[Level] = ()
    marks: Sequence[int] = ()
    has_zero: bool = False
    note: str = ""
    names_lines: bool = False
    """In the legend, however few they are."""


def chart_html(chart: Chart) -> str:
    """A figure with title, legend and drawing; empty where there is nothing to draw."""
    lines = [line for line in chart.lines if any(math.isfinite(value) for _, value in line.points)]
    if not lines:
        return ""
    names = [(f"k{line.colour}", line.title) for line in lines] if chart.names_lines else []
    names += dict.fromkeys(("dashed", level.title) for level in chart.levels)
    legend = "".join(f'<span class="key"><i class="{key}"></i>{escape(title)}</span>' for key, title in names)
    if chart.marks:
        legend += '<span class="key"><i class="mark"></i>went on from a checkpoint</span>'
    unit = f' <span class="unit">{escape(chart.unit)}</span>' if chart.unit else ""
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
    drawings = "".join(_drawing(chart, lines, size, name) for size, name in ((WIDE, "wide"), (NARROW, "narrow")))
    return (
        f'<figure><figcaption>{escape(chart.title)}{unit}</figcaption><div class="legend">{legend}</div>'
        f"{drawings}{note}</figure>"
    )


def _drawing(chart: Chart, lines: Sequence[Line], size: tuple[int, int], name: str) -> str:
    width, height = size
    values = [value for line in lines for _, value in line.points if math.isfinite(value)]
    values += [level.value for level in chart.levels]
    steps = [step for line in lines for step, _ in line.points]
    low, high = axis_range(min([0.0, *values] if chart.has_zero else values), max(values))
    first, last = min(steps), max(steps)
    last = last if last > first else first + 1

    def x(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * (width - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return height - _BOTTOM - (value - low) / (high - low) * (height - _BOTTOM - _TOP)

    parts = [
        f'<svg class="{name}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(chart.title)}, by step">'
    ]
    rows = ticks(low, high, 5)
    for value, text in zip(rows, tick_texts(rows), strict=True):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{_LEFT - 8}" y="{y(value) + 4:.1f}">{text}</text>')
    columns = [step for step in ticks(first, last, 6 if width > 400 else 4) if step == int(step)]
    for step, text in zip(columns, tick_texts(columns), strict=True):
        parts.append(
            f'<text class="tick" text-anchor="middle" x="{x(step):.1f}" y="{height - _BOTTOM + 17}">{text}</text>'
        )
    parts.append(
        f'<text class="tick" text-anchor="middle" x="{(_LEFT + width - _RIGHT) / 2:.0f}" y="{height - 4}">step</text>'
    )
    for step in chart.marks:
        if first <= step <= last:
            parts.append(
                f'<line class="mark" x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{_TOP}" y2="{height - _BOTTOM}"/>'
            )
    for level in chart.levels:
        parts.append(
            f'<line class="line dashed c{level.colour}" x1="{_LEFT}" x2="{width - _RIGHT}" '
            f'y1="{y(level.value):.1f}" y2="{y(level.value):.1f}"/>'
        )
    for line in lines:
        parts.append(_line(line, x, y))
    return "".join([*parts, "</svg>"])


def _line(line: Line, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    points = thinned(line.points)
    pieces: list[list[str]] = [[]]
    for step, value in points:
        if math.isfinite(value):
            pieces[-1].append(f"{x(step):.1f},{y(value):.1f}")
        elif pieces[-1]:
            pieces.append([])
    drawn = "".join(
        f'<polyline class="line c{line.colour}" points="{" ".join(piece)}"/>' for piece in pieces if len(piece) > 1
    )
    # Invisible ones still have tips where a pointer can be.
    alone = {piece[0] for piece in pieces if len(piece) == 1}
    for step, value in points if line.has_dots or alone or len(points) <= 150 else ():
        if not math.isfinite(value):
            continue
        is_shown = line.has_dots or f"{x(step):.1f},{y(value):.1f}" in alone
        tip = f"<title>{escape(line.title)}, step {step:,.0f}: {value:.6g}</title>"
        drawn += (
            f'<circle class="{"dot" if is_shown else "tip"} f{line.colour}" '
            f'cx="{x(step):.1f}" cy="{y(value):.1f}" r="{3.2 if is_shown else 5}">{tip}</circle>'
        )
    return drawn


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most so many: the mean of as many neighbours as needed. What is not finite stays a gap."""
    if len(points) <= most:
        return points
    size = -(-len(points) // most)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(step for step, _ in group) / len(group), _mean([value for _, value in group])) for group in groups]


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def axis_range(low: float, high: float) -> tuple[float, float]:
    """A little more than the values take."""
    room = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    return (0.0 if low == 0 else low - room, high + room)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from low to high: 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    apart = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / apart - 1e-9)
    return [number * apart for number in range(first, math.floor(high / apart + 1e-9) + 1)]


def tick_texts(values: Sequence[float]) -> list[str]:
    """With as many digits as tell them apart: `1,200`, `0.15`, `2e-05`."""
    apart = min((b - a for a, b in zip(values, values[1:], strict=False)), default=abs(values[0]) if values else 1.0)
    largest = max(map(abs, values), default=0.0)
    if 0 < largest < 1e-3:
        return ["0" if value == 0 else f"{value:.{_digits(apart, largest)}e}" for value in values]
    decimals = max(0, -math.floor(math.log10(apart) + 1e-9)) if apart > 0 else 2
    return [f"{value:,.{decimals}f}" for value in values]


def _digits(apart: float, largest: float) -> int:
    return max(0, math.floor(math.log10(largest) + 1e-9) - math.floor(math.log10(apart) + 1e-9))
