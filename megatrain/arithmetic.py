"""Whether a run that goes on from a checkpoint is the same run, bit for bit: what its results depend on, then and now.

Where layers live, how many slots there are, how much memory may be used: nothing of that changes a bit, so nothing of
it is here. Memory can decide how many micro-batches are merged, so that is here, and a run that goes on takes it over.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

from megatrain.execute.attention import AttentionKernels, parse_kernels
from megatrain.execute.templates import prefer_attention
from megatrain.outline import attention_of
from megatrain.save.checkpoints import has_manifest

if TYPE_CHECKING:
    from megatrain.trainer_checkpoints import CheckpointingTrainer

ATTENTION = "attention kernels"
EXACT_MOMENTS = "exact fp32"
"""Of moments in fp32 and in lossless code: the same bits."""

MERGED = "tokens up to which micro-batches are merged"
BEFORE = {MERGED: 0}
"""What checkpoints meant that were written before these were told."""

ARGUMENTS = {
    "rounding": ("full_determinism", "use_liger_kernel", "liger_kernel_config"),
    "training": (
        *("lr_scheduler_kwargs", "neftune_noise_alpha", "optim_target_modules"),
        *("train_sampling_strategy", "length_column_name", "dataloader_drop_last", "ignore_data_skip"),
        *("accelerator_config", "remove_unused_columns", "label_names"),
    ),
    "kept": ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_args"),
}
"""Of TrainingArguments, as they are. Others are put in words of their own below."""

UNVOUCHED = " It has no manifest: nothing tells whether its files are whole, and all of one step."

NEW_ORDER = "the rows of this epoch come in another order (train_sampling_strategy=group_by_length, as in transformers)"

Facts = dict[str, dict[str, Any]]


def arithmetic_of(trainer: CheckpointingTrainer, max_steps: int) -> Facts:
    """What bits depend on, by name, as JSON takes it.

    rounding: sums are made in another order, or by other kernels. training: it is another training. kept: a checkpoint
    has it, and what is set now is not used.
    """
    engine, args = trainer.engine, trainer.args
    config, formats = engine.config, engine.formats
    rows = args.per_device_train_batch_size
    is_exact = config.moments in ("fp32", "lossless")
    rounding: dict[str, Any] = {
        "per_device_train_batch_size": rows,
        "rows at a time": trainer.most_rows or "as they come",
        MERGED: engine.merging.most_tokens,
        "attn_implementation": attention_of(trainer.model),
        ATTENTION: str(engine.attention),
        "compile": config.compile,
        "logits_in_pieces": config.logits_in_pieces,
        "tile_tokens": config.tile_tokens,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if engine.device.type == "cuda":
        rounding["device"] = torch.cuda.get_device_name(engine.device)
    else:
        rounding["device"] = f"CPU ({platform.machine()} {torch.backends.cpu.get_cpu_capability()})"
        rounding["threads"] = torch.get_num_threads()
    training = {
        "sequences a step": rows * args.gradient_accumulation_steps,
        "steps in all": max_steps,
        "lr_scheduler_type": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        "warmup_steps": args.get_warmup_steps(max_steps),
        "max_grad_norm": args.max_grad_norm,
        "seed": args.seed,
        "data_seed": args.data_seed,
        "label_smoothing_factor": args.label_smoothing_factor,
        "ema_decay": getattr(trainer.optimizer, "ema_decay", None),
        "precision": formats.precision,
        "master": formats.master,
        "moments": EXACT_MOMENTS if is_exact else config.moments,
        "grad_dtype": formats.gradient_dtype_name,
        "clip": config.clip,
    }
    facts: Facts = {"rounding": rounding, "training": training, "kept": {}}
    plain = json.loads(json.dumps(args.to_dict(), default=str))  # as a checkpoint gives it back
    for kind, names in ARGUMENTS.items():
        facts[kind] |= {name: plain[name] for name in names if name in plain}
    return facts


def go_on_with(trainer: CheckpointingTrainer, checkpoint: Path, saved: Mapping[str, Any] | None, max_steps: int) -> str:
    """Take over from the checkpoint what bits depend on and is free to choose, where `mt.init` has not chosen: up to
    how many tokens micro-batches are merged, if not to more than there is room for now; and attention kernels, where
    the device is the same. Returns what is to be said of the run (see `said_of_resuming`)."""
    name = checkpoint.name
    engine = trainer.engine
    of_then = {} if saved is None else saved.get("rounding", {})
    if saved is not None and engine.config.exact is None:
        engine.merging.limit(of_then.get(MERGED, BEFORE[MERGED]))
    now, changed = arithmetic_of(trainer, max_steps), ""
    if engine.config.attention is None and of_then.get("device") == now["rounding"]["device"]:
        kernels = AttentionKernels(parse_kernels(of_then.get(ATTENTION, "torch")), f"as in {name}")
        if kernels.order != engine.attention.order:
            changed = f" Attention kernels are those of {name}: {kernels} (first chosen: {engine.attention})."
            prefer_attention(engine, kernels)
            now = arithmetic_of(trainer, max_steps)
    # The sampler draws from the generator as it is, which from the second epoch on is not where the epoch began.
    epoch = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)).epoch or 0.0
    draws_anew = trainer.args.train_sampling_strategy == "group_by_length" and epoch > 1 and epoch != int(epoch)
    unvouched = "" if saved is None or has_manifest(checkpoint) else UNVOUCHED
    return said_of_resuming(name, saved, now, NEW_ORDER if draws_anew else "") + changed + unvouched


def said_of_resuming(
    name: str, saved: Mapping[str, Any] | None, now: Mapping[str, Mapping[str, Any]], new_order: str = ""
) -> str:
    """Whether the run goes on bit for bit.

    Args:
        saved: None where the checkpoint does not tell.
        new_order: what is another order of its rows, in words.
    """
    if saved is None:
        but = f"; {new_order}" if new_order else ""
        return f"{name} does not tell what its bits depend on: the run goes on from exactly its weights and states{but}"
    rounding, training, kept = (_changes(saved.get(kind, {}), of) for kind, of in now.items())
    training = "; ".join(part for part in (new_order, training) if part)
    unused = f" Not used, the checkpoint's goes on: {kept}." if kept else ""
    if not (rounding or training):
        return f"going on from {name}, bit for bit as if it had never stopped (with the same data and code).{unused}"
    start = f"going on from exactly the weights and states of {name}"
    if training:
        both = "; ".join(part for part in (training, rounding) if part)
        return f"{start}. From here on it is another training: {both}.{unused}"
    return f"{start}. What comes is equal within rounding, not bit for bit: {rounding}.{unused}"


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    saved = {**BEFORE, **saved}
    changed = {key: (saved[key], value) for key, value in now.items() if saved.get(key, value) != value}
    return "; ".join(_change(key, *of) for key, of in changed.items())


def _change(key: str, was: Any, now: Any) -> str:
    if key != MERGED:
        return f"{key} was {was}, is {now}"
    before, after = (f"on (up to {tokens:,} tokens)" if tokens else "off" for tokens in (was, now))
    return f"merging of micro-batches was {before}, is {after}"
