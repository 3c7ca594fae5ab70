"""The page of a report: what a run's folder tells (`report_data.py`), as one HTML file that needs nothing else."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import statistics
from collections.abc import Iterable, Sequence
from html import escape

from megatrain.base.units import GIB, format_bytes, format_count, format_number, format_seconds
from megatrain.commands.report_charts import Chart, Level, Line, Points, chart_html
from megatrain.commands.report_data import (
    RunData,
    memory_bytes,
    step_seconds,
    tokens_per_second,
)
from megatrain.commands.report_lanes import lanes_html
from megatrain.commands.report_style import STYLE
from megatrain.run_log import Entry, is_number

TIERS = {"hbm": "device memory", "ram": "host memory in use", "disk": "offload disk"}
_MANY = 20
"""Losses from which on the later ones get a chart of their own."""


def page(run: RunData) -> str:
    """The whole HTML."""
    title = f"Run {run.folder.absolute().name}"
    sections = [
        _head(run, title),
        _section("Training", '<div class="charts">' + "".join(map(chart_html, _training_charts(run))) + "</div>"),
        _section("Speed and memory", '<div class="charts">' + "".join(map(chart_html, _speed_charts(run))) + "</div>"),
        _section("Plan against actual", _plan_table(run)),
        _section("Where the time of a step goes", _lanes(run)),
        _section("Checkpoints", _checkpoints(run)),
        _section("Waits and faults", _faults(run)),
        _section("What the run said of itself", _list(run.said, "said")),
        _section("Not in this report", _list(run.notes)),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _section(title: str, html: str) -> str:
    is_empty = not html or html == '<div class="charts"></div>'
    return "" if is_empty else f"<section><h2>{escape(title)}</h2>{html}</section>"


# The head


def _head(run: RunData, title: str) -> str:
    about = run.about
    facts = []
    if about:
        parameters = f", {format_count(about['num_parameters'])} parameters" if about.get("num_parameters") else ""
        facts.append(f"{about.get('model', 'a model')}{parameters} on {about.get('device', 'an unknown device')}")
        facts.append(f"{about.get('precision')} compute, {about.get('moments')} moments")
        facts.append(f"megatrain {about.get('version')}")
    lines = [f"<h1>{escape(title)}</h1>"]
    lines.append(f'<p class="soft">{escape(" · ".join(facts))}</p>' if facts else "")
    lines.append(f"<p>{escape(_state(run))}</p>")
    tiles = "".join(
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b><span>{escape(beside)}</span></div>'
        for name, value, beside in _tiles(run)
    )
    return f'<header>{"".join(lines)}<div class="tiles">{tiles}</div></header>'


def _state(run: RunData) -> str:
    """How far it has come, and when."""
    max_steps = run.about.get("max_steps")
    of = f" of {max_steps:,}" if is_number(max_steps) else ""
    text = f"Step {run.last_step:,}{of}"
    if run.begins:
        if run.end is None:
            text += "; the log has no end: it still runs, or was killed"
        else:
            text += ", complete" if run.end.get("is_complete") else ", stopped before its last step"
    if run.resumed_at:
        steps = ", ".join(f"{step:,}" for step in run.resumed_at)
        text += f"; went on from a checkpoint {format_number(len(run.resumed_at), 'time')} (step {steps})"
    times = [entry["time"] for entry in (*run.begins, *run.logs) if is_number(entry.get("time"))]
    if times:
        text += f". {_date(min(times))} to {_date(max(times))}"
    return f"{text}."


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _tiles(run: RunData) -> Iterable[tuple[str, str, str]]:
    losses = run.points(run.logs, lambda entry: entry.get("loss"))
    evals = run.points(run.evals, lambda entry: entry.get("eval_loss"))
    if losses:
        yield "training loss", f"{losses[-1][1]:.4f}", f"from {losses[0][1]:.4f} at step {losses[0][0]:,.0f}"
    if evals:
        step, best = min(evals, key=lambda point: point[1])
        yield "best held-out loss", f"{best:.4f}", f"at step {step:,.0f}; last {evals[-1][1]:.4f}"
    seconds = _values(_after_first(run.points(run.logs, step_seconds)))
    if seconds:
        yield "step time", format_step(statistics.median(seconds)), "median"
    rates = _values(_after_first(run.points(run.logs, tokens_per_second)))
    if rates:
        yield "throughput", f"{statistics.median(rates):,.0f}", "tokens/s, median"
    if run.plain_sum("num_tokens"):
        yield "tokens", _count(run.plain_sum("num_tokens")), f"in {format_seconds(run.plain_sum('seconds'))} of steps"
    for tier, name in TIERS.items():
        most = max(_values(run.points(run.logs, lambda entry, tier=tier: memory_bytes(entry, tier))), default=0.0)
        if most:
            yield name, format_bytes(most), "at most, at logging steps"
    if run.saved or run.checkpoints:
        yield "checkpoints", str(len(run.saved)), "in the folder"
    if run.begins:
        faults = run.total("faults")
        yield "faults", f"{sum(faults.values()):,.0f}", "retries, changed transfers, skipped steps"


def _count(number: float) -> str:
    return format_count(int(number)) if number >= 1e6 else f"{number:,.0f}"


def format_step(seconds: float) -> str:
    """`1.23 s`, `45.6 ms`."""
    if seconds >= 100:
        return format_seconds(seconds)
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _values(points: Points) -> list[float]:
    return [value for _, value in points]


def _after_first(points: Points) -> Points:
    """Without the first step of the run, which warms up, where there are others."""
    return points[1:] if len(points) > 1 else points


# Charts


def _training_charts(run: RunData) -> list[Chart]:
    marks = run.resumed_at
    held_out = run.points(run.evals, lambda entry: entry.get("eval_loss"))
    losses = [
        Line(title="training", points=run.points(run.logs, lambda entry: entry.get("loss")), colour=1),
        Line(title="held out", points=held_out, colour=2, has_dots=True),
    ]
    late = [dataclasses.replace(line, points=_late(run, line.points)) for line in losses]
    is_long = len(losses[0].points) >= _MANY
    rate = Line(title="learning rate", points=run.points(run.logs, lambda entry: entry.get("learning_rate")), colour=3)
    norm = Line(title="gradient norm", points=run.points(run.logs, lambda entry: entry.get("grad_norm")), colour=4)
    return [
        Chart(title="Loss", lines=losses, marks=marks, names_lines=True),
        Chart(
            title="Loss",
            unit="without the first quarter",
            lines=late if is_long else [],
            marks=marks,
            names_lines=True,
        ),
        Chart(title="Learning rate", lines=[rate], marks=marks, has_zero=True),
        Chart(title="Gradient norm", unit="before clipping", lines=[norm], marks=marks, has_zero=True),
    ]


def _late(run: RunData, points: Points) -> Points:
    return [(step, value) for step, value in points if step >= run.last_step / 4]


def _speed_charts(run: RunData) -> list[Chart]:
    marks, planned = run.resumed_at, run.about.get("planned") or {}
    predicted = (run.outcome or {}).get("predicted") or planned
    seconds = run.points(run.logs, step_seconds)
    is_short = bool(seconds) and statistics.median(_values(seconds)) < 1
    scale, unit = (1e3, "ms") if is_short else (1.0, "s")
    step = predicted.get("step_seconds")
    rates = Line(title="tokens/s", points=run.points(run.logs, tokens_per_second), colour=1)
    times = Line(title="measured", points=[(at, value * scale) for at, value in seconds], colour=3)
    levels = [Level(title="predicted", value=step * scale, colour=3)] if is_number(step) else []
    memory, peaks = [], predicted.get("bytes") or {}
    tops = []
    for colour, (tier, name) in zip((1, 2, 4), TIERS.items(), strict=True):
        points = run.points(run.logs, lambda entry, tier=tier: memory_bytes(entry, tier))
        if points:
            memory.append(Line(title=name, points=[(at, value / GIB) for at, value in points], colour=colour))
            if peaks.get(tier):
                tops.append(Level(title="predicted peak", value=peaks[tier] / GIB, colour=colour))
    note = "Device: the most that its allocator held so far. Host: what the process has at that step." if memory else ""
    return [
        Chart(title="Throughput", unit="tokens/s", lines=[rates], marks=marks, has_zero=True),
        Chart(
            title="Step time",
            unit=unit,
            lines=[times],
            levels=levels,
            marks=marks,
            has_zero=True,
            names_lines=bool(levels),
        ),
        Chart(
            title="Memory",
            unit="GiB",
            lines=memory,
            levels=tops,
            marks=marks,
            has_zero=True,
            names_lines=True,
            note=note,
        ),
        Chart(
            title="Waits of the compute lane",
            unit="% of the steps' time",
            lines=_waits(run),
            marks=marks,
            has_zero=True,
            names_lines=True,
        ),
    ]


def _waits(run: RunData) -> list[Line]:
    causes = list(run.total("stall_seconds"))[:5]
    return [
        Line(title=f"for {cause}", points=run.points(run.logs, functools.partial(_share, cause)), colour=colour)
        for colour, cause in enumerate(causes, start=1)
    ]


def _share(cause: str, entry: Entry) -> float | None:
    waited, seconds = (entry.get("stall_seconds") or {}).get(cause), entry.get("seconds")
    return 100 * waited / seconds if is_number(waited) and is_number(seconds) and seconds else None


# Tables


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are text; the first column are names."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _list(lines: Sequence[str], css: str = "") -> str:
    items = "".join(f'<li class="{css}">{escape(line)}</li>' for line in lines)
    return f"<ul>{items}</ul>" if lines else ""


def _plan_table(run: RunData) -> str:
    outcome = run.outcome
    if outcome is None:
        return ""
    measured, predicted = outcome.get("measured") or {}, outcome.get("predicted") or {}
    rows = []
    pair = predicted.get("step_seconds"), measured.get("step_seconds")
    rows.append(("step", *_compared(*pair, format_step)))
    for tier, name in TIERS.items():
        of_tier = (predicted.get("bytes") or {}).get(tier), (measured.get("bytes") or {}).get(tier)
        if any(of_tier):
            rows.append((name, *_compared(*of_tier, format_bytes)))
    what = (
        f"{outcome.get('num_sequences')} x {outcome.get('length')} tokens a step, median of "
        f"{format_number(outcome.get('num_steps') or 0, 'step')} after the first, at step {outcome['step']:,}"
    )
    source = f"; rates of the machine: {predicted['source']}" if predicted.get("source") else ""
    return _table(("", "predicted", "measured", "difference"), rows) + f'<p class="note">{escape(what + source)}.</p>'


def _compared(predicted: float | None, measured: float | None, tell: object) -> tuple[str, str, str]:
    assert callable(tell)
    texts = [tell(value) if is_number(value) and value else "–" for value in (predicted, measured)]
    is_known = is_number(predicted) and is_number(measured) and predicted
    return (*texts, f"{measured / predicted - 1:+.1%}" if is_known else "–")


def _checkpoints(run: RunData) -> str:
    """What the log tells of, then what else is in the folder."""
    told = {_name(entry) for entry in run.checkpoints}
    left = [
        entry
        for entry in run.given_up
        if _name(entry) in run.saved and _name(entry) not in told and "error" not in entry
    ]
    unknown = [name for name in run.saved if name not in told and name not in map(_name, left)]
    if not run.checkpoints and not left:
        return _list([f"{name} (nothing more is known)" for name in unknown])
    rows = [
        _checkpoint_row(entry, "there" if _name(entry) in run.saved else "gone (rotated or moved)")
        for entry in run.checkpoints
    ]
    rows += [_checkpoint_row(entry, "there, of steps that were given up") for entry in left]
    rows += [(name, *_UNKNOWN, "there, not in the log") for name in unknown]
    heads = ("checkpoint", "size", "written in", "training waited", "predicted wait", "in the folder")
    return _table(heads, rows)


_UNKNOWN = ("–",) * 4


def _name(entry: Entry) -> str:
    return str(entry.get("name", entry["step"]))


def _checkpoint_row(entry: Entry, place: str) -> Sequence[str]:
    if "error" in entry:
        return (_name(entry), "failed", *_UNKNOWN[1:], str(entry["error"]))
    expected = entry.get("predicted_pause_seconds")
    return (
        _name(entry),
        format_bytes(entry.get("num_bytes") or 0),
        format_step(entry.get("seconds") or 0.0),
        format_step(entry.get("pause_seconds") or 0.0),
        format_step(expected) if is_number(expected) else "–",
        place,
    )


_FAULTS = {
    "num_retries": "transfers between host and device that were made again",
    "num_mismatches": "of which arrived changed",
    "disk_num_retries": "reads and writes of the offload disk that were made again",
    "num_skipped_steps": "steps skipped for gradients that were not finite",
}


def _faults(run: RunData) -> str:
    if not run.begins:
        return ""
    faults, stalls, seconds = run.total("faults"), run.total("stall_seconds"), run.plain_sum("seconds")
    rows = [(words, f"{faults.get(name, 0):,.0f}") for name, words in _FAULTS.items()]
    rows.append(("times the run went on from a checkpoint", f"{len(run.resumed_at):,}"))
    failed = sum("error" in entry for entry in run.checkpoints)
    rows.append(("checkpoints that could not be written", f"{failed:,}"))
    waits = [
        (f"waits for {name}", format_step(value), f"{value / seconds:.2%}" if seconds else "–")
        for name, value in stalls.items()
    ]
    waits_html = _table(("the compute lane", "in all", "of the steps' time"), waits) if waits else ""
    return f'<div class="tables">{_table(("fault", "count"), rows)}{waits_html}</div>'


# Lanes


def _lanes(run: RunData) -> str:
    if run.trace is None:
        return ""
    figure = lanes_html(run.trace, run.trace_name)
    return figure + _lane_table(run.trace) if figure else ""


def _lane_table(trace: Entry) -> str:
    """Of the whole trace, from the summary that it carries."""
    other = trace.get("otherData")
    summary = other.get("summary") if isinstance(other, dict) else None
    if not isinstance(summary, dict) or not summary.get("seconds"):
        return ""
    seconds = summary["seconds"]
    busy = [
        (lane, format_step(value), f"{value / seconds:.1%}") for lane, value in summary.get("busy_seconds", {}).items()
    ]
    stalls = [
        (f"behind {what}", format_step(value), f"{value / seconds:.1%}")
        for what, value in summary.get("stall_behind_seconds", {}).items()
    ]
    host = summary.get("host_seconds_per_visit", {})
    python = [(name, format_step(host[name])) for name in ("median", "max") if is_number(host.get(name))]
    num_steps = format_number(summary.get("num_steps", 0), "step")
    note = f'<p class="note">Of the whole trace: {num_steps}, {format_step(seconds)}.</p>'
    tables = _table(("lane", "busy", "share"), busy)
    tables += _table(("the compute lane waited", "in all", "share"), stalls) if stalls else ""
    tables += _table(("Python's time for a visit", ""), python) if python else ""
    return f'<div class="tables">{tables}</div>{note}'
