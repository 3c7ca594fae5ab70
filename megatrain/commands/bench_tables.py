"""What `megatrain bench` prints: the rows side by side, how each ran, and of this library's own what its lanes did and
what its plan had said."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatrain.base.units import GB, GIB, MB, format_count, format_number
from megatrain.commands.console import print_fact, print_warning
from megatrain.commands.plan_tables import STALL_WORDS

if TYPE_CHECKING:
    from rich.console import Console

LARGEST_LOSS_DIFFERENCE = 0.02
"""Of the first steps' losses, relative: rows compute in bf16 in orders of their own."""
LANE_WORDS = {
    "compute": "compute: the step less its waits",
    "h2d": "h2d: to the device",
    "d2h": "d2h: to the host",
    "cpu": "cpu: updates there",
    "update": "update: on the device",
    "disk update": "updates of states on disk",
    "disk read": "disk: reads",
    "disk write": "disk: writes",
}
WAIT_WORDS = {"weights": "for weights or their update", "drain": "for room for gradients"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Of the table."""

    name: str
    how: str
    """It ran, in words."""
    merged: str = ""
    """What its micro-batches were merged into: less work for the same step than of rows that run them as they are."""
    figures: dict[str, Any] | None = None
    """Measured. None: nothing was, and `problem` says why."""
    problem: str = ""
    tried: tuple[str, ...] = ()
    """Before it, and did not fit."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """What the run said while it went on."""
    device: str = ""
    """That computed: the name of a GPU, or `cpu`; empty where it was not told."""

    def data(self) -> dict[str, Any]:
        """For programs."""
        return {"row": self.name, **{name: value for name, value in vars(self).items() if name != "name"}}


def print_head(console: Console, head: dict[str, Any]) -> None:
    from rich.markup import escape

    model, machine, workload = head["model"], head["machine"], head["workload"]
    console.rule(f"[bold]megatrain bench[/] {escape(model['name'])}", align="left")
    active = model["active_parameters"]
    work = f", {format_count(active)} of them at work for a token" if active < 0.7 * model["parameters"] else ""
    blocks = format_number(model["blocks"], "block")
    print_fact(console, "model", f"{format_count(model['parameters'])} parameters{work}, {blocks}, random weights")
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    print_fact(console, "machine", f"{format_number(machine['cores'], 'core')}; {versions}")
    sequences, length = workload["sequences"], workload["length"]
    print_fact(console, "step", f"{sequences} x {length:,} = {workload['tokens']:,} tokens, AdamW, gradients clipped")
    if model["max_length"] is not None and length > model["max_length"]:
        print_warning(console, f"the model's config allows {model['max_length']:,} positions, fewer than {length:,}")


def print_bench(console: Console, rows: list[Row]) -> None:
    no_gpu = "none: all rows are computed on the CPU, and say nothing of a GPU"
    print_fact(console, "GPU", no_gpu if rows[0].device == "cpu" else rows[0].device or "not known")
    console.print()
    _print_rows(console, rows)
    own = rows[0].figures
    for row in rows:
        _print_words(console, row, own)
    if own is not None:
        for name, formula in own["formulas"].items():
            print_fact(console, name, formula)
        console.print()
        _print_predicted(console, own)
        _print_lanes(console, own)
        _print_bytes(console, own, is_cpu=rows[0].device == "cpu")
        if "trace" in own:
            _print_trace(console, own["trace"])


def _print_rows(console: Console, rows: list[Row]) -> None:
    from rich import box
    from rich.table import Table

    num_steps = next((len(row.figures["step_seconds"]) for row in rows if row.figures is not None), 0)
    title = f"measured, median of {num_steps} steps" if num_steps else "nothing was measured"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("")
    titles = ("step s", "least-most", "tokens/s", "TFLOPS\npublished", "TFLOPS\ncounted", "device\nGiB", "host\nGiB")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        of = row.figures
        if of is None:
            table.add_row(row.name, "-", "see below", style="yellow")
            continue
        seconds = of["step_seconds"]
        table.add_row(
            f"{row.name},\n{row.merged}" if row.merged else row.name,
            _seconds(of["median_seconds"]),
            f"{_seconds(min(seconds))}-{_seconds(max(seconds))}",
            f"{of['tokens_per_second']:,.0f}",
            _rate(of["tflops_published"]),
            _rate(of["tflops_counted"]),
            f"{of['peak_device_bytes'] / GIB:.1f}" if of["peak_device_bytes"] else "-",
            f"{of['peak_host_bytes'] / GIB:.1f}",
        )
    console.print(table)


def _print_words(console: Console, row: Row, own: dict[str, Any] | None) -> None:
    """How it ran, and whatever its figures do not tell."""
    if row.how:
        print_fact(console, row.name, row.how)
    for words in row.tried:
        print_fact(console, "", f"before: {words}")
    if row.figures is None:
        print_warning(console, f"{row.name}: NOT MEASURED: {row.problem}")
        return
    for line in row.notes:
        print_fact(console, "", line)
    if not row.figures["has_settled"]:
        number = len(row.figures["warm_up_seconds"])
        print_warning(console, f"{row.name}: steps had not settled after {number} of warm-up: look at the spread")
    if row.figures.get("num_skipped_steps"):
        number = format_number(row.figures["num_skipped_steps"], "step")
        print_warning(console, f"{row.name}: {number} had gradients that were not finite, and made no update")
    first = row.figures["losses"][0]
    if own is None or row.figures is own:
        return
    difference = abs(first / own["losses"][0] - 1)
    if not difference <= LARGEST_LOSS_DIFFERENCE:
        print_warning(
            console,
            f"{row.name}: the first loss is {first:.4f}, and {own['losses'][0]:.4f} in the row above: these rows did "
            "not do the same work",
        )


def _print_predicted(console: Console, own: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    planned = own["predicted"]
    if planned is None:
        print_fact(console, "predicted", "nothing: plans are of machines with a GPU whose rates are known")
        console.print()
        return
    table = Table(
        title="predicted before the first step, and measured",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    for title in ("", "predicted", "measured", "difference"):
        table.add_column(title, justify="right" if title else "left")
    said, found = planned["step_seconds"], own["median_seconds"]
    table.add_row("step s", _seconds(said), _seconds(found), f"{found / said - 1:+.1%}")
    for name, key in {"device": "peak_device_bytes", "host": "peak_host_bytes", "disk": "disk_bytes"}.items():
        said, found = planned[f"{name}_bytes"], own[key]
        if said or found:
            difference = f"{found / said - 1:+.1%}" if said else ""
            table.add_row(f"{name} GiB", f"{said / GIB:.1f}", f"{found / GIB:.1f}", difference)
    console.print(table)
    print_fact(console, "", f"rates: {planned['machine']}")


def _print_lanes(console: Console, own: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    planned = own["predicted"] or {"busy_seconds": {}, "stall_seconds": {}}
    mean = f"lanes, a step: mean of {len(own['step_seconds'])} steps, {_seconds(own['mean_seconds'])} s"
    table = Table(title=mean, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for title in ("", "busy s", "share", *(["predicted s"] if own["predicted"] else [])):
        table.add_column(title, justify="right" if title else "left")
    for lane, seconds in own["busy_seconds"].items():
        said = planned["busy_seconds"].get(lane)
        cells = [_seconds(said) if said else ""] if own["predicted"] else []
        share = f"{seconds / own['mean_seconds']:.1%}"
        table.add_row(LANE_WORDS.get(lane, lane), _seconds(seconds), share, *cells)
    for cause, seconds in own["stall_seconds"].items():
        share = f"{seconds / own['mean_seconds']:.1%}"
        table.add_row(f"compute waits {WAIT_WORDS.get(cause, cause)}", _seconds(seconds), share, style="yellow")
    console.print(table)
    said = [f"{STALL_WORDS.get(name, name)} {_seconds(s)} s" for name, s in planned["stall_seconds"].items() if s]
    if said:
        print_fact(console, "", f"predicted waits: {', '.join(said)}")


def _print_bytes(console: Console, own: dict[str, Any], *, is_cpu: bool) -> None:
    link, disk, slots = own["link_bytes"], own["disk_step_bytes"], own["slot_bytes"]
    if is_cpu:
        moved = f"weights {_bytes(slots['weights'])} from homes to slots, gradients {_bytes(slots['gradients'])} back"
        print_fact(console, "a step", f"{moved}; no link is crossed on a CPU")
    else:
        moved = f"{_bytes(link['to_device'])} to the device, {_bytes(link['to_host'])} to the host over the link"
        print_fact(console, "a step", f"{moved}; {own['num_late_transfers']:.3g} transfers of weights began late")
    if any(disk.values()):
        print_fact(console, "", f"disk: {_bytes(disk['read'])} read, {_bytes(disk['written'])} written")
    homes = ", ".join(f"{number} {place}" for place, number in own["homes"].items())
    each = f"{own['home_bytes_per_parameter']:.2f} bytes a parameter, gradients apart"
    print_fact(console, "homes", f"{homes}; {each}")


def _print_trace(console: Console, trace: dict[str, Any]) -> None:
    """Where it lies, and what the figures above do not tell."""
    summary = trace["summary"]
    if trace["problem"]:
        print_warning(console, trace["problem"])
    else:
        number = format_number(summary["num_steps"], "more step")
        print_fact(console, "trace", f"{trace['file']}: {number}, for chrome://tracing or Perfetto; in them:")
    visit = {name: f"{1e3 * seconds:.2f}" for name, seconds in summary["host_seconds_per_visit"].items()}
    of = f"{summary['num_visits']:,} visits with {summary['num_calls']:,} calls of layers and their backward"
    print_fact(console, "", f"Python a visit, ms: {visit['median']} in the median, {visit['max']} at most; {of}")
    behind = {STALL_WORDS.get(what, what): _seconds(s) for what, s in summary["stall_behind_seconds"].items()}
    waits = [f"{words} {seconds} s" for words, seconds in behind.items() if seconds != _seconds(0)]
    if waits:
        print_fact(console, "", f"compute waited behind {', '.join(waits)}")


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}" if seconds >= 20 else f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.4f}"


def _rate(tflops: float) -> str:
    return f"{tflops:,.0f}" if tflops >= 10 else f"{tflops:.2g}"


def _bytes(num_bytes: float) -> str:
    return f"{num_bytes / GB:,.1f} GB" if num_bytes >= GB else f"{num_bytes / MB:,.1f} MB"
