"""What is refused names what is short, and every remedy that it names is enough alone."""

from __future__ import annotations

import dataclasses
import re

import pytest
from model_zoo import make_model
from planning_helpers import SPLIT, STEP, builtin, machine, planned, wide_llama

from megatrain.base.config import Config
from megatrain.base.errors import UserError
from megatrain.base.units import GB, MB
from megatrain.plan.machines import H200, MACHINES
from megatrain.plan.planner import Planner
from megatrain.plan.remedies import plan
from megatrain.plan.timeline import CONTEXT_BYTES
from megatrain.plan.workload import Workload
from megatrain.spec.model import model_spec, with_bf16_masters


def refused(hbm_gb: float, ram_gb: float, work: Workload = STEP, **settings: object) -> str:
    with pytest.raises(UserError, match="does not fit tried") as error:
        plan(machine(hbm_gb, ram_gb, 1000), wide_llama(), work, Config(**settings))
    return str(error.value)


def test_each_remedy_is_enough_alone() -> None:
    hbm, ram = 10, 14
    text = refused(hbm, ram)
    lacking = float(re.search(r"([\d.]+) GB more of host memory", text)[1])
    assert 0 < lacking < 30
    # 3 % of the machine's memory are left free.
    assert planned(hbm, ram + lacking / 0.97 + 0.01) is not None
    assert planned(hbm, ram + 0.8 * lacking) is None
    compression = re.search(r'optimizer_compression="(\w+)"( with clip="layer")? \(saves', text)
    assert planned(hbm, ram, optimizer_compression=compression[1], clip="layer" if compression[2] else "global")
    disk_gb = float(re.search(r"offload_dir with ([\d.]+) GB free", text)[1])
    assert planned(hbm, ram, disk_gb) is not None


def test_a_limit_is_to_be_raised_where_it_is_what_lacks() -> None:
    text = refused(10, 100, max_ram_gb=10)
    assert "more of host memory" not in text
    limit = float(re.search(r"max_ram_gb=([\d.]+)", text)[1])
    assert planned(10, 100, max_ram_gb=limit) is not None
    assert planned(10, 100, max_ram_gb=limit - 1.01) is None, "it is rounded up to a GB"
    text = refused(10, 12, max_ram_gb=10)
    lacking, limit = map(float, re.search(r"([\d.]+) GB more of host memory with max_ram_gb=([\d.]+)", text).groups())
    assert planned(10, 12 + lacking, max_ram_gb=limit) is not None
    assert planned(10, 12 + lacking, max_ram_gb=10) is None and planned(10, 12, max_ram_gb=limit) is None


def test_device_memory_that_is_short_is_named() -> None:
    text = refused(3, 60, Workload(num_sequences=1, length=65536))
    assert "device memory is 2.9 GB" in text and "more" in text
    context = int(re.search(r"at most ([\d,]+) tokens", text)[1].replace(",", ""))
    spec = wide_llama()
    assert plan(machine(3, 60), spec, Workload(num_sequences=1, length=context), Config())
    with pytest.raises(UserError):
        plan(machine(3, 60), spec, Workload(num_sequences=1, length=2 * context), Config())


def parts_of(text: str, what: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(rf"([\d.,]+) {what}", text)]


def test_what_a_step_needs_of_the_device_adds_up_and_the_context_is_named() -> None:
    work = Workload(num_sequences=1, length=65536)
    for hbm, unit, tiny in ((3, "GB", False), (0.2, "MB", True)):
        spec = builtin("qwen2.5-0.5b") if not tiny else model_spec(make_model("llama"), SPLIT, "tiny")
        with pytest.raises(UserError) as error:
            plan(machine(hbm, 60), spec, work if not tiny else Workload(num_sequences=1, length=64), Config())
        text = str(error.value)
        has, needed, *parts = parts_of(text.partition("What is enough")[0].partition("Any of")[0], unit)
        assert sum(parts) == pytest.approx(needed)
        assert parts[0] * {"GB": GB, "MB": MB}[unit] >= CONTEXT_BYTES and "for the CUDA context" in text
        assert parts_of(text, f"{unit} more")[0] == pytest.approx(needed - has)


def test_a_remedy_in_host_memory_counts_the_disk_that_there_is() -> None:
    hbm, ram, disk = 8, 7, 8
    with pytest.raises(UserError) as error:
        plan(machine(hbm, ram, disk), wide_llama(), STEP, Config(offload_dir="."))
    text = str(error.value)
    assert f"and {disk} GB of disk" in text
    lacking = parts_of(text, "GB more of host memory")[0]
    assert planned(hbm, ram + lacking / 0.97 + 0.01, disk) is not None
    assert planned(hbm, ram + 0.8 * lacking / 0.97, disk) is None
    larger = parts_of(text, "GB free")[0]
    assert parts_of(text, "GB more than there is")[0] == pytest.approx(larger - disk, abs=0.2)
    assert planned(hbm, ram, larger) is not None
    assert planned(hbm, ram, 0.9 * larger) is None


def test_formats_that_are_enough_together_are_named() -> None:
    """4-bit moments and clip="layer" are not enough in 8 GB of host memory; with bf16 masters they are."""
    text = refused(3, 8)
    named = re.search(r'optimizer_compression="4bit" with clip="layer" with master="bf16"(?: \(|$|;)', text)
    assert named, text
    assert planned(3, 8, optimizer_compression="4bit", clip="layer") is None
    spec = model_spec(make_model("llama"), SPLIT, "tiny")
    bf16 = model_spec(make_model("llama"), dataclasses.replace(SPLIT, master="bf16"), "tiny")
    assert with_bf16_masters(spec).formats == bf16.formats
    sizes = [Planner(H200, of, STEP, Config(master="bf16")).sizes for of in (with_bf16_masters(spec), bf16)]
    assert sizes[0] == sizes[1] != Planner(H200, spec, STEP, Config()).sizes


def test_formats_and_a_disk_are_named_with_the_sequences_that_they_are_enough_for() -> None:
    work = Workload(num_sequences=64, length=1024)
    with pytest.raises(UserError) as error:
        plan(MACHINES["h200-128gb"], builtin("llama-3.1-405b"), work, Config(offload_dir="."))
    text = str(error.value)
    formats = re.search(r'4bit" with clip="layer" with master="bf16" and at most (\d+) sequences', text)
    disk = re.search(r"offload_dir with (\d+) GB free, \d+ GB more than there is and at most (\d+) sequences", text)
    small = Config(offload_dir=".", optimizer_compression="4bit", clip="layer", master="bf16")
    fewer = Workload(num_sequences=int(formats[1]), length=1024)
    assert Planner(MACHINES["h200-128gb"], with_bf16_masters(builtin("llama-3.1-405b")), fewer, small).fits()
    larger = dataclasses.replace(MACHINES["h200-128gb"], disk_bytes=int(disk[1]) * GB)
    fewer = Workload(num_sequences=int(disk[2]), length=1024)
    assert Planner(larger, builtin("llama-3.1-405b"), fewer, Config(offload_dir=".")).fits()


def test_smaller_micro_batches_and_fewer_sequences_are_offered_where_they_are_enough() -> None:
    work = Workload(num_sequences=64, length=4096, rows=64)
    text = refused(30, 60, work)
    rows = int(re.search(r"micro-batches of at most (\d+) sequence", text)[1])
    for number, fits in ((rows, True), (rows + 1, False)):
        tried = dataclasses.replace(work, rows=number)
        assert (Planner(machine(30, 60), wide_llama(), tried, Config()).best() is not None) is fits
    # The inputs of all sequences of a step wait for the backward.
    work = Workload(num_sequences=256, length=4096)
    text = refused(12, 20, work)
    number = int(re.search(r"at most (\d+) sequences of 4,096 tokens a step", text)[1])
    for count, fits in ((number, True), (number + 1, False)):
        tried = dataclasses.replace(work, num_sequences=count)
        assert (Planner(machine(12, 20), wide_llama(), tried, Config()).best() is not None) is fits


def test_a_remedy_for_the_device_names_what_the_host_lacks_too() -> None:
    """12 GB more of device memory alone would not do for 405B, of which the host holds a fortieth."""
    both = r"What is enough: a device with [\d.]+ GB more, and 5\d\d\d GB more of host memory"
    with pytest.raises(UserError, match=both):
        plan(MACHINES["rtx4090"], builtin("llama-3.1-405b"), Workload(num_sequences=16, length=1024), Config())


def test_homes_that_leave_the_device_no_room_for_a_layer_are_named() -> None:
    for hbm_home_gb in (7.5, 50):
        text = refused(8, 60, hbm_home_gb=hbm_home_gb)
        assert f"hbm_home_gb={hbm_home_gb:g} leaves too little of" in text and text.endswith("or leave it out")
