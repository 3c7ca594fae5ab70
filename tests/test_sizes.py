"""The table of benchmarks/sizes.py, from lines as scripts/gpu_figures.py writes them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
GIB = 2**30


def module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_rows_of_a_bench_become_rows_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {
        "median_seconds": 1.25, "step_seconds": [1.5, 1.25, 1.0], "tflops_published": 464.4, "tflops_counted": 475.6,
        "peak_device_bytes": 120 * GIB, "peak_host_bytes": 2 * GIB,
        "predicted": {"step_seconds": 1.5, "device_bytes": 128 * GIB, "host_bytes": GIB},
    }  # fmt: skip
    told = {
        "model": {"parameters": 3_085_938_688}, "workload": {"sequences": 32, "length": 1024},
        "rows": [
            {"row": "megatrain", "how": "compiled", "problem": "", "figures": figures},
            {"row": "megatrain", "problem": "out of device memory", "figures": None},
        ],
    }  # fmt: skip
    lines = module("scripts/gpu_figures.py")._lines("3B", told)
    assert [line["billions"] for line in lines] == [3.09, 3.09] and lines[1]["problem"] == "out of device memory"
    file = tmp_path / "speed.jsonl"
    file.write_text("".join(json.dumps({**line, "commit": "abc"}) + "\n" for line in lines))
    sizes = module("benchmarks/sizes.py")
    sizes.print_table(sizes.read(file))
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows == ["| `3B` | 1.25 (1-1.5) (1.5) | 464 | 476 | 120.0 (128.0) | 2.0 (1.0) | abc |"]
