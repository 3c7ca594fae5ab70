"""A run that is planned: what the planner chose is what the stream gets, and what it said can be compared."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from update_training import assert_same, batches, result, start, tiny_llama, train

import megatrain as mt
from megatrain import run_plan
from megatrain.api import stream
from megatrain.base.config import Config, StreamOptions
from megatrain.base.errors import UserError
from megatrain.execute.engine import engine_of
from megatrain.plan.machine import Machine
from megatrain.plan.machines import H200, MACHINES, nearest_machine
from megatrain.plan.rows import NUM_UPDATE_SLOTS
from megatrain.plan.timeline import CONTEXT_BYTES, PROCESS_BYTES
from megatrain.plan.workload import Workload
from megatrain.spec.homes import Formats

SPLIT = Formats(precision="bf16", master="split")
WORKLOAD = Workload(num_sequences=4, length=9, rows=2)


def small(hbm_bytes: int, ram_bytes: int, disk_bytes: int = 0) -> Machine:
    """A machine with so much beside what the process and CUDA take."""
    return dataclasses.replace(
        H200, hbm_bytes=CONTEXT_BYTES + hbm_bytes, ram_bytes=PROCESS_BYTES + ram_bytes, disk_bytes=disk_bytes
    )


def planned(monkeypatch: pytest.MonkeyPatch, machine: Machine, **settings: object) -> tuple[run_plan.Plan, Config]:
    monkeypatch.setattr(run_plan, "machine_at_hand", lambda config, device: machine)
    limits = {"max_vram_gb": machine.hbm_bytes / 1e9, "max_ram_gb": machine.ram_bytes / 1e9}
    config = Config(**{**limits, **settings})
    return run_plan.plan_run(tiny_llama(torch.bfloat16), SPLIT, config, WORKLOAD, torch.device("cpu")), config


@pytest.mark.parametrize("hbm_bytes", [2 * 10**6, 5 * 10**6])
def test_what_was_planned_is_what_streams(hbm_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = planned(monkeypatch, small(hbm_bytes, 10**8))
    options = run_plan.options_of(plan, StreamOptions())
    model, optimizer = start(options, precision="bf16")
    placement = engine_of(model).placement
    assert [placement.places[home] for home in placement.plans] == list(plan.choice.places)
    assert placement.options.num_slots == plan.choice.num_slots
    assert engine_of(model).activations.budget_bytes == plan.choice.activation_bytes
    train(model, optimizer, batches(3))
    truth, its_optimizer = start(StreamOptions(serial=True), precision="bf16")
    train(truth, its_optimizer, batches(3))
    assert_same(result(model, optimizer), result(truth, its_optimizer))


def test_more_device_memory_takes_more_homes(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (planned(monkeypatch, small(n, 10**8))[0].num_on_device for n in (600_000, 10**7))
    assert 0 < few < many


def deep_llama() -> torch.nn.Module:
    config = LlamaConfig(hidden_size=32, intermediate_size=80, num_hidden_layers=20, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=90)  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16)


def test_what_host_memory_cannot_take_goes_to_disk(tmp_path: Path) -> None:
    machine = small(250_000, 5_000_000, 10**10)
    config = Config(max_vram_gb=machine.hbm_bytes / 1e9, max_ram_gb=machine.ram_bytes / 1e9, offload_dir=str(tmp_path))
    plan = run_plan.plan(machine, run_plan.spec_of(deep_llama(), SPLIT), WORKLOAD, config)
    assert 0 < plan.timeline.peak("disk")
    mt.init(device="cpu", precision="bf16", offload_dir=tmp_path)
    model = stream(deep_llama(), options=run_plan.options_of(plan, StreamOptions()))
    optimizer = mt.optim.AdamW(model)
    engine = engine_of(model)
    assert engine.placement.has_disk and engine.placement.num_update_slots >= NUM_UPDATE_SLOTS
    train(model, optimizer, batches(2))
    engine.wait()
    assert engine.memory.disk.disk_bytes == pytest.approx(plan.timeline.peak("disk"), rel=0.05)
    rounded_bytes = 4096 * 2 * len(engine.homes)  # each piece of memory ends with a page, which shows at this size
    assert PROCESS_BYTES + engine.memory.ram_bytes <= machine.ram_bytes + rounded_bytes


def test_what_does_not_fit_is_refused_with_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="does not fit .* enough: .* more of host memory"):
        planned(monkeypatch, small(2 * 10**6, 10_000))


def test_a_gpu_is_found_in_the_catalogue_by_its_name() -> None:
    assert nearest_machine("NVIDIA H200").name.startswith("h200")
    assert nearest_machine("NVIDIA GeForce RTX 4090") is MACHINES["rtx4090"]
    assert nearest_machine("NVIDIA A100-SXM4-80GB") is MACHINES["a100"]
    unknown = nearest_machine("Some GPU 9000")
    assert "a guess from" in unknown.source and "megatrain doctor" in unknown.source
    assert unknown.matmul_flops_per_second == min(m.matmul_flops_per_second for m in MACHINES.values())


def test_a_workload_is_checked_at_once() -> None:
    with pytest.raises(UserError, match="workload=3 must be an mt.Workload"):
        mt.init(device="cpu", workload=3)
    with pytest.raises(UserError, match="workload='8x128' must be"):
        mt.stream(tiny_llama(), workload="8x128")
    with pytest.raises(UserError, match="rows=5 of a micro-batch are more than the 4"):
        mt.Workload(num_sequences=4, length=1, rows=5)
