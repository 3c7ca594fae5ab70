"""Numbers of TrainingArguments that cannot work, told before any work and not as a crash or a silent no-op in it.

Rule: only what transformers itself lets pass stands here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import TrainingArguments

_MAX_SEED = 2**32 - 1
"""The largest one that numpy takes."""

Check = tuple[Callable[[Any], bool], str]

_COUNT: Check = (lambda value: value >= 1, "1 or more")
_POSITIVE: Check = (lambda value: 0 < value < math.inf, "a number above 0")
_NOT_NEGATIVE: Check = (lambda value: 0 <= value < math.inf, "0 or more")
_SHARE: Check = (lambda value: 0 <= value < 1, "0 or more and below 1")
_SEED: Check = (lambda value: 0 <= value <= _MAX_SEED, f"a whole number from 0 to {_MAX_SEED}")

_CHECKS: dict[str, Check] = {
    "per_device_train_batch_size": _COUNT,
    "per_device_eval_batch_size": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "max_steps": (lambda value: value == -1 or value >= 1, "a number of steps, or -1 to train for num_train_epochs"),
    "learning_rate": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "adam_beta1": _SHARE,
    "adam_beta2": _SHARE,
    "adam_epsilon": _NOT_NEGATIVE,
    "num_train_epochs": _NOT_NEGATIVE,
    "label_smoothing_factor": (lambda value: 0 <= value <= 1, "0 to 1"),
    # Infinity is a common way to ask for the norm without clipping.
    "max_grad_norm": (lambda value: value >= 0, "0 (no clipping) or more"),
    "seed": _SEED,
    "data_seed": _SEED,
}

_INTERVALS = {"save_steps": "save_strategy", "logging_steps": "logging_strategy", "eval_steps": "eval_strategy"}
"""Steps between two of something: field -> the strategy under which it is read."""


def out_of_range(args: TrainingArguments) -> Iterator[str]:
    """A complaint for each number that cannot work."""
    checks = dict(_CHECKS)
    for name, strategy in _INTERVALS.items():
        if str(getattr(getattr(args, strategy), "value", getattr(args, strategy))) == "steps":
            checks[name] = _POSITIVE
    for name, (is_right, wanted) in checks.items():
        value = getattr(args, name)
        if value is not None and not is_right(value):
            yield f"{name}={value!r} is refused: it cannot work. Instead: {wanted}."
