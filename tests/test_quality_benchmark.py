"""The benchmark of formats runs, runs nothing twice, and its report judges what it should."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """benchmarks/quality.py as a module, with the modules beside it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    names = ("quality", "quality_jobs", "quality_report")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = __import__("quality")
    yield module
    for name in names:
        sys.modules.pop(name, None)


def test_it_trains_reports_and_resumes(quality: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, image = tmp_path / "quality.jsonl", tmp_path / "images" / "quality.png"
    patterns = ["scratch/split/fp32/0", "scratch/split/lossless/0", "scratch/split/2bit/0", "scratch/split/fp32/1"]
    run = ["run", "--tiny", "--device", "cpu", "--threads", "1", "--output", str(output), "--only", *patterns]
    quality.main(run)
    lines = [json.loads(text) for text in output.read_text().splitlines()]
    assert [line["moments"] for line in lines] == ["fp32", "2bit", "lossless", "fp32"]
    exact, two_bits, lossless, _ = lines
    assert exact["weights"] == lossless["weights"] != two_bits["weights"]
    assert exact["loss"] < exact["curve"][0][2]
    assert [step for step, _, _ in exact["curve"]] == [0, 2, 4]

    quality.main(run)
    assert len(output.read_text().splitlines()) == len(lines)

    capsys.readouterr()
    quality.main(["report", "--output", str(output), "--image", str(image)])
    table = capsys.readouterr().out
    assert "| split | fp32 | 2 |" in table
    assert "same weights, bit for bit" in table
    if "matplotlib" in sys.modules:
        assert 0 < image.stat().st_size < 200_000


def line(moments: str, seed: int, loss: float, **changes: Any) -> dict[str, Any]:
    base = {"experiment": "scratch", "master": "split", "moments": moments, "seed": seed, "loss": loss, "stderr": 0.1}
    rest = {"settings": {"steps": 1}, "data": "d", "environment": "e", "weights": "w", "curve": [[0, None, 9.0]]}
    return base | rest | changes


def test_a_format_is_outside_when_it_is_worse_by_more_than_the_spread(
    quality: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line("fp32", seed, 2.0 + 0.1 * seed) for seed in range(3)]
    for moments, worse in (("8bit", 0.19), ("4bit", 0.21), ("2bit", float("nan"))):
        lines += [line(moments, seed, 2.0 + 0.1 * seed + worse) for seed in range(3)]
    quality.print_report(lines)
    rows = capsys.readouterr().out.splitlines()[6:10]
    verdicts = {row.split("|")[2].strip(): row.split("|")[-2].strip() for row in rows}
    assert verdicts == {"fp32": "exact", "8bit": "within", "4bit": "outside", "2bit": "outside"}


def test_results_that_cannot_be_compared_are_refused(quality: ModuleType) -> None:
    lines = [line("fp32", 0, 2.0), line("8bit", 0, 2.0, environment="another machine")]
    with pytest.raises(SystemExit, match="cannot be compared"):
        quality.print_report(lines)
