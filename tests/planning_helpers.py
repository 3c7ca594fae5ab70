"""Specs and plans for tests of the planner: built-in shapes, a tiny model, choices as a run was measured with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain.base.config import Config
from megatrain.base.units import GB
from megatrain.plan.choice import Choice
from megatrain.plan.machine import Machine
from megatrain.plan.machines import H200
from megatrain.plan.outcome import Plan
from megatrain.plan.placement import CPU, HBM
from megatrain.plan.planner import Planner
from megatrain.plan.workload import Workload
from megatrain.planning import outline_model
from megatrain.spec.homes import Formats
from megatrain.spec.model import ModelSpec, model_spec

SPLIT = Formats(precision="bf16", master="split")


@functools.cache
def builtin(name: str) -> ModelSpec:
    return outline_model(name).spec(SPLIT)


def llama_config(**changes: object) -> LlamaConfig:
    values = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
                  num_key_value_heads=2, vocab_size=128)  # fmt: skip
    return LlamaConfig(**{**values, **changes})


@functools.cache
def wide_llama() -> ModelSpec:
    """1.7B parameters in 12 blocks, so that GB are the right unit."""
    config = llama_config(hidden_size=3072, intermediate_size=8192, num_hidden_layers=12, num_attention_heads=24,
                          num_key_value_heads=8, vocab_size=32000)  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    return model_spec(model, SPLIT, "wide")


def predicted(
    spec: ModelSpec,
    workload: Workload,
    *,
    homes: int | Sequence[int] = 0,
    slots: int = 3,
    inputs_gb: float = 1e9,
    config: Config | None = None,
    machine: Machine = H200,
) -> Plan:
    """The prediction for a given choice: the first `homes`, or those named, live on the device, and inputs stay there
    up to `inputs_gb`. As in a run that was not planned, gradients on the device have memory of their own."""
    planner = Planner(machine, spec, workload, config or Config(), shares_device=False)
    on_device = range(homes) if isinstance(homes, int) else homes
    places = tuple(HBM if index in on_device else CPU for index in range(len(spec.homes)))
    rows = workload.rows or workload.num_sequences
    choice = Choice(rows=rows, num_slots=slots, places=places, activation_bytes=int(inputs_gb * 1e9))
    return planner.plan_of(choice)


STEP = Workload(num_sequences=8, length=512)


def machine(hbm_gb: float, ram_gb: float, disk_gb: float = 0) -> Machine:
    return dataclasses.replace(
        H200, name="tried", hbm_bytes=int(hbm_gb * GB), ram_bytes=int(ram_gb * GB), disk_bytes=int(disk_gb * GB)
    )


def planned(hbm_gb: float, ram_gb: float, disk_gb: float = 0, **settings: object) -> Plan | None:
    config = Config(offload_dir="." if disk_gb else None, **settings)
    return Planner(machine(hbm_gb, ram_gb, disk_gb), wide_llama(), STEP, config).best()


def with_updates(factor: float) -> Machine:
    """An H200 whose host takes so much longer for an update."""
    slow = {name: factor * ns for name, ns in H200.update_ns_per_parameter.items()}
    return dataclasses.replace(H200, update_ns_per_parameter=slow)


def small_step(**changes: object) -> Plan:
    """7B with 8 x 1024 tokens, all in host memory: the step waits for updates by the CPU."""
    plan = predicted(builtin("qwen2.5-7b"), Workload(num_sequences=8, length=1024, rows=8), **changes)
    assert plan.step_seconds > 2
    return plan
