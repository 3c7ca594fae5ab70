"""A late update, read or drain holds back what depends on it and nothing else, and changes no bit.

Each test holds one piece of one layer's work until all that does not depend on it has been seen to be over. Lanes that
kept the order of submission would never come to that.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import closed_later
from torch import nn
from update_training import assert_same, batches, result, start, train

from megatrain.base.config import StreamOptions
from megatrain.base.fence import Fence
from megatrain.execute.engine import engine_of
from megatrain.optim.base import HomeOptimizer
from megatrain.plan.placement import Place
from megatrain.store.disk import Extent
from megatrain.store.home import Home
from megatrain.transport.slots import Slot

pytestmark = pytest.mark.timeout(300)

LATE = "model.layers.1"
OTHERS = ("model.embed_tokens", "model.layers.0", "model.layers.2", "lm_head")
NUM_STEPS = 4


class Watch:
    """What was seen to be over: ("update", home, number of it) and ("fill", home, number of its update)."""

    def __init__(self) -> None:
        self._seen: list[Hashable] = []
        self._is_new = threading.Condition()

    def note(self, *what: Hashable) -> None:
        with self._is_new:
            self._seen.append(what)
            self._is_new.notify_all()

    def count(self, *what: Hashable) -> int:
        return self._seen.count(what)

    def wait(self, wanted: set[tuple]) -> None:
        with self._is_new:
            is_over = self._is_new.wait_for(lambda: wanted <= set(self._seen), timeout=60)
        assert is_over, f"held back though independent: {wanted - set(self._seen)}"


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Sees the updates and fills of all models."""
    seen, run, fill = Watch(), HomeOptimizer._run, Slot.fill

    def watched_run(self: HomeOptimizer, engine: Any, home: Home, *args: Any) -> None:
        run(self, engine, home, *args)
        seen.note("updated", home.name)
        seen.note("update", home.name, seen.count("updated", home.name))

    def watched_fill(self: Slot, home: Home, filled: Fence) -> None:
        number = seen.updates_queued(home)
        fill(self, home, filled)
        filled.when_recorded(lambda: seen.note("fill", home.name, number))

    first_versions: dict[Home, int] = {}
    seen.updates_queued = lambda home: home.version - first_versions.setdefault(home, home.version)
    monkeypatch.setattr(HomeOptimizer, "_run", watched_run)
    monkeypatch.setattr(Slot, "fill", watched_fill)
    return seen


def trained(options: StreamOptions, clip: str = "global", **settings: Any) -> dict[str, torch.Tensor]:
    model, optimizer = start(options, clip=clip, **settings)
    return finish(model, optimizer, clip)


def finish(model: nn.Module, optimizer: HomeOptimizer, clip: str = "global") -> dict[str, torch.Tensor]:
    closed_later(model)
    train(model, optimizer, batches(NUM_STEPS), clip)
    return result(model, optimizer)


def hold_update(watch: Watch, monkeypatch: pytest.MonkeyPatch, wanted: set[tuple], number: int = 2) -> None:
    """The late layer's update of this number (1 is the first) waits for what is wanted."""
    run = HomeOptimizer._run

    def held(self: HomeOptimizer, engine: Any, home: Home, *args: Any) -> None:
        if home.name == LATE and watch.count("updated", LATE) == number - 1:
            watch.wait(wanted)
        run(self, engine, home, *args)

    monkeypatch.setattr(HomeOptimizer, "_run", held)


def hold_reads(watch: Watch, monkeypatch: pytest.MonkeyPatch, extent: Extent, wanted: set[tuple]) -> list[Fence]:
    """Reads of the extent, from its first after the first step on, end when what is wanted was seen. Returns them."""
    read, held = Extent.read, []

    def late_read(self: Extent, offset: int, tensor: torch.Tensor) -> Fence:
        fence = read(self, offset, tensor)
        if self is not extent:
            return fence
        late = Fence()

        def record() -> None:
            try:
                watch.wait(wanted)
                fence.wait()
            except BaseException as error:  # noqa: BLE001 - whoever waits for the read has to see it
                late.fail(error)
            else:
                late.record()

        threading.Thread(target=record, daemon=True).start()
        held.append(late)
        return late

    monkeypatch.setattr(Extent, "read", late_read)
    return held


def test_a_late_update_lets_other_updates_and_fills_go_on(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = trained(StreamOptions(serial=True))
    watch.__init__()
    wanted = {("update", name, 2) for name in OTHERS} | {("fill", name, 2) for name in ("model.layers.2", "lm_head")}
    hold_update(watch, monkeypatch, wanted)
    places = {LATE: "cpu", **dict.fromkeys(OTHERS, "stream")}
    assert_same(trained(StreamOptions(places=places, num_slots=4)), truth)
    assert watch.count("update", LATE, NUM_STEPS)


def test_late_weights_on_disk_let_other_reads_go_on(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """More reads than there are host slots pass by the late one."""
    truth = trained(StreamOptions(serial=True))
    model, optimizer = start(StreamOptions(places=Place(weights="disk"), num_slots=4), offload_dir=tmp_path)
    engine = engine_of(model)
    train(model, optimizer, [next(batches(1))])
    engine.wait()
    watch.__init__()
    home = next(home for home in engine.homes if home.name == LATE)
    extent, _ = engine.memory.disk.locate(home.wire)
    wanted = {("fill", name, 1) for name in ("model.layers.2", "lm_head")}
    held = hold_reads(watch, monkeypatch, extent, wanted)
    many = batches(NUM_STEPS)
    next(many)
    train(closed_later(model), optimizer, many)
    assert_same(result(model, optimizer), truth)
    assert len(held) >= NUM_STEPS - 1


def test_late_states_on_disk_let_updates_in_memory_go_on(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    truth = trained(StreamOptions(serial=True))
    watch.__init__()
    options = StreamOptions(places={LATE: Place(moments="disk")}, num_slots=4)
    model, optimizer = start(options, offload_dir=tmp_path)
    states = optimizer.state[model.get_parameter(f"{LATE}.mlp.up_proj.weight")]["exp_avg"]
    extent, _ = engine_of(model).memory.disk.locate(states)
    wanted = {("update", name, 1) for name in OTHERS} | {("fill", name, 1) for name in ("model.layers.2", "lm_head")}
    held = hold_reads(watch, monkeypatch, extent, wanted)
    del states
    assert_same(finish(model, optimizer), truth)
    assert held


def test_a_late_update_in_the_backward_keeps_its_own_slab_alone(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """clip="layer", two slabs: while the late update keeps one, the drains of all others go through the other."""
    truth = trained(StreamOptions(serial=True), clip="layer")
    watch.__init__()
    hold_update(watch, monkeypatch, {("update", name, 2) for name in OTHERS})
    assert_same(trained(StreamOptions(places={LATE: "stream"}, max_drains=1), clip="layer"), truth)
    assert watch.count("update", LATE, NUM_STEPS)
