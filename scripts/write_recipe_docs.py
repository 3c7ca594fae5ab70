"""Writes docs/recipes.md from the dataclasses of a recipe: `python scripts/write_recipe_docs.py`.

The words stand once, under each field in the code; a test fails when the file is not what this writes.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from pathlib import Path
from typing import Any

from megatrain.recipe import SECTIONS, Recipe
from megatrain.typecheck import describe, field_types

TARGET = Path(__file__).resolve().parents[1] / "docs" / "recipes.md"

HEAD = """\
# Recipes

A recipe is one YAML file that says which model, which data and how to train:

    megatrain train recipes/quickstart.yaml

Any key can be set on the command line, by its dotted name; the value is read as YAML:

    megatrain train recipes/quickstart.yaml training.learning_rate=5e-5 training.max_steps=100 'sample.prompts=[Hello]'

`--dry-run` rehearses: it reads the model and all of the data, prints memory, disk space and an estimated time, and
runs one tiny step through every path (training, evaluation, a sample, saving). Nothing is kept, except what fetching
the model leaves in its cache.

Ctrl-C (or SIGTERM) finishes the step and saves a checkpoint, a second one ends the run at once
(`training.save_strategy` makes checkpoints on the way). A run goes on from its newest checkpoint that is not damaged:

    megatrain resume runs/own-documents training.max_steps=200
    megatrain train recipes/own_documents.yaml training.resume_from_checkpoint=true

The first takes recipe and settings from the output folder, which keeps them; settings may be added. A run of your own
script goes on otherwise: [reliability.md](reliability.md#saving-and-resuming).

`true` is the newest sound checkpoint in `output.dir`; the folder of another one may stand there instead. Such a run
measures the held-out loss and writes samples only at its end, and its figures are of its own steps alone. A new run
into a folder with a model or checkpoints of an earlier one is refused unless `output.overwrite` is true: then these
checkpoints are removed, all at once, when the new run has been checked and begins to train, so that `megatrain resume`
and `save_total_limit` see those of one run. With `output.overwrite` and the folder of one of its own checkpoints, those
behind it are removed.

Paths are looked up from the folder in which the command runs; `~` is your home. An unknown key, a wrong type, a
value that cannot work or a missing file is refused before any work. `yes`, `no`, `on` and `off` are text here; only
`true` and `false` are true and false. A mistake of the user's ends the command with exit code 2, a failure while
running with 1, Ctrl-C with 130 where no training had begun, or at the second one; `megatrain verify` that found damage
with 1.

A recipe with `model.shape` instead of `model.name` trains a new model with random weights, which are made where they
will live, a layer at a time: to try how a shape trains on a machine, or to train one from the start. What it says
before it is trained means nothing, so such recipes have no prompts. Where the trained weights would not fit on the
disk, `output.save_model: false` saves none.

Two recipes to start from: [quickstart.yaml](../recipes/quickstart.yaml) (a small model, text that every Python has,
3 to 5 minutes on two CPU cores) and [own_documents.yaml](../recipes/own_documents.yaml) (your own folder).
[long_documents.yaml](../recipes/long_documents.yaml) trains on whole long documents. Recipes of large shapes, 7B to
117B, with the machine that each is for and its plan: [hundred-billion.md](hundred-billion.md#recipes).

This file is written by scripts/write_recipe_docs.py from the code.
"""

TRAINING = """\
## training

Any field of `transformers.TrainingArguments`, by its name there, with its default there. Which are honoured and which
are refused, and why: [training_arguments.md](training_arguments.md). Set otherwise here: `report_to` is `none` unless
the recipe says so, and `output_dir` is `output.dir`.
"""


def main() -> None:
    TARGET.write_text(render(), encoding="utf-8")


def render() -> str:
    """The whole file."""
    parts = [HEAD]
    for field in dataclasses.fields(Recipe):
        if field.name in SECTIONS:
            parts.append(_section(field.name, SECTIONS[field.name]))
        elif field.name == "training":
            parts.append(TRAINING)
    return "\n".join(parts)


def _section(name: str, cls: type) -> str:
    docs = field_docs(cls)
    purpose = textwrap.fill(field_docs(Recipe)[name], 120, break_long_words=False, break_on_hyphens=False)
    lines = [f"## {name}", "", purpose, "", "| key | type | default | |", "|---|---|---|---|"]
    types = field_types(cls)
    for field in dataclasses.fields(cls):
        cells = [f"`{name}.{field.name}`", describe(types[field.name]), _default(field), docs[field.name]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return "none"
    if field.default is dataclasses.MISSING:
        return "required"
    if field.default in (None, ()):
        return "none"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def field_docs(cls: type) -> dict[str, str]:
    """The text under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    docs = {}
    for field, below in zip(body, body[1:], strict=False):
        is_text = isinstance(below, ast.Expr) and isinstance(getattr(below.value, "value", None), str)
        if isinstance(field, ast.AnnAssign) and is_text:
            docs[field.target.id] = " ".join(below.value.value.split())
    return docs


if __name__ == "__main__":
    main()
