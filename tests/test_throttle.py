"""A link that is held down to a rate: how long copies take by a clock that is made up, who waits, the same bits."""

from __future__ import annotations

import dataclasses
import functools
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_helpers import silent, small_work
from comparing import assert_equal, closed_later
from planning_helpers import builtin
from update_training import batches, result, start, train

import megatrain as mt
from megatrain.base.config import Config, StreamOptions
from megatrain.bench.streamed import measure_streamed
from megatrain.execute.engine import engine_of
from megatrain.plan.machines import MACHINES
from megatrain.plan.planner import Planner
from megatrain.plan.workload import Workload
from megatrain.transport import hops
from megatrain.transport import throttle as of_throttle
from megatrain.transport.hops import Hops
from megatrain.transport.lane import Lane
from megatrain.transport.throttle import TO_DEVICE, TO_HOST, Throttle


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    mt.init()


class Clock:
    """Goes on when somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self._lock = threading.Lock()
        made_up = types.SimpleNamespace(perf_counter=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(of_throttle, "time", made_up)

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds
            self.slept.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def tensors(num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)


# How long


def test_each_way_has_its_rate_and_no_credit_for_rest(clock: Clock) -> None:
    throttle = Throttle(10.0)
    assert throttle.begin(TO_DEVICE, 50) == 105.0
    assert throttle.begin(TO_DEVICE, 20) == 107.0, "behind the first"
    assert throttle.begin(TO_HOST, 30) == 103.0, "beside both"
    throttle.wait(107.0)
    assert clock.now == 107.0
    clock.now = 200.0
    throttle.wait(150.0)
    assert clock.now == 200.0 and throttle.begin(TO_HOST, 10) == 201.0


def test_a_copy_is_as_slow_as_the_throttle_and_a_slower_one_waits_for_nothing(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Hops(throttle=Throttle(10.0))
    target, source = tensors(80)
    held.move(target, source, "weights", TO_DEVICE)
    assert clock.now == 108.0 and target.equal(source)
    held.move(target, source, "a copy that crosses no link")
    assert clock.slept == [8.0]
    copy_ = functools.partial(torch.Tensor.copy_)

    def slow(target: torch.Tensor, source: torch.Tensor) -> None:
        clock.now += 20.0
        copy_(target, source)

    monkeypatch.setattr("megatrain.transport.hops.copy_", slow)
    held.send(source, target, "a layer")
    assert (clock.now, clock.slept) == (128.0, [8.0])


def test_what_goes_down_is_waited_for_at_its_end_so_that_the_next_comes_up_beside_it(clock: Clock) -> None:
    held = Hops(throttle=Throttle(10.0))
    target, source = tensors(50)
    begun = held.begin(target, source, "states", TO_HOST)
    held.move(*tensors(40), "states", TO_DEVICE)
    assert clock.now == 104.0
    held.end(begun)
    assert clock.now == 105.0


# Who waits


def test_nobody_waits_but_who_needs_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    is_asleep, may_go_on = threading.Event(), threading.Event()

    def sleep(_: float) -> None:
        is_asleep.set()
        assert may_go_on.wait(60)
        monkeypatch.setattr(of_throttle, "time", types.SimpleNamespace(perf_counter=lambda: 1e9))

    monkeypatch.setattr(of_throttle, "time", types.SimpleNamespace(perf_counter=lambda: 0.0, sleep=sleep))
    held, cpu = Hops(throttle=Throttle(1.0)), torch.device("cpu")
    h2d, d2h = Lane("h2d", cpu), Lane("d2h", cpu)
    target, source = tensors(8)
    filled = h2d.submit(lambda: held.move(target, source, "weights", TO_DEVICE))
    needs_it = d2h.submit(lambda: None, after=(filled,))
    assert is_asleep.wait(60)
    d2h.submit(lambda: held.move(*tensors(0), "nothing", TO_HOST)).wait()
    assert not filled.is_recorded and not needs_it.is_recorded
    may_go_on.set()
    needs_it.wait()
    for lane in (h2d, d2h):
        lane.close()


# Runs

WAYS: dict[str, dict[str, Any]] = {
    "lanes": {},
    "inputs in host memory": {"options": StreamOptions(activation_bytes=0)},
    "states through the device": {"options": StreamOptions(places="stream")},
    "checked": {"verify_transfers": True},
    "on disk": {"options": StreamOptions(places="disk")},
    "by layer": {"clip": "layer"},
}


def run(many: list[Any], rate: float | None, way: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    options, settings = way.get("options"), {name: value for name, value in way.items() if name != "options"}
    model, optimizer = start(options, max_link_gb_s=rate, **settings)
    closed_later(model)
    train(model, optimizer, iter(many), settings.get("clip", "global"))
    engine_of(model).transport.quiesce()
    return result(model, optimizer), mt.stats(model)


@pytest.mark.parametrize("name", WAYS)
def test_a_run_on_a_slower_link_has_the_same_bits(
    name: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    way = {**WAYS[name], **({"offload_dir": tmp_path} if name == "on disk" else {})}
    monkeypatch.setattr("megatrain.transport.activations.MIN_BYTES", 0)
    many = list(batches(3))
    free, _ = run(many, None, way)
    assert not clock.slept
    begun: list[tuple[str, int]] = []
    copied: list[int] = []
    begin, copy_ = Throttle.begin, hops.copy_

    def counted(self: Throttle, way: str, num_bytes: int) -> float:
        begun.append((way, num_bytes))
        return begin(self, way, num_bytes)

    def copy_counted(target: torch.Tensor, source: torch.Tensor) -> None:
        copied.append(target.nbytes)
        copy_(target, source)

    monkeypatch.setattr(Throttle, "begin", counted)
    monkeypatch.setattr(hops, "copy_", copy_counted)
    held, stats = run(many, 1.0, way)
    assert_equal(held, free)
    crossed = {way: sum(num_bytes for of, num_bytes in begun if of == way) for way in (TO_DEVICE, TO_HOST)}
    assert sum(crossed.values()) == sum(copied), "nothing goes past it"
    # Gradients, their norms and inputs go home.
    inputs, num_norms = stats["offloaded_activation_bytes"], 30 * len(many)
    assert (inputs > 0) == (name == "inputs in host memory")
    states = crossed[TO_HOST] - stats["drained_bytes"] - inputs - 4 * num_norms
    assert (states > 0) == (name == "states through the device") and states >= 0
    assert crossed[TO_DEVICE] > inputs + states, "weights come up beside them"
    assert clock.now - 100.0 >= max(crossed.values()) / 1e9 * (1 - 1e-9)
    assert stats["num_retries"] == 0


# Plans, settings, words


def test_plans_take_the_slower_of_the_link_and_its_throttle() -> None:
    machine = MACHINES["h200-128gb"]
    slow = machine.with_link(12e9)
    assert (slow.h2d_bytes_per_second, slow.d2h_bytes_per_second) == (12e9, 12e9)
    assert slow.pageable_h2d_bytes_per_second == machine.pageable_h2d_bytes_per_second == 8.5e9
    assert machine.with_link(None) == machine.with_link(1e12) == machine
    spec, workload = builtin("qwen2.5-tiny"), Workload(num_sequences=8, length=64, rows=4)
    held = Planner(machine, spec, workload, Config(max_link_gb_s=12)).best()
    told = Planner(slow, spec, workload, Config()).best()
    assert held is not None and told is not None and held.machine == slow
    assert (held.choice, held.step_seconds) == (told.choice, told.step_seconds)


@pytest.mark.parametrize("rate", [0, -1, 0.0001, True, "12", float("nan"), 1e10])
def test_a_rate_that_cannot_be_is_refused(rate: Any) -> None:
    with pytest.raises(mt.UserError, match="max_link_gb_s=.* must be a number of GB"):
        mt.init(max_link_gb_s=rate)


def test_the_first_line_says_it_and_a_benchmark_takes_it(
    clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measure_streamed(dataclasses.replace(small_work(tmp_path), max_link_gb_s=12.5), silent)
    assert "copies, in place of a link, held down to 12.5 GB/s each way" in capsys.readouterr().out
    assert len(clock.slept) > 0 and len(found["step_seconds"]) == 5
    start()
    assert "link" not in capsys.readouterr().out
