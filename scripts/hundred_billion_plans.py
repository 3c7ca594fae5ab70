"""Plans anew what docs/hundred-billion.md shows: `python scripts/hundred_billion_plans.py`, which takes some minutes.

The plans are kept in docs/hundred-billion.json, a line each. Run scripts/write_hundred_billion.py behind it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import gc
import itertools
import json
from pathlib import Path
from typing import Any

from megatrain.base.config import Config
from megatrain.base.errors import PlanError
from megatrain.base.units import GB, GIB
from megatrain.plan.explain import bottleneck
from megatrain.plan.machine import Machine
from megatrain.plan.machines import MACHINES
from megatrain.plan.simulate import COMPUTE
from megatrain.plan.what_if import Question
from megatrain.plan.workload import Workload
from megatrain.planning import OutlinedModel, outline_model

PLANS = Path(__file__).resolve().parents[1] / "docs" / "hundred-billion.json"

SLOW_DISK = "h200-256gb, slow disk"
"""With a disk as docs/performance.md measured it, of 128 GiB."""
MODELS = ("llama-3-70b", "command-r-plus", "gpt-oss-120b", "mistral-large", "llama-3.1-405b", "deepseek-v3", "kimi-k2")
FORMATS: dict[str, dict[str, str]] = {
    "exact": {},
    "exact, by layer": {"clip": "layer"},
    "8bit": {"optimizer_compression": "8bit"},
    "4bit": {"optimizer_compression": "4bit"},
    "4bit, by layer": {"optimizer_compression": "4bit", "clip": "layer"},
    "smallest": {"optimizer_compression": "4bit", "clip": "layer", "master": "bf16"},
}
"""Name in these tables -> settings of `mt.init`."""
TOKENS = (1, 8, 32)
"""x 1024, a step."""
SHOWN = (
    ("command-r-plus", "h200-1.5tb", "exact"),
    ("command-r-plus", "h200-512gb", "exact"),
    ("command-r-plus", "h200-256gb", "smallest"),
    ("command-r-plus", SLOW_DISK, "smallest"),
    ("llama-3-70b", "h200-256gb", "4bit"),
    ("llama-3-70b", SLOW_DISK, "4bit"),
    ("llama-3-70b", "h200-256gb", "4bit, by layer"),
    ("gpt-oss-120b", "h200-256gb", "smallest"),
    ("mistral-large", "h200-256gb", "smallest"),
)
"""Plans of 32 x 1024 tokens that are shown whole."""


def machine_of(name: str) -> Machine:
    if name != SLOW_DISK:
        return MACHINES[name]
    rates = {"disk_read_bytes_per_second": 1.9e9, "disk_write_bytes_per_second": 2.4e9}
    return dataclasses.replace(MACHINES["h200-256gb"], name=name, disk_bytes=128 * GIB, **rates)


def wanted() -> list[tuple[str, str, str, int]]:
    """(model, machine, format, thousands of tokens) of all plans."""
    both = ("exact", "smallest")
    at_32 = itertools.product(MODELS, MACHINES, both, (32,))
    others = itertools.product(("command-r-plus",), MACHINES, both, TOKENS)
    return list(dict.fromkeys([*at_32, *others, *((*shown, 32) for shown in SHOWN)]))


@functools.cache
def outlined(model: str) -> OutlinedModel:
    return outline_model(model)


def planned(model: str, machine: str, of: str, number: int) -> dict[str, Any]:
    """What docs/hundred-billion.json keeps of a plan."""
    row: dict[str, Any] = {"model": model, "machine": machine, "format": of, "sequences": number}
    question = Question(
        machine=machine_of(machine),
        spec_of=outlined(model).spec,
        precision="bf16",
        workload=Workload(num_sequences=number, length=1024),
        config=Config(offload_dir=".", **FORMATS[of]),
    )
    try:
        plan = question.answer()
    except PlanError as error:
        return {**row, "short_of": "device" if ": device memory is" in str(error) else "host and disk"}
    return {
        **row,
        "step_seconds": round(plan.step_seconds, 3),
        "compute_seconds": round(plan.simulation.busy_seconds()[COMPUTE], 3),
        "gb": {tier: round(plan.timeline.peak(tier) / GB, 1) for tier in ("hbm", "ram", "disk")},
        "counted_tflops": round(plan.counted_tflops, 1),
        "rows": plan.choice.rows,
        "bottleneck": bottleneck(plan.simulation)[0],
    }


def main() -> None:
    gc.freeze()  # simulations make many small objects
    with concurrent.futures.ProcessPoolExecutor() as pool:
        rows = list(pool.map(planned, *zip(*wanted(), strict=True)))
    lines = ",\n".join(json.dumps(row) for row in rows)
    PLANS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def kept_plans() -> dict[tuple[str, str, str, int], dict[str, Any]]:
    rows = json.loads(PLANS.read_text(encoding="utf-8"))
    return {(row["model"], row["machine"], row["format"], row["sequences"]): row for row in rows}


if __name__ == "__main__":
    main()
