"""Text that every Python has at hand: the documentation inside the running interpreter's standard library.

Turns each documented public function and class into a short chat: the user asks what it does, the assistant answers
with its signature and its docstring. Nothing is downloaded, and the source is parsed, never imported or run.

Rule: the result depends on nothing but the files of this Python version, so two runs see the same text in the same
order. Gives up: modules written in C have no source to read, so they are absent.
"""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from megatrain.base.errors import UserError

Chat = dict[str, list[dict[str, str]]]

MAX_ANSWER_CHARACTERS = 600
MIN_DOC_CHARACTERS = 20

# Graphical toolkits repeat the same few sentences hundreds of times; the others are tools about Python's own insides.
_LEFT_OUT = {"antigravity", "distutils", "idlelib", "lib2to3", "this", "tkinter", "turtle", "turtledemo"}


def python_docs() -> list[Chat]:
    """Chats about the standard library, in an order that mixes the modules and is the same in every run.

    Each is `{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}`.

    Raises:
        UserError: this Python keeps no source files of its standard library (some frozen builds).
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    answers: dict[str, str] = {}  # answer -> name: overridden methods share a docstring, one of them is enough
    for module, file in _source_files(folder):
        for name, answer in _documented(ast.parse(file.read_bytes()), module):
            answers.setdefault(answer, name)
    if not answers:
        raise UserError(
            f"data.path: no Python source found in {folder}, so there is no builtin:python-docs. "
            "Name your own text instead, or use a Python with its standard library as files."
        )
    ordered = sorted(answers.items(), key=lambda item: hashlib.sha256(item[1].encode()).digest())
    return [_chat(name, answer) for answer, name in ordered]


BUILTIN_SOURCES: dict[str, Callable[[], list[Chat]]] = {"python-docs": python_docs}


def _source_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """(module name, file) of the public modules: single files and the direct files of packages."""
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in _LEFT_OUT:
            continue
        if (folder / f"{name}.py").is_file():
            yield name, folder / f"{name}.py"
        for file in sorted((folder / name).glob("*.py")):
            if file.stem == "__init__":
                yield name, file
            elif not file.stem.startswith("_"):
                yield f"{name}.{file.stem}", file


def _documented(scope: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, str]]:
    """(dotted name, answer) of every public function, method and class of `scope` that has a docstring."""
    for node in scope.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        doc = ast.get_docstring(node) or ""
        if len(doc) > MAX_ANSWER_CHARACTERS:
            doc = doc.split("\n\n")[0]
        if MIN_DOC_CHARACTERS <= len(doc) <= MAX_ANSWER_CHARACTERS:
            indented = doc.replace("\n", "\n    ").replace("\n    \n", "\n\n")
            yield f"{prefix}.{node.name}", f"{_signature(node)}\n    {indented}"
        if isinstance(node, ast.ClassDef):
            yield from _documented(node, f"{prefix}.{node.name}")


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """`dedent(text)`, or `class Counter(dict)`."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    return f"{node.name}({ast.unparse(node.args)})"


def _chat(name: str, answer: str) -> Chat:
    question = f"What does `{name}` do?"
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
