"""Errors of the Python interface in the words of a recipe: `training.fp16=true`, `engine.max_ram_gb`, null.

Rule: one table of keys is behind both, so no message is written twice.
"""

from __future__ import annotations

import dataclasses
import re

from megatrain.arguments import TABLE
from megatrain.base.config import Config

_ENGINE = [field.name for field in dataclasses.fields(Config)]
_LITERALS = {"None": "null", "True": "true", "False": "false"}

_CALL = re.compile(r"(\b\w+\.train\([^()]*\))")
"""What a script calls: it is told as it is written there."""


def in_recipe_words(message: str) -> str:
    """The message with dotted keys and with the values of YAML, as they can be written on the command line."""
    message = re.sub(r"\b(?:mt|megatrain)\.init\(([^()]*)\)", r"\1", message)
    parts = _CALL.split(message)
    parts[::2] = map(_translated, parts[::2])
    message = "".join(parts)
    message = re.sub(r"^TrainingArguments[^\n:]*:\s*", "", message)
    return re.sub(r"^(\w+): (?=\1\.)", "", message)  # the section, where the key has it


def _translated(text: str) -> str:
    for section, names in (("engine", _ENGINE), ("training", TABLE)):
        text = re.sub(_keys(names), rf"{section}.\g<0>", text)
    return re.sub(r"(?<![\w'\"])(None|True|False)(?![\w'\"])", lambda found: _LITERALS[found[0]], text)


def _keys(names: object) -> str:
    """Finds names that stand alone: not in a path, quoted or dotted. Plain words count only as `word=`."""
    plain = "|".join(name for name in names if "_" not in name)
    joined = "|".join(sorted((name for name in names if "_" in name), key=len, reverse=True))
    return rf"(?<![\w./'\"`-])(?:(?:{joined})(?![\w/'\"`-])|(?:{plain})(?==))"
