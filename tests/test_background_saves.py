"""Checkpoints that are written beside the steps: of their moment bit for bit, within their memory, and told of."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import transformers
from hypothesis import given as hypothesis_given
from model_zoo import ARCHITECTURES, make_model
from saving_helpers import AtStep, Gate, files_of, load_weights, make_trainer
from trainer_helpers import Blocks, arguments, assert_equal_weights, llama
from transformers import TrainerCallback, TrainerState

import megatrain as mt
from megatrain.background_saves import BackgroundSaves
from megatrain.base.config import StreamOptions
from megatrain.base.errors import StoppedRunError
from megatrain.save import saving as saving_module
from megatrain.save.checkpoints import damage_of
from megatrain.save.layers import SavedLayers, can_save_by_layer
from megatrain.save.pause import PauseMeter, predicted_pause
from megatrain.save.saving import Saving


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    mt.init(device="cpu")


# What is saved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ARCHITECTURES, ids=str)
def test_weights_are_saved_as_transformers_saves_them(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    plain_trainer = transformers.Trainer(model=make_model(name).to(dtype), args=arguments(tmp_path / "run"))
    plain_trainer.save_model(str(tmp_path / "plain"))
    model = make_model(name).to(dtype)
    mt.init(device="cpu", precision="bf16")
    mt.Trainer(model=model, args=arguments(tmp_path / "run")).save_model(str(tmp_path / "ours"))
    assert can_save_by_layer(model)
    plain, ours = files_of(tmp_path / "plain"), files_of(tmp_path / "ours")
    assert plain.keys() == ours.keys()
    assert all(torch.equal(plain[key], ours[key]) and plain[key].dtype == ours[key].dtype for key in plain)
    others = [{path.name: path.read_text() for path in (tmp_path / of).glob("*.json")} for of in ("plain", "ours")]
    assert others[0] == others[1]


def test_a_module_of_the_users_own_is_saved_by_layer(tmp_path: Path) -> None:
    model = mt.stream(Blocks("dict", tied=True))
    assert can_save_by_layer(model)
    mt.Trainer(model=model, args=arguments(tmp_path)).save_model(str(tmp_path / "ours"))
    assert files_of(tmp_path / "ours").keys() == model.state_dict().keys() - {"head.weight"}


FORMATS = [
    {},
    {"clip": "layer"},
    {"optimizer_compression": "8bit"},
    {"optimizer_compression": "4bit", "master": "bf16", "clip": "layer"},
    {"optimizer_compression": "lossless"},
]
PLACES = ["cpu", "hbm", "disk"]
SPARE_BYTES = [0, 4000, 1 << 30]
# Every two of the three meet; lossless moments do not live on a device.
CASES = [
    (place, settings, SPARE_BYTES[(row + column) % 3])
    for row, settings in enumerate(FORMATS)
    for column, place in enumerate(PLACES)
    if (place, settings) != ("hbm", FORMATS[-1])
]
CASES.append(("cpu", FORMATS[-1], SPARE_BYTES[-1]))


@pytest.mark.parametrize(("place", "settings", "spare_bytes"), CASES, ids=str)
def test_a_checkpoint_is_of_its_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], place: str, spare_bytes: int
) -> None:
    """Against the same run that saves before it goes on."""
    monkeypatch.setattr("megatrain.trainer_checkpoints.spare_host_bytes", lambda _: spare_bytes)
    held: list[tuple[int, int]] = []
    capture = SavedLayers.capture

    def noted(layers: SavedLayers, home: Any, *, copies: bool) -> Any:
        held.append((sum(saving._held_bytes for saving in saving_module._alive), layers.num_bytes(home)))
        return capture(layers, home, copies=copies)

    trainers = []
    for behind in (True, False):
        mt.init(device="cpu", precision="bf16", offload_dir=tmp_path, save_in_background=behind, **settings)
        options = StreamOptions(places=place, lane_delay_seconds=0.002 if behind else 0.0)
        model = mt.stream(llama().bfloat16(), options=options)
        if behind:
            monkeypatch.setattr(SavedLayers, "capture", noted)
        trainers.append(make_trainer(tmp_path / f"{behind}", model, save_steps=1, num_train_epochs=1))
        trainers[-1].train()
        monkeypatch.setattr(SavedLayers, "capture", capture)
    for step in (1, 2, 3):
        one, other = (tmp_path / f"{behind}" / f"checkpoint-{step}" for behind in (True, False))
        assert damage_of(one) == []
        assert_equal_weights(files_of(one), files_of(other))
        settings_files = [(folder / "optimizer.json").read_text() for folder in (one, other)]
        assert settings_files[0] == settings_files[1]
    assert_equal_weights(*(mt.full_state_dict(trainer.model) for trainer in trainers))
    # One layer at a time, or as many as there is spare memory for.
    assert held and all(bytes_ <= max(spare_bytes, own) for bytes_, own in held)


@pytest.mark.parametrize("clip", ["global", "layer"])
def test_without_spare_memory_the_update_waits_for_its_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: str
) -> None:
    mt.init(device="cpu", clip=clip)
    monkeypatch.setattr("megatrain.trainer_checkpoints.spare_host_bytes", lambda _: 0)
    gate = Gate(monkeypatch)
    model = mt.stream(llama())
    trainer = make_trainer(tmp_path, model, {"callbacks": [AtStep(3, lambda: seen.append(before_gate()))]}, max_steps=3)
    seen: list[bool] = []
    at_two: dict[str, torch.Tensor] = {}
    trainer.add_callback(AtStep(2, lambda: at_two.update(mt.full_state_dict(model))))

    def before_gate() -> bool:
        """Step 3 is made, and the first layer still waits for the writer."""
        assert gate.reached.wait(60)
        first = saving_module._alive and next(iter(saving_module._alive))._layers.homes[0]
        is_held_back = not first.updated.is_recorded
        gate.opened.set()
        return is_held_back

    if clip == "layer":
        # Gradients that are used up wait in slabs for their updates, so the backward itself waits for the writer.
        trainer.add_callback(AtStep(2, lambda: threading.Timer(0.5, gate.opened.set).start()))
    trainer.train()
    assert seen == [clip == "global"]
    assert all(torch.equal(load, at_two[name]) for name, load in load_weights(tmp_path / "checkpoint-2").items())


def test_with_spare_memory_steps_go_on_while_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    model = mt.stream(llama())
    trainer = make_trainer(tmp_path, model, max_steps=3)

    def at_three() -> None:
        trainer.engine.wait()  # the updates of step 3 are over, and nothing of checkpoint-2 is written
        assert not gate.opened.is_set() and not (tmp_path / "checkpoint-2").exists()
        gate.opened.set()

    trainer.add_callback(AtStep(3, at_three))
    trainer.train()
    assert damage_of(tmp_path / "checkpoint-2") == damage_of(tmp_path / "checkpoint-3") == []


def test_whoever_changes_weights_by_hand_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.trainer_checkpoints.spare_host_bytes", lambda _: 0)
    gate = Gate(monkeypatch)
    model = mt.stream(llama())
    at_two: dict[str, torch.Tensor] = {}

    def change() -> None:
        threading.Timer(0.2, gate.opened.set).start()
        with torch.no_grad():
            model.lm_head.weight.zero_()

    class AtBegin(TrainerCallback):
        def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                change()

    trainer = make_trainer(tmp_path, model, {"callbacks": [AtBegin()]}, max_steps=3)
    trainer.add_callback(AtStep(2, lambda: at_two.update(mt.full_state_dict(model))))
    trainer.train()
    assert torch.equal(load_weights(tmp_path / "checkpoint-2")["lm_head.weight"], at_two["lm_head.weight"])


# The pause


@hypothesis_given(
    num_bytes=st.integers(1, 10**12),
    spare=st.integers(0, 10**12),
    rate=st.floats(1e6, 1e11),
    step=st.floats(0.0, 1e3),
    clip=st.sampled_from(["global", "layer"]),
)
def test_a_predicted_pause_is_what_is_left_of_the_writing(
    num_bytes: int, spare: int, rate: float, step: float, clip: str
) -> None:
    def pause(*, is_behind: bool = True, spare_bytes: int = spare) -> float:
        return predicted_pause(
            num_bytes, spare_bytes=spare_bytes, bytes_per_second=rate, step_seconds=step, clip=clip, is_behind=is_behind
        )

    before = pause(is_behind=False)
    assert before == num_bytes / rate
    assert 0 <= pause() <= pause(spare_bytes=0) <= before
    assert pause(spare_bytes=0) >= before - 1.25 * step


def test_a_pause_is_what_steps_were_longer() -> None:
    now = [0.0]
    meter = PauseMeter(clock=lambda: now[0])
    for seconds, is_saving in [(9.0, False), (2.0, False), (2.0, False), (5.0, True), (1.0, True), (2.0, False)]:
        meter.begin_step()
        now[0] += seconds
        meter.end_step(is_saving=is_saving)
    meter.add_foreground(0.5)
    assert meter.step_seconds == 2.0  # the first one warms up
    assert meter.take() == 3.5
    assert meter.take() == 0.0


def test_what_a_checkpoint_takes_is_said_before_the_first_step() -> None:
    class Planned:
        step_seconds = 10.0

    def said(rate: float | None, num_bytes: float, plan: Any = None, **how: Any) -> str:
        return BackgroundSaves(bytes_per_second=rate, clip="layer", on_error="warn", **how).said_before(
            int(num_bytes), 0, plan
        )

    told = "takes 20.0 s, of which training waits 10.0 s (predicted; the last of a run is waited for whole)"
    assert said(2e9, 40e9, Planned()).endswith(told)
    assert said(2e9, 40e9, Planned(), is_behind=False).endswith("of which training waits 20.0 s (predicted)")
    assert said(2e9, 40e9).endswith("a checkpoint has 37.3 GiB and takes 20.0 s (predicted)")
    assert said(2e9, 1e9) == said(None, 40e9) == ""


@pytest.mark.parametrize("is_told", [False, True], ids=["at the end", "by Ctrl-C"])
def test_the_last_checkpoint_is_predicted_to_be_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    predicted: list[bool] = []

    def noted(num_bytes: int, *, is_behind: bool, **how: Any) -> float:
        predicted.append(is_behind)
        return predicted_pause(num_bytes, is_behind=is_behind, **how)

    monkeypatch.setattr("megatrain.background_saves.predicted_pause", noted)
    monkeypatch.setattr("megatrain.trainer_checkpoints.disk_write_rate", lambda: 1e9)
    monkeypatch.setattr(PauseMeter, "step_seconds", 1.0)
    trainer = make_trainer(tmp_path, save_steps=1, max_steps=6 if is_told else 3)
    if is_told:
        trainer.add_callback(AtStep(3, lambda: signal.raise_signal(signal.SIGINT)))
        with pytest.raises(StoppedRunError):
            trainer.train()
    else:
        trainer.train()
    assert predicted == [True, True, False]


def test_a_saving_that_never_began_holds_nobody_back(tmp_path: Path) -> None:
    model = mt.stream(llama())
    trainer = make_trainer(tmp_path, model)
    Saving(model, trainer.engine, None, tmp_path)
    assert all(home.captured.is_recorded for home in trainer.engine.homes)
