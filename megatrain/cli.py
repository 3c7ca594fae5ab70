"""The command `megatrain`: a table from verb to plain function.

Exit codes: 0 done; 1 a bug or a failure while running (with its traceback), damage that `verify` found, or a `bench`
that could not measure; 2 a mistake of the user's, named in one line; 130 interrupted.

Rule: nothing heavy is imported before the verb is known, so that help appears at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from megatrain.base.errors import InterruptedRunError, UserError

DAMAGED = 1
NOT_MEASURED = 1
INTERRUPTED = 130
PURPOSE = "Train language models bigger than the GPU, all parameters, on one GPU."

Shape = Annotated[
    str,
    typer.Argument(
        help="A folder, a config.json, a name on the Hub, or a built-in shape: "
        "qwen2.5-{tiny,0.5b,1.5b,3b,7b,14b,32b,72b}, "
        "qwen3-{0.6b,1.7b,4b,8b,14b,32b,30b-a3b,235b-a22b}, llama-{3.2-1b,3.2-3b,3-8b,3-70b,3.1-8b,3.1-70b,3.1-405b}, "
        "mistral-{7b,large}, mixtral-{8x7b,8x22b}, command-r-plus, gpt-{oss-20b,oss-120b}, deepseek-v3, kimi-k2.",
        metavar="MODEL",
    ),
]
Tokens = Annotated[
    str, typer.Option(help="Of a step: sequences x length, or their product (see --seq).", metavar="BxT")
]
Length = Annotated[int | None, typer.Option(help="Tokens of a sequence; left out: 1024 at most.")]
Accumulate = Annotated[
    int | None,
    typer.Option(
        help="Micro-batches of a step, given to every row; left out: as the plan takes. This library's row merges them "
        "where it may, and says so; not with --exact.",
        metavar="N",
    ),
]


def train(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file. See docs/recipes.md.", metavar="FILE.yaml")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings over the recipe's, as in training.learning_rate=1e-5.", metavar="KEY=VALUE"),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Rehearse: print plan, disk and time, try every path with a tiny step."),
    ] = False,
) -> None:
    """Train a model as a recipe says."""
    from megatrain.commands.train import train as run

    run(recipe, overrides or [], dry_run=dry_run)


def doctor(
    offload_dir: Annotated[
        list[Path] | None,
        typer.Option(help="Folder for offloading whose disk is measured; may be given several times.", metavar="DIR"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds in place of half a minute; rough.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Where the profile goes, in place of the cache.", metavar="FILE")
    ] = None,
) -> None:
    """Measure this machine, and say what slows it down. The profile is kept for plans."""
    from megatrain.commands.doctor import doctor as run

    run(offload_dir or [], quick=quick, as_json=as_json, output=output)


def plan(
    model: Shape,
    machine: Annotated[
        str,
        typer.Option(
            help="h200-128gb, h200-256gb, h200-512gb, h200-1.5tb, b300-2tb, gh200, a100, rtx4090, rtx3090, a6000, the "
            "file of a profile, or this: what doctor measured here.",
            metavar="NAME|FILE|this",
        ),
    ] = "this",
    tokens: Tokens = "64x1024",
    seq: Length = None,
    rows: Annotated[int | None, typer.Option(help="Sequences of a micro-batch; left out: the plan chooses.")] = None,
    precision: Annotated[str, typer.Option(help="bf16 or fp32 compute.")] = "bf16",
    master: Annotated[str | None, typer.Option(help="Master weights: split (exact, the default) or bf16.")] = None,
    compression: Annotated[str | None, typer.Option(help="Moments: lossless, bf16, 8bit, 4bit; else fp32.")] = None,
    clip: Annotated[str, typer.Option(help="global or layer.")] = "global",
    compile: Annotated[bool, typer.Option("--compile", help="Blocks compiled with torch.compile.")] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Merge no micro-batches of equal length.")] = False,
    vram_gb: Annotated[float | None, typer.Option(help="Device memory to use at most.")] = None,
    ram_gb: Annotated[float | None, typer.Option(help="Host memory to use at most.")] = None,
    no_disk: Annotated[bool, typer.Option("--no-disk", help="Refuse what does not fit in memory.")] = False,
    what_if: Annotated[bool, typer.Option("--what-if", help="Also with one thing changed at a time.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write the simulated lanes as a Chrome trace.", metavar="FILE")
    ] = None,
) -> None:
    """Predict memory and time of a training step. Of this machine or another, without a GPU and without weights."""
    from megatrain.commands.plan import PlanOptions
    from megatrain.commands.plan import plan as run

    options = PlanOptions(
        machine=machine,
        tokens=tokens,
        seq=seq,
        rows=rows,
        precision=precision,
        master=master,
        compression=compression,
        clip=clip,
        compile=compile,
        exact=exact,
        vram_gb=vram_gb,
        ram_gb=ram_gb,
        use_disk=not no_disk,
        what_if=what_if,
        as_json=as_json,
        trace=trace,
    )
    run(model, options)


def bench(
    model: Shape,
    tokens: Tokens = "64x1024",
    seq: Length = None,
    accumulate: Accumulate = None,
    vs: Annotated[
        str, typer.Option(help="Peers to measure beside it: zero3, hbm, or zero3,hbm.", metavar="PEERS")
    ] = "",
    steps: Annotated[int, typer.Option(help="Measured steps, 5 at least, behind the warm-up.")] = 5,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; left out: a GPU if there is one.")] = None,
    vram_gb: Annotated[float | None, typer.Option(help="Device memory to use at most, in every row.")] = None,
    ram_gb: Annotated[float | None, typer.Option(help="Host memory to use at most.")] = None,
    offload_dir: Annotated[
        list[Path] | None,
        typer.Option(help="For what does not fit in host memory; may be given several times.", metavar="DIR"),
    ] = None,
    compression: Annotated[str | None, typer.Option(help="Moments: lossless, bf16, 8bit, 4bit; else fp32.")] = None,
    master: Annotated[str | None, typer.Option(help="Master weights: split (exact, the default) or bf16.")] = None,
    clip: Annotated[str, typer.Option(help="global or layer.")] = "global",
    hbm_home_gb: Annotated[
        float | None, typer.Option(help="Device memory for layers that live there, without a plan.")
    ] = None,
    places: Annotated[
        str | None, typer.Option(help="Where all homes live: cpu, stream, hbm or disk; nothing is planned then.")
    ] = None,
    moments_on_disk: Annotated[
        int, typer.Option(help="Moments of so many blocks, the last ones, on disk; nothing is planned then.")
    ] = 0,
    compile: Annotated[bool, typer.Option("--compile", help="Blocks compiled with torch.compile.")] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Merge no micro-batches of equal length.")] = False,
    replan: Annotated[
        bool, typer.Option("--replan", help="Let the run change homes and slots in a longer warm-up.")
    ] = False,
    attention: Annotated[str | None, typer.Option(help="Its kernel, or torch; left out: the fastest.")] = None,
    verify_transfers: Annotated[
        bool, typer.Option("--verify-transfers", help="Check sums of all that is copied.")
    ] = False,
    link_gb_s: Annotated[float | None, typer.Option(help="GB/s over the link at most, each way.")] = None,
    threads: Annotated[int | None, typer.Option(help="Of the CPU update; left out: as many as are of use.")] = None,
    unplanned: Annotated[bool, typer.Option("--unplanned", help="Homes as a run without a workload has.")] = False,
    limit_minutes: Annotated[
        float, typer.Option(help="A row that gives no sign for so long is ended, and says so.")
    ] = 20.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write two more steps as a Chrome trace, and say what it shows.", metavar="FILE"),
    ] = None,
) -> None:
    """Measure whole training steps on this machine. Of a shape with random weights, and of peers beside it."""
    settings = locals()  # the options by name, and nothing else yet
    from megatrain.commands.bench import BenchOptions
    from megatrain.commands.bench import bench as run

    if not run(settings.pop("model"), BenchOptions(**settings)):
        raise typer.Exit(NOT_MEASURED)


def verify(
    folder: Annotated[
        Path, typer.Argument(help="A checkpoint, a model, or the output folder of a run.", metavar="DIR")
    ],
) -> None:
    """Check that checkpoints and models are what was written. The exit code is 1 if one is damaged."""
    from megatrain.commands.verify import verify as run

    if not run(folder):
        raise typer.Exit(DAMAGED)


def resume(
    folder: Annotated[Path, typer.Argument(help="The output folder of a `megatrain train`.", metavar="DIR")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings over those of the run, as in training.max_steps=200.", metavar="KEY=VALUE"),
    ] = None,
) -> None:
    """Go on with a recipe's run from its newest sound checkpoint. A script of your own goes on with
    trainer.train(resume_from_checkpoint=True)."""
    from megatrain.commands.train import resume as run

    run(folder, overrides or [])


def report(
    folder: Annotated[Path, typer.Argument(help="The output folder of a run.", metavar="DIR")],
    output: Annotated[
        Path | None, typer.Option(help="Where the page goes, in place of DIR/report.html.", metavar="FILE")
    ] = None,
) -> None:
    """Show a run as one HTML page. Losses, speed, memory, plan against actual, lanes, checkpoints, faults."""
    from megatrain.commands.report import report as run

    run(folder, output)


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of a run, or a saved model.", metavar="CHECKPOINT")],
    folder: Annotated[Path, typer.Argument(help="A new folder.", metavar="DIR")],
    dtype: Annotated[
        str | None, typer.Option(help="bf16, or fp32: the exact masters. Left out: as they were saved.")
    ] = None,
) -> None:
    """Make a checkpoint a model to give away. With weights, config, tokenizer, a card."""
    from megatrain.commands.export import export as run

    run(checkpoint, folder, dtype)


VERBS: dict[str, Callable[..., None]] = {
    "train": train,
    "resume": resume,
    "plan": plan,
    "bench": bench,
    "doctor": doctor,
    "verify": verify,
    "report": report,
    "export": export,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the verb and ends the process with its exit code."""
    sys.exit(run_command(sys.argv[1:] if arguments is None else list(arguments)))


def run_command(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code; anything that is no mistake of the user's is raised."""
    try:
        code = _app()(arguments, prog_name="megatrain", standalone_mode=False) or 0
    except UserError as error:
        _print_error(_in_words_of(arguments, str(error)))
        return 2
    except InterruptedRunError as error:
        _print_error(str(error))
        return INTERRUPTED
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        if not hasattr(error, "exit_code"):
            raise
        error.show()  # a usage error of the command line itself
        return error.exit_code
    if code == INTERRUPTED:  # some versions of typer turn Ctrl-C into this code, others raise
        _print_error("interrupted")
    return code


def _in_words_of(arguments: list[str], message: str) -> str:
    """Settings as they are written in a recipe, for what reads one."""
    if arguments[:1] not in (["train"], ["resume"]):
        return message
    from megatrain.commands.words import in_recipe_words

    return in_recipe_words(message)


def _app() -> typer.Typer:
    app = typer.Typer(
        name="megatrain",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback(help=PURPOSE)(_options)  # also keeps the verb in the command while there is only one
    for name, function in VERBS.items():
        app.command(name)(function)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        from megatrain import __version__

        print(f"megatrain {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """The options that stand before a verb. Typer calls back for the one there is."""


def _print_error(text: str) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, highlight=False).print(Text(f"error: {text}", style="bold red"), soft_wrap=True)


if __name__ == "__main__":
    main()
