"""What a run proposes to change of itself, by simulated time and within the memory that is spare."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from planning_helpers import builtin, predicted, small_step, wide_llama, with_updates
from update_training import start

from megatrain import run_plan
from megatrain.base.config import Config
from megatrain.base.units import GIB
from megatrain.execute.engine import engine_of
from megatrain.plan.outcome import Plan
from megatrain.plan.placement import CPU, HBM, STAGING_BYTES, STREAM
from megatrain.plan.planner import Planner
from megatrain.plan.replan import WORTH_A_CHANGE, Change, Spare, better_choice
from megatrain.plan.workload import Workload


def planner_of(plan: Plan, **settings: object) -> Planner:
    return Planner(plan.machine, plan.spec, plan.workload, Config(**settings), shares_device=False)


def spare(plan: Plan, num_bytes: float, slot_bytes: int = 0) -> Spare:
    sizes = planner_of(plan).sizes
    home_bytes = [sum(of.values()) if home.layers else None for of, home in zip(sizes, plan.spec.homes, strict=True)]
    return Spare(num_bytes=int(num_bytes), home_bytes=home_bytes, slot_bytes=slot_bytes)


def taken_bytes(change: Change, of: Spare) -> int:
    homes = (of.home_bytes[index] for index, place in enumerate(change.choice.places) if place == HBM)
    return sum(homes) + (2 * STAGING_BYTES if STREAM in change.choice.places else 0)


def test_homes_go_to_the_device_as_far_as_memory_is_spare() -> None:
    plan, before = small_step(), None
    for num_bytes in (20e9, 40e9, 80e9):
        free = spare(plan, num_bytes)
        change = better_choice(planner_of(plan), plan.choice, free)
        assert change is not None and taken_bytes(change, free) <= num_bytes
        now, then = change.seconds
        assert now == plan.step_seconds and then == planner_of(plan).simulate(change.choice).step_seconds
        assert then <= (1 - WORTH_A_CHANGE) * now and (before is None or then <= before)
        places = change.choice.places
        num_on_device = places.count(HBM)
        assert places[:num_on_device] == (HBM,) * num_on_device, "the first of the forward have the least time"
        assert dataclasses.replace(change.choice, places=plan.choice.places) == plan.choice
        before = then


def test_where_no_memory_is_spare_nothing_is_proposed() -> None:
    plan = small_step()
    assert better_choice(planner_of(plan), plan.choice, spare(plan, 0)) is None
    assert better_choice(planner_of(plan), plan.choice, spare(plan, 2 * STAGING_BYTES - 1)) is None


def test_with_little_memory_updates_stream_through_the_device() -> None:
    plan = small_step(machine=with_updates(4))
    change = better_choice(planner_of(plan), plan.choice, spare(plan, 2 * STAGING_BYTES))
    assert change is not None
    layered = [place for place, home in zip(change.choice.places, plan.spec.homes, strict=True) if home.layers]
    assert set(layered) == {STREAM} and change.choice.places[-1] == CPU


def test_what_the_config_says_of_device_memory_holds() -> None:
    plan = small_step()
    change = better_choice(planner_of(plan, hbm_home_gb=0), plan.choice, spare(plan, 80e9))
    assert change is None or HBM not in change.choice.places


def test_a_gain_below_the_worth_is_left() -> None:
    plan = predicted(builtin("qwen2.5-7b"), Workload(num_sequences=64, length=1024, rows=16))
    assert better_choice(planner_of(plan), plan.choice, spare(plan, 80e9)) is None, "compute takes all of the step"


def test_slots_are_added_where_they_pay() -> None:
    work = Workload(num_sequences=8, length=1024, rows=8)
    # Its embedding is no larger than a block, so there is no other slot.
    plan = predicted(wide_llama(), work, slots=1, machine=with_updates(0.1))
    planner = planner_of(plan, hbm_home_gb=0)
    slot_bytes = max(of["weights"] for of, home in zip(planner.sizes, plan.spec.homes, strict=True) if home.layers)
    free = dataclasses.replace(spare(plan, 2 * slot_bytes, slot_bytes), home_bytes=[None] * len(plan.spec.homes))
    change = better_choice(planner, plan.choice, free)
    faster = [planner.simulate(dataclasses.replace(plan.choice, num_slots=n)).step_seconds for n in (1, 2, 3)]
    assert faster[1] < (1 - WORTH_A_CHANGE) * faster[0], "else this shows nothing"
    assert change is not None and change.choice.num_slots == 2 and change.seconds == (faster[0], faster[1])
    assert better_choice(planner, plan.choice, dataclasses.replace(free, num_bytes=slot_bytes - 1)) is None
    assert better_choice(planner, plan.choice, dataclasses.replace(free, slot_bytes=0)) is None


@pytest.mark.parametrize(
    ("settings", "left_gib"),
    [
        # 2 free and 10 reserved, of which a step took 9; 1 % of 16 stays free.
        ({}, 2 + 10 - 9 - 0.16),
        # Within the limit for the process, with the context.
        ({"max_vram_gb": 11 * 2**30 / 1e9}, 11 - 0.5 - 9),
        ({"max_vram_gb": 15 * 2**30 / 1e9}, 2 + 10 - 9),
        ({"max_vram_gb": 8 * 2**30 / 1e9}, 0),
    ],
)
def test_spare_is_what_the_peak_of_a_step_left(
    settings: dict, left_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = {"max_memory_reserved": 9 * GIB, "memory_reserved": 10 * GIB, "mem_get_info": (2 * GIB, 16 * GIB)}
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    model, _ = start(**settings)
    spare_bytes = run_plan._spare_device_bytes(engine_of(model))
    assert spare_bytes == pytest.approx(run_plan.SPARE_SHARE * left_gib * GIB, abs=100)
    model, _ = start(clip="layer", **settings)
    engine = engine_of(model)
    slabs = engine.placement.ring_bytes(engine.placement.plans)
    assert slabs > 0
    expected = max(0, spare_bytes - int(run_plan.SPARE_SHARE * slabs))
    assert run_plan._spare_device_bytes(engine) == pytest.approx(expected, abs=100), "gradients on their way take room"
