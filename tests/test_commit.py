"""A step commits by rolling forward: faults at every kind of update, once and for good; interrupts of a step."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commit_cases import CASES, Case, Fault, nothing
from comparing import the_engine
from interrupting import interrupted
from torch import nn
from trainer_helpers import arguments, llama, rows
from update_training import MAX_NORM, assert_same, batches, result, start, train

import megatrain as mt
from megatrain.base.config import StreamOptions
from megatrain.base.errors import DiskError, RefusedError, UpdateError
from megatrain.optim import commit, kernel
from megatrain.optim.base import HomeOptimizer
from megatrain.plan.placement import Place
from megatrain.run_log import LOG_NAME
from megatrain.store import disk_file
from megatrain.store.disk_calls import DiskCalls

pytestmark = pytest.mark.timeout(120)

NUM_STEPS = 3


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "FIRST_PAUSE_SECONDS", 1e-4)
    monkeypatch.setattr(disk_file, "FIRST_PAUSE_SECONDS", 1e-5)


def backward(model: nn.Module, number: int) -> None:
    """Of step `number`."""
    for index, micro_batches in enumerate(batches(NUM_STEPS)):
        if index == number:
            mt.accumulate(model, micro_batches)
    mt.clip_grad_norm_(model, MAX_NORM)


def settle(model: nn.Module) -> None:
    """Nothing is under way, and nothing is read ahead: faults meet the update of the step that is to come."""
    engine = the_engine(model)
    engine.wait()
    if engine.memory.disk is not None:
        engine.memory.disk.expose()


def reference(case: Case, folder: Path, num_steps: int) -> dict[str, torch.Tensor]:
    """What an undisturbed run has."""
    model, optimizer = case.start(folder)
    train(model, optimizer, batches(NUM_STEPS) if num_steps == NUM_STEPS else steps(num_steps))
    return result(model, optimizer)


def steps(num_steps: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    return (many for number, many in enumerate(batches(NUM_STEPS)) if number < num_steps)


def num_step_calls(case: Case, fault: Fault, folder: Path, *, serial: bool = False) -> int:
    """Of the function that fails, in the update of the second step."""
    model, optimizer = case.start(folder, serial=serial)
    train(model, optimizer, steps(1))
    backward(model, 1)
    settle(model)
    fault.num_calls = 0
    optimizer.step()
    the_engine(model).wait()
    return fault.num_calls


def places_to_fail(num_calls: int, num_wanted: int) -> list[int]:
    return sorted({0, num_calls - 1, *range(0, num_calls, max(1, num_calls // num_wanted))})


SERIAL = ["kernel split", "torch split", "lossless", "muon 8bit", "averages"]


@pytest.mark.parametrize(("name", "serial"), [*((one, False) for one in CASES), *((one, True) for one in SERIAL)])
def test_a_fault_that_passes_changes_no_bit(
    name: str, serial: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[name]
    expected = reference(case, tmp_path, NUM_STEPS)
    fault = case.fault(monkeypatch)
    # A call of the disk is tried again by itself before the update is.
    num_times = disk_file.NUM_RETRIES + 1 if case.owner is DiskCalls else 1
    for at in places_to_fail(num_step_calls(case, fault, tmp_path, serial=serial), 3):
        fault.at(1 << 62, 0)
        model, optimizer = case.start(tmp_path, serial=serial)
        train(model, optimizer, steps(1))
        backward(model, 1)
        settle(model)
        fault.at(at, num_times)
        with caplog.at_level(logging.WARNING, logger="megatrain"):
            optimizer.step()
            the_engine(model).wait()
        if case.owner is not DiskCalls:  # of several at once, the one that read ahead may have them all
            assert any("is tried again" in record.getMessage() for record in caplog.records), at
        optimizer.zero_grad()
        backward(model, 2)
        optimizer.step()
        assert_same(result(model, optimizer), expected)
        caplog.clear()


def bits_of(model: nn.Module) -> dict[str, tuple[torch.Tensor, ...]]:
    """Weights as they lie at home, by parameter, without a look at whether they may be read."""
    found = {}
    for home in the_engine(model).homes:
        for one in home.fields:
            low = (home.low_half(one).clone(),) if one.is_split else ()
            found[one.name] = (home.weights(one).clone(), *low)
    return found


def assert_never_half(now: dict, before: dict, after: dict) -> None:
    for name, bits in now.items():
        is_before, is_after = (all(map(torch.equal, bits, other[name])) for other in (before, after))
        assert is_before or is_after, name


@pytest.mark.parametrize("name", CASES)
def test_a_fault_that_stays_is_named_and_rolled_forward(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    model, optimizer = case.start(tmp_path)
    train(model, optimizer, steps(1))
    the_engine(model).wait()
    before = bits_of(model)
    train(model, optimizer, (many for number, many in enumerate(steps(2)) if number == 1))
    the_engine(model).wait()
    after, expected = bits_of(model), reference(case, tmp_path, NUM_STEPS)
    fault = case.fault(monkeypatch)
    # Of a disk, the last calls of a step read ahead.
    places = [0, 1] if case.owner is DiskCalls else places_to_fail(num_step_calls(case, fault, tmp_path), 2)
    for number, at in enumerate(places):
        fault.at(1 << 62, 0)
        model, optimizer = case.start(tmp_path)
        train(model, optimizer, steps(1))
        backward(model, 1)
        settle(model)
        fault.at(at, 1 << 60)
        optimizer.step()
        if number % 2:  # as loops do, which hear of it later
            optimizer.zero_grad()
        assert_refused(model, optimizer)
        assert_never_half(bits_of(model), before, after)
        fault.at(1 << 62, 0)
        optimizer.step()
        optimizer.check_whole("saving")
        assert_never_half(bits_of(model), after, after)
        optimizer.zero_grad()
        backward(model, 2)
        optimizer.step()
        assert_same(result(model, optimizer), expected)
        assert the_engine(model).num_steps == NUM_STEPS


def assert_refused(model: nn.Module, optimizer: HomeOptimizer) -> None:
    """Whatever reads or saves a home, or goes on."""
    engine = the_engine(model)
    names = "|".join(home.name for home in engine.homes)
    for refused in (
        engine.wait,
        lambda: optimizer.check_whole("saving"),
        lambda: mt.full_state_dict(model),
        optimizer.state_dict,
        optimizer.step,
    ):
        with pytest.raises(UpdateError, match=f"the update of '({names})' failed 4 times .*step\\(\\) again"):
            refused()
    with pytest.raises(UpdateError):
        mt.accumulate(model, next(steps(1)))


@pytest.mark.parametrize("name", ["kernel", "torch", "lossless", "muon", "streamed", "disk read"])
def test_with_layers_clipped_a_fault_passes_or_the_checkpoint_is_the_refuge(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    model, optimizer = case.start(tmp_path, clip="layer")
    train(model, optimizer, batches(NUM_STEPS), clip="layer")
    expected = result(model, optimizer)
    fault = case.fault(monkeypatch)
    model, optimizer = case.start(tmp_path, clip="layer")
    num_times = disk_file.NUM_RETRIES + 1 if case.owner is DiskCalls else 1
    for number, many in enumerate(batches(NUM_STEPS)):
        fault.at(number, num_times)
        train(model, optimizer, iter([many]), clip="layer")
        the_engine(model).wait()
    assert_same(result(model, optimizer), expected)
    fault.at(3, 1 << 60)
    with pytest.raises(UpdateError, match="gradients are used up, so go on from the last checkpoint"):
        train(model, optimizer, batches(NUM_STEPS), clip="layer")
    fault.at(1 << 62, 0)
    for refused in (optimizer.step, optimizer.state_dict, lambda: optimizer.check_whole("saving")):
        with pytest.raises(UpdateError, match="last checkpoint"):
            refused()
    with pytest.raises(UpdateError):
        train(model, optimizer, batches(2), clip="layer")


def test_the_first_line_says_what_is_the_refuge(capsys: pytest.CaptureFixture[str]) -> None:
    start(clip="layer")
    assert "an update that fails leaves the last checkpoint" in capsys.readouterr().out
    start()
    assert "last checkpoint" not in capsys.readouterr().out


@pytest.mark.parametrize("places", [Place(moments="disk"), "disk"], ids=str)
def test_a_home_whose_states_were_written_in_part_is_refused_from_then_on(
    places: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = start(StreamOptions(places=places), offload_dir=tmp_path)
    train(model, optimizer, steps(1))
    backward(model, 1)
    the_engine(model).wait()
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    with monkeypatch.context() as patch:
        fault = Fault(DiskCalls.write, error, nothing)
        patch.setattr(DiskCalls, "write", lambda *args: fault(*args))
        fault.at(2, 1 << 60)
        optimizer.step()
        with pytest.raises(DiskError, match="written in part .*could not write .*last checkpoint"):
            the_engine(model).wait()
    for refused in (
        lambda: optimizer.check_whole("saving"),
        optimizer.state_dict,
        optimizer.step,
        lambda: mt.full_state_dict(model),
        lambda: mt.accumulate(model, next(steps(1))),
    ):
        with pytest.raises(UpdateError, match="last checkpoint"):
            refused()


def test_sticky_errors_of_a_device_are_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    fault = Case(kernel.Kernel, "update", error).fault(monkeypatch)
    model, optimizer = start()
    backward(model, 0)
    fault.at(0, 1)
    with pytest.raises(RuntimeError, match="illegal memory"):
        optimizer.step()
        the_engine(model).wait()
    assert "tried again" not in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("serial", [False, True])
def test_a_step_that_was_interrupted_is_made_whole_by_the_next_call(serial: bool) -> None:
    options = StreamOptions(serial=serial, lane_delay_seconds=0.0 if serial else 0.001)
    settings = {"precision": "bf16", "optimizer_compression": "8bit"}
    model, optimizer = start(options, numbers={"ema_decay": 0.9}, **settings)
    train(model, optimizer, batches(NUM_STEPS))
    expected = result(model, optimizer)
    # The serial twin runs updates where it is interrupted: only what is around them is looked at.
    ours = ["megatrain/execute", "megatrain/optim/base", "megatrain/optim/commit"]
    ours += [] if serial else ["megatrain/transport", "megatrain/store", "megatrain/optim/updating"]
    model, optimizer = start(options, numbers={"ema_decay": 0.9}, **settings)
    backward(model, 0)
    num_places = interrupted(optimizer.step, None, ours=ours)
    is_refused = []
    for at in range(1, num_places, max(1, num_places // 20)):
        model, optimizer = start(options, numbers={"ema_decay": 0.9}, **settings)
        train(model, optimizer, steps(1))
        backward(model, 1)
        if interrupted(optimizer.step, at, ours=ours) < at:
            break  # a first step has more places
        try:
            optimizer.check_whole("saving")
        except RefusedError as error:
            is_refused.append(str(error))
            optimizer.param_groups[0]["lr"] = 0.5  # is for the next one
        optimizer.step()
        optimizer.check_whole("saving")
        optimizer.param_groups[0]["lr"] = 1e-2
        assert the_engine(model).num_steps == 2, at
        optimizer.zero_grad()
        backward(model, 2)
        optimizer.step()
        assert_same(result(model, optimizer), expected)
    assert is_refused and "call optimizer.step() again" in is_refused[0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_gives_an_interrupted_step_up(caplog: pytest.LogCaptureFixture) -> None:
    """zero_grad, and another backward: the layers that are left do not make it, and are not held back."""
    for gives_up in ("zero_grad", "backward"):
        model, optimizer = start()
        backward(model, 0)
        num_places = interrupted(optimizer.step, None)
        model, optimizer = start()
        backward(model, 0)
        interrupted(optimizer.step, num_places // 2)
        with pytest.raises(RefusedError, match="have not made the step"):
            optimizer.check_whole("saving")
        if gives_up == "zero_grad":
            optimizer.zero_grad()
            optimizer.check_whole("saving")
        backward(model, 1)
        optimizer.step()
        optimizer.check_whole("saving")
        assert "do not make that step" in caplog.text
        counts = {int(optimizer.state[one]["step"]) for one in model.parameters()}
        assert counts == {1, 2}
        caplog.clear()


def test_the_trainer_saves_nothing_half_made(tmp_path: Path) -> None:
    trainer = mt.Trainer(llama(), arguments(tmp_path, max_steps=1), train_dataset=rows())
    trainer.train()
    home = trainer.engine.homes[1]
    home.due.add("an update that an interrupt kept from the queue")
    with pytest.raises(RefusedError, match=f"saving: .*1 layers, the first of them '{home.name}'"):
        trainer.save_model(str(tmp_path / "model"))
    with pytest.raises(RefusedError, match="saving a checkpoint: "):
        trainer._save_checkpoint(trainer.model, None)
    assert [path.name for path in tmp_path.iterdir()] == [LOG_NAME]
    home.due.clear()
    trainer.save_model(str(tmp_path / "model"))
