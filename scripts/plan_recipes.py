"""Plans each recipe under recipes/ that trains a shape, on the machine that it names: `python scripts/plan_recipes.py`.

The plan is the one that the run makes on such a machine when all of its memory is free. What it predicts is written
into the recipes, below the line that says so, and into the table of docs/hundred-billion.md.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

from hundred_billion_plans import SLOW_DISK, machine_of

from megatrain.base.units import GB, GIB, format_seconds
from megatrain.plan.explain import bottleneck
from megatrain.plan.machine import Machine
from megatrain.plan.machines import MACHINES
from megatrain.plan.outcome import Plan
from megatrain.plan.remedies import plan
from megatrain.plan.workload import Workload
from megatrain.planning import OutlinedModel, outline_model
from megatrain.recipe import Recipe, load_recipe
from megatrain.spec.homes import Formats

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"
DOCS = ROOT / "docs" / "hundred-billion.md"
MARK = "# Predicted by scripts/plan_recipes.py, not measured:\n"
TABLE_BEGIN, TABLE_END = "<!-- recipes -->\n", "<!-- end -->"
PRECISION = "bf16"

BIG = machine_of(SLOW_DISK)
SMALL = dataclasses.replace(
    MACHINES["h200-128gb"],
    disk_bytes=64 * GIB,
    disk_read_bytes_per_second=BIG.disk_read_bytes_per_second,
    disk_write_bytes_per_second=BIG.disk_write_bytes_per_second,
)
AS_IT_IS: tuple[str, ...] = ()
PLANNED: dict[str, tuple[Machine, list[tuple[str, ...]]]] = {
    "command_r_plus_104b": (BIG, [AS_IT_IS]),
    "llama_70b_exact": (BIG, [AS_IT_IS, ("engine.clip=global",)]),
    "gpt_oss_120b": (BIG, [AS_IT_IS]),
    "llama_70b_128gb": (SMALL, [AS_IT_IS]),
    "qwen_32b_exact": (SMALL, [AS_IT_IS]),
    "qwen_14b_24gb": (SMALL, [AS_IT_IS]),
    "long_context_7b": (
        SMALL,
        [AS_IT_IS, ("data.sequence_length=32768",), ("data.sequence_length=262144",), ("data.sequence_length=524288",)],
    ),
}
"""Recipe -> its machine, and what is set on the command line."""


def recipe_of(name: str, overrides: tuple[str, ...] = AS_IT_IS) -> Recipe:
    return load_recipe(RECIPES / f"{name}.yaml", overrides)


def planned(name: str, overrides: tuple[str, ...] = AS_IT_IS) -> Plan:
    """Raises PlanError where it does not fit."""
    recipe, machine = recipe_of(name, overrides), PLANNED[name][0]
    model, settings = _outlined(recipe.model.given, tuple(recipe.model.config.items())), recipe.engine
    formats = Formats(precision=PRECISION, master=settings.master_for(PRECISION), grad_dtype=settings.grad_dtype)
    return plan(machine, model.spec(formats), workload_of(recipe, model), settings)


def workload_of(recipe: Recipe, model: OutlinedModel | None = None) -> Workload:
    """A step: rows are not packed, and all of one length, or one at a time.

    model: merges micro-batches, if it can.
    """
    arguments = recipe.training_arguments()
    rows, num_accumulated = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    varied = not recipe.data.eval_fraction  # else the short rest of the text is in the part that is held out
    assert not recipe.data.packing and not (varied and rows > 1)
    return Workload(
        num_sequences=rows * num_accumulated,
        length=recipe.data.sequence_length,
        rows=rows,
        varied=varied,
        merges=model is not None and not varied and not model.why_unmerged(recipe.engine, PRECISION),
    )


@functools.cache
def _outlined(shape: str, changes: tuple[tuple[str, object], ...]) -> OutlinedModel:
    return outline_model(shape, dict(changes))


def predicted(found: Plan) -> str:
    """One line."""
    gb = {tier: f"{found.timeline.peak(tier) / GB:.0f} GB" for tier in ("hbm", "ram", "disk")}
    workload = found.workload
    return (
        f"{format_seconds(found.step_seconds)} a step of {workload.num_sequences} x {workload.length:,} tokens, "
        f"{found.counted_tflops:.0f} TFLOPS counted, held up by {bottleneck(found.simulation)[0]}; "
        f"device {gb['hbm']}, host {gb['ram']}, disk {gb['disk']}"
    )


def lines_of(name: str) -> list[str]:
    """What stands in the recipe, a line for each way to run it."""
    lines = []
    for overrides in PLANNED[name][1]:
        how = f"{' '.join(overrides)}: " if overrides else ""
        lines.append(f"# - {how}{predicted(planned(name, overrides))}")
    return lines


def kept_lines(name: str) -> list[str]:
    """Those that stand there now."""
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    return re.match(r"(?:# -.*\n)*", text.partition(MARK)[2])[0].splitlines()


def write(name: str) -> None:
    file = RECIPES / f"{name}.yaml"
    before, mark, after = file.read_text(encoding="utf-8").partition(MARK)
    after = re.sub(r"\A(?:# -.*\n)*", "", after)
    file.write_text(before + mark + "\n".join(lines_of(name)) + "\n" + after, encoding="utf-8")


# The table


def render(text: str) -> str:
    """docs/hundred-billion.md with its table of recipes written anew, from the heads of the recipes."""
    before, begin, rest = text.partition(TABLE_BEGIN)
    assert begin and TABLE_END in rest, f"{DOCS} has no place for the table"
    rows = ["| recipe | machine | exact | LOSSY | predicted |", "| --- | --- | --- | --- | --- |"]
    rows += [_row(name) for name in PLANNED]
    return before + begin + "\n".join(rows) + "\n" + TABLE_END + rest.partition(TABLE_END)[2]


def _row(name: str) -> str:
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    cells = [re.search(rf"^# {key}: (.*?)\.?$", text, re.MULTILINE)[1] for key in ("Machine", "Exact", "LOSSY")]
    figures = kept_lines(name)[0].removeprefix("# - ")
    return f"| [{name}](../recipes/{name}.yaml) | {' | '.join(cells)} | {figures} |"


def main() -> None:
    for name in PLANNED:
        write(name)
    DOCS.write_text(render(DOCS.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
