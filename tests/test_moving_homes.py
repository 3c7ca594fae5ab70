"""Homes that move between host memory and the device between two steps: no bit of a result changes."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from update_training import COMPRESSIONS, assert_same, batches, result, start, train

import megatrain as mt
from megatrain.base.config import StreamOptions
from megatrain.base.errors import UserError
from megatrain.execute.engine import Engine, engine_of
from megatrain.plan.placement import CPU, HBM, STREAM, Place
from megatrain.store.lending import Lending
from megatrain.transport.slots import State

RACES = {"poison": True, "lane_delay_seconds": 0.001}
MOMENTS_ON_DEVICE = Place(moments="hbm", update="device")
PLACES = [CPU, HBM, STREAM, MOMENTS_ON_DEVICE]


def move(engine: Engine, places: dict[str, Place]) -> None:
    """As a run does at a step boundary."""
    assert engine.mover.is_free()
    engine.mover.move([places.get(home.name, home.place) for home in engine.homes])


def trained(moves: list[dict[str, Place]], options: StreamOptions, clip: str = "global", **config: Any) -> dict:
    """Weights and states after a step, each of the moves with a step after it."""
    model, optimizer = start(options, clip=clip, **config)
    steps = batches(1 + len(moves))
    train(model, optimizer, [next(steps)], clip)
    for places, step in zip(moves, steps, strict=True):
        move(engine_of(model), places)
        train(model, optimizer, [step], clip)
    return result(model, optimizer)


def everywhere(place: Place) -> dict[str, Place]:
    return {name: place for name in ("model.embed_tokens", *(f"model.layers.{n}" for n in range(3)), "lm_head")}


MOVES = [
    {"model.embed_tokens": HBM, "model.layers.0": HBM},
    {"model.layers.0": STREAM, "model.layers.1": HBM, "lm_head": MOMENTS_ON_DEVICE},
    everywhere(HBM),
    everywhere(CPU),
]


@pytest.mark.parametrize(
    ("precision", "compression", "clip", "master"),
    [
        *(("bf16", compression, "global", None) for compression in COMPRESSIONS if compression != "lossless"),
        ("fp32", False, "global", None),
        ("fp32", "8bit", "layer", None),
        ("bf16", "4bit", "layer", "bf16"),
        ("bf16", "8bit", "global", "bf16"),
    ],
)
def test_no_bit_depends_on_when_a_home_moved(
    precision: str, compression: bool | str, clip: str, master: str | None
) -> None:
    config = {"precision": precision, "optimizer_compression": compression, "clip": clip, "master": master}
    truth = trained([{}] * 4, StreamOptions(serial=True), **config)
    assert_same(trained(MOVES, StreamOptions(**RACES), **config), truth)
    assert_same(trained(MOVES, StreamOptions(serial=True), **config), truth)
    # With rooms, slots and lanes that were made for homes on the device.
    options = StreamOptions(places={"model.layers.1": "hbm"}, room_bytes=2**20, device_room_bytes=2**20, **RACES)
    assert_same(trained(MOVES, options, **config), truth)


@pytest.mark.parametrize("clip", ["global", "layer"])
def test_averages_and_other_rules_move_too(clip: str) -> None:
    for optimizer, numbers in ((mt.optim.AdamW, {"ema_decay": 0.9}), (mt.optim.Lion, {}), (mt.optim.Muon, {})):
        results = []
        for moves in ([{}] * 4, MOVES):
            model, made = start(StreamOptions(**RACES), optimizer, numbers, precision="bf16", clip=clip)
            for places, step in zip([{}, *moves], batches(5), strict=True):
                move(engine_of(model), places)
                train(model, made, [step], clip)
            results.append(result(model, made))
        assert_same(*results)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from([*everywhere(CPU)]), st.sampled_from(PLACES), max_size=5),
            st.integers(1, 4),
            st.sampled_from(["train", "evaluate", "look", "nothing"]),
        ),
        max_size=5,
    ),
    st.sampled_from([False, "8bit", "4bit"]),
)
def test_any_sequence_of_moves_changes_nothing(moves: list[tuple], compression: bool | str) -> None:
    def run(is_moved: bool) -> dict[str, torch.Tensor]:
        model, optimizer = start(StreamOptions(**RACES), precision="bf16", optimizer_compression=compression)
        engine, steps = engine_of(model), batches(1 + len(moves))
        train(model, optimizer, [next(steps)])
        logits = []
        for (places, num_slots, what), step in zip(moves, steps, strict=True):
            if is_moved:
                move(engine, places)
                engine.mover.resize_slots(num_slots)
                assert {**dict(zip([h.name for h in engine.homes], engine.mover.places, strict=True)), **places} == {
                    home.name: home.place for home in engine.homes
                }
            if what == "evaluate":
                with torch.no_grad():
                    logits.append(model(**step[0]).logits)
            if what == "look":
                logits += [value.clone() for value in result(model, optimizer).values()]
            if what != "nothing":
                train(model, optimizer, [step])
        seen = {str(number): tensor for number, tensor in enumerate(logits)}
        return seen | result(model, optimizer)

    assert_same(run(is_moved=True), run(is_moved=False))


def test_a_moved_home_is_where_its_place_says_and_its_old_memory_is_free() -> None:
    model, optimizer = start(precision="bf16")
    engine = engine_of(model)
    train(model, optimizer, batches(2))
    home = next(home for home in engine.homes if home.name == "model.layers.0")
    memory, version, before = engine.memory, home.version, engine.mover.part_bytes(home)
    held_bytes = memory.ram_bytes
    move(engine, {home.name: HBM})
    gc.collect()
    assert (home.place, home.version) == (HBM, version)
    # In pages of host memory; gradients are cut of a room that stays.
    freed_bytes = held_bytes - memory.ram_bytes
    assert freed_bytes >= before["weights"] + before["low"] + before["moments"]
    assert engine.mover.part_bytes(home) == before
    assert engine.placement.places[engine.placement.plans[engine.homes.index(home)]] == HBM
    assert engine.mover.device_bytes(home) == 0
    state = next(own for parameter, own in optimizer._states.items() if parameter._home is home)
    pointers = {name: tensor.data_ptr() for name, tensor in state.items()}
    train(model, optimizer, batches(2, seed=2))
    assert {name: tensor.data_ptr() for name, tensor in state.items()} == pointers, "updates run on what moved"
    assert home.version == version + 2
    move(engine, {home.name: CPU})
    assert memory.ram_bytes == held_bytes


def test_a_moved_home_crosses_no_link_and_comes_back_into_slots() -> None:
    model, optimizer = start()
    engine = engine_of(model)
    train(model, optimizer, batches(2))
    move(engine, everywhere(HBM))
    before = mt.stats(model)["num_transfers"]
    train(model, optimizer, batches(2))
    assert mt.stats(model)["num_transfers"] == before
    move(engine, everywhere(CPU))
    train(model, optimizer, batches(2))
    late = mt.stats(model)["num_late_transfers"]
    train(model, optimizer, batches(3))
    assert mt.stats(model)["num_transfers"] > before
    # The order is learned once more, in one step. The first visit of a step is late in every run: nobody fetches what
    # is yet to be updated.
    assert mt.stats(model)["num_late_transfers"] == late + 3


def test_slots_are_added_and_taken_away() -> None:
    model, optimizer = start(StreamOptions(num_slots=1))
    engine = engine_of(model)
    train(model, optimizer, batches(2))
    sizes = [slot.buffer.numel() for slot in engine.transport.slots.slots]
    engine.mover.resize_slots(3)
    more = [slot.buffer.numel() for slot in engine.transport.slots.slots]
    assert more == [sizes[0]] * 2 + sizes and engine.placement.options.num_slots == 3
    train(model, optimizer, batches(2))
    engine.mover.resize_slots(1)
    assert [slot.buffer.numel() for slot in engine.transport.slots.slots] == sizes
    assert all(slot.state is not State.IN_USE for slot in engine.transport.slots.slots)
    train(model, optimizer, batches(2))


def test_nothing_is_free_while_somebody_holds_something() -> None:
    model, optimizer = start(numbers={"ema_decay": 0.9})
    engine = engine_of(model)
    (step,) = batches(1)
    mt.accumulate(model, step)
    assert not engine.mover.is_free(), "gradients wait for their update"
    optimizer.step()
    assert not engine.mover.is_free(), "and are still there"
    optimizer.zero_grad()
    assert engine.mover.is_free()
    parameter = next(model.parameters())
    for take in (
        lambda: model.state_dict(),
        lambda: optimizer.state_dict(),
        lambda: optimizer.state[parameter]["exp_avg"].view(-1),
    ):
        held = take()
        assert not engine.mover.is_free()
        del held
        gc.collect()
        assert engine.mover.is_free()
    with optimizer.ema_weights():
        assert not engine.mover.is_free()
    assert engine.mover.is_free()
    loss = model(**step[0]).loss
    loss.backward()
    held = parameter.grad
    optimizer.step()
    optimizer.zero_grad()
    del loss
    assert held is not None and engine.mover.is_free(), "a gradient that was dropped is theirs alone"


def test_what_was_lent_on_a_device_may_have_aliases_that_nobody_counts() -> None:
    lending = Lending()
    lending.lend(torch.zeros(3))
    assert not lending.has_lent_on_device
    alias = lending.lend(torch.zeros(3, device="meta")).detach()
    gc.collect()
    assert not lending.is_any_out and lending.has_lent_on_device and alias.numel()
    model, optimizer = start()
    engine = engine_of(model)
    train(model, optimizer, batches(1))
    move(engine, {"model.layers.0": HBM})
    optimizer._lending.has_lent_on_device = True
    move(engine, {"model.layers.1": HBM, "model.layers.0": MOMENTS_ON_DEVICE})
    with pytest.raises(UserError, match="model.layers.0 cannot leave the device: somebody may hold a view of"):
        move(engine, {"model.layers.0": CPU})


def test_what_cannot_move_stays(tmp_path: Path) -> None:
    model, _ = start(StreamOptions(places={"model.layers.1": Place(moments="disk")}), offload_dir=tmp_path)
    engine = engine_of(model)
    may = {home.name for home in engine.homes if engine.mover.may_move(home)}
    assert may == {"model.embed_tokens", "model.layers.0", "model.layers.2", "lm_head"}
    lossless, _ = start(optimizer_compression="lossless")
    engine = engine_of(lossless)
    assert not any(engine.mover.may_move(home) for home in engine.homes)


def test_a_home_without_a_slot_does_not_leave_the_device() -> None:
    model, optimizer = start(StreamOptions(places="hbm"))
    engine = engine_of(model)
    train(model, optimizer, batches(1))
    with pytest.raises(UserError, match="model.embed_tokens cannot leave the device: there is no slot"):
        move(engine, everywhere(CPU))
    assert set(engine.mover.places[:-1]) == {HBM}
    train(model, optimizer, batches(1))


def test_a_home_that_host_memory_has_no_room_for_stays_whole() -> None:
    model, optimizer = start(precision="bf16")
    engine = engine_of(model)
    train(model, optimizer, batches(1))
    move(engine, {"model.layers.0": HBM})
    engine.memory.max_bytes = engine.memory.ram_bytes
    truth = {name: value.clone() for name, value in result(model, optimizer).items()}
    gc.collect()
    with pytest.raises(UserError, match=r"model.layers.0 needs .* of host memory, and 0 B are free"):
        move(engine, {"model.layers.0": CPU})
    assert engine.mover.places[1] == HBM
    assert_same(result(model, optimizer), truth)


@pytest.mark.parametrize("num_calls", range(1, 6))
def test_an_interrupt_leaves_a_home_here_or_there(num_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at any of the moments of the last step of a move."""
    from megatrain.execute import mover

    truth = trained([{}, {}], StreamOptions())
    model, optimizer = start()
    engine, steps = engine_of(model), batches(3)
    train(model, optimizer, [next(steps)])
    whole, left = mover._take_over, [num_calls]

    def torn(parts: list) -> None:
        monkeypatch.setattr(mover, "_take_over", whole)
        for part in parts[: left[0] - 1]:
            part()
        raise KeyboardInterrupt

    monkeypatch.setattr(mover, "_take_over", torn)
    with pytest.raises(KeyboardInterrupt):
        move(engine, {"model.layers.0": HBM})
    home = engine.homes[1]
    assert home.place == HBM
    train(model, optimizer, steps)
    assert_same(result(model, optimizer), truth)


def test_a_resumed_state_and_a_new_group_find_the_moved_home(tmp_path: Path) -> None:
    model, optimizer = start(precision="bf16", optimizer_compression="8bit")
    train(model, optimizer, batches(2))
    move(engine_of(model), {"model.layers.0": HBM, "model.layers.1": STREAM})
    saved = {"model": mt.full_state_dict(model), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "state.pt")
    del saved
    train(model, optimizer, batches(2, seed=5))
    truth = result(model, optimizer)
    other, its_optimizer = start(precision="bf16", optimizer_compression="8bit")
    loaded = torch.load(tmp_path / "state.pt")
    move(engine_of(other), {"model.layers.2": HBM})
    other.load_state_dict(loaded["model"])
    its_optimizer.load_state_dict(loaded["optimizer"])
    train(other, its_optimizer, batches(2, seed=5))
    assert_same(result(other, its_optimizer), truth)


def test_places_are_told_apart_by_what_has_to_be_copied() -> None:
    assert [part for part in ("weights", "low", "moments", "gradients") if CPU.is_apart(part, STREAM)] == [
        "low",
        "moments",
    ], "weights and gradients are page-locked anyway"
    assert not any(STREAM.is_apart(part, CPU) for part in ("weights", "low", "moments", "gradients"))
    assert all(CPU.is_apart(part, HBM) for part in ("weights", "low", "moments", "gradients"))
    assert dataclasses.replace(HBM, weights="ram").is_apart("weights", HBM)
