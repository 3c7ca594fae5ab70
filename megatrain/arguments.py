"""What becomes of every field of transformers.TrainingArguments: honoured, refused by name, or irrelevant.

Rule: every field of the installed transformers has one row here. A test iterates the fields of the installed
version and fails on a field without a row, so a new version is never trusted silently.
At run time a field without a row is refused as soon as it is set to something other than its default.
docs/training_arguments.md is written from this table by `render_markdown`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatrain.argument_ranges import (
    ANY,
    COUNT,
    FLAG,
    INTERVAL,
    METRIC_INPUTS,
    NORM,
    NOT_NEGATIVE,
    SECTION,
    SEED,
    SHARE,
    SMOOTHING,
    START_METHOD,
    STEPS,
    TEXT,
    TEXTS,
    WORKERS,
    Check,
    choice,
    conflicts,
    plain,
    unset_or,
)
from megatrain.argument_trials import trials
from megatrain.base.errors import UserError
from megatrain.optimizer_choice import OPTIM_NAMES, bad_optim_args

if TYPE_CHECKING:
    from transformers import TrainingArguments

HONOURED = "honoured"
REFUSED = "refused"
IRRELEVANT = "irrelevant"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One field of TrainingArguments."""

    status: str
    """HONOURED, REFUSED (only the values in `allowed` pass) or IRRELEVANT (no value changes anything)."""
    note: str
    """What the field does here, or why it cannot be had."""
    allowed: tuple[object, ...] | None = None
    """Values that pass; None means every value. Enum members are compared by their value."""
    remedy: str = ""
    """What to do instead of a value that does not pass."""
    check: Check = ANY
    """What else a value must be."""

    def __post_init__(self) -> None:
        assert self.status in (HONOURED, REFUSED, IRRELEVANT), self.status
        assert (self.allowed is None) == (not self.remedy), "a restricted field needs a remedy, a free one has none"
        assert self.status != REFUSED or self.allowed is not None


def _yes(check: Check, note: str = "as in transformers") -> Row:
    return Row(status=HONOURED, note=note, check=check)


def _only(allowed: tuple[object, ...], note: str, remedy: str) -> Row:
    return Row(status=HONOURED, note=note, allowed=allowed, remedy=remedy)


def _no(note: str, remedy: str, allowed: tuple[object, ...] = (None, False)) -> Row:
    return Row(status=REFUSED, note=note, allowed=allowed, remedy=remedy)


def _moot(note: str, check: Check = ANY) -> Row:
    return Row(status=IRRELEVANT, note=note, check=check)


_ONE_PROCESS = "one process, one device: nothing to distribute"
_SCRIPT_FLAG = "a flag for scripts; transformers.Trainer does not read it either"
_RECOMPUTE = "the plan says which layers keep what they compute and which recompute it, so both values mean the same"
_SHARDING = "weights are sharded over time, not over devices"
_PRECISION = "bf16=True, or megatrain.init(precision='fp32' or 'bf16')"

_LEVEL = choice("passive", "detail", "debug", "info", "warning", "error", "critical")
_TRIED = Check(lambda value: True, "what transformers takes; tried before any work")

TABLE: dict[str, Row] = {
    # Output, duration, batch size
    "output_dir": _yes(TEXT),
    "per_device_train_batch_size": _yes(COUNT, "size of one micro-batch"),
    "num_train_epochs": _yes(NOT_NEGATIVE),
    "max_steps": _yes(STEPS, "-1: num_train_epochs decides"),
    # Learning rate and optimizer
    "learning_rate": _yes(NOT_NEGATIVE),
    "lr_scheduler_type": _yes(_TRIED, "through transformers' own schedulers"),
    "lr_scheduler_kwargs": _yes(_TRIED),
    "warmup_steps": _yes(NOT_NEGATIVE),
    "optim": _only(
        OPTIM_NAMES,
        "megatrain.optim's AdamW (the first two), SGD and Lion, which update the weights in their homes",
        "for an 8-bit or paged one optim='adamw_torch' or 'lion_32bit', and megatrain.init(optimizer_compression="
        "'8bit'); for others give the Trainer an optimizer of megatrain.optim (a recipe says optimizer.name)",
    ),
    "optim_args": _yes(
        unset_or(TEXT), "with optim='sgd': momentum, dampening, nesterov; refused with others, which read none"
    ),
    "weight_decay": _yes(NOT_NEGATIVE, "not on biases and norms: the same groups as in transformers"),
    "adam_beta1": _yes(SHARE, "also Lion's"),
    "adam_beta2": _yes(SHARE, "also Lion's"),
    "adam_epsilon": _yes(NOT_NEGATIVE),
    "optim_target_modules": _no("only GaLore and APOLLO read it, and those are not available", "leave it unset"),
    # Regularisation and stability
    "gradient_accumulation_steps": _yes(
        COUNT, "all micro-batches of a step pass through a layer in one visit, forward and backward (layer-major)"
    ),
    "average_tokens_across_devices": _moot(_ONE_PROCESS),
    "max_grad_norm": _yes(
        NORM, "exact global norm over all layers; 0 means no clipping, the norm is logged all the same"
    ),
    "label_smoothing_factor": _yes(SMOOTHING),
    # Precision
    "bf16": _yes(
        FLAG, "bf16 compute with an exact fp32 master; decides the precision of the stream, no autocast is used"
    ),
    "fp16": _no("float16 needs loss scaling, and the stream computes in fp32 or bf16", _PRECISION),
    "bf16_full_eval": _no("evaluation runs on the streamed weights in the precision of the training", _PRECISION),
    "fp16_full_eval": _no("evaluation runs on the streamed weights in the precision of the training", _PRECISION),
    "tf32": _no("fp32 here means fp32: TF32 stays off", "use bf16=True for speed, or leave tf32 unset"),
    # Activation checkpointing; the second pair of names is the older one
    "activation_checkpointing": _moot(_RECOMPUTE, FLAG),
    "activation_checkpointing_kwargs": _moot(_RECOMPUTE, unset_or(SECTION)),
    "gradient_checkpointing": _moot(_RECOMPUTE, FLAG),
    "gradient_checkpointing_kwargs": _moot(_RECOMPUTE, unset_or(SECTION)),
    # Compilation and kernels
    "torch_compile": _no(
        "compiling the whole model would freeze weights that move",
        "leave it off and say mt.init(compile=True) for each kind of block",
    ),
    "torch_compile_backend": _no("setting it turns torch_compile on", "leave it unset"),
    "torch_compile_mode": _no("setting it turns torch_compile on", "leave it unset"),
    "use_liger_kernel": _no(
        "it patches module instances, and a streamed layer runs its class's forward",
        "leave it off, and call Liger's own function for the model class before the model is built",
    ),
    "liger_kernel_config": _no("only use_liger_kernel reads it", "leave it unset"),
    # Additional
    "use_cache": _no(
        "a key-value cache grows again when a layer is recomputed",
        "leave it off; model.generate() uses a cache all the same",
    ),
    "neftune_noise_alpha": _yes(unset_or(NOT_NEGATIVE)),
    "torch_empty_cache_steps": _yes(unset_or(COUNT), "once in such a step, before its micro-batches"),
    "auto_find_batch_size": _no(
        "a step that ran out of memory cannot be tried again half-way",
        "set per_device_train_batch_size, and megatrain.init(max_vram_gb=...) for the rest",
    ),
    # Logging
    "logging_strategy": _yes(choice("no", "steps", "epoch")),
    "logging_steps": _yes(INTERVAL),
    "logging_first_step": _yes(FLAG),
    "log_on_each_node": _moot(_ONE_PROCESS),
    "logging_nan_inf_filter": _yes(FLAG, "the losses of a step are fetched in one transfer, so it costs no wait"),
    "include_num_input_tokens_seen": _yes(choice("all", "non_padding", "no")),
    "log_level": _yes(_LEVEL),
    "log_level_replica": _moot(_ONE_PROCESS, _LEVEL),
    "disable_tqdm": _yes(FLAG),
    "report_to": _yes(_TRIED, "integrations also get grad_norm/LAYER and update_ratio/LAYER at every logging step"),
    "run_name": _yes(ANY),
    "project": _yes(ANY),
    "trackio_space_id": _yes(ANY),
    "trackio_bucket_id": _yes(ANY),
    "trackio_static_space_id": _yes(ANY),
    # Evaluation
    "eval_strategy": _yes(
        choice("no", "steps", "epoch"), "between steps; an evaluation waits for the updates that are still running"
    ),
    "eval_steps": _yes(INTERVAL),
    "eval_delay": _yes(NOT_NEGATIVE),
    "per_device_eval_batch_size": _yes(COUNT),
    "prediction_loss_only": _yes(FLAG, "logits are kept only for compute_metrics and predict()"),
    "eval_on_start": _yes(FLAG),
    "eval_do_concat_batches": _yes(FLAG),
    "eval_use_gather_object": _moot(_ONE_PROCESS),
    "eval_accumulation_steps": _yes(unset_or(COUNT)),
    "include_for_metrics": _yes(METRIC_INPUTS),
    "batch_eval_metrics": _yes(FLAG),
    # Saving and resuming
    "save_only_model": _yes(FLAG, "weights without optimizer state; such a checkpoint cannot be resumed, and says so"),
    "save_strategy": _yes(
        choice("no", "steps", "epoch", "best"),
        "complete weights that plain transformers loads; a folder appears only when it is complete",
    ),
    "save_steps": _yes(INTERVAL),
    "save_on_each_node": _moot(_ONE_PROCESS),
    "save_total_limit": _yes(unset_or(COUNT)),
    "enable_jit_checkpoint": _yes(FLAG),
    "load_best_model_at_end": _yes(FLAG, "the best weights are read back into their homes"),
    "metric_for_best_model": _yes(unset_or(TEXT)),
    "greater_is_better": _yes(FLAG),
    "ignore_data_skip": _yes(FLAG),
    "restore_callback_states_from_checkpoint": _yes(FLAG),
    # Hub
    "push_to_hub": _yes(FLAG),
    "hub_token": _yes(ANY),
    "hub_private_repo": _yes(FLAG),
    "hub_model_id": _yes(unset_or(TEXT)),
    "hub_strategy": _yes(choice("end", "every_save", "checkpoint", "all_checkpoints")),
    "hub_always_push": _yes(FLAG),
    "hub_revision": _yes(unset_or(TEXT)),
    # Reproducibility and hardware
    "full_determinism": _yes(FLAG, "slow: it makes every kernel launch wait"),
    "seed": _yes(SEED, "each micro-batch of a step draws (dropout) from its own generator, seeded from the global one"),
    "data_seed": _yes(unset_or(SEED)),
    "use_cpu": _yes(FLAG, "needs a stream on the CPU: megatrain.init(device='cpu')"),
    # Accelerate, data loading
    "accelerator_config": _yes(_TRIED, "its data options; batches stay on the host until their micro-batch runs"),
    "parallelism_config": _no(_SHARDING, "leave it unset"),
    "dataloader_drop_last": _yes(FLAG),
    "dataloader_num_workers": _yes(WORKERS),
    "dataloader_pin_memory": _yes(FLAG),
    "dataloader_persistent_workers": _yes(FLAG),
    "dataloader_prefetch_factor": _yes(unset_or(COUNT)),
    "dataloader_multiprocessing_context": _yes(unset_or(START_METHOD)),
    "dataloader_in_order": _yes(FLAG),
    "remove_unused_columns": _yes(FLAG),
    "label_names": _yes(unset_or(TEXTS)),
    "train_sampling_strategy": _yes(
        choice("random", "sequential", "group_by_length", "batch_rebalance"),
        "as in transformers; group_by_length with dropout gives other orders from the second epoch on, since "
        "micro-batches draw from seeds of their own; a run that goes on inside such an epoch draws its order anew",
    ),
    "length_column_name": _yes(TEXT),
    # Distributed training
    "ddp_find_unused_parameters": _moot(_ONE_PROCESS),
    "ddp_bucket_cap_mb": _moot(_ONE_PROCESS),
    "ddp_broadcast_buffers": _moot(_ONE_PROCESS),
    "ddp_static_graph": _moot(_ONE_PROCESS),
    "ddp_backend": _moot(_ONE_PROCESS),
    "ddp_timeout": _moot(_ONE_PROCESS),
    "local_rank": _moot(_ONE_PROCESS),
    "fsdp": _no(_SHARDING, "leave it unset", (None, False, "", [])),
    "fsdp_config": _moot("only fsdp reads it"),
    "deepspeed": _no("the weights are already offloaded, by the stream", "leave it unset", (None, "")),
    # Debugging
    "debug": _no("its hooks read weights that are absent while their layer does not run", "leave it empty", ([], "")),
    "skip_memory_metrics": _yes(FLAG),
    # Flags of scripts
    "do_train": _moot(_SCRIPT_FLAG),
    "do_eval": _moot(_SCRIPT_FLAG),
    "do_predict": _moot(_SCRIPT_FLAG),
    "resume_from_checkpoint": _moot(
        _SCRIPT_FLAG + "; pass it to Trainer.train(), which makes no step beyond the last (transformers makes one)"
    ),
}


def check_model(model: object) -> None:
    """Raises UserError for what is no module. None: `model_init` will make one."""
    from torch import nn

    if model is not None and not isinstance(model, nn.Module):
        kind = type(model).__name__
        got = model.__name__ if isinstance(model, type) else f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
        raise UserError(
            f"model must be a model, got {got}: load it first, for example with "
            "AutoModelForCausalLM.from_pretrained(...)"
        )


def check_arguments(args: TrainingArguments) -> None:
    """Refuse, before any work, what cannot be honoured.

    Raises UserError that names every refused field, its value, the reason and the remedy.
    """
    from transformers import TrainingArguments

    if not isinstance(args, TrainingArguments):
        raise UserError(f"args must be transformers.TrainingArguments, got a {type(args).__name__}")
    given = {name: plain(getattr(args, name)) for name in TABLE if hasattr(args, name)}
    complaints = [complaint for name, value in given.items() if (complaint := _complaint(name, value))]
    complaints += [
        f"{name}={getattr(args, name)!r} is refused: this version of megatrain does not know the field. "
        "Leave it at its default, or update megatrain."
        for name in changed_unknown_fields(args)
    ]
    if args.world_size > 1:
        complaints.append(
            f"{args.world_size} processes are refused: {_ONE_PROCESS}. Start the script with plain `python`."
        )
    # These look at several fields at once, each of which must be right.
    _refuse(complaints or [*conflicts(args), *bad_optim_args(args)] or list(trials(args)))


def check_given(given: Mapping[str, object]) -> None:
    """Refuse what cannot be honoured before TrainingArguments is built from it, and asks for packages of its own.

    Raises UserError as `check_arguments` does.
    """
    known = {name: value for name, value in given.items() if name in TABLE}
    _refuse([_refusal(name, value) for name, value in known.items() if not _is_allowed(name, value)])


def _refuse(complaints: list[str]) -> None:
    if len(complaints) == 1:
        raise UserError(f"TrainingArguments: {complaints[0]}")
    if complaints:
        raise UserError("TrainingArguments that cannot be honoured:\n  " + "\n  ".join(complaints))


def changed_unknown_fields(args: TrainingArguments) -> list[str]:
    """Names of fields of transformers' own TrainingArguments that have no row and differ from their default.

    Fields which a subclass adds belong to the subclass and are not looked at.
    """
    from transformers import TrainingArguments

    unknown = [field for field in dataclasses.fields(TrainingArguments) if field.name not in TABLE]
    return [field.name for field in unknown if not _is_default(field, getattr(args, field.name))]


def _is_default(field: dataclasses.Field[object], value: object) -> bool:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    # None often becomes an empty list or False when TrainingArguments tidies itself up.
    return plain(value) == plain(default) or (default is None and not value)


def _complaint(name: str, value: object) -> str | None:
    if not _is_allowed(name, value):
        return _refusal(name, value)
    check = TABLE[name].check
    return None if check.fits(value) else check.refusal(name, value)


def _is_allowed(name: str, value: object) -> bool:
    allowed = TABLE[name].allowed
    return allowed is None or value in allowed


def _refusal(name: str, value: object) -> str:
    row = TABLE[name]
    if row.status == REFUSED:
        return f"{name}={value!r} is refused: {row.note}. Instead: {row.remedy}."
    return f"{name}={value!r} must be one of {', '.join(map(repr, row.allowed))} ({row.note}). Instead: {row.remedy}."


_PREFACE = """# TrainingArguments

Written from the table in `megatrain/arguments.py` by `megatrain.arguments.render_markdown()`; do not edit by hand.

`megatrain.Trainer` takes the same `transformers.TrainingArguments` as `transformers.Trainer`.
Each field is **honoured**, **refused** by name before any work starts unless it has one of the accepted values,
or **irrelevant**: no value changes anything. A value that is not accepted, or that cannot work together with the
others (a schedule without the arguments it needs, workers that persist where there are none), is refused before any
work too.
Fields that the installed version of transformers does not have are skipped.
A field that is missing here is refused as soon as it differs from its default.
In a recipe they are the keys of `training`, and the arguments of `megatrain.init` those of `engine`.

Beside the logs of transformers, callbacks and `report_to` integrations get `grad_norm/LAYER` (norm of the layer's
gradient) and `update_ratio/LAYER` (length of the last finished update over length of the weights) at every logging
step. They are not printed and not kept in `log_history`. `Trainer.log_layers = False` turns them off.
At the same steps a line is appended to `megatrain_log.jsonl` in `output_dir`, which `megatrain report` shows
([guides](guides.md#reading-a-report)); `Trainer.keeps_log = False` turns that off.

| field | status | accepted values | what it does here, or why not |
|---|---|---|---|
"""


def render_markdown() -> str:
    """The text of docs/training_arguments.md."""
    lines = []
    for name, row in TABLE.items():
        accepted = row.check.wanted if row.allowed is None else ", ".join(f"`{value!r}`" for value in row.allowed)
        note = f"{row.note}. Instead: {row.remedy}" if row.remedy else row.note
        lines.append(f"| `{name}` | {row.status} | {accepted} | {note} |")
    return _PREFACE + "\n".join(lines) + "\n"


def num_times(strategy: object, every: float | None, num_steps: int, num_epochs: float) -> int:
    """How often a run saves or evaluates: every so many steps (below 1: a share of all), each epoch, or never."""
    kind = str(getattr(strategy, "value", strategy))
    if kind == "epoch":
        return math.ceil(num_epochs)
    if kind != "steps":
        return 2 if kind == "best" else 0  # the best one so far, and the one that is better
    assert every is not None, "transformers fills it in"
    return math.ceil(num_steps / (every if every >= 1 else max(1, math.ceil(every * num_steps))))
