"""A run that changes its own placement: when that is made, what is said, and how it is undone."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from planning_helpers import SPLIT, small_step, with_updates
from trainer_helpers import arguments, llama, rows
from update_training import assert_same, batches, result, start, tiny_llama, train

import megatrain as mt
from megatrain import run_plan
from megatrain.base.config import StreamOptions
from megatrain.base.errors import UserError
from megatrain.execute.engine import Engine, engine_of
from megatrain.plan.calibrate import Measured
from megatrain.plan.choice import Choice
from megatrain.plan.placement import CPU, HBM, STREAM
from megatrain.plan.replan import Change

MEASURED = Measured(step=1.0, stalls=0.0, cpu_update=0.5)

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

    def refuse(*_: object) -> Callable[[], None]:
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
