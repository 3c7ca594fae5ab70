"""Values of TrainingArguments that only transformers can judge: tried out before any work, without the model.

Rule: what it raises at a trial is told to the user with the name of the field; nothing is judged here a second time.
Gives up: a scheduler of the user's own makes the schedule of the arguments unused, and it is tried all the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import math
import numbers
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.argument_ranges import COUNT, FLAG, SECTION, plain

if TYPE_CHECKING:
    from transformers import TrainingArguments

_STAND_IN_STEPS = 1000
"""Length of the trial where the number of steps depends on the data."""

_NUM_TRIAL_METRICS = 50
"""Losses, all the same, for a schedule that follows the loss: enough for the default patience to run out."""


def trials(args: TrainingArguments) -> Iterator[str]:
    """A complaint for each value that fails. The fields must have passed the checks of argument_ranges."""
    yield from _schedule(args)
    yield from _accelerator(args)
    yield from _integrations(args)
    if args.push_to_hub:
        yield from _hub(args)


def _schedule(args: TrainingArguments) -> Iterator[str]:
    kind, keywords = plain(args.lr_scheduler_type), args.lr_scheduler_kwargs
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            problem = _try_schedule(args)
    except Exception as error:  # the schedules check little: anything may come out of their arithmetic
        problem = f"transformers raises {type(error).__name__}: {str(error).rstrip('.')}"
    if problem is not None:
        yield (
            f"lr_scheduler_type={kind!r} with lr_scheduler_kwargs={keywords!r} is refused: {problem}. "
            f"Instead: lr_scheduler_kwargs with what it takes ({', '.join(_schedule_keywords(kind))})."
        )


def _try_schedule(args: TrainingArguments) -> str | None:
    """Learning rates at the turns of the schedule. Returns what is wrong with them; raises what transformers raises."""
    import torch
    from transformers import get_scheduler

    num_steps = args.max_steps if args.max_steps > 0 else _STAND_IN_STEPS
    num_warmup_steps = args.get_warmup_steps(num_steps)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, num_warmup_steps, num_steps, args.lr_scheduler_kwargs)
    for name, value in (args.lr_scheduler_kwargs or {}).items():
        if value != value:
            return f"{name} is nan"  # the schedules make a rate of 0 of it
    if not hasattr(schedule, "lr_lambdas"):
        for _ in range(_NUM_TRIAL_METRICS):
            schedule.step(1.0)
        return _rate_problem(optimizer.param_groups[0]["lr"], "when the loss stays the same")
    middle = (num_warmup_steps + num_steps) // 2
    for step in sorted({0, 1, num_warmup_steps, num_warmup_steps + 1, middle, num_steps - 1, num_steps}):
        problem = _rate_problem(args.learning_rate * schedule.lr_lambdas[0](step), f"at step {step}")
        if problem is not None:
            return problem
    return None


def _rate_problem(rate: Any, when: str) -> str | None:
    is_rate = isinstance(rate, numbers.Real) and 0 <= rate < math.inf
    return None if is_rate else f"it gives a learning rate of {rate} {when}"


def _schedule_keywords(kind: object) -> list[str]:
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    function = TYPE_TO_SCHEDULER_FUNCTION[kind]
    given = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")
    names = [name for name in inspect.signature(function).parameters if name not in given]
    return [f"those of transformers.{function.__name__}"] if names == ["kwargs"] else names or ["nothing"]


def _accelerator(args: TrainingArguments) -> Iterator[str]:
    config = args.accelerator_config
    problems = []
    for field in dataclasses.fields(config):
        check = SECTION if field.name == "gradient_accumulation_kwargs" else FLAG
        value = getattr(config, field.name)
        if value is not None and not check.fits(value):
            problems.append(check.refusal(field.name, value))
    if config.dispatch_batches:
        problems.append("dispatch_batches=True is refused: it sends batches to other devices. Instead: leave it unset.")
    if not problems and config.gradient_accumulation_kwargs:
        problems += _accumulation(args, config.gradient_accumulation_kwargs)
    yield from (f"accelerator_config: {problem}" for problem in problems)


def _accumulation(args: TrainingArguments, keywords: dict[str, Any]) -> Iterator[str]:
    from accelerate.utils import GradientAccumulationPlugin

    try:
        GradientAccumulationPlugin(**keywords)
    except TypeError as error:
        yield f"gradient_accumulation_kwargs={keywords!r} is refused by accelerate: {error}"
    if "num_steps" in keywords and not (args.gradient_accumulation_steps == 1 and COUNT.fits(keywords["num_steps"])):
        yield f"gradient_accumulation_kwargs={keywords!r} is refused: say gradient_accumulation_steps instead."


def _integrations(args: TrainingArguments) -> Iterator[str]:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    for name in args.report_to:
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            yield f"report_to: {name!r} is refused: no such integration. Instead: none, all, or some of {known}."
            continue
        try:
            INTEGRATION_TO_CALLBACK[name]()
        except (RuntimeError, ImportError) as error:
            yield f"report_to: {name!r} is refused: {error} Or leave it out."


def _hub(args: TrainingArguments) -> Iterator[str]:
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not (args.hub_token or get_token()):
        yield (
            "push_to_hub=True is refused: nobody is logged in to the Hugging Face Hub. "
            "Instead: run `hf auth login`, or set HF_TOKEN or hub_token."
        )
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        yield f"push_to_hub=True with hub_model_id={args.hub_model_id!r} is refused: {error} Instead: owner/name."
