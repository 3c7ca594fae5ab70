"""`megatrain bench MODEL`: whole steps of a shape with random weights, measured here; and those of peers beside it.

config -> this library's row -> a row for each peer, each in a process of its own -> table, or JSON

Rule: this process never touches a GPU: its context would take memory from every row.
"""

from __future__ import annotations

import contextlib
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.base.cgroup import usable_cores
from megatrain.base.config import Config
from megatrain.base.errors import UserError
from megatrain.base.paths import fixed_path
from megatrain.base.trace import writable
from megatrain.base.units import format_number
from megatrain.commands.bench_tables import Row, print_bench, print_head
from megatrain.commands.console import make_console, print_fact
from megatrain.commands.plan import check_words, read_workload
from megatrain.commands.plan_tables import in_flag_words

if TYPE_CHECKING:
    from megatrain.bench.peers import Variant
    from megatrain.bench.process import Outcome
    from megatrain.bench.work import Work
    from megatrain.planning import OutlinedModel

OWN = "megatrain"
LEAST_STEPS = 5
PEERS = ("zero3", "hbm")
PLACES = ("cpu", "stream", "hbm", "disk")

Run = Callable[["Variant | None"], "Outcome"]


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What the command line said."""

    tokens: str = "64x1024"
    seq: int | None = None
    accumulate: int | None = None
    vs: str = ""
    steps: int = LEAST_STEPS
    device: str | None = None
    vram_gb: float | None = None
    ram_gb: float | None = None
    offload_dir: list[Path] | None = None
    compression: str | None = None
    master: str | None = None
    clip: str = "global"
    hbm_home_gb: float | None = None
    places: str | None = None
    moments_on_disk: int = 0
    compile: bool = False
    exact: bool = False
    replan: bool = False
    attention: str | None = None
    verify_transfers: bool = False
    link_gb_s: float | None = None
    threads: int | None = None
    unplanned: bool = False
    limit_minutes: float = 20.0
    as_json: bool = False
    trace: Path | None = None


def bench(model: str, options: BenchOptions) -> bool:
    """Measures and prints. Returns whether this library's own row has figures.

    Raises UserError before any work: no such model, settings that cannot be.
    """
    peers = _check(options)
    from megatrain.planning import outline_model

    outlined = outline_model(model)
    console = make_console()
    with tempfile.TemporaryDirectory(prefix="megatrain-bench-") as folder:
        outlined.config.save_pretrained(folder)
        work = _work(options, folder)
        head = _head(outlined, work)
        if not options.as_json:
            print_head(console, head)
        rows = list(_rows(work, peers, options))
    if options.as_json:
        print(json.dumps({**head, "rows": [row.data() for row in rows]}, indent=2))
    else:
        print_bench(console, rows)
    return rows[0].figures is not None


# What is asked.


def _check(options: BenchOptions) -> list[str]:
    """The peers. Raises UserError."""
    check_words(options)
    peers = [name.strip() for name in options.vs.split(",") if name.strip()]
    for name in peers:
        if name not in PEERS:
            raise UserError(f"--vs {name} is not known: use {', '.join(PEERS)}, or both with a comma")
    if options.steps < LEAST_STEPS:
        raise UserError(f"--steps {options.steps} is too few to tell a median and a spread: {LEAST_STEPS} at least")
    if options.places is not None and options.places not in PLACES:
        raise UserError(f"--places {options.places} is not known: use one of {', '.join(PLACES)}")
    for name in ("limit_minutes", "threads"):
        if getattr(options, name) is not None and not getattr(options, name) > 0:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name):g} must be above 0")
    if options.moments_on_disk < 0:
        raise UserError(f"--moments-on-disk {options.moments_on_disk} must not be negative")
    to_disk = options.moments_on_disk or options.places == "disk"
    if to_disk and not options.offload_dir:
        raise UserError("parts of homes are to live on disk: say where, --offload-dir DIR")
    if options.moments_on_disk and options.places:
        raise UserError("--places says where all homes live, and --moments-on-disk of the last ones: give one of them")
    if options.trace is not None:
        writable(options.trace, "--trace")
    workload = read_workload(options.tokens, options.seq)
    number = options.accumulate
    if number is not None and (number < 1 or workload.num_sequences % number):
        raise UserError(f"--accumulate {number} does not divide the step's {workload.num_sequences} sequences")
    Config(
        offload_dir=options.offload_dir or None,
        hbm_home_gb=options.hbm_home_gb,
        optimizer_compression=options.compression,
        master=options.master,
        precision="bf16",
        attention=options.attention,
    )
    return list(dict.fromkeys(peers))


def _work(options: BenchOptions, folder: str) -> Work:
    from megatrain.bench.work import Work

    workload = read_workload(options.tokens, options.seq)
    return Work(
        config_folder=folder,
        num_sequences=workload.num_sequences,
        length=workload.length,
        num_micro_batches=options.accumulate,
        num_steps=options.steps,
        device=options.device,
        max_vram_gb=options.vram_gb,
        max_ram_gb=options.ram_gb,
        offload_dirs=tuple(str(fixed_path(path, "--offload-dir")) for path in options.offload_dir or ()),
        compression=options.compression,
        master=options.master,
        clip=options.clip,
        hbm_home_gb=options.hbm_home_gb,
        places=options.places,
        moments_on_disk=options.moments_on_disk,
        compile=options.compile,
        exact=options.exact,
        replan=options.replan,
        attention=options.attention,
        verify_transfers=options.verify_transfers,
        max_link_gb_s=options.link_gb_s,
        num_threads=options.threads,
        is_planned=not options.unplanned,
        trace_file=None if options.trace is None else str(fixed_path(options.trace, "--trace")),
    )


def _head(outlined: OutlinedModel, work: Work) -> dict[str, Any]:
    """Of the model, the machine and the step. Not of the GPU: this process leaves all of its memory to the rows'."""
    import torch
    import transformers

    from megatrain import __version__
    from megatrain.spec.homes import Formats

    spec = outlined.spec(Formats(precision="bf16", master="split"))
    if not spec.vocabulary_size:
        raise UserError(f"MODEL: {spec.name} has no head that makes logits: causal language models are measured")
    return {
        "model": {
            "name": spec.name,
            "parameters": spec.num_parameters,
            "active_parameters": spec.active_parameters,
            "blocks": spec.num_blocks,
            "max_length": spec.max_length,
        },
        "machine": {
            "cores": usable_cores(),
            "versions": {
                "megatrain": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
        },
        "workload": {"sequences": work.num_sequences, "length": work.length, "tokens": work.num_tokens},
    }


# The rows.


def _rows(work: Work, peers: list[str], options: BenchOptions) -> Iterator[Row]:
    from megatrain.bench import peers as of
    from megatrain.bench.process import run_row

    def run(variant: Variant | None, words: str) -> Outcome:
        with _progress(words) as tell:
            return run_row(work, variant, options.limit_minutes * 60, tell)

    outcome = run(None, OWN)
    own = Row(name=OWN, merged=_merged(outcome), how=_own_words(work, outcome), figures=outcome.figures,
              problem=outcome.problem, notes=list(map(in_flag_words, outcome.notes[1:])),
              device=outcome.device)  # fmt: skip
    yield own
    number = work.num_micro_batches or work.num_sequences
    if own.figures is not None:
        number = own.figures["num_micro_batches"]
    for name in [row for peer in peers for row in of.ROWS[peer]]:
        reason = of.why_not(name, work)
        yield Row(name=name, how=of.WORDS[name], problem=reason) if reason else _peer_row(name, work, number, run)


def _peer_row(name: str, work: Work, number: int, run: Callable[[Variant, str], Outcome]) -> Row:
    """The first variant that fits, and what did not."""
    from megatrain.bench.peers import BEFORE_STEPS, variants
    from megatrain.bench.worker import DEVICE_MEMORY

    tried: list[str] = []
    row = None
    for variant in variants(name, work, number):
        words = variant.words(work)
        outcome = run(variant, f"{name}: {words}")
        row = Row(name=name, how=words, figures=outcome.figures, problem=outcome.problem, tried=tuple(tried))
        if outcome.kind != DEVICE_MEMORY or outcome.phase in BEFORE_STEPS:
            break
        tried.append(f"{words}: {outcome.problem}")
    assert row is not None
    return row


def _own_words(work: Work, outcome: Outcome) -> str:
    """How this library ran: its first line, and the micro-batches."""
    first = in_flag_words(outcome.notes[0].partition(": ")[2]) if outcome.notes else ""
    if outcome.figures is None:
        return first
    number = outcome.figures["num_micro_batches"]
    batches = f"{number} micro-batch{'es' if number > 1 else ''}"
    rows = format_number(work.num_sequences // number, "sequence")
    merged = ", ".join(filter(None, [rows, _merged(outcome)]))
    by = "placed by the planner" if outcome.figures["is_planned"] else "not planned"
    return f"{first}; {batches} of {merged}; {by}"


def _merged(outcome: Outcome) -> str:
    """What its micro-batches were merged into; empty where they ran as they are, as those of peers do."""
    of = outcome.figures
    if of is None or of["num_micro_batches_run"] >= of["num_micro_batches"]:
        return ""
    return f"merged into {of['num_micro_batches_run']:g}"


@contextlib.contextmanager
def _progress(words: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What is told by a row's process, on standard error: a line that changes, or where no one watches, lines."""
    console = make_console(sys.stderr)
    phase = "starting"

    def line(event: dict[str, Any]) -> str:
        nonlocal phase
        phase = event.get("phase", phase)
        return f"{phase}, step {event['step']}: {event['seconds']:.3g} s" if "step" in event else phase

    if not console.is_terminal:
        print_fact(console, "measuring", words)
        yield lambda event: print_fact(console, "", line(event))
        return
    with console.status(f"{words}: {phase}") as status:
        yield lambda event: status.update(f"{words}: {line(event)}")
