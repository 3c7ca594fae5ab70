"""How the commands print: one console, aligned facts, tables.

Rule: what is no terminal (a file, a pipe, a log) gets the same words as plain lines, never cut at 80 columns.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

PLAIN_WIDTH = 120
NAME_WIDTH = 11
INDENT = 4


def make_console(file: TextIO | None = None) -> Console:
    """A console on `file` (standard output if None)."""
    from rich.console import Console

    file = file or sys.stdout
    return Console(file=file, width=None if file.isatty() else PLAIN_WIDTH, highlight=False)


def print_fact(console: Console, name: str, text: str) -> None:
    """`model       HuggingFaceTB/...`: a name in its column and a text that wraps beside it."""
    from rich.text import Text

    if console.is_terminal:
        _print_beside(console, Text(name, style="bold"), Text(text), NAME_WIDTH)
        return
    beside = text.replace("\n", "\n" + " " * (NAME_WIDTH + 1))
    console.print(Text(f"{name:<{NAME_WIDTH}} {beside}"), soft_wrap=True)


def print_figure(console: Console, name: str, text: str, width: int) -> None:
    """`  step             7.19 s`: as a fact, set in, with a column of `width` for the name."""
    from rich.text import Text

    if console.is_terminal:
        _print_beside(console, Text(f"  {name}"), Text(text), width + 2)
    else:
        print_fact(console, "", f"{name:<{width}} {text}")


def print_remark(console: Console, kind: str, text: str, style: str, more: str = "") -> None:
    """`warning: ...` or `note: ...`, wrapped beside its kind.

    Args:
        more: a line of its own behind the text, set in.
    """
    from rich.text import Text

    label = Text(f"{kind}:", style=style)
    if console.is_terminal:
        _print_beside(console, label, Text("\n".join(filter(None, [text, more]))), len("warning:"))
        return
    console.print(label.append(f" {text}"), soft_wrap=True)
    if more:
        console.print(Text(" " * 6 + more), soft_wrap=True)


def _print_beside(console: Console, name: Text, text: Text, width: int) -> None:
    """A name, whole however long it is, and a text that wraps beside it."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 1))
    grid.add_column(min_width=width, overflow="fold")
    grid.add_column(overflow="fold")
    grid.add_row(name, text)
    console.print(grid)


def print_step(console: Console, text: str) -> None:
    """`            loading the weights ...`, before a stretch that may be long and prints nothing."""
    print_fact(console, "", f"{text} ...")


def print_block(console: Console, text: str) -> None:
    """Text of several lines, indented, with an empty line after it."""
    from rich.padding import Padding
    from rich.text import Text

    if console.is_terminal:
        console.print(Padding(Text(text, style="cyan"), (0, 0, 1, INDENT)))
        return
    for line in text.splitlines():
        console.print(Text(" " * INDENT + line if line.strip() else ""), soft_wrap=True)
    console.print()


def print_warning(console: Console, text: str) -> None:
    print_remark(console, "warning", text, "yellow")


def print_table(console: Console, title: str, rows: Mapping[str, str] | Sequence[Sequence[str]]) -> None:
    """Names to the left, figures to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    lines = list(rows.items()) if isinstance(rows, Mapping) else [tuple(row) for row in rows]
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_header=False)
    for index in range(len(lines[0])):
        table.add_column(justify="right" if index == len(lines[0]) - 1 else "left", overflow="fold")
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))
    console.print(table)
