"""The peers: what else trains this shape on one GPU. Plain PyTorch with everything in device memory, and DeepSpeed
ZeRO-3 with parameters and optimizer offloaded to the host.

Each is written as its own users would, and may do what helps it: layers compiled, activations kept where they fit,
other numbers of micro-batches. What was done is said in its row (`Variant.words`).
Rule: same weights, same tokens, AdamW with the same numbers, the gradient clipped by its global norm, as in every row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatrain.base.errors import UserError
from megatrain.base.units import format_number
from megatrain.bench import timing
from megatrain.bench.work import (
    MAX_NORM,
    NUMBERS,
    Tell,
    Work,
    empty_model,
    micro_batches,
    random_values,
    rates,
    read_config,
)
from megatrain.plan.flops import model_work
from megatrain.spec.discover import find_layers

FIRST_UPDATE = "making the first update"
"""The phase in which moments are made."""
INITIALISING = "initialising DeepSpeed"
BEFORE_STEPS = ("building", INITIALISING, FIRST_UPDATE)
"""Phases without activations: what does not fit in one of them fits in no number of micro-batches."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a peer runs, once."""

    row: str
    """`hbm bf16`, `hbm fp32` or `zero3`."""
    num_micro_batches: int
    is_compiled: bool = False
    is_checkpointed: bool = False

    def words(self, work: Work) -> str:
        rows = work.num_sequences // self.num_micro_batches
        how = [WORDS[self.row]]
        if self.row != "zero3":
            how.append("layers compiled" if self.is_compiled else "not compiled")
        how.append("gradient checkpointing" if self.is_checkpointed else "activations kept")
        batches = f"{self.num_micro_batches} micro-batch{'es' if self.num_micro_batches > 1 else ''}"
        return ", ".join([*how, f"{batches} of {format_number(rows, 'sequence')}"])


WORDS = {
    "hbm bf16": "plain PyTorch, all in memory; bf16 weights, gradients and moments, NO fp32 master",
    "hbm fp32": "plain PyTorch, all in memory; fp32 weights, gradients and moments, bf16 autocast",
    "zero3": "DeepSpeed ZeRO-3, parameters and optimizer offloaded to the host; bf16 with fp32 master and moments",
}
ROWS = {"zero3": ("zero3",), "hbm": ("hbm bf16", "hbm fp32")}
"""What `--vs` names -> rows."""


def why_not(row: str, work: Work) -> str:
    """Why there is no need to try; empty if there is none."""
    if row != "zero3":
        return ""
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed (pip install deepspeed)"
    return "" if work.compute_device.type == "cuda" else "DeepSpeed's ZeRO-3 offload needs a GPU, and there is none"


def variants(row: str, work: Work, num_micro_batches: int) -> list[Variant]:
    """What is tried in turn until one fits in the device's memory, the fastest first.

    num_micro_batches: of this library's own row. Where the user gave a number, every row takes that one.
    """
    most = work.num_sequences
    more = [n for n in (num_micro_batches, 2 * num_micro_batches, 4 * num_micro_batches) if most % n == 0]
    counts = more if work.num_micro_batches is None else [work.num_micro_batches]
    one = Variant(row=row, num_micro_batches=counts[0])
    if row == "zero3":
        # Its parameters cross the link for every micro-batch: the fewest that fit are its best.
        fewest = [n for n in (1, 2, 4, 8) if n < num_micro_batches and most % n == 0]
        counts = [*fewest, *more] if work.num_micro_batches is None else counts
        return [dataclasses.replace(one, num_micro_batches=n, is_checkpointed=True) for n in counts]
    if work.compute_device.type != "cuda":
        return [one]  # compilation for a CPU takes longer than it saves here
    compiled = [dataclasses.replace(one, num_micro_batches=n, is_compiled=True) for n in counts]
    recomputing = dataclasses.replace(one, is_checkpointed=True)
    return [*compiled, dataclasses.replace(recomputing, is_compiled=True), recomputing]


def measure_peer(variant: Variant, work: Work, tell: Tell) -> dict[str, Any]:
    """Raises torch.OutOfMemoryError where it does not fit, and whatever else the peer raises."""
    tell({"phase": "building"})
    started, device = time.perf_counter(), work.compute_device
    if work.max_vram_gb is not None and device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, work.max_vram_gb * 1e9 / total_bytes), device)
    model = empty_model(read_config(work))
    flops = model_work(model)  # before ZeRO takes the parameters apart
    batches = micro_batches(work, variant.num_micro_batches, model)
    make = _zero3_step if variant.row == "zero3" else _plain_step
    step = make(model, variant, batches, device, tell)
    built_seconds = time.perf_counter() - started
    times = timing.warm_up(step, device, tell)
    timing.measure(step, times, work.num_steps, tell)
    return {
        "num_micro_batches": variant.num_micro_batches,
        "build_seconds": built_seconds,
        **times.data(),
        **rates(work, flops, times.median_seconds),
        "peak_device_bytes": timing.peak_device_bytes(device),
        "peak_host_bytes": timing.peak_host_bytes(),
    }


def _plain_step(
    model: nn.Module, variant: Variant, batches: list[dict[str, torch.Tensor]], device: torch.device, tell: Tell
) -> Callable[[], float]:
    """One step of plain PyTorch, as a user writes it."""
    is_autocast = variant.row == "hbm fp32"
    _materialise(model, device, torch.float32 if is_autocast else torch.bfloat16)
    if variant.is_checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if variant.is_compiled:
        for layer in find_layers(model):
            if layer.kind == "block":
                layer.module.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), **NUMBERS, fused=True)
    cast = torch.autocast(device.type, torch.bfloat16) if is_autocast else contextlib.nullcontext()
    is_first = True

    def step() -> float:
        nonlocal is_first
        losses = []
        for batch in batches:
            with cast:
                loss = model(**batch, use_cache=False).loss / len(batches)
            loss.backward()
            losses.append(loss.detach())
        if is_first:
            tell({"phase": FIRST_UPDATE})
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if is_first:
            is_first = False
            tell({"phase": timing.WARMING_UP})
        return float(sum(loss.item() for loss in losses))  # behind the update, on the same stream

    return step


def _zero3_step(
    model: nn.Module, variant: Variant, batches: list[dict[str, torch.Tensor]], device: torch.device, tell: Tell
) -> Callable[[], float]:
    """One step of DeepSpeed; the settings are those of its documentation's ZeRO-3 offload."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one_process = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **one_process})
    try:
        import deepspeed  # Not a dependency; `why_not` is asked before.
    except ImportError as error:
        raise UserError(f"DeepSpeed cannot be imported ({error})") from error
    _materialise(model, torch.device("cpu"), torch.bfloat16, made_on=device)
    if variant.is_checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tell({"phase": INITIALISING})
    config = {**ZERO3, "train_micro_batch_size_per_gpu": len(batches[0]["input_ids"]),
              "gradient_accumulation_steps": len(batches)}  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())

    def step() -> float:
        losses = []
        for batch in batches:
            loss = engine(**batch, use_cache=False).loss
            engine.backward(loss)  # divides by the number of micro-batches
            engine.step()
            losses.append(loss.detach())
        return float(sum(loss.item() for loss in losses)) / len(losses)

    return step


_PINNED = {"device": "cpu", "pin_memory": True}
ZERO3: dict[str, Any] = {
    "bf16": {"enabled": True},
    "gradient_clipping": MAX_NORM,
    "optimizer": {"type": "AdamW", "params": NUMBERS},
    "steps_per_print": 10**9,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": _PINNED,
        "offload_param": _PINNED,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5 * 10**8,
        "stage3_prefetch_bucket_size": 5 * 10**8,
        "stage3_param_persistence_threshold": 10**5,
        "stage3_max_live_parameters": 10**9,
        "stage3_max_reuse_distance": 10**9,
    },
}


def _materialise(
    model: nn.Module, device: torch.device, dtype: torch.dtype, made_on: torch.device | None = None
) -> None:
    """Give parameters on the meta device their values, one at a time, and bring all to `device`.

    made_on: where values are drawn, if not there.
    """
    values, made = random_values(made_on or device), {}
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                drawn = values(f"{path}.{name}" if path else name, parameter.shape, parameter.dtype)
                made[parameter] = nn.Parameter(drawn.to(device, dtype), requires_grad=parameter.requires_grad)
            setattr(module, name, made[parameter])
    model.to(device)
