"""Parts of homes on disk, and parts of one home in different tiers: no bit of a result depends on it."""

from __future__ import annotations

import itertools
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from update_training import COMPRESSIONS, assert_same, batches, result, start, tiny_llama, train

import megatrain as mt
from megatrain.base.config import Config, StreamOptions
from megatrain.base.errors import UserError
from megatrain.execute.engine import engine_of
from megatrain.plan.placement import DISK, DISK_TIER, PARTS, Place, place_homes
from megatrain.plan.rows import disk_bytes, host_bytes
from megatrain.spec.discover import find_layers
from megatrain.spec.homes import Formats, plan_homes
from megatrain.store.disk_memory import DiskMemory
from megatrain.store.memory import HostMemory
from megatrain.store.tier import PAGE_BYTES
from megatrain.transport.disk import DiskWindow

ANY_HOME = Mock(name="a home that no write fails for")

RACES = {"poison": True, "lane_delay_seconds": 0.001}
MIXED = {
    "model.embed_tokens": Place(moments="disk", gradients="disk"),
    "model.layers.0": Place(low="disk"),
    "model.layers.1": "disk",
    "model.layers.2": Place(weights="disk"),
    "resident": Place(moments="disk"),
}


def trained(options: StreamOptions, clip: str = "global", num_steps: int = 4, **config) -> dict[str, torch.Tensor]:
    model, optimizer = start(options, clip=clip, **config)
    train(model, optimizer, batches(num_steps), clip)
    return result(model, optimizer)


# Results


@pytest.mark.parametrize(
    ("precision", "compression", "clip"),
    [
        *(("bf16", compression, "global") for compression in COMPRESSIONS),
        ("fp32", False, "global"),
        ("fp32", "8bit", "layer"),
        ("bf16", "4bit", "layer"),
    ],
)
def test_training_from_disk_gives_the_bits_of_training_from_memory(
    precision: str, compression: bool | str, clip: str, tmp_path: Path
) -> None:
    config = {"precision": precision, "optimizer_compression": compression, "clip": clip}
    truth = trained(StreamOptions(serial=True), **config)
    for places in ("disk", Place(moments="disk"), MIXED):
        assert_same(trained(StreamOptions(places=places, **RACES), offload_dir=tmp_path, **config), truth)
    assert_same(trained(StreamOptions(serial=True, places=MIXED), offload_dir=tmp_path, **config), truth)


@pytest.mark.parametrize("place", [Place(moments="hbm", update="device"), Place(low="hbm", update="device")])
@pytest.mark.parametrize("compression", [False, "4bit"])
def test_parts_on_the_device_are_updated_where_they_are(place: Place, compression: bool | str) -> None:
    config = {"precision": "bf16", "optimizer_compression": compression}
    truth = trained(StreamOptions(serial=True), **config)
    assert_same(trained(StreamOptions(places=place, **RACES), **config), truth)


def test_folders_share_a_home(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two", "three")]
    truth = trained(StreamOptions(serial=True))
    model, optimizer = start(StreamOptions(places="disk", **RACES), offload_dir=folders)
    train(model, optimizer, batches(4))
    assert_same(result(model, optimizer), truth)
    assert len(engine_of(model).memory.disk.store.is_direct) == 3


@pytest.mark.parametrize(
    ("optimizer", "compression"), [(mt.optim.SGD, False), (mt.optim.Lion, "4bit"), (mt.optim.Muon, "8bit")]
)
def test_other_rules_train_from_disk(optimizer: type, compression: bool | str, tmp_path: Path) -> None:
    numbers = {"momentum": 0.9} if optimizer is mt.optim.SGD else {}
    outcome = []
    for options in (StreamOptions(serial=True), StreamOptions(places="disk", **RACES)):
        config = {"offload_dir": tmp_path, "optimizer_compression": compression}
        model, made = start(options, optimizer, numbers, **config)
        train(model, made, batches(3))
        outcome.append(result(model, made))
    assert_same(*outcome)


def test_an_average_of_the_weights_lies_on_disk_too(tmp_path: Path) -> None:
    outcome = []
    for options in (StreamOptions(serial=True), StreamOptions(places="disk", **RACES)):
        model, optimizer = start(options, numbers={"ema_decay": 0.5}, offload_dir=tmp_path)
        train(model, optimizer, batches(3))
        with optimizer.ema_weights():
            average = mt.full_state_dict(model)
        train(model, optimizer, batches(2, seed=5))
        outcome.append({**result(model, optimizer), **{f"average {name}": value for name, value in average.items()}})
    assert_same(*outcome)


def test_a_step_after_the_first_takes_nothing_from_memory(tmp_path: Path) -> None:
    model, optimizer = start(StreamOptions(places=MIXED), offload_dir=tmp_path)
    train(model, optimizer, batches(2))
    memory = engine_of(model).memory
    before = memory.ram_bytes, memory.disk.disk_bytes
    train(model, optimizer, batches(3))
    assert (memory.ram_bytes, memory.disk.disk_bytes) == before


# Others who read and write


def test_what_others_write_between_steps_is_what_is_updated(tmp_path: Path) -> None:
    """What was read ahead across the step boundary is dropped when a state or weight was written meanwhile."""

    def meddled(options: StreamOptions) -> dict[str, torch.Tensor]:
        model, optimizer = start(options, offload_dir=tmp_path, precision="bf16")
        train(model, optimizer, batches(3))
        engine_of(model).wait()
        for parameter in model.parameters():
            optimizer.state[parameter]["exp_avg"].mul_(3.0)
            with torch.no_grad():
                parameter.mul_(1.5)
        train(model, optimizer, batches(2, seed=7))
        held = [optimizer.state[parameter]["exp_avg_sq"] for parameter in model.parameters()]
        train(model, optimizer, batches(1, seed=8))
        for state in held:
            state.add_(1e-3)
        del held
        train(model, optimizer, batches(2, seed=9))
        optimizer.load_state_dict(optimizer.state_dict())
        model.load_state_dict({name: value + 0.25 for name, value in model.state_dict().items()})
        train(model, optimizer, batches(2, seed=10))
        return result(model, optimizer)

    assert_same(meddled(StreamOptions(places="disk", **RACES)), meddled(StreamOptions(serial=True)))


def test_a_state_that_was_held_while_others_were_read_ahead(tmp_path: Path) -> None:
    def meddled(options: StreamOptions) -> dict[str, torch.Tensor]:
        model, optimizer = start(options, offload_dir=tmp_path)
        train(model, optimizer, batches(3))
        held = optimizer.state[model.get_parameter("model.layers.0.self_attn.q_proj.weight")]["exp_avg"]
        if not options.serial:
            engine_of(model).transport._disk_update.flush()  # until all is read ahead
        held.mul_(1000.0)
        del held
        train(model, optimizer, batches(1, seed=7))
        return result(model, optimizer)

    assert_same(meddled(StreamOptions(places="disk")), meddled(StreamOptions(serial=True)))


def test_a_saved_model_and_state_are_those_of_memory(tmp_path: Path) -> None:
    model, optimizer = start(StreamOptions(places="disk"), offload_dir=tmp_path / "homes")
    plain, its_optimizer = start()
    for one, its in ((model, optimizer), (plain, its_optimizer)):
        train(one, its, batches(2))
    model.save_pretrained(tmp_path / "saved")
    loaded = type(tiny_llama()).from_pretrained(tmp_path / "saved")
    assert_same(dict(loaded.state_dict()), mt.full_state_dict(plain))
    fresh, its_fresh = start(StreamOptions(places=MIXED), offload_dir=tmp_path / "homes")
    fresh.load_state_dict(plain.state_dict())
    its_fresh.load_state_dict(its_optimizer.state_dict())
    for one, its in ((fresh, its_fresh), (plain, its_optimizer)):
        train(one, its, batches(2, seed=3))
    assert_same(result(fresh, its_fresh), result(plain, its_optimizer))


# The plan


def test_what_is_over_the_limit_goes_to_disk(tmp_path: Path) -> None:
    truth_model, truth_optimizer = start(precision="bf16")
    train(truth_model, truth_optimizer, batches(3))
    everything = host_bytes(engine_of(truth_model).placement)
    for share in (0.9, 0.6, 0.3):
        model, optimizer = start(precision="bf16", max_ram_gb=share * everything / 1e9, offload_dir=tmp_path)
        engine = engine_of(model)
        assert 0 < disk_bytes(engine.placement)
        train(model, optimizer, batches(3))
        assert_same(result(model, optimizer), result(truth_model, truth_optimizer))


def test_the_last_moments_go_to_disk_first() -> None:
    model = tiny_llama()
    plans = plan_homes(model, find_layers(model), Formats(precision="bf16", master="split"))
    trainable = {id(parameter) for parameter in model.parameters()}

    def parts_on_disk(ram_bytes: int) -> list[tuple[int, str]]:
        places = place_homes(plans, trainable, Config(), StreamOptions(), spare_hbm_bytes=None, ram_bytes=ram_bytes)
        return [
            (number, part)
            for part, (number, plan) in itertools.product(PARTS, enumerate(plans))
            if places[plan].tiers[part] == DISK_TIER
        ]

    assert parts_on_disk(10**9) == []
    all_bytes = 10**6
    ordered: list[tuple[int, str]] = []
    for ram_bytes in range(all_bytes, 0, -4096):
        ordered += [one for one in parts_on_disk(ram_bytes) if one not in ordered]
    parts = [part for _, part in ordered]
    assert [part for part, _ in itertools.groupby(parts)] == ["moments", "low", "weights", "gradients"]
    numbers = [number for number, part in ordered if part == "moments"]
    assert numbers == sorted(numbers, reverse=True)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"moments": "tape"}, "moments='tape' is not known"),
        ({"moments": "hbm"}, 'say update="device"'),
        ({"moments": "disk", "update": "device"}, 'say update="cpu"'),
        ({"update": "gpu"}, "update='gpu' is not known"),
    ],
)
def test_places_that_cannot_be(place: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Place(**place)


def test_a_place_on_disk_needs_a_folder() -> None:
    with pytest.raises(UserError, match="offload_dir"):
        start(StreamOptions(places="disk"))
    with pytest.raises(UserError, match="resident is used outside of layers"):
        start(StreamOptions(places={"resident": DISK}))


# The window


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_slots=st.integers(1, 5),
    order=st.lists(st.integers(0, 5), min_size=1, max_size=30),
    meddles=st.sets(st.integers(0, 29)),
)
def test_a_window_is_a_plain_array(num_slots: int, order: list[int], meddles: set[int], tmp_path: Path) -> None:
    """Pieces in any order, with others who write between: what is opened is what was written last."""
    disk = DiskMemory([tmp_path])
    data = disk.empty(6 * PAGE_BYTES)
    fresh = torch.zeros(1)
    truth = torch.zeros(6 * PAGE_BYTES, dtype=torch.uint8)
    window = DiskWindow(disk, HostMemory(max_bytes=None, pin=False), num_slots=num_slots, slot_bytes=4 * PAGE_BYTES)
    for turn, number in enumerate(order):
        # Ranges overlap by half a page: neighbours share pages.
        piece = slice(number * PAGE_BYTES, min((number + 1) * PAGE_BYTES + PAGE_BYTES // 2, 6 * PAGE_BYTES))
        if turn in meddles:
            window.flush()
            disk.expose()
            window.rest()  # reads ahead what is about to change
            data[piece].fill_(turn)
            truth[piece].fill_(turn)
            window.end_exposures()
        opened, other = window.open(ANY_HOME, [data[piece], fresh], fresh)
        assert other is fresh
        assert torch.equal(opened, truth[piece]), turn
        opened.add_(turn + 1)
        truth[piece].add_(turn + 1)
        window.close()
    window.flush()
    assert torch.equal(data, truth)


def test_a_repeated_order_is_read_ahead(tmp_path: Path) -> None:
    disk = DiskMemory([tmp_path])
    data = disk.empty(8 * PAGE_BYTES).view(8, PAGE_BYTES)
    fresh = torch.zeros(1)
    window = DiskWindow(disk, HostMemory(max_bytes=None, pin=False), num_slots=4, slot_bytes=PAGE_BYTES)
    for _ in range(3):
        for row in data:
            window.open(ANY_HOME, [row, fresh], fresh)
            window.close()
        window.flush()
    # All but the 8 of the first time, and the first one after it, are known by the two before them.
    assert (window.predictor.num_hits, window.predictor.num_misses) == (14, 0)
