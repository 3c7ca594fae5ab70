"""Writes the tables of docs/hundred-billion.md: `python scripts/write_hundred_billion.py`.

Prices, watts and endurance are in `Inputs` and `OWNED`: change them and run this again. What is planned is kept in
docs/hundred-billion.json (see hundred_billion_plans.py). The words between the tables are the document's own. Tests
hold its tables to what this writes, and some plans to what the planner says.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hundred_billion_plans import FORMATS, MODELS, SHOWN, TOKENS, kept_plans, machine_of, outlined

from megatrain.base.config import Config
from megatrain.base.units import GB, format_count, format_seconds
from megatrain.plan.machines import MACHINES
from megatrain.plan.placement import CPU
from megatrain.plan.planner import Planner
from megatrain.plan.schedule import Choice
from megatrain.plan.workload import Workload
from megatrain.spec.homes import Formats

DOCS = Path(__file__).resolve().parents[1] / "docs"
TARGET, QUALITY = DOCS / "hundred-billion.md", DOCS / "compression.md"
MANY = 10**9
"""Tokens, for hours and energy."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Round assumptions of 2026-12, in US dollars. None is a quotation: put in your own."""

    memory_per_gb: float = 10.0
    """Registered DDR5."""
    disk_per_tb: float = 120.0
    """NVMe."""
    disk_endurance_writes: float = 600.0
    """Times that a disk may be written whole before its warranty ends; data-centre disks: 1,800 and more."""
    host: float = 4000.0
    """Board, CPU, supply, case."""
    idle_share: float = 0.25
    """Of its board power, what a GPU takes while it waits."""
    usable_share: float = 0.9
    """Of the memory of each of many GPUs, for weights, gradients and moments."""


@dataclass(frozen=True, kw_only=True)
class Owned:
    """Assumptions for a machine of the catalogue."""

    gpu: float
    """US dollars."""
    gpu_watts: float
    """Board power by the data sheet."""
    host_watts: float


INPUTS = Inputs()
OWNED = {
    "h200-128gb": Owned(gpu=30000, gpu_watts=700, host_watts=300),
    "h200-256gb": Owned(gpu=30000, gpu_watts=700, host_watts=320),
    "h200-512gb": Owned(gpu=30000, gpu_watts=700, host_watts=350),
    "h200-1.5tb": Owned(gpu=30000, gpu_watts=700, host_watts=600),
    "b300-2tb": Owned(gpu=45000, gpu_watts=1400, host_watts=650),
    "gh200": Owned(gpu=35000, gpu_watts=700, host_watts=350),
    "a100": Owned(gpu=10000, gpu_watts=400, host_watts=400),
    "rtx4090": Owned(gpu=2000, gpu_watts=450, host_watts=200),
    "rtx3090": Owned(gpu=800, gpu_watts=350, host_watts=200),
    "a6000": Owned(gpu=4000, gpu_watts=300, host_watts=250),
}

# Tables of arithmetic.


@functools.cache
def planner(model: str, of: str) -> Planner:
    """For one sequence of 1024 tokens, on any machine."""
    config = Config(**FORMATS[of])
    spec = outlined(model).spec(Formats(precision="bf16", master=config.master_for("bf16")))
    return Planner(MACHINES["h200-1.5tb"], spec, Workload(num_sequences=1, length=1024), config)


def state_bytes(model: str, of: str) -> dict[str, int]:
    """Part -> bytes of all homes."""
    parts: dict[str, int] = {}
    for sizes in planner(model, of).sizes:
        for part, num_bytes in sizes.items():
            parts[part] = parts.get(part, 0) + num_bytes
    return parts


def least_device_bytes(model: str) -> int:
    """For a step of one sequence of 1024 tokens: one slot, all else in host memory."""
    asked = planner(model, "smallest")
    places = tuple(CPU for _ in asked.spec.homes)
    choice = Choice(rows=1, num_slots=1, places=places, activation_bytes=0)
    return asked.maker.timeline(choice).peak("hbm")


def bytes_table() -> list[str]:
    model = "command-r-plus"
    count = planner(model, "exact").spec.num_parameters
    rows = [["conventional", "fp32, on GPUs", 4, 0, 8, 4, 16, f"{16 * count / GB:,.0f}"]]
    for of, settings in FORMATS.items():
        told = ", ".join(f'`{name}="{value}"`' for name, value in settings.items()) or "the default"
        parts = state_bytes(model, of)
        each = [parts[name] / count for name in ("weights", "low", "moments", "gradients")]
        rows.append([of, told, *(round(value, 2) for value in (*each, sum(each))), f"{sum(each) * count / GB:,.0f}"])
    head = ["format", "`mt.init`", "weights", "low halves", "moments", "gradients", "together", "104B, GB"]
    return _table(head, [[cell if isinstance(cell, str) else f"{cell:g}" for cell in row] for row in rows])


def models_table() -> list[str]:
    rows = []
    for model in MODELS:
        spec = planner(model, "exact").spec
        largest = max(home.numel for home in spec.homes if home.layers)
        sizes = [f"{sum(state_bytes(model, of).values()) / GB:,.0f}" for of in ("exact", "4bit", "smallest")]
        counts = [format_count(count) for count in (spec.num_parameters, spec.active_parameters, largest)]
        rows.append([model, *counts, *sizes, f"{least_device_bytes(model) / GB:,.0f}"])
    head = ["shape", "parameters", "at work for a token", "largest layer", "exact, GB", "4-bit, GB", "smallest, GB",
            "least device memory, GB"]  # fmt: skip
    return _table(head, rows)


def lanes_table() -> list[str]:
    """Tokens a step from which a lane takes no longer than compute: a dense model's size does not matter."""
    rows = []
    for name in OWNED:
        machine = machine_of(name)
        compute = 8 / machine.matmul_flops_per_second
        disk = 1 / machine.disk_read_bytes_per_second + 1 / machine.disk_write_bytes_per_second
        seconds = [
            4 / machine.h2d_bytes_per_second,
            machine.update_ns_per_parameter["fp32"] * 1e-9,
            machine.update_ns_per_parameter["4bit"] * 1e-9,
            state_bytes("command-r-plus", "4bit")["moments"] / planner("command-r-plus", "4bit").spec.num_parameters
            * disk,
            8 * disk,
        ]  # fmt: skip
        rows.append([name, *(f"{_two_figures(each / compute):,}" for each in seconds)])
    return _table(["machine", "link", "update, fp32 moments", "update, 4-bit", "disk, 4-bit moments",
                   "disk, fp32 moments"], rows)  # fmt: skip


def shopping_table() -> list[str]:
    rows = []
    for model in MODELS:
        count = planner(model, "exact").spec.num_parameters
        gpus = math.ceil(16 * count / (INPUTS.usable_share * MACHINES["h200-256gb"].hbm_bytes))
        cells = [model]
        for of in ("exact", "smallest"):
            gb = sum(state_bytes(model, of).values()) / GB
            cells += [_dollars(gb * INPUTS.memory_per_gb), _dollars(gb / 1000 * INPUTS.disk_per_tb)]
        gpu, memory = OWNED["h200-256gb"].gpu, gb * INPUTS.memory_per_gb
        is_held = least_device_bytes(model) < MACHINES["h200-256gb"].hbm_bytes
        cells.append(_dollars(gpu + INPUTS.host + memory) if is_held else "no: device")
        rows.append([*cells, f"{gpus:,} x H200: {_dollars(gpus * gpu)}"])
    head = ["shape", "exact: memory for it", "or disk", "smallest: memory for it", "or disk",
            "smallest: memory, host, one H200", "conventional"]  # fmt: skip
    return _table(head, rows)


def inputs_table() -> list[str]:
    told = {
        "host memory, a GB": f"${INPUTS.memory_per_gb:g}",
        "disk, a TB": f"${INPUTS.disk_per_tb:g}",
        "times that a disk can be written whole": f"{INPUTS.disk_endurance_writes:g}",
        "host without memory, disk and GPU": _dollars(INPUTS.host),
        "a GPU that waits takes, of its board power": f"{INPUTS.idle_share:.0%}",
        "of each of many GPUs' memory can be used": f"{INPUTS.usable_share:.0%}",
    }
    for name, owned in OWNED.items():
        told[name] = f"GPU {_dollars(owned.gpu)}, {owned.gpu_watts:g} W; host {owned.host_watts:g} W"
    return _table(["assumed, 2026-12", ""], [[name, value] for name, value in told.items()])


def quality_table() -> list[str]:
    """From the two tables of docs/compression.md."""
    scratch, tuned = re.split(r"\n\*\*Fine-tuning\*\*", QUALITY.read_text(encoding="utf-8"))
    rows = []
    for master, moments in (("split", "8bit"), ("split", "4bit"), ("bf16", "4bit")):
        cells = [_cell(text, master, moments) for text in (scratch, tuned)]
        rows.append([f"{master} masters, {moments[0]}-bit moments", *cells])
    rows.append(["LoRA, r = 16, beside it", "", _cell(tuned, "LoRA, r = 16, all linear layers", "fp32")])
    return _table(["held-out loss minus that of the exact format", "from scratch, 3.2M", "fine-tuning, 135M"], rows)


def _cell(text: str, master: str, moments: str) -> str:
    """`minus exact, by seed` of a row."""
    row = next(line for line in text.splitlines() if line.startswith(f"| {master} | {moments}"))
    return row.split("|")[5].strip(" *")


# Tables of plans.


def shown_table() -> list[str]:
    rows = []
    for key in SHOWN:
        row = kept_plans()[(*key, 32)]
        if "short_of" in row:
            rows.append([*key, f"no: {row['short_of']}", *[""] * 7])
            continue
        written_bytes = MANY / (32 * 1024) * row["gb"]["disk"] * GB
        endured = written_bytes / (INPUTS.disk_endurance_writes * machine_of(key[1]).disk_bytes)
        worn = [f"{written_bytes / 1e12:,.0f}", f"{endured:,.1f}"] if written_bytes else ["none", ""]
        sizes = [f"{row['gb'][tier]:,.0f}" for tier in ("hbm", "ram", "disk")]
        step = format_seconds(row["step_seconds"])
        rows.append([*key, step, f"{row['counted_tflops']:,.0f}", row["bottleneck"], *sizes, *worn])
    head = ["shape", "machine", "format", "step", "TFLOPS, counted", "decided by", "device GB", "host GB", "disk GB",
            "TB written", "of what its disk endures"]  # fmt: skip
    return _table(head, rows)


def fits_table(of: str) -> list[str]:
    plans = kept_plans()
    rows = [[machine, *(_fit(plans[model, machine, of, 32]) for model in MODELS)] for machine in OWNED]
    return _table(["machine", *MODELS], rows)


def _fit(row: dict[str, Any]) -> str:
    if "short_of" in row:
        return f"no: {row['short_of']}"
    disk = row["gb"]["disk"]
    return format_seconds(row["step_seconds"]) + (f"; disk {disk:,.0f} GB" if disk else "")


def hours_table(of: str) -> list[str]:
    plans = kept_plans()
    rows = [[machine, *(cost(plans["command-r-plus", machine, of, number]) for number in TOKENS)] for machine in OWNED]
    return _table(["machine", *(f"{number} x 1024 a step" for number in TOKENS)], rows)


def models_hours_table() -> list[str]:
    plans = kept_plans()
    rows = [[machine, *(cost(plans[model, machine, "smallest", 32]) for model in MODELS)] for machine in OWNED]
    return _table(["machine", *MODELS], rows)


def cost(row: dict[str, Any]) -> str:
    """Hours and kWh for `MANY` tokens."""
    if "short_of" in row:
        return "no"
    owned = OWNED[row["machine"]]
    steps = MANY / (1024 * row["sequences"])
    busy, waits = row["compute_seconds"], row["step_seconds"] - row["compute_seconds"]
    joules = owned.host_watts * row["step_seconds"] + owned.gpu_watts * (busy + INPUTS.idle_share * max(0.0, waits))
    return f"{_two_figures(steps * row['step_seconds'] / 3600):,} h, {_two_figures(steps * joules / 3.6e6):,} kWh"


# Text.


def _two_figures(value: float) -> int:
    """No prediction is better than that."""
    return int(float(f"{value:.2g}"))


def _dollars(amount: float) -> str:
    return f"${_two_figures(amount):,}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


TABLES = {
    "bytes": bytes_table,
    "models": models_table,
    "lanes": lanes_table,
    "shown": shown_table,
    "fits exact": functools.partial(fits_table, "exact"),
    "fits smallest": functools.partial(fits_table, "smallest"),
    "hours exact": functools.partial(hours_table, "exact"),
    "hours smallest": functools.partial(hours_table, "smallest"),
    "hours models": models_hours_table,
    "shopping": shopping_table,
    "inputs": inputs_table,
    "quality": quality_table,
}


def render(text: str) -> str:
    """The document with every table written anew. Raises ValueError where a table has no place in it."""
    for name, make in TABLES.items():
        begin, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        before, _, rest = text.partition(begin)
        if end not in rest:
            raise ValueError(f"{TARGET} has no place for the table {name!r}")
        text = before + begin + "\n".join(make()) + "\n" + end + rest.partition(end)[2]
    return text


def main() -> None:
    TARGET.write_text(render(TARGET.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
