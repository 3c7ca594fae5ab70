"""A run that changes its own placement: what is proposed, when it is made, what is said, and how it is undone."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from planning_helpers import SPLIT, builtin, predicted, wide_llama
from trainer_helpers import arguments, llama, rows
from update_training import assert_same, batches, result, start, tiny_llama, train

import megatrain as mt
from megatrain import run_plan
from megatrain.base.config import Config, StreamOptions
from megatrain.base.errors import UserError
from megatrain.base.units import GIB
from megatrain.execute.engine import Engine, engine_of
from megatrain.plan.calibrate import Measured
from megatrain.plan.machine import Machine
from megatrain.plan.machines import H200
from megatrain.plan.placement import CPU, HBM, STAGING_BYTES, STREAM
from megatrain.plan.planner import Plan, Planner
from megatrain.plan.replan import WORTH_A_CHANGE, Change, Spare, better_choice
from megatrain.plan.schedule import Choice
from megatrain.plan.workload import Workload

MEASURED = Measured(step=1.0, stalls=0.0, cpu_update=0.5)

# What is proposed.


def with_updates(factor: float) -> Machine:
    """An H200 whose host takes so much longer for an update."""
    slow = {name: factor * ns for name, ns in H200.update_ns_per_parameter.items()}
    return dataclasses.replace(H200, update_ns_per_parameter=slow)


def small_step(**changes: object) -> Plan:
    """7B with 8 x 1024 tokens, all in host memory: the step waits for updates by the CPU."""
    plan = predicted(builtin("qwen2.5-7b"), Workload(num_sequences=8, length=1024, rows=8), **changes)
    assert plan.step_seconds > 2
    return plan


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


# When it is made, and what is said.


def change_to(engine: Engine, num_slots: int = 3, **places: object) -> Change:
    wanted = {name.replace("__", "."): place for name, place in places.items()}
    choice = Choice(
        rows=2,
        num_slots=num_slots,
        places=tuple(wanted.get(home.name, home.place) for home in engine.homes),
        activation_bytes=0,
    )
    return Change(choice=choice, seconds=(1.0, 0.9))


def watched(**settings: object) -> tuple[torch.nn.Module, mt.optim.AdamW, Engine, list[str]]:
    model, optimizer = start(StreamOptions(num_slots=2), **settings)
    engine, said = engine_of(model), []
    engine.report._say = said.append
    return model, optimizer, engine, said


def ticking(step_seconds: Iterable[float]) -> Callable[[], float]:
    """A clock that is looked at once a step."""
    times = itertools.accumulate(step_seconds, initial=0.0)
    return lambda: next(times)


BEFORE = [1.0, 1.02, 0.98, 1.0]


@pytest.mark.parametrize("after", [0.85, 1.03])
def test_a_change_is_made_measured_and_stays(after: float) -> None:
    model, optimizer, engine, said = watched()
    engine.report.silence()
    train(model, optimizer, batches(2))
    change = change_to(engine, 3, model__embed_tokens=HBM, model__layers__0=HBM, model__layers__1=STREAM)
    engine.changes.propose = lambda plan, measured: change
    engine.changes.consider(small_step(), MEASURED, BEFORE)
    assert said == [] and set(engine.mover.places) == {CPU}, "not in the middle of a step"
    engine.changes.clock = ticking([after] * 9)
    train(model, optimizer, batches(1))
    assert engine.mover.places == change.choice.places and engine.placement.options.num_slots == 3
    (line,) = said
    assert line.startswith(
        "megatrain: changed at this step boundary: 2 homes, model.embed_tokens to model.layers.0, moved from host "
        "memory to the device ("
    )
    assert line.endswith(
        "), model.layers.1 stream through the device for their update, 3 slots for blocks instead of 2; 0.9 s a step "
        "are predicted instead of 1 s, 10.0 % less"
    ), line
    train(model, optimizer, batches(3))
    assert len(said) == 1, "the first step after it learns the order anew and does not count"
    train(model, optimizer, batches(4))
    _, line = said
    assert (
        line
        == {
            0.85: "megatrain: over 4 steps after that change 0.85 s a step were measured instead of 1 s: 15.0 % less, "
            "predicted was 10.0 % less",
            1.03: "megatrain: over 4 steps after that change 1.03 s a step were measured instead of 1 s: 3.0 % more, "
            "predicted was 10.0 % less",
        }[after]
    )
    assert engine.mover.places == change.choice.places


def test_what_was_measured_to_be_slower_is_undone() -> None:
    model, optimizer, engine, said = watched()
    engine.report.silence()
    before = [slot.buffer.numel() for slot in engine.transport.slots.slots]
    engine.changes.propose = lambda plan, measured: change_to(engine, 3, model__layers__0=HBM)
    engine.changes.consider(small_step(), MEASURED, BEFORE)
    engine.changes.clock = ticking([1.05] * 9)
    train(model, optimizer, batches(5))
    assert engine.mover.places[1] == HBM
    assert said[1].endswith(
        "1.05 s a step were measured instead of 1 s: 5.0 % more, predicted was 10.0 % less, more than the spread of "
        "0.04 s: it is undone at the next step boundary"
    ), said
    state = optimizer.state_dict()
    train(model, optimizer, batches(1))
    assert engine.mover.places[1] == HBM and len(said) == 2, "not while somebody holds a state"
    del state
    train(model, optimizer, batches(1))
    assert set(engine.mover.places) == {CPU} and engine.placement.options.num_slots == 2
    assert [slot.buffer.numel() for slot in engine.transport.slots.slots] == before
    assert said[2:] == ["megatrain: undone: homes and slots are as before"]
    train(model, optimizer, batches(6))
    assert len(said) == 3


@pytest.mark.parametrize("what", ["weights", "states", "gradients", "average", "no grad mode"])
def test_no_move_while_something_is_held(what: str) -> None:
    model, optimizer, engine, said = watched(numbers={"ema_decay": 0.9})
    engine.report.silence()
    train(model, optimizer, batches(2))
    engine.changes.propose = lambda plan, measured: change_to(engine, 2, model__layers__0=HBM)
    engine.changes.consider(small_step(), MEASURED, BEFORE)
    (step,) = batches(1)
    held = None
    if what == "gradients":
        engine.changes._is_due = False
        mt.accumulate(model, step)
        optimizer.step()
    if what == "weights":
        held = model.state_dict()
    if what == "states":
        held = optimizer.state[next(model.parameters())]
    if what in ("average", "no grad mode"):
        with optimizer.ema_weights() if what == "average" else torch.no_grad():
            with torch.no_grad():
                model(**step[0])
        assert set(engine.mover.places) == {CPU}
    else:
        mt.accumulate(model, step)
        assert set(engine.mover.places) == {CPU} and said == []
        optimizer.step()
        optimizer.zero_grad()
    del held
    train(model, optimizer, batches(1))
    assert engine.mover.places[1] == HBM and len(said) == 1


def test_a_plain_loop_has_boundaries_too() -> None:
    results = []
    for is_changed in (True, False):
        model, optimizer, engine, said = watched()
        engine.report.silence()
        engine.changes.propose = lambda plan, measured, engine=engine: change_to(engine, 3, model__layers__1=HBM)
        for number, (batch, _) in enumerate(batches(4)):
            if is_changed and number == 2:
                engine.changes.consider(small_step(), MEASURED, BEFORE)
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(said) == is_changed and (engine.mover.places[2] == HBM) == is_changed
        results.append(result(model, optimizer))
    assert_same(*results)


def test_a_change_without_room_is_undone_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, engine, said = watched()
    engine.report.silence()
    train(model, optimizer, batches(1))
    engine.changes.propose = lambda plan, measured: change_to(engine, 3, model__layers__0=HBM, model__layers__1=HBM)
    engine.changes.consider(small_step(), MEASURED, BEFORE)
    last = engine.homes[2]
    whole = last.prepare_move

    def refuse(place: object) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate")

    monkeypatch.setattr(last, "prepare_move", refuse)
    train(model, optimizer, batches(1))
    assert set(engine.mover.places) == {CPU} and engine.placement.options.num_slots == 2
    assert said == [
        "megatrain: there was no room for a change of homes or slots (CUDA out of memory. Tried)",
        "megatrain: undone: homes and slots are as before",
    ]
    monkeypatch.setattr(last, "prepare_move", whole)
    train(model, optimizer, batches(7))
    assert len(said) == 2


def test_a_step_that_the_device_does_not_hold_takes_the_change_back() -> None:
    results = []
    for fails in (True, False):
        model, optimizer, engine, said = watched()
        engine.report.silence()
        train(model, optimizer, batches(1))
        if fails:
            engine.changes.propose = lambda plan, measured, engine=engine: change_to(engine, 3, model__layers__0=HBM)
            engine.changes.consider(small_step(), MEASURED, BEFORE)
        train(model, optimizer, batches(2))
        mlp, left = model.model.layers[1].mlp, [fails]
        plain = mlp.forward

        def forward(hidden: torch.Tensor, plain: Callable = plain, left: list[bool] = left) -> torch.Tensor:
            if left.pop() if left else False:
                raise torch.OutOfMemoryError("CUDA out of memory. (a test)")
            return plain(hidden)

        mlp.forward = forward
        budget_bytes = engine.activations.budget_bytes
        train(model, optimizer, batches(6, seed=2))
        assert set(engine.mover.places) == {CPU} and engine.activations.budget_bytes == budget_bytes > 0
        if fails:
            _, gives_way, undone = said
            assert gives_way.endswith(
                "did not hold this step, which is done again without the change of homes or slots"
            )
            assert undone == "megatrain: undone: homes and slots are as before"
        results.append(result(model, optimizer))
    assert_same(*results)


def test_a_run_that_ends_says_what_it_measured_so_far() -> None:
    model, optimizer, engine, said = watched()
    engine.report.silence()
    engine.changes.propose = lambda plan, measured: change_to(engine, 2, model__layers__0=HBM)
    engine.changes.consider(small_step(), MEASURED, BEFORE)
    engine.changes.clock = ticking([0.9] * 9)
    train(model, optimizer, batches(3))
    engine.report.finish()
    assert len(said) == 2 and said[1].startswith("megatrain: over 2 steps after that change 0.9 s a step")
    train(model, optimizer, batches(5))
    engine.report.finish()
    assert len(said) == 2


# All of it.


def replanning(monkeypatch: pytest.MonkeyPatch, **settings: object) -> tuple[dict, list[str], Engine]:
    """A run whose machine has a slow CPU and a device with room."""
    slow = dataclasses.replace(with_updates(1e6), hbm_bytes=10**12)
    monkeypatch.setattr(run_plan, "machine_at_hand", lambda config, device: slow)
    monkeypatch.setattr(run_plan, "_spare_device_bytes", lambda engine: 10**9)
    model, optimizer, engine, said = watched(precision="bf16", **settings)
    spec = run_plan.spec_of(tiny_llama(torch.bfloat16), SPLIT)
    engine.report.predict = functools.partial(run_plan.predict_run, engine, spec)
    if engine.config.replan:
        engine.changes.propose = functools.partial(run_plan.propose_change, engine)
    train(model, optimizer, batches(16), engine.config.clip)
    return result(model, optimizer), said, engine


@pytest.mark.parametrize("clip", ["global", "layer"])
@pytest.mark.parametrize("compression", [False, "8bit", "4bit", "lossless"])
def test_a_run_changes_itself_and_no_bit_of_its_result(
    compression: bool | str, clip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth, said, engine = replanning(monkeypatch, optimizer_compression=compression, clip=clip, replan=False)
    assert len(said) == 1 and set(engine.mover.places) == {CPU}
    changed, said, engine = replanning(monkeypatch, optimizer_compression=compression, clip=clip)
    assert_same(changed, truth)
    assert said[0].startswith("megatrain: predicted (")
    if compression == "lossless":
        assert set(engine.mover.places) == {CPU}, "only the CPU codes them"
        return
    assert said[1].startswith("megatrain: changed at this step boundary: "), said
    assert said[2].startswith("megatrain: over 4 steps after that change "), said
    is_undone = len(said) > 3
    assert (HBM in engine.mover.places) != is_undone, "as it was measured here"


def test_a_trainer_that_saves_and_evaluates_changes_itself_too(tmp_path: Path) -> None:
    states = []
    for is_changed in (True, False):
        changes = {
            "max_steps": 12,
            "save_strategy": "steps",
            "save_steps": 3,
            "eval_strategy": "steps",
            "eval_steps": 2,
        }
        trainer = mt.Trainer(
            model=llama(), args=arguments(tmp_path, **changes), train_dataset=rows(), eval_dataset=rows(4)
        )
        engine, said = trainer.engine, []
        engine.report._say = said.append
        engine.report.predict = lambda workload: small_step()
        if is_changed:
            engine.changes.propose = lambda plan, measured, engine=engine: change_to(engine, 3, lm_head=HBM)
            engine.changes.clock = ticking([1e-9] * 12)
        trainer.train()
        assert (HBM in engine.mover.places) == is_changed
        lines = [line.partition(":")[2].split()[0] for line in said]
        assert lines == ["predicted", *(["changed", "over"] if is_changed else [])], said
        states.append(mt.full_state_dict(trainer.model))
    assert_same(*states)


def test_replan_is_a_switch() -> None:
    with pytest.raises(UserError, match="replan='no' must be True or False"):
        mt.init(device="cpu", replan="no")
