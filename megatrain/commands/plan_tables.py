"""What `megatrain plan` prints: the plan in words, memory by tier, time by lane, what else could be done."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from megatrain.base.units import GB, MB, format_count, format_number, format_seconds
from megatrain.commands.console import print_fact, print_figure, print_warning

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from megatrain.plan.outcome import Plan
    from megatrain.plan.what_if import WhatIf


TIER_TITLES = {"hbm": "device", "ram": "host", "disk": "disk"}
STALL_WORDS = {
    "update": "updates",
    "fetch": "weights on the link",
    "drain": "gradients on the link",
    "bring input": "layer inputs on the link",
    "stage states": "states on the link",
    "read states": "states from disk",
    "read weights": "weights from disk",
    "write states": "states to disk",
    "unstage states": "states on the link",
    "write gradients": "gradients to disk",
}


def in_flag_words(text: str) -> str:
    """Settings of `mt.init` as options of the command line."""
    text = text.replace("mt.init(exact=True)", "--exact").replace('clip="layer"', "--clip layer")
    return re.sub(r"\bexact=True\b", "--exact", text)


def print_plan(console: Console, found: Plan, notes: list[str], context: int) -> None:
    """
    Args:
        notes: what the user should know of where the machine's figures are from, and of what was assumed; may be empty.
        context: the largest, in tokens; 0 if none fits.
    """
    _print_head(console, found, notes)
    _print_memory(console, found)
    _print_time(console, found, context)


def _print_head(console: Console, found: Plan, notes: list[str]) -> None:
    from rich.markup import escape

    from megatrain.plan.explain import describe
    from megatrain.plan.placement import DISK_TIER
    from megatrain.plan.threads import divide_cores

    spec, machine, config, formats = found.spec, found.machine, found.config, found.spec.formats
    layers = format_number(spec.num_blocks, "block")
    active = spec.active_parameters
    is_sparse = active < 0.7 * spec.num_parameters
    work = f", {format_count(active)} of them at work for a token" if is_sparse else ""
    console.rule(f"[bold]megatrain plan[/] {escape(spec.name)}", align="left")
    print_fact(console, "model", f"{format_count(spec.num_parameters)} parameters{work}, {layers}")
    disk = f", {_gb(machine.disk_bytes)} GB disk" if found.budgets.disk else ""
    memory = (
        f"{_gb(machine.hbm_bytes)} GB device, {_gb(machine.ram_bytes)} GB host memory{disk}, {machine.num_cores} cores"
    )
    print_fact(console, "machine", f"{machine.name}: {memory}\n{machine.source}")
    for note in filter(None, notes):
        print_warning(console, note)
    step = f"{found.workload.num_sequences} x {found.workload.length:,} = {found.workload.num_tokens:,} tokens"
    how = f"{formats.precision} compute, {formats.master} master weights, {config.moments} moments"
    clip = "clipped by the exact global norm" if config.clip == "global" else "clipped by layer, no gradients kept"
    print_fact(console, "step", f"{step}; {how}, {clip}" + (", compiled" if config.compile else ""))
    print_fact(console, "plan", in_flag_words(describe(found)))
    has_disk = any(DISK_TIER in place.tiers.values() for place in found.choice.places)
    print_fact(console, "threads", divide_cores(machine.num_cores, has_disk=has_disk).describe())
    length = found.workload.length
    if spec.max_length is not None and length > spec.max_length:
        print_warning(console, f"the model's config allows {spec.max_length:,} positions, fewer than {length:,}")


def _print_memory(console: Console, found: Plan) -> None:
    from rich import box
    from rich.table import Table

    from megatrain.plan.explain import conventional_bytes, memory_table

    rows, conventional = memory_table(found), conventional_bytes(found)
    unit, cell = _unit([*(found.timeline.peak(tier) for tier in TIER_TITLES), sum(conventional.values())])
    table = Table(
        title=f"memory, {unit}, each tier at its fullest moment",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    tiers = [tier for tier in TIER_TITLES if tier != "disk" or found.timeline.peak("disk")]
    table.add_column("")
    for tier in tiers:
        table.add_column(TIER_TITLES[tier], justify="right")
    table.add_column("conventional", justify="right", style="dim")
    for name, cells in rows.items():
        if any(cells.values()) or name in conventional:
            shown = [cell(cells[tier]) for tier in tiers]
            table.add_row(name, *shown, cell(conventional.get(name, 0)))
    table.add_section()
    totals = [cell(found.timeline.peak(tier)) for tier in tiers]
    table.add_row("total", *totals, cell(sum(conventional.values())), style="bold")
    budget = {"hbm": found.budgets.hbm, "ram": found.budgets.ram, "disk": found.budgets.disk}
    table.add_row("may be used", *(cell(budget[tier]) for tier in tiers), cell(found.machine.hbm_bytes), style="dim")
    console.print(table)
    print_fact(
        console,
        "",
        "conventional: fp32 weights, gradients and Adam's moments, all activations of one sequence, all on the device",
    )


def _print_time(console: Console, found: Plan, context: int) -> None:
    from rich import box
    from rich.table import Table

    from megatrain.plan.explain import bottleneck, has_experts, why_late

    lane, why = bottleneck(found.simulation)
    late = why_late(found)
    why = in_flag_words(f"{why}; {late}") if late else why
    counted = f"{_rate(found.counted_tflops)} counted (active matrices, causal attention)"
    published = f"{_rate(found.published_tflops)} as published (6 x parameters x tokens)"
    longest = f"{context:,} tokens, one sequence at a time" if context else "less than 256 tokens"
    if found.spec.max_length is not None and context > found.spec.max_length:
        longest += f": as far as memory goes; the model's config allows {found.spec.max_length:,} positions"
    lines = {
        "step": format_seconds(found.step_seconds) if found.step_seconds >= 60 else f"{_seconds(found.step_seconds)} s",
        "tokens a second": f"{found.tokens_per_second:,.0f}",
        "TFLOPS": counted if has_experts(found.spec) else f"{published}, {counted}",
        "bottleneck": f"{lane}: {why}",
        "disk writes": f"{_gb(found.disk_written_bytes)} GB a step: look up how much your disks endure",
        "largest context": longest,
    }
    if not found.disk_written_bytes:
        del lines["disk writes"]
    console.print()
    console.print("time, predicted by simulating the lanes", style="bold")
    for name, text in lines.items():
        print_figure(console, name, text, 16)
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("lane", "busy s", "share", ""):
        table.add_column(title, justify="left" if title in ("lane", "") else "right")
    for name, seconds in found.simulation.busy_seconds().items():
        share = seconds / found.step_seconds
        table.add_row(name, _seconds(seconds), f"{share:.0%}", _bar(share))
    stalls = sorted(found.simulation.stall_seconds().items(), key=lambda of: -of[1])
    for name, seconds in stalls:
        if seconds >= 0.001 * found.step_seconds:
            share = seconds / found.step_seconds
            words = STALL_WORDS.get(name, name)
            table.add_row(f"compute waits for {words}", _seconds(seconds), f"{share:.1%}", "", style="yellow")
    console.print(table)


def print_what_if(console: Console, found: Plan, answers: list[WhatIf]) -> None:
    from rich import box
    from rich.table import Table

    plans = [found, *(answer.plan for answer in answers if answer.plan is not None)]
    unit, cell = _unit([answer.timeline.peak(tier) for answer in plans for tier in TIER_TITLES])
    table = Table(title="what if", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("")
    for title in ("step s", "tokens/s", "speed", *(f"{title} {unit}" for title in TIER_TITLES.values())):
        table.add_column(title, justify="right")
    _add_answer(table, "as planned", found, found.step_seconds, cell)
    for answer in answers:
        if answer.plan is None:
            table.add_row(answer.change, "does not fit", style="dim")
        else:
            _add_answer(table, answer.change, answer.plan, found.step_seconds, cell)
    console.print(table)


def _add_answer(table: Any, change: str, answer: Plan, step_seconds: float, cell: Callable[[int], str]) -> None:
    gain = step_seconds / answer.step_seconds - 1
    table.add_row(
        change,
        _seconds(answer.step_seconds),
        f"{answer.tokens_per_second:,.0f}",
        f"{gain:+.0%}" if abs(gain) >= 0.005 else "",
        *(cell(answer.timeline.peak(tier)) for tier in TIER_TITLES),
    )


def _unit(sizes: list[int]) -> tuple[str, Callable[[int], str]]:
    """GB, or MB for small models, of which little is left in GB; and what writes a size in it."""
    name, unit = ("GB", GB) if max(sizes) >= 4 * GB else ("MB", MB)

    def cell(num_bytes: int) -> str:
        if num_bytes < unit / 20:
            return "-" if num_bytes == 0 else "0.0"
        return f"{num_bytes / unit:,.1f}" if num_bytes < 1000 * unit else f"{num_bytes / unit:,.0f}"

    return name, cell


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f}" if seconds >= 1 else f"{seconds:.4f}"


def _rate(tflops: float) -> str:
    return f"{tflops:,.0f}" if tflops >= 10 else f"{tflops:.2g}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:,.0f}"


def _bar(share: float, width: int = 30) -> str:
    return "█" * round(width * min(1.0, share))
