"""Whether a run that goes on from a checkpoint is the same run, bit for bit: what its results depend on, then and now.

Where layers live, how many slots there are, how much memory may be used: nothing of that changes a bit, so nothing of
it is here.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from megatrain.execute.engine import Engine


def arithmetic_of(engine: Engine, args: transformers.TrainingArguments) -> dict[str, Any]:
    """What bits depend on, by name, as JSON takes it."""
    config, formats = engine.config, engine.formats
    known: dict[str, Any] = {
        "per_device_train_batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "precision": formats.precision,
        "master": formats.master,
        "moments": config.moments,
        "grad_dtype": formats.gradient_dtype_name,
        "clip": config.clip,
        "compile": config.compile,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if engine.device.type == "cuda":
        return {**known, "device": torch.cuda.get_device_name(engine.device)}
    kernels = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {**known, "device": f"CPU ({kernels})", "threads": torch.get_num_threads()}


def said_of_resuming(name: str, saved: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """One line: whether the run goes on bit for bit. saved: None where the checkpoint does not tell."""
    if saved is None:
        return f"{name} does not tell what its bits depend on: the run goes on from exactly its weights and states"
    changes = [
        f"{key} was {saved.get(key)}, is {value}" for key, value in now.items() if saved.get(key, value) != value
    ]
    if not changes:
        return f"going on from {name}, bit for bit as if it had never stopped"
    return (
        f"going on from exactly the weights and states of {name}; what comes is equal within rounding, not bit for "
        f"bit: {'; '.join(changes)}"
    )
