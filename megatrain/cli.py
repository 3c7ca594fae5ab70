"""The command `megatrain`: a table from verb to plain function.

Exit codes: 0 done; 1 a bug or a failure while running (with its traceback); 2 a mistake of the user's, named in one
line; 130 interrupted.

Rule: nothing heavy is imported before the verb is known, so that help appears at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from megatrain.base.errors import InterruptedRunError, UserError

INTERRUPTED = 130
PURPOSE = "Train language models bigger than the GPU, all parameters, on one GPU."


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
    """Measure this machine, say what slows it down, keep the profile that plans use."""
    from megatrain.commands.doctor import doctor as run

    run(offload_dir or [], quick=quick, as_json=as_json, output=output)


VERBS: dict[str, Callable[..., None]] = {"train": train, "doctor": doctor}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the verb and ends the process with its exit code."""
    sys.exit(run_command(sys.argv[1:] if arguments is None else list(arguments)))


def run_command(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code; anything that is no mistake of the user's is raised."""
    try:
        code = _app()(arguments, prog_name="megatrain", standalone_mode=False) or 0
    except UserError as error:
        from megatrain.commands.words import in_recipe_words

        _print_error(in_recipe_words(str(error)))
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
