"""What goes wrong on the way between device, host and disk: it is found where that was asked for, named, done again.

Truth is a run in peace: a fault that passed leaves no trace in any bit.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import closed_later
from copy_faults import Faulty, broken, flip
from torch import nn
from update_training import assert_same, batches, result, start, train

import megatrain as mt
from megatrain.base import faults
from megatrain.base.config import StreamOptions
from megatrain.base.errors import ChangedInTransitError, CorruptionError, DiskError, UpdateError
from megatrain.base.faults import NUM_RETRIES, may_pass
from megatrain.execute.engine import engine_of
from megatrain.optim import commit
from megatrain.optim.base import HomeOptimizer
from megatrain.plan.placement import CPU, HBM, Place
from megatrain.store.disk_calls import DiskCalls
from megatrain.transport import hops

pytestmark = pytest.mark.timeout(120)

NUM_STEPS = 3
NUM_DISK_STEPS = 5
"""Sums of pages are there once a step has passed in which nobody held a view."""
LAYER = "model.layers.1"

HOPS = {
    f"weights of {LAYER} on their way to the device": {},
    "weights of model.embed_tokens on their way to the device": {},
    "weights of resident on their way to the device": {},
    f"gradients of {LAYER} on their way home": {},
    "gradients of lm_head on their way home": {},
    f"an input of {LAYER} on its way to host memory": {"activation_bytes": 0},
    f"an input of {LAYER} on its way back to the device": {"activation_bytes": 0},
    f"states of {LAYER} on their way to the device": {"places": {LAYER: "stream"}},
    f"updated states of {LAYER} on their way home": {"places": {LAYER: "stream"}},
    "weights of model.layers.2 on their way to the device": {"places": {"model.layers.2": "disk"}},
}
"""A hop of a layer -> options of a stream that has it."""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "FIRST_PAUSE_SECONDS", 1e-4)
    monkeypatch.setattr("megatrain.store.disk_file.FIRST_PAUSE_SECONDS", 1e-4)
    monkeypatch.setattr(commit, "FIRST_PAUSE_SECONDS", 1e-4)
    monkeypatch.setattr("megatrain.transport.activations.MIN_BYTES", 1)


def prepared(tmp_path: Path, verifies: bool = True, **options: Any) -> tuple[nn.Module, HomeOptimizer]:
    model, optimizer = start(StreamOptions(**options), offload_dir=tmp_path, verify_transfers=verifies)
    return closed_later(model), optimizer


def finished(model: nn.Module, optimizer: HomeOptimizer) -> dict[str, torch.Tensor]:
    train(model, optimizer, batches(NUM_STEPS))
    return result(model, optimizer)


@functools.cache
def the_truth() -> dict[str, torch.Tensor]:
    return finished(*start(StreamOptions(serial=True)))


def warnings_of(caplog: pytest.LogCaptureFixture, what: str) -> int:
    """How many are there, all of them of this."""
    assert all(what in record.message for record in caplog.records), caplog.messages
    return len(caplog.records)


# Bits that flip


@pytest.mark.parametrize("num_times", [1, NUM_RETRIES])
@pytest.mark.parametrize("what", HOPS)
def test_a_flipped_bit_is_found_named_and_done_again(
    what: str, num_times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    truth = the_truth()
    faulty = Faulty(what, flip, num_times)
    faulty.install(monkeypatch)
    model, optimizer = prepared(tmp_path, **HOPS[what])
    assert_same(finished(model, optimizer), truth)
    assert faulty.num_spoilt == num_times == warnings_of(caplog, what)
    counts = mt.stats(model)
    assert counts["num_mismatches"] == counts["num_retries"] == num_times and counts["num_checks"] > 10 * num_times


@pytest.mark.parametrize("what", [what for what in HOPS if "embed_tokens" not in what])  # of rows that no token uses
def test_without_checks_nobody_would_know(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests above find what does harm."""
    truth = the_truth()
    Faulty(what, flip, 1).install(monkeypatch)
    model, optimizer = prepared(tmp_path, verifies=False, **HOPS[what])
    with pytest.raises(AssertionError):
        assert_same(finished(model, optimizer), truth)
    assert mt.stats(model)["num_checks"] == 0


@pytest.mark.parametrize("what", HOPS)
def test_bits_that_flip_every_time_end_the_run(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = Faulty(what, flip, -1)
    faulty.install(monkeypatch)
    model, optimizer = prepared(tmp_path, **HOPS[what])
    with pytest.raises(CorruptionError, match=f"{re.escape(what)} arrived changed.*last checkpoint"):
        finished(model, optimizer)
        engine_of(model).wait()
    assert faulty.num_spoilt >= NUM_RETRIES + 1


@pytest.mark.parametrize("part", ["weights", "states"])
def test_a_home_that_moves_arrives_whole(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    truth = the_truth()
    faulty = Faulty(f"{part} of {LAYER} on their way to another tier", flip, 1)
    faulty.number = {"weights": 3, "states": 2}[part]  # of weights, on the way back
    faulty.install(monkeypatch)
    model, optimizer = prepared(tmp_path)
    engine, many = engine_of(model), batches(NUM_STEPS)
    for place in (CPU, HBM, CPU):
        engine.mover.move([place if home.name == LAYER else home.place for home in engine.homes])
        train(model, optimizer, [next(many)])
    assert_same(result(model, optimizer), truth)
    assert faulty.num_spoilt == mt.stats(model)["num_mismatches"] == warnings_of(caplog, faulty.what) == 1


def test_weights_that_change_in_host_memory_are_named_and_not_tried_again(tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path)
    train(model, optimizer, batches(2))
    engine = engine_of(model)
    engine.wait()
    home = next(home for home in engine.homes if home.name == LAYER)
    home.wire[77] ^= 1
    with pytest.raises(CorruptionError, match=rf"weights of {LAYER} changed in host memory.*last checkpoint"):
        finished(model, optimizer)
    assert mt.stats(model)["num_retries"] == 0


def test_an_input_that_changes_in_host_memory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepared(tmp_path, activation_bytes=0)
    bring = hops.Hops.bring

    def spoilt(self: hops.Hops, host: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
        if name == LAYER:
            host.view(-1)[5] += 1.0
        bring(self, host, tensor, name)

    monkeypatch.setattr(hops.Hops, "bring", spoilt)
    with pytest.raises(CorruptionError, match=f"an input of {LAYER} changed in host memory"):
        finished(model, optimizer)


class FlippingDisk:
    """Reads of what an owner wrote that come with a flipped bit: so many, once it is armed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_left = self.num_spoilt = 0
        self.is_meant: Callable[[int], bool] = lambda offset: True
        self._lock = threading.Lock()
        read = DiskCalls.read

        def flipped(calls: DiskCalls, fd: int, view: memoryview, offset: int) -> int:
            moved = read(calls, fd, view, offset)
            with self._lock:
                if self.num_left and self.is_meant(offset):
                    self.num_left -= 1
                    self.num_spoilt += 1
                    view[moved // 2] ^= 1
            return moved

        monkeypatch.setattr(DiskCalls, "read", flipped)


ON_DISK = {"moments": Place(moments="disk"), "weights": Place(weights="disk"), "low halves": Place(low="disk")}


@pytest.mark.parametrize("part", ON_DISK)
@pytest.mark.parametrize("num_times", [1, NUM_RETRIES, -1])
def test_a_bit_that_flips_on_disk_is_read_again(
    part: str, num_times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = {"precision": "bf16"}
    model, optimizer = start(StreamOptions(serial=True), **numbers)
    train(closed_later(model), optimizer, batches(NUM_DISK_STEPS))
    truth = result(model, optimizer)
    disk = FlippingDisk(monkeypatch)
    options = StreamOptions(places={LAYER: ON_DISK[part]}, num_update_slots=3)
    model, optimizer = start(options, offload_dir=tmp_path, verify_transfers=True, **numbers)
    closed_later(model)
    many = batches(NUM_DISK_STEPS)
    train(model, optimizer, [next(many) for _ in range(NUM_DISK_STEPS - 1)])
    disk.num_left = num_times
    what = f"{part} of {LAYER} read from {tmp_path}, offset"
    if num_times < 0:
        with pytest.raises(CorruptionError, match=rf"{what} \d+ arrived changed.*last checkpoint"):
            train(model, optimizer, many)
            engine_of(model).wait()
        return
    train(model, optimizer, many)
    engine_of(model).wait()
    assert disk.num_spoilt == num_times and warnings_of(caplog, what) == num_times
    assert mt.stats(model)["num_mismatches"] == num_times
    assert_same(result(model, optimizer), truth)


def test_a_run_says_that_it_checks_and_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    Faulty(f"gradients of {LAYER} on their way home", flip, 2).install(monkeypatch)
    model, optimizer = prepared(tmp_path)
    said: list[str] = []
    engine_of(model).report._say = said.append
    train(model, optimizer, batches(5))
    assert capsys.readouterr().out.splitlines()[-1].endswith(", transfers checked")
    assert said[0].endswith(", 2 transfers made again, 2 of which arrived changed")


# Nothing else changes


SETTINGS = {
    "fp32": {},
    "split, 8bit": {"precision": "bf16", "optimizer_compression": "8bit"},
    "bf16, by layer": {"precision": "bf16", "master": "bf16", "clip": "layer"},
    "lossless": {"optimizer_compression": "lossless"},
}
OPTIONS = {
    "one slot": {"num_slots": 1, "max_drains": 1, "poison": True, "lane_delay_seconds": 0.002},
    "inputs on the host": {"activation_bytes": 0, "lane_delay_seconds": 0.002},
    "streamed": {"places": "stream"},
    "on the device": {"places": {LAYER: "hbm"}},
    "on disk": {"places": Place(weights="disk", low="disk", moments="disk", gradients="disk"), "num_update_slots": 3},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("settings", SETTINGS)
def test_checks_change_no_bit(settings: str, options: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if settings == "lossless" and options in ("streamed", "on the device"):
        pytest.skip("moments in lossless code are updated by the CPU")
    clip = SETTINGS[settings].get("clip", "global")
    states = []
    for stream_options, verifies in ((StreamOptions(serial=True), False), (StreamOptions(**OPTIONS[options]), True)):
        model, optimizer = start(stream_options, offload_dir=tmp_path, verify_transfers=verifies, **SETTINGS[settings])
        train(closed_later(model), optimizer, batches(NUM_DISK_STEPS), clip)
        states.append(result(model, optimizer))
        counts = mt.stats(model)
    assert_same(*states)
    assert counts["num_checks"] > 0 and counts["num_mismatches"] == counts["num_retries"] == 0
    assert warnings_of(caplog, "none at all") == 0


def train_and_write(model: nn.Module, optimizer: HomeOptimizer) -> None:
    many, held = batches(8), []
    parameter = model.get_parameter(f"{LAYER}.mlp.up_proj.weight")
    for step in range(8):
        train(model, optimizer, [next(many)])
        if step in (3, 4):
            held.append(optimizer.state[parameter]["exp_avg"])
        for moment in held:
            moment.mul_(0.5)
        if step == 5:
            held.clear()
            with torch.no_grad():
                parameter.mul_(0.9)
            with optimizer.ema_weights():
                model(**next(batches(1))[0])


@pytest.mark.parametrize("places", [None, "disk", {LAYER: Place(weights="disk", moments="disk")}])
def test_what_others_write_is_no_fault(places: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Into weights, into states, into views that they hold for some steps; averages in place of weights."""
    states = []
    for options, verifies in ((StreamOptions(serial=True, places=places), False), (StreamOptions(places=places), True)):
        numbers = {"ema_decay": 0.9}
        model, optimizer = start(options, offload_dir=tmp_path, verify_transfers=verifies, numbers=numbers)
        train_and_write(closed_later(model), optimizer)
        states.append(result(model, optimizer))
    assert_same(*states)
    assert mt.stats(model)["num_mismatches"] == 0 and warnings_of(caplog, "none at all") == 0


def test_weights_that_somebody_holds_may_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = prepared(tmp_path)
    train(model, optimizer, batches(2))
    state = model.state_dict()
    for _ in range(3):
        state[f"{LAYER}.mlp.up_proj.weight"].mul_(1.5)
        train(model, optimizer, batches(1))
    del state
    train(model, optimizer, batches(1))
    assert mt.stats(model)["num_mismatches"] == 0 and warnings_of(caplog, "none at all") == 0


# Copies that fail


@pytest.mark.parametrize("verifies", [False, True])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), RuntimeError("the link is down")])
@pytest.mark.parametrize("what", HOPS)
def test_a_copy_that_fails_for_a_while_is_made_again(
    what: str,
    error: Exception,
    verifies: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    truth = the_truth()
    Faulty(what, broken(error), NUM_RETRIES).install(monkeypatch)
    model, optimizer = prepared(tmp_path, verifies=verifies, **HOPS[what])
    assert_same(finished(model, optimizer), truth)
    assert mt.stats(model)["num_retries"] == NUM_RETRIES == warnings_of(caplog, what)


@pytest.mark.parametrize(
    ("error", "num_tries"),
    [
        (OSError(5, "Input/output error"), NUM_RETRIES + 1),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), 1),
        (ValueError("a mistake"), 1),
    ],
)
@pytest.mark.parametrize("what", HOPS)
def test_a_copy_that_fails_for_good_ends_the_run(
    what: str, error: Exception, num_tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = Faulty(what, broken(error), -1)
    faulty.install(monkeypatch)
    model, optimizer = prepared(tmp_path, verifies=False, **HOPS[what])
    is_of_update = "states" in what and "CUDA" not in str(error)
    with pytest.raises(UpdateError if is_of_update else type(error), match=re.escape(str(error))):
        finished(model, optimizer)
        engine_of(model).wait()
    # An update is tried again as a whole, unless it was written in part.
    num_updates = commit.NUM_RETRIES + 1 if is_of_update and what.startswith("states") else 1
    assert faulty.num_spoilt == num_tries * num_updates


def test_what_never_passes_is_tried_once() -> None:
    passing = [OSError(5, "Input/output error"), RuntimeError("the link is down"), ChangedInTransitError("weights")]
    lasting = [torch.OutOfMemoryError("memory"), torch.AcceleratorError("CUDA error: illegal address")]
    lasting += [RuntimeError("CUDA error: illegal address"), CorruptionError("weights"), DiskError("after retries")]
    assert all(map(may_pass, passing)) and not any(map(may_pass, lasting))


def test_a_setting_that_is_none_is_refused() -> None:
    with pytest.raises(mt.UserError, match="verify_transfers=1 must be True or False"):
        mt.init(verify_transfers=1)
