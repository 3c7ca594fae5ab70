"""`megatrain report DIR`: what a run did, as one HTML page that needs no network."""

from __future__ import annotations

import os
from pathlib import Path

from megatrain.base.paths import looking_at
from megatrain.base.trace import writable
from megatrain.commands.console import make_console, print_fact, print_warning
from megatrain.commands.report_data import read_run
from megatrain.commands.report_page import page

REPORT_NAME = "report.html"


def report(folder: Path, output: Path | None) -> None:
    """Writes the page. Raises UserError for a folder that is none of a run, or a file that cannot be written."""
    run = read_run(folder)
    file = run.folder / REPORT_NAME if output is None else output
    file = writable(file, "--output")
    text = page(run)
    with looking_at("--output", file):
        beside = file.with_name(f".{file.name}.incomplete")
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, file)
    console = make_console()
    print_fact(console, "report", f"{file} (open it in a browser)")
    for note in run.notes:
        print_warning(console, note)
