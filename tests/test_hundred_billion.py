"""docs/hundred-billion.md: its tables are what the script writes, its plans those of now, its bytes counted apart."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from megatrain.plan.machines import MACHINES
from megatrain.spec.homes import Formats

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("write_hundred_billion")


def test_the_tables_are_what_the_script_writes(script: ModuleType) -> None:
    text = script.TARGET.read_text(encoding="utf-8")
    assert script.render(text) == text, "run python scripts/write_hundred_billion.py"


def test_bytes_are_those_of_the_parameters(script: ModuleType) -> None:
    """Against 2 bytes for each number that is held in bf16; codes are 4 bits and their scales."""
    spec = script.outlined("llama-3-70b").spec(Formats(precision="bf16", master="split"))
    count = sum(field.numel for home in spec.homes for field in home.fields)
    assert count == pytest.approx(70.55e9, rel=1e-3)
    exact, smallest = (script.state_bytes("llama-3-70b", of) for of in ("exact", "smallest"))
    assert {part: num_bytes / count for part, num_bytes in exact.items()} == pytest.approx(
        {"weights": 2, "low": 2, "moments": 8, "gradients": 2}, rel=1e-3
    )
    # Two moments of half a byte, and of one fp32 scale each for 128 numbers.
    assert smallest["moments"] / count == pytest.approx(2 * (0.5 + 4 / 128), rel=1e-3)
    assert sum(smallest.values()) / count == pytest.approx(3.06, rel=2e-3)


def test_a_lane_is_hidden_from_the_tokens_on_that_the_table_says(script: ModuleType) -> None:
    machine = MACHINES["rtx4090"]
    row = next(line for line in script.lanes_table() if line.startswith("| rtx4090 |"))
    tokens = int(row.split("|")[2].replace(",", ""))
    numel = 10**9
    link_seconds = 2 * 2 * numel / machine.h2d_bytes_per_second
    assert 8 * numel * tokens / machine.matmul_flops_per_second == pytest.approx(link_seconds, rel=0.05)


def test_energy_counts_what_waits_at_its_share(script: ModuleType) -> None:
    """1024 tokens in 100 s, of which the GPU computes 10."""
    row = {"machine": "a100", "sequences": 1, "step_seconds": 100.0, "compute_seconds": 10.0}
    steps, owned = 1e9 / 1024, script.OWNED["a100"]
    joules = steps * (10 * owned.gpu_watts + 90 * script.INPUTS.idle_share * owned.gpu_watts + 100 * owned.host_watts)
    hours, kwh = (float(cell.split()[0].replace(",", "")) for cell in script.cost(row).split(", "))
    assert (hours, kwh) == pytest.approx((steps * 100 / 3600, joules / 3.6e6), rel=0.05)


@pytest.mark.parametrize(
    "key",
    [
        ("command-r-plus", "h200-1.5tb", "exact", 32),
        ("llama-3.1-405b", "h200-1.5tb", "smallest", 32),
        ("deepseek-v3", "h200-256gb", "smallest", 32),
        ("kimi-k2", "h200-1.5tb", "smallest", 32),
    ],
)
def test_plans_are_those_of_now(script: ModuleType, key: tuple[str, str, str, int]) -> None:
    plans = importlib.import_module("hundred_billion_plans")
    kept, now = plans.kept_plans()[key], plans.planned(*key)
    told = "run python scripts/hundred_billion_plans.py, then scripts/write_hundred_billion.py"
    assert kept.get("short_of") == now.get("short_of"), told
    if "short_of" not in now:
        assert now["step_seconds"] == pytest.approx(kept["step_seconds"], rel=0.15), told


def test_every_plan_that_is_shown_is_kept(script: ModuleType) -> None:
    plans = importlib.import_module("hundred_billion_plans")
    assert set(plans.kept_plans()) == set(plans.wanted())
    assert set(script.OWNED) == set(MACHINES)
