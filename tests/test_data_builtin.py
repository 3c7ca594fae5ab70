"""Text out of the running Python's standard library."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatrain.base.errors import UserError
from megatrain.data import builtin
from megatrain.data.builtin import BUILTIN_SOURCES, MAX_ANSWER_CHARACTERS, python_docs, python_library, python_source


def answer_to(question: str) -> str:
    return next(chat["messages"][1]["content"] for chat in python_docs() if question in chat["messages"][0]["content"])


def test_an_answer_is_the_signature_and_the_docstring() -> None:
    doc = inspect.getdoc(textwrap.dedent) or ""
    shown = doc if len(doc) <= MAX_ANSWER_CHARACTERS else doc.split("\n\n")[0]
    assert answer_to("`textwrap.dedent`") == "dedent(text)\n" + textwrap.indent(shown, "    ")


def test_there_is_plenty_and_each_is_a_question_and_an_answer() -> None:
    chats = python_docs()
    assert len(chats) > 1000
    for chat in chats:
        user, assistant = chat["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        assert user["content"].startswith("What does `") and "\n" in assistant["content"]
        assert "._" not in user["content"] and len(assistant["content"]) < 2 * MAX_ANSWER_CHARACTERS
    answers = [chat["messages"][1]["content"] for chat in chats]
    assert len(set(answers)) == len(answers)


def test_every_run_gives_the_same_in_the_same_order_and_imports_nothing() -> None:
    script = (
        "import json, sys\n"
        "from megatrain.data.builtin import python_docs\n"
        "before = set(sys.modules)\n"
        "chats = python_docs()\n"
        "assert not {'telnetlib', 'antigravity', 'smtplib', 'pdb'} & (set(sys.modules) - before)\n"
        "print(json.dumps(chats[:50]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert json.loads(done.stdout) == python_docs()[:50], done.stderr


def test_methods_classes_and_long_docstrings() -> None:
    source = (
        "class Outer(Base, metaclass=Meta):\n"
        "    '''What the outer one is for.'''\n"
        "    async def wait(self, timeout=None, *, loop):\n"
        f"        '''First paragraph of it.\n\n        {'long ' * 200}'''\n"
        "    def short(self): '''Too short.'''\n"
        "    def _private(self): '''Nobody needs to know about this.'''\n"
    )
    assert list(builtin._documented(ast.parse(source), "module")) == [
        ("module.Outer", "class Outer(Base)\n    What the outer one is for."),
        ("module.Outer.wait", "wait(self, timeout=None, *, loop)\n    First paragraph of it."),
    ]


def test_a_python_without_source_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    for name, read in BUILTIN_SOURCES.items():
        with pytest.raises(UserError, match=f"no Python source found in .*, so there is no builtin:{name}"):
            read()


def test_each_module_is_one_document_and_the_library_is_all_of_them() -> None:
    texts = [document["text"] for document in python_source()]
    assert texts.count(Path(textwrap.__file__).read_text(encoding="utf-8")) == 1
    assert len(texts) > 200 and all(text.strip() for text in texts)
    [library] = python_library()
    assert "# module textwrap\n\n" + inspect.getsource(textwrap) in library["text"]
    places = [library["text"].index(text) for text in texts if texts.count(text) == 1]
    assert places == sorted(places)
    assert texts == [document["text"] for document in python_source()]
