"""Which values a field of TrainingArguments can have, and which values do not go together.

Rule: only what transformers itself lets pass stands here, and what then crashes, does nothing or does something else.
It is told before any work.
"""

from __future__ import annotations

import enum
import math
import multiprocessing
import numbers
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import TrainingArguments

_MAX_SEED = 2**32 - 1
"""The largest one that numpy takes."""

_MAX_NUMBER = 2**63 - 1
"""Beyond it counts are no machine words, products overflow, and nothing can be meant."""

_MAX_WORKERS = 1024
"""Each is a process: a slip of the finger must not fill the machine with them."""


@dataclass(frozen=True)
class Check:
    """What a field can be."""

    fits: Callable[[Any], bool]
    """Whether a value can work. Takes a value of any type; an enum member comes as its value."""
    wanted: str
    """In words, for messages and docs."""

    def refusal(self, name: str, value: object) -> str:
        """A complaint about a value that does not fit."""
        return f"{name}={value!r} must be {self.wanted}."


def plain(value: object) -> object:
    """An enum member as its value, anything else as it is."""
    return value.value if isinstance(value, enum.Enum) else value


def unset_or(check: Check) -> Check:
    """The same, or None."""
    return Check(lambda value: value is None or check.fits(value), f"{check.wanted}; or unset")


def choice(*values: str) -> Check:
    """One of these texts."""
    return Check(lambda value: isinstance(value, str) and value in values, "one of " + ", ".join(map(repr, values)))


def _whole(least: int, most: int, wanted: str) -> Check:
    return Check(lambda value: _is_number(value, numbers.Integral) and least <= value <= most, wanted)


def _number(fits: Callable[[Any], bool], wanted: str) -> Check:
    return Check(lambda value: _is_number(value, numbers.Real) and fits(value), wanted)


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _texts(*allowed: str) -> Check:
    def fits(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and all(
            isinstance(text, str) and (not allowed or text in allowed) for text in value
        )

    return Check(fits, "a list of " + (" and ".join(map(repr, allowed)) if allowed else "texts"))


ANY = Check(lambda value: True, "any")
# 0, 1 and None have long passed for these in Python; a text such as "false" would count as true.
FLAG = Check(lambda value: value is None or value in (True, False), "True or False")
TEXT = Check(lambda value: isinstance(value, str), "a text")
TEXTS = _texts()
SECTION = Check(lambda value: isinstance(value, dict), "a dict (in a recipe a section with keys)")
COUNT = _whole(1, _MAX_NUMBER, "a whole number, 1 or more")
STEPS = Check(
    lambda value: COUNT.fits(value) or (value == -1 and not isinstance(value, float)),
    "a whole number of steps, or -1 to train for num_train_epochs",
)
WORKERS = _whole(0, _MAX_WORKERS, f"a whole number from 0 to {_MAX_WORKERS}")
SEED = _whole(0, _MAX_SEED, f"a whole number from 0 to {_MAX_SEED}")
NOT_NEGATIVE = _number(lambda value: 0 <= value <= _MAX_NUMBER, "a number, 0 or more")
SHARE = _number(lambda value: 0 <= value < 1, "a number, 0 or more and below 1")
SMOOTHING = _number(lambda value: 0 <= value <= 1, "a number from 0 to 1")
# Infinity is a common way to ask for the norm without clipping, and None another.
NORM = unset_or(
    _number(lambda value: 0 <= value <= sys.float_info.max or value == math.inf, "a number, 0 (no clipping) or more")
)
INTERVAL = unset_or(
    _number(lambda value: abs(value) <= _MAX_NUMBER, "a number of steps above 0, or a share of all below 1")
)
START_METHOD = Check(
    lambda value: value in multiprocessing.get_all_start_methods(),
    "'fork', 'spawn' or 'forkserver', as far as the system has it",
)
METRIC_INPUTS = _texts("inputs", "loss")

_POSITIVE = unset_or(_number(lambda value: 0 < value <= _MAX_NUMBER, "a number above 0"))

_INTERVALS = {"save_steps": "save_strategy", "logging_steps": "logging_strategy", "eval_steps": "eval_strategy"}
"""Steps between two of something: field -> the strategy under which it is read."""

_WORKER_FIELDS = ("dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context")


def conflicts(args: TrainingArguments) -> Iterator[str]:
    """A complaint for values that fit alone and not together. Each field must have passed its check."""
    for name, strategy in _INTERVALS.items():
        value = getattr(args, name)
        if plain(getattr(args, strategy)) == "steps" and not _POSITIVE.fits(value):
            yield _POSITIVE.refusal(name, value)
    for name in _WORKER_FIELDS if args.dataloader_num_workers == 0 else ():
        if getattr(args, name, None):
            yield (
                f"{name}={getattr(args, name)!r} is refused: it is for worker processes, and there are none. "
                "Instead: dataloader_num_workers of 1 or more, or leave it unset."
            )
    never_evaluates = plain(args.eval_strategy) == "no"
    if plain(args.save_strategy) == "best" and (never_evaluates or args.metric_for_best_model is None):
        lacking = "an eval_strategy, nothing is measured" if never_evaluates else "metric_for_best_model, none is best"
        yield (
            f"save_strategy='best' is refused: without {lacking}. "
            "Instead: eval_strategy='steps' or 'epoch' and metric_for_best_model='loss'."
        )
    if args.load_best_model_at_end and never_evaluates:
        yield (
            "load_best_model_at_end=True is refused: eval_strategy='no' measures nothing, so no model is the best. "
            "Instead: the same eval_strategy and save_strategy, 'steps' or 'epoch'."
        )
