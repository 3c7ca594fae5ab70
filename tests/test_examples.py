"""Every example runs as it stands, without a network, and its loss falls."""

from __future__ import annotations

import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


def losses(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss ([\d.]+)", output)]


def assert_falling(output: str) -> list[float]:
    found = losses(output)
    # It starts from random weights over 256 bytes: log(256) = 5.5. Byte frequencies alone would give 3.26.
    assert found[0] > 5.3 and found[-1] < 3.4, output
    return found


def test_all_are_here() -> None:
    assert {path.stem for path in EXAMPLES} >= {"own_loop", "custom_loss", "custom_block", "custom_router"}


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.stem != "custom_block"], ids=lambda path: path.stem)
def test_it_runs_and_its_loss_falls(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("an example used the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    runpy.run_path(str(path), run_name="__main__")
    output = capsys.readouterr().out
    found = assert_falling(output)
    if path.stem == "own_loop":
        assert f"by plain transformers: {found[-1]:.3f}" in output


def test_it_runs_as_a_command_from_anywhere(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(FOLDER / "custom_block.py")], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert_falling(result.stdout)
    assert result.stderr == ""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_short_and_says_how_to_run_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    assert f"python examples/{path.name}" in text
