"""This library's row: steps of a streamed model, what its lanes did in them, and what its plan had said."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

import megatrain as mt
from megatrain.api import stream
from megatrain.base.config import StreamOptions
from megatrain.base.errors import UserError
from megatrain.batch_rows import grouped
from megatrain.bench import timing
from megatrain.bench.work import (
    MAX_NORM,
    NUMBERS,
    Tell,
    Work,
    empty_model,
    formulas,
    micro_batches,
    random_values,
    rates,
    read_config,
)
from megatrain.execute.engine import Engine, engine_of
from megatrain.execute.report import NUM_STEPS
from megatrain.plan.flops import model_work
from megatrain.plan.placement import DISK_TIER, HBM_TIER, RAM, Place
from megatrain.plan.timeline import CONTEXT_BYTES
from megatrain.spec.discover import find_layers

if TYPE_CHECKING:
    from torch import nn

    from megatrain.optim.base import HomeOptimizer
    from megatrain.plan.planner import Plan

TRACED_STEPS = 2
CHANGE_STEPS = 2 * NUM_STEPS + 2
"""Of a run that may change its own placement: it measures, changes, measures again, and may go back."""


def measure_streamed(work: Work, tell: Tell) -> dict[str, Any]:
    """Raises UserError where the model cannot be trained so, torch.OutOfMemoryError where a step does not fit."""
    tell({"phase": "building", "device": _device_name(work.compute_device)})
    started = time.perf_counter()
    _initialise(work)
    model = empty_model(read_config(work))
    flops = model_work(model)
    plan, model = _stream(work, model)
    engine = engine_of(model)
    assert engine is not None
    if not work.replan:
        engine.report.silence()  # what it would say is in the figures, and the profile stays as doctor left it
    max_norm = {"max_norm": MAX_NORM} if work.clip == "layer" else {}
    optimizer = mt.optim.AdamW(model, **NUMBERS, num_threads=work.num_threads, **max_norm)
    built_seconds = time.perf_counter() - started
    num_micro_batches = _num_micro_batches(work, plan)
    batches = micro_batches(work, num_micro_batches, model)

    def step() -> float:
        losses = mt.accumulate(model, batches)
        if work.clip == "global":
            mt.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(sum(loss.item() for loss in losses))

    least = CHANGE_STEPS if work.replan else timing.LEAST_WARM_UP
    times = timing.warm_up(step, engine.device, tell, least)
    before = engine.stats()
    timing.measure(step, times, work.num_steps, tell)
    after, ended = engine.stats(), time.perf_counter()
    engine.wait()
    figures = {
        "num_micro_batches": num_micro_batches,
        "num_micro_batches_run": _a_step("num_micro_batches_run", before, after, times),
        "build_seconds": built_seconds,
        **times.data(),
        **rates(work, flops, times.median_seconds),
        "last_update_seconds": time.perf_counter() - ended,
        "peak_device_bytes": timing.peak_device_bytes(engine.device),
        "peak_host_bytes": timing.peak_host_bytes(),
        "disk_bytes": 0 if engine.memory.disk is None else engine.memory.disk.disk_bytes,
        "num_skipped_steps": optimizer.num_skipped_steps,
        "formulas": formulas(work, flops),
        **_moved(before, after, times),
        "predicted": None if plan is None else _predicted(plan),
        "is_planned": engine.plan is not None,
        "homes": dict(Counter(str(home.place) for home in engine.homes)),
        "home_bytes_per_parameter": _home_bytes(engine, optimizer),
        "attention": str(engine.attention),
    }
    # Behind all that is measured: a trace has a cost of its own.
    return figures if work.trace_file is None else {**figures, "trace": _traced(step, model, work.trace_file, tell)}


def _traced(step: Callable[[], float], model: nn.Module, file: str, tell: Tell) -> dict[str, Any]:
    """Two more steps, written to `file`. Beside the second goes the update of the first, as in every step of a run."""
    tell({"phase": "tracing"})
    with mt.trace(model) as found:
        for _ in range(TRACED_STEPS):
            step()
    problem = ""
    try:
        found.export_chrome_trace(file)
    except UserError as error:
        problem = str(error)  # a disk that is full by now takes no figure with it
    return {"file": file, "problem": problem, "summary": found.summary()}


def _initialise(work: Work) -> None:
    mt.init(
        max_vram_gb=work.max_vram_gb,
        max_ram_gb=work.max_ram_gb,
        offload_dir=list(work.offload_dirs) or None,
        optimizer_compression=False if work.compression in (None, "fp32") else work.compression,
        device=work.device,
        compile=work.compile,
        exact=work.exact or None,
        master=work.master,
        clip=work.clip,
        hbm_home_gb=work.hbm_home_gb,
        replan=work.replan,
        attention=work.attention,
        verify_transfers=work.verify_transfers,
        max_link_gb_s=work.max_link_gb_s,
    )


def _stream(work: Work, model: nn.Module) -> tuple[Plan | None, nn.Module]:
    """The model at home, and what is predicted of its steps, if anything is."""
    places: Any = work.places
    if work.moments_on_disk:
        blocks = [layer.name for layer in find_layers(model) if layer.kind == "block"]
        places = dict.fromkeys(blocks[-work.moments_on_disk :], Place(moments=DISK_TIER))
    rows = None if work.num_micro_batches is None else work.num_sequences // work.num_micro_batches
    workload = mt.Workload(num_sequences=work.num_sequences, length=work.length, rows=rows)
    values = random_values(work.compute_device)
    stream(model, values, options=StreamOptions(places=places), workload=workload if work.is_planned else None)
    engine = engine_of(model)
    assert engine is not None
    if engine.plan is None:
        workload = dataclasses.replace(workload, rows=_rows_at_once(rows or 1, work, engine))
    # Before a step has been measured: what is learnt from these very steps is no prediction of them.
    return engine.plan or engine.report.predict(workload), model


def _rows_at_once(rows: int, work: Work, engine: Engine) -> int:
    """Of the micro-batches that those of `rows` sequences are merged into."""
    number = work.num_sequences // rows
    groups = grouped([0] * number, [rows * work.length] * number, engine.merging.most_tokens)
    return rows * max(map(len, groups))


def _num_micro_batches(work: Work, plan: Plan | None) -> int:
    if work.num_micro_batches is not None:
        return work.num_micro_batches
    return work.num_sequences if plan is None else -(-work.num_sequences // plan.choice.rows)


def _moved(before: dict[str, Any], after: dict[str, Any], times: timing.Timing) -> dict[str, Any]:
    """What the lanes did in a step: seconds, and bytes by way."""
    num_steps = len(times.step_seconds)
    a_step = functools.partial(_a_step, before=before, after=after, times=times)

    def seconds(name: str) -> dict[str, float]:
        return {lane: (now - before[name].get(lane, 0.0)) / num_steps for lane, now in after[name].items()}

    waits = seconds("stall_seconds")
    mean_seconds = sum(times.step_seconds) / num_steps
    lanes = {"compute": mean_seconds - sum(waits.values()), **seconds("busy_seconds")}
    if "disk_read_seconds" in after:
        lanes.pop("disk", None)  # it asks for reads, which threads of their own do
        lanes |= {"disk read": a_step("disk_read_seconds"), "disk write": a_step("disk_write_seconds")}
    return {
        "mean_seconds": mean_seconds,
        "busy_seconds": lanes,
        "stall_seconds": waits,
        "link_bytes": {"to_device": a_step("link_to_device_bytes"), "to_host": a_step("link_to_host_bytes")},
        "slot_bytes": {
            "weights": a_step("transferred_bytes"),
            "gradients": a_step("drained_bytes"),
            "inputs": a_step("offloaded_activation_bytes"),
        },
        "disk_step_bytes": {"read": a_step("disk_read_bytes"), "written": a_step("disk_written_bytes")},
        "num_late_transfers": a_step("num_late_transfers"),
        "num_checks": after["num_checks"],
    }


def _a_step(name: str, before: dict[str, Any], after: dict[str, Any], times: timing.Timing) -> float:
    return (after.get(name, 0) - before.get(name, 0)) / len(times.step_seconds)


def _predicted(plan: Plan) -> dict[str, Any]:
    """What was said before the first step, in the units of what is measured."""
    return {
        "step_seconds": plan.step_seconds,
        # The context is no memory of PyTorch's allocator, which is what is measured.
        "device_bytes": plan.timeline.peak(HBM_TIER) - CONTEXT_BYTES,
        "host_bytes": plan.timeline.peak(RAM),
        "disk_bytes": plan.timeline.peak(DISK_TIER),
        "busy_seconds": plan.simulation.busy_seconds(),
        "stall_seconds": plan.simulation.stall_seconds(),
        "machine": plan.machine.source,
    }


def _home_bytes(engine: Engine, optimizer: HomeOptimizer) -> float:
    """Bytes a parameter of masters and moments, as allocated, scales included; gradients apart."""
    num_parameters = sum(home.num_parameters for home in engine.homes)
    master_bytes = sum(home.wire.nbytes + home.low.nbytes for home in engine.homes)
    return (master_bytes + optimizer.num_state_bytes()) / num_parameters


def _device_name(device: torch.device) -> str:
    has_gpu = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if has_gpu else device.type
