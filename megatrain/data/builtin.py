"""Text that every Python has at hand: the running interpreter's standard library.

- `python-docs`: each documented public function and class as a short chat: the user asks what it does, the assistant
  answers with its signature and its docstring.
- `python-source`: each public module's source as one document.
- `python-library`: all of these in one document, of millions of tokens.

Nothing is downloaded, and the source is parsed or read, never imported or run.

Rule: the result depends on nothing but the files of this Python version, so two runs see the same text in the same
order. Gives up: modules written in C have no source to read, so they are absent.
"""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sized
from pathlib import Path

from megatrain.base.errors import UserError

Chat = dict[str, list[dict[str, str]]]
Text = dict[str, str]

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
    _refuse_nothing(answers, folder, "python-docs")
    ordered = sorted(answers.items(), key=lambda item: _mixing(item[1]))
    return [_chat(name, answer) for answer, name in ordered]


def python_source() -> list[Text]:
    """The source of each public module, `{"text": ...}`, in an order that mixes them and is the same in every run.

    Raises UserError: this Python keeps no source files of its standard library.
    """
    return [{"text": text} for text in _modules("python-source").values()]


def python_library() -> list[Text]:
    """One document: the source of all public modules, each under its name. For sequences longer than any module.

    Raises UserError: this Python keeps no source files of its standard library.
    """
    modules = _modules("python-library")
    return [{"text": "\n\n".join(f"# module {module}\n\n{text}" for module, text in modules.items())}]


BUILTIN_SOURCES: dict[str, Callable[[], list[Chat] | list[Text]]] = {
    "python-docs": python_docs,
    "python-source": python_source,
    "python-library": python_library,
}


def _modules(source: str) -> dict[str, str]:
    """Module -> its source, in the order of `_mixing`. An empty one is no text."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(_source_files(folder), key=lambda item: _mixing(item[0]))
    texts = {module: file.read_text(encoding="utf-8", errors="replace") for module, file in files}
    _refuse_nothing(texts, folder, source)
    return {module: text for module, text in texts.items() if text.strip()}


def _refuse_nothing(found: Sized, folder: Path, name: str) -> None:
    if not found:
        raise UserError(
            f"data.path: no Python source found in {folder}, so there is no builtin:{name}. "
            "Name your own text instead, or use a Python with its standard library as files."
        )


def _mixing(name: str) -> bytes:
    """To sort by: mixes the modules, the same in every run."""
    return hashlib.sha256(name.encode()).digest()


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
