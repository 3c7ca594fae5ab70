"""`megatrain plan MODEL`: what a step would take on a machine, this one or another, without a GPU and without weights.

config -> spec on the meta device -> plan -> memory, time, what if
"""

from __future__ import annotations

import contextlib
import gc
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.base.config import CLIPS, COMPRESSIONS, LEAST_LINK_GB_S, MASTERS, MOST_GB, PRECISIONS, Config
from megatrain.base.errors import UserError
from megatrain.base.paths import looking_at, machine_profile_path, user_path
from megatrain.base.trace import writable, write_trace
from megatrain.commands.console import make_console, print_fact
from megatrain.commands.plan_tables import TIER_TITLES, in_flag_words, print_plan, print_what_if

if TYPE_CHECKING:
    from megatrain.plan.machine import Machine
    from megatrain.plan.outcome import Plan
    from megatrain.plan.what_if import Question, WhatIf
    from megatrain.plan.workload import Workload
    from megatrain.planning import OutlinedModel

THIS = "this"


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
    exact: bool = False
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
    workload = read_workload(options.tokens, options.seq, options.rows)
    settings = _settings(options)
    trace = None if options.trace is None else writable(options.trace, "--trace")
    # What takes long comes last: building the model behind a name to look up, measuring this machine behind both.
    named = None if options.machine == THIS else find_machine(options.machine)
    outlined = outline_model(model)
    machine, note = named or find_machine(THIS)
    question, unmerged = _question(outlined, machine, workload, settings, options)
    with _imports_left_alone():
        found = question.answer()
        context = _context(question, found)
        if trace is not None:
            _write_trace(found, trace)
        if options.as_json:
            print(json.dumps(_data(found, context, _answers(question, found) if options.what_if else []), indent=2))
            return
        print_plan(console, found, [note, _assumed(options, workload), unmerged], context)
        if trace is not None:
            print_fact(console, "trace", f"{trace}: open it in chrome://tracing or Perfetto")
        if options.what_if:
            with console.status("what if ...") as status:
                answers = _answers(question, found, lambda change: status.update(f"what if: {change} ..."))
            print_what_if(console, found, answers)


@contextlib.contextmanager
def _imports_left_alone() -> Iterator[None]:
    """Simulations make many small objects; looking through all of PyTorch for garbage each time takes half the time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# What is asked.


def read_workload(tokens: str, seq: int | None, rows: int | None = None) -> Workload:
    """What --tokens and --seq say. Raises UserError for what is neither BxT nor a number of tokens."""
    from megatrain.plan.workload import Workload

    match = re.fullmatch(r"(\d+)(?:[x*](\d+))?", tokens.replace(",", "").replace("_", "").lower())
    if match is None:
        raise UserError(f"--tokens {tokens} is neither SEQUENCESxLENGTH, as in 64x1024, nor a number of tokens")
    if match[2]:
        if seq is not None and seq != int(match[2]):
            raise UserError(f"--tokens {tokens} and --seq {seq} say different lengths: give one of them")
        return Workload(num_sequences=int(match[1]), length=int(match[2]), rows=rows)
    length = seq or min(1024, int(match[1]))
    if length < 1 or int(match[1]) % length:
        raise UserError(f"--tokens {tokens} are not a whole number of sequences of {length}: give --seq")
    return Workload(num_sequences=int(match[1]) // length, length=length, rows=rows)


def _assumed(options: PlanOptions, workload: Workload) -> str:
    """What was taken for a length that was not given; empty where it was."""
    if options.seq is not None or not options.tokens.replace(",", "").replace("_", "").isdecimal():
        return ""
    step = f"{workload.num_sequences}x{workload.length}"
    return f"--tokens {options.tokens} does not say how long a sequence is: {step} is assumed; give BxT, or --seq"


def check_words(options: Any) -> None:
    """Raises UserError with what can be typed on a command line: `mt.init` takes True and None too.

    options: of a command, with some of the attributes that are known here.
    """
    masters = [master for of in MASTERS.values() for master in of]
    compressions = [name for name in COMPRESSIONS if isinstance(name, str)]
    known = {"precision": PRECISIONS, "master": masters, "compression": compressions, "clip": CLIPS}
    for name, words in known.items():
        word = getattr(options, name, None)
        if word is not None and word not in words and (name, word) != ("compression", "2bit"):
            raise UserError(f"--{name} {word} is not known: use one of {', '.join(dict.fromkeys(words))}")
    for name in ("vram_gb", "ram_gb"):
        value = getattr(options, name, None)
        if value is not None and not 0 < value <= MOST_GB:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} {value:g} must be a positive number of GB (1e9 bytes), at most {MOST_GB:,}")
    rate = getattr(options, "link_gb_s", None)
    if rate is not None and not LEAST_LINK_GB_S <= rate <= MOST_GB:
        raise UserError(f"--link-gb-s {rate:g} must be a number of GB (1e9 bytes) a second, {LEAST_LINK_GB_S} at least")


def _settings(options: PlanOptions) -> Config:
    check_words(options)
    return Config(
        offload_dir="." if options.use_disk else None,
        max_vram_gb=options.vram_gb,
        max_ram_gb=options.ram_gb,
        optimizer_compression=options.compression,
        precision=options.precision,
        master=options.master,
        clip=options.clip,
        compile=options.compile,
        exact=options.exact or None,
    )


def _question(
    outlined: OutlinedModel, machine: Machine, workload: Workload, settings: Config, options: PlanOptions
) -> tuple[Question, str]:
    """And why micro-batches of so many rows as were asked for are not merged, if they are not."""
    import dataclasses

    from megatrain.plan.what_if import Question

    if not (machine.disk_bytes and machine.disk_read_bytes_per_second and machine.disk_write_bytes_per_second):
        settings = dataclasses.replace(settings, offload_dir=None)
    reason = outlined.why_unmerged(settings, options.precision)
    question = Question(
        machine=machine,
        spec_of=outlined.spec,
        precision=options.precision,
        workload=dataclasses.replace(workload, merges=not reason),
        config=settings,
    )
    has_several = workload.rows is not None and workload.rows < workload.num_sequences
    tells = reason and has_several and not options.exact  # what was asked for is no news
    return question, f"micro-batches are not merged: {reason}" if tells else ""


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
            return Machine.from_json(path.read_bytes(), str(path)), ""
    return machine_named(name), ""


def _this_machine() -> tuple[Machine, str]:
    """The profile that doctor keeps; without one, a quick measurement."""
    from megatrain.plan.machine import Machine
    from megatrain.plan.machines import MACHINES

    profile = machine_profile_path()
    with looking_at("--machine"):
        if profile.is_file():
            machine = Machine.from_json(profile.read_bytes(), str(profile))
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


def _answers(question: Question, found: Plan, tell: Callable[[str], None] = lambda change: None) -> list[WhatIf]:
    """tell: gets each change before it is planned, which takes seconds."""
    from megatrain.plan.what_if import what_if

    return list(what_if(question, uses_disk=found.timeline.peak("disk") > 0, tell=tell))


def _context(question: Question, found: Plan) -> int:
    from megatrain.plan.remedies import largest_context

    return largest_context(question.machine, found.spec, found.config)


# For programs.


def _data(found: Plan, context: int, answers: list[WhatIf]) -> dict[str, Any]:
    from megatrain.plan.explain import as_data

    data = as_data(found)
    data["largest_context"] = context
    data["plan"]["words"] = in_flag_words(data["plan"]["words"])
    data["time"]["why"] = in_flag_words(data["time"]["why"])
    if answers:
        data["what_if"] = [_answer_data(answer) for answer in answers]
    return data


def _answer_data(answer: WhatIf) -> dict[str, Any]:
    if answer.plan is None:
        return {"change": answer.change, "fits": False, "why": answer.refusal}
    peaks = {tier: answer.plan.timeline.peak(tier) for tier in TIER_TITLES}
    return {"change": answer.change, "fits": True, "step_seconds": answer.plan.step_seconds, "peak": peaks}


def _write_trace(found: Plan, file: Path) -> None:
    from megatrain.plan.explain import simulated_trace

    write_trace(simulated_trace(found), file, "--trace")
