"""`megatrain plan MODEL`: what a step would take on a machine, this one or another, without a GPU and without weights.

config -> spec on the meta device -> plan -> memory, time, what if
"""

from __future__ import annotations

import contextlib
import gc
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.base.config import Config
from megatrain.base.errors import UserError
from megatrain.base.paths import looking_at, machine_profile_path, user_path
from megatrain.base.units import GB, format_count, format_number, format_seconds
from megatrain.commands.console import make_console, print_fact, print_warning

if TYPE_CHECKING:
    from rich.console import Console

    from megatrain.plan.machine import Machine
    from megatrain.plan.planner import Plan
    from megatrain.plan.what_if import Question, WhatIf
    from megatrain.plan.workload import Workload
    from megatrain.planning import OutlinedModel

THIS = "this"
TIER_TITLES = {"hbm": "device", "ram": "host", "disk": "disk"}
STALL_WORDS = {
    "update": "updates",
    "fetch": "weights on the link",
    "drain": "gradients on the link",
    "bring input": "layer inputs on the link",
    "stage states": "states on the link",
    "read states": "states from disk",
    "read weights": "weights from disk",
    "write gradients": "gradients to disk",
}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the command line said."""

    machine: str = THIS
    tokens: str = "64x1024"
    seq: int | None = None
    rows: int | None = None
    precision: str = "bf16"
    master: str | None = None
    compression: str | None = None
    clip: str = "global"
    compile: bool = False
    vram_gb: float | None = None
    ram_gb: float | None = None
    use_disk: bool = True
    what_if: bool = False
    as_json: bool = False
    trace: Path | None = None


def plan(model: str, options: PlanOptions) -> None:
    """Prints the plan. Raises UserError: no such model or machine, settings that cannot be, nothing that fits."""
    from megatrain.planning import outline_model

    console = make_console()
    workload = _workload(options)
    settings = _settings(options)
    trace = None if options.trace is None else _writable(options.trace)
    outlined = outline_model(model)  # a slip in its name is told before a machine is measured
    machine, note = find_machine(options.machine)
    question = _question(outlined, machine, workload, settings, options)
    with _imports_left_alone():
        found = question.answer()
        answers = _answers(question, found) if options.what_if else []
        context = _context(question, found)
    if trace is not None:
        _write_trace(found, trace)
    if options.as_json:
        print(json.dumps(_data(found, context, answers), indent=2))
        return
    _print_head(console, found, note)
    _print_memory(console, found)
    _print_time(console, found, context)
    if answers:
        _print_what_if(console, found, answers)
    if trace is not None:
        print_fact(console, "trace", f"{trace}: open it in chrome://tracing or Perfetto")


@contextlib.contextmanager
def _imports_left_alone() -> Iterator[None]:
    """Simulations make many small objects; looking through all of PyTorch for garbage each time takes half the time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# What is asked.


def _workload(options: PlanOptions) -> Workload:
    from megatrain.plan.workload import Workload

    match = re.fullmatch(r"(\d+)(?:[x*](\d+))?", options.tokens.replace(",", "").replace("_", "").lower())
    if match is None:
        raise UserError(f"--tokens {options.tokens} is neither SEQUENCESxLENGTH, as in 64x1024, nor a number of tokens")
    if match[2]:
        if options.seq is not None and options.seq != int(match[2]):
            raise UserError(
                f"--tokens {options.tokens} and --seq {options.seq} say different lengths: give one of them"
            )
        return Workload(num_sequences=int(match[1]), length=int(match[2]), rows=options.rows)
    length = options.seq or min(1024, int(match[1]))
    if length < 1 or int(match[1]) % length:
        raise UserError(f"--tokens {options.tokens} are not a whole number of sequences of {length}: give --seq")
    return Workload(num_sequences=int(match[1]) // length, length=length, rows=options.rows)


def _settings(options: PlanOptions) -> Config:
    return Config(
        offload_dir="." if options.use_disk else None,
        max_vram_gb=options.vram_gb,
        max_ram_gb=options.ram_gb,
        optimizer_compression=options.compression,
        precision=options.precision,
        master=options.master,
        clip=options.clip,
        compile=options.compile,
    )


def _question(
    outlined: OutlinedModel, machine: Machine, workload: Workload, settings: Config, options: PlanOptions
) -> Question:
    import dataclasses

    from megatrain.plan.what_if import Question

    if not (machine.disk_bytes and machine.disk_read_bytes_per_second and machine.disk_write_bytes_per_second):
        settings = dataclasses.replace(settings, offload_dir=None)
    return Question(
        machine=machine,
        spec_of=outlined.spec,
        precision=options.precision,
        workload=workload,
        config=settings,
    )


def find_machine(name: str) -> tuple[Machine, str]:
    """A machine of the catalogue, of a file, or this one; and what the user should know of where it is from.

    Raises UserError: no such machine, a file that is no profile, no GPU here.
    """
    from megatrain.plan.machine import Machine
    from megatrain.plan.machines import MACHINES, machine_named

    if name.lower() in MACHINES:
        return MACHINES[name.lower()], ""
    if name == THIS:
        return _this_machine()
    path = user_path(name, "--machine")
    with looking_at("--machine"):
        if path.is_file():
            return Machine.from_json(path.read_text(encoding="utf-8"), str(path)), ""
    return machine_named(name), ""


def _this_machine() -> tuple[Machine, str]:
    """The profile that doctor keeps; without one, a quick measurement."""
    from megatrain.plan.machine import Machine
    from megatrain.plan.machines import MACHINES

    profile = machine_profile_path()
    with looking_at("--machine"):
        if profile.is_file():
            machine = Machine.from_json(profile.read_text(encoding="utf-8"), str(profile))
            if machine.hbm_bytes:
                return machine, ""
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            f"this machine has no GPU that PyTorch sees: plan for another with --machine, one of {', '.join(MACHINES)} "
            "or the file of a profile that `megatrain doctor --output FILE` wrote there"
        )
    from megatrain.probe.measure import machine_of, measure_machine
    from megatrain.probe.timing import QUICK

    machine = machine_of(measure_machine([], QUICK), date="now, quickly")
    return (
        machine,
        "measured for this plan alone, roughly and without a disk: `megatrain doctor` measures it once for all",
    )


def _answers(question: Question, found: Plan) -> list[WhatIf]:
    from megatrain.plan.what_if import what_if

    return list(what_if(question, uses_disk=found.timeline.peak("disk") > 0))


def _context(question: Question, found: Plan) -> int:
    from megatrain.plan.remedies import largest_context

    return largest_context(question.machine, found.spec, found.config)


# What is printed.


def _print_head(console: Console, found: Plan, note: str) -> None:
    from rich.markup import escape

    from megatrain.plan.explain import describe

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
    if note:
        print_warning(console, note)
    step = f"{found.workload.num_sequences} x {found.workload.length:,} = {found.workload.num_tokens:,} tokens"
    how = f"{formats.precision} compute, {formats.master} master weights, {config.moments} moments"
    clip = "clipped by the exact global norm" if config.clip == "global" else "clipped by layer, no gradients kept"
    print_fact(console, "step", f"{step}; {how}, {clip}" + (", compiled" if config.compile else ""))
    print_fact(console, "plan", describe(found))
    length = found.workload.length
    if spec.max_length is not None and length > spec.max_length:
        print_warning(console, f"the model's config allows {spec.max_length:,} positions, fewer than {length:,}")


def _print_memory(console: Console, found: Plan) -> None:
    from rich import box
    from rich.table import Table

    from megatrain.plan.explain import conventional_bytes, memory_table

    table = Table(
        title="memory, GB, each tier at its fullest moment",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    tiers = [tier for tier in TIER_TITLES if tier != "disk" or found.timeline.peak("disk")]
    table.add_column("")
    for tier in tiers:
        table.add_column(TIER_TITLES[tier], justify="right")
    table.add_column("conventional", justify="right", style="dim")
    rows, conventional = memory_table(found), conventional_bytes(found)
    for name, cells in rows.items():
        if any(cells.values()) or name in conventional:
            shown = [_cell(cells[tier]) for tier in tiers]
            table.add_row(name, *shown, _cell(conventional.get(name, 0)))
    table.add_section()
    totals = [_cell(found.timeline.peak(tier)) for tier in tiers]
    table.add_row("total", *totals, _cell(sum(conventional.values())), style="bold")
    budget = {"hbm": found.budgets.hbm, "ram": found.budgets.ram, "disk": found.budgets.disk}
    table.add_row("may be used", *(_cell(budget[tier]) for tier in tiers), _cell(found.machine.hbm_bytes), style="dim")
    console.print(table)
    print_fact(
        console,
        "",
        "conventional: fp32 weights, gradients and Adam's moments, all activations of one sequence, all on the device",
    )


def _print_time(console: Console, found: Plan, context: int) -> None:
    from rich import box
    from rich.table import Table

    from megatrain.plan.explain import bottleneck, has_experts

    lane, why = bottleneck(found.simulation)
    counted = f"{found.counted_tflops:,.0f} counted (active matrices, causal attention)"
    published = f"{found.published_tflops:,.0f} as published (6 x parameters x tokens)"
    lines = {
        "step": format_seconds(found.step_seconds) if found.step_seconds >= 60 else f"{found.step_seconds:.2f} s",
        "tokens a second": f"{found.tokens_per_second:,.0f}",
        "TFLOPS": counted if has_experts(found.spec) else f"{published}, {counted}",
        "bottleneck": f"{lane}: {why}",
        "largest context": f"{context:,} tokens, one sequence at a time" if context else "less than 256 tokens",
    }
    console.print()
    console.print("time, predicted by simulating the lanes", style="bold")
    for name, text in lines.items():
        print_fact(console, "", f"{name:<16} {text}") if not console.is_terminal else console.print(
            f"  {name:<16} {text}"
        )
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("lane", "busy s", "share", ""):
        table.add_column(title, justify="left" if title in ("lane", "") else "right")
    for name, seconds in found.simulation.busy_seconds().items():
        share = seconds / found.step_seconds
        table.add_row(name, f"{seconds:.2f}", f"{share:.0%}", _bar(share))
    stalls = sorted(found.simulation.stall_seconds().items(), key=lambda of: -of[1])
    for name, seconds in stalls:
        if seconds >= 0.001 * found.step_seconds:
            share = seconds / found.step_seconds
            words = STALL_WORDS.get(name, name)
            table.add_row(f"compute waits for {words}", f"{seconds:.2f}", f"{share:.1%}", "", style="yellow")
    console.print(table)


def _print_what_if(console: Console, found: Plan, answers: list[WhatIf]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title="what if", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("")
    for title in ("step s", "tokens/s", "", "device GB", "host GB", "disk GB"):
        table.add_column(title, justify="right")
    _add_answer(table, "as planned", found, found.step_seconds)
    for answer in answers:
        if answer.plan is None:
            table.add_row(answer.change, "does not fit", style="dim")
        else:
            _add_answer(table, answer.change, answer.plan, found.step_seconds)
    console.print(table)


def _add_answer(table: Any, change: str, answer: Plan, step_seconds: float) -> None:
    gain = step_seconds / answer.step_seconds - 1
    table.add_row(
        change,
        f"{answer.step_seconds:,.2f}",
        f"{answer.tokens_per_second:,.0f}",
        f"{gain:+.0%}" if abs(gain) >= 0.005 else "",
        *(_cell(answer.timeline.peak(tier)) for tier in TIER_TITLES),
    )


def _cell(num_bytes: int) -> str:
    if num_bytes < GB / 20:
        return "-" if num_bytes == 0 else "0.0"
    return f"{num_bytes / GB:,.1f}" if num_bytes < 1000 * GB else f"{num_bytes / GB:,.0f}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:,.0f}"


def _bar(share: float, width: int = 30) -> str:
    return "█" * round(width * min(1.0, share))


# For programs.


def _data(found: Plan, context: int, answers: list[WhatIf]) -> dict[str, Any]:
    from megatrain.plan.explain import as_data

    data = as_data(found)
    data["largest_context"] = context
    if answers:
        data["what_if"] = [_answer_data(answer) for answer in answers]
    return data


def _answer_data(answer: WhatIf) -> dict[str, Any]:
    if answer.plan is None:
        return {"change": answer.change, "fits": False, "why": answer.refusal}
    peaks = {tier: answer.plan.timeline.peak(tier) for tier in TIER_TITLES}
    return {"change": answer.change, "fits": True, "step_seconds": answer.plan.step_seconds, "peak": peaks}


def _writable(file: Path) -> Path:
    file = user_path(file, "--trace")
    with looking_at("--trace"):
        if file.is_dir() or not file.absolute().parent.is_dir():
            raise UserError(f"--trace: {file} cannot be written; name a file in a folder that is there")
    return file


def _write_trace(found: Plan, file: Path) -> None:
    from megatrain.plan.explain import trace_events

    with looking_at("--trace"):
        file.write_text(json.dumps(trace_events(found.simulation)), encoding="utf-8")
