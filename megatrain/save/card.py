"""The model card (README.md) of a saved model: what was trained, as far as it is known.

Rule: a card that somebody else wrote, or took over, is never written again. Facts are lines of text by name; what is
not known is left out. No path of the machine is written.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from megatrain.base.units import format_count
from megatrain.execute.engine import Engine, engine_of
from megatrain.save.checkpoints import CARD_NAME

FACTS_NAME = "megatrain_facts.json"
"""In a checkpoint: what `megatrain export` writes into the card."""

MARK = "<!-- Written by MegaTrain, and again with each save. Take this line out to keep what you write here. -->"
BASE_MODEL, BASE_WEIGHTS, WEIGHTS = "base model", "base model's weights", "weights"

Facts = dict[str, str]

_COMPUTE = {
    "fp32": "float32 throughout",
    "split": "bfloat16 compute, exact float32 masters",
    "bf16": "bfloat16 compute, bfloat16 masters with stochastic rounding",
}
_MOMENTS = {
    "fp32": "exact float32",
    "lossless": "exact float32, losslessly coded",
    "bf16": "bfloat16 with stochastic rounding",
    "8bit": "8 bits",
    "4bit": "4 bits",
}
# Where the Hub's cache keeps a model: models--OWNER--NAME/snapshots/REVISION.
_IN_CACHE = re.compile(r"models--([\w.-]+?)--([\w.-]+)[/\\]snapshots[/\\]")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def model_facts(model: nn.Module, engine: Engine) -> Facts:
    """What a streamed model tells by itself."""
    fields = [(home, field) for home in engine.homes for field in home.fields]
    num_all = sum(field.numel for _, field in fields)
    num_trained = sum(field.numel for home, field in fields if home.trainable[field])
    facts = {BASE_MODEL: base_model_name(getattr(getattr(model, "config", None), "_name_or_path", None))}
    trained = "all of " if num_trained == num_all else f"{format_count(num_trained)} of "
    facts["parameters trained"] = trained + format_count(num_all)
    facts["precision"] = _COMPUTE[engine.formats.master]
    facts["moments"] = _MOMENTS[engine.config.moments]
    facts[WEIGHTS] = listed_dtypes(field.saved_dtype for _, field in fields)
    # On the path and not installed, it has no version that anybody knows.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        facts["megatrain"] = importlib.metadata.version("megatrain")
    return {name: fact for name, fact in facts.items() if fact}


def state_facts(state: Mapping[str, Any]) -> Facts:
    """What a Trainer's state (trainer_state.json) tells."""
    logs = state.get("log_history", [])
    facts = {
        "steps": f"{state['global_step']:,} of {state['max_steps']:,}",
        "epochs": f"{state['epoch']:.3g}" if state.get("epoch") is not None else "",
        "last training loss": _last(logs, "loss"),
        "last evaluation loss": _last(logs, "eval_loss"),
    }
    return {name: fact for name, fact in facts.items() if fact}


def base_model_name(name_or_path: Any) -> str:
    """A name on the Hub, or that of a folder without its place; empty if there is none."""
    text = os.fspath(name_or_path or "")
    if found := _IN_CACHE.search(text):
        return f"{found[1]}/{found[2]}"
    if _is_hub_name(text) and not os.path.isdir(text):
        return text
    return os.path.basename(os.path.normpath(text)) if text else ""


def listed_dtypes(dtypes: Iterable[Any]) -> str:
    return ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes}))


def card_text(facts: Mapping[str, str]) -> str:
    """Markdown with the metadata that the Hub reads."""
    base = facts.get(BASE_MODEL, "")
    metadata = ["library_name: transformers", *([f"base_model: {base}"] if _is_hub_name(base) else [])]
    lines = ["---", *metadata, "---", "", MARK, "", f"# {base.rpartition('/')[2] or 'Model'}, trained", ""]
    lines += ["Trained with MegaTrain.", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {_cell(fact)} |" for name, fact in facts.items()]
    return "\n".join(lines) + "\n"


def write_card(folder: Path, facts: Mapping[str, str], *, instead_of: Path | None = None) -> None:
    """Write the card into `folder`, unless there is one that is not this library's.

    Args:
        instead_of: the folder whose card this one will replace.
    """
    card = folder / CARD_NAME
    if instead_of is not None and not _may_write(instead_of / CARD_NAME):
        card.unlink(missing_ok=True)  # nor must one that peft wrote replace it
    elif _may_write(card):
        card.write_text(card_text(facts), encoding="utf-8")


def write_model_card(model: nn.Module, folder: Path) -> None:
    """After `model.save_pretrained(folder)`. A model that was not trained here gets none."""
    engine = engine_of(model)
    assert engine is not None
    if engine.num_steps:
        write_card(folder, model_facts(model, engine) | {"steps": f"{engine.num_steps:,}"})


def write_facts(folder: Path, facts: Facts) -> None:
    (folder / FACTS_NAME).write_text(json.dumps(facts, indent=1), encoding="utf-8")


def read_facts(folder: Path) -> Facts:
    """Those of a checkpoint, or of a model's card; none where it has neither, or they cannot be read."""
    try:
        if not (folder / FACTS_NAME).exists():
            return _facts_on((folder / CARD_NAME).read_text(encoding="utf-8"))
        facts = json.loads((folder / FACTS_NAME).read_text(encoding="utf-8"))
        return {str(name): str(fact) for name, fact in facts.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _facts_on(card: str) -> Facts:
    """What `card_text` wrote there; nothing where somebody else wrote it."""
    if MARK not in card:
        return {}
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", card, re.MULTILINE)
    return {name: fact.replace("\\|", "|") for name, fact in rows if name != "---"}


def _may_write(path: Path) -> bool:
    if not os.path.lexists(path):
        return True
    try:
        return MARK in path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def _is_hub_name(name: str) -> bool:
    return bool(_HUB_NAME.fullmatch(name))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _last(logs: Iterable[Mapping[str, Any]], name: str) -> str:
    values = [log[name] for log in logs if name in log]
    return f"{float(values[-1]):.4f}" if values else ""
