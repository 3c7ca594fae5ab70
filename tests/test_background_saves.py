"""Checkpoints that are written beside the steps: of their moment bit for bit, within their memory, and told of."""

from __future__ import annotations

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
from saving_helpers import files_of, load_weights, make_trainer
from trainer_helpers import Blocks, arguments, assert_equal_weights, llama, rows
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import megatrain as mt
from megatrain.background_saves import BackgroundSaves
from megatrain.base.config import StreamOptions
from megatrain.save import saving as saving_module
from megatrain.save.checkpoints import damage_of
from megatrain.save.layers import SavedLayers, can_save_by_layer
from megatrain.save.pause import PauseMeter, predicted_pause
from megatrain.save.saving import Saving
from megatrain.save.tensor_files import Shards


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    mt.init(device="cpu")


class Gate:
    """Holds back the writing of groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        write = Shards.write_group

        def held_back(shards: Shards, tensors: Any) -> None:
            self.reached.set()
            assert self.opened.wait(60)
            write(shards, tensors)

        monkeypatch.setattr(Shards, "write_group", held_back)


class AtStep(TrainerCallback):
    """Calls something at the end of a step."""

    def __init__(self, step: int, call: Any) -> None:
        self.step, self.call = step, call

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.call()


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


# What goes wrong


def fail_to_write(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The disk is full at the group of that number, once."""
    write, calls = Shards.write_group, []

    def failing(shards: Shards, tensors: Any) -> None:
        calls.append(1)
        if len(calls) == at:
            raise OSError(28, "No space left on device")
        write(shards, tensors)

    monkeypatch.setattr(Shards, "write_group", failing)


def test_a_full_disk_is_told_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = make_trainer(tmp_path / "whole")
    whole.train()
    groups = 2 * len(whole.engine.homes) + 1
    fail_to_write(monkeypatch, groups + 3)
    trainer = make_trainer(tmp_path / "run", save_total_limit=1)
    trainer.train()
    assert "checkpoint-4 was not saved (" in caplog.text and "is full" in caplog.text
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoint-6"}
    assert_equal_weights(mt.full_state_dict(trainer.model), mt.full_state_dict(whole.model))
    assert_equal_weights(files_of(tmp_path / "run" / "checkpoint-6"), files_of(tmp_path / "whole" / "checkpoint-6"))


def test_a_full_disk_ends_the_run_where_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mt.init(device="cpu", on_save_error="stop")
    trainer = make_trainer(tmp_path)
    fail_to_write(monkeypatch, 2 * len(trainer.engine.homes) + 4)
    with pytest.raises(OSError, match="is full"):
        trainer.train()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2"}
    assert damage_of(tmp_path / "checkpoint-2") == []


def test_the_best_checkpoint_is_none_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = make_trainer(tmp_path, None, {"eval_dataset": rows(4)}, **changes)
    fail_to_write(monkeypatch, 2 * (2 * len(trainer.engine.homes) + 1) + 2)
    trainer.train()
    # The loss falls, so the last one would have been the best.
    assert trainer.state.best_global_step == 6
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_drops_what_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    gate = Gate(monkeypatch)

    def interrupt() -> None:
        threading.Timer(0.2, gate.opened.set).start()
        raise error

    trainer = make_trainer(tmp_path, None, {"callbacks": [AtStep(3, interrupt)]})
    with pytest.raises(error):
        trainer.train()
    assert list(tmp_path.iterdir()) == []
    assert not any(thread.name.startswith(("megatrain-save", "megatrain-capture")) for thread in threading.enumerate())
    assert all(home.captured.is_recorded for home in trainer.engine.homes)


def test_an_error_of_the_run_comes_behind_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)

    def fail() -> None:
        threading.Timer(0.2, gate.opened.set).start()
        raise RuntimeError("a callback of mine")

    with pytest.raises(RuntimeError, match="a callback of mine"):
        make_trainer(tmp_path, None, {"callbacks": [AtStep(3, fail)]}).train()
    assert damage_of(tmp_path / "checkpoint-2") == []


def test_a_lane_that_fails_ends_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = SavedLayers.capture

    def failing(layers: SavedLayers, home: Any, *, copies: bool) -> Any:
        if home is layers.homes[2]:
            raise RuntimeError("the update lane died")
        return capture(layers, home, copies=copies)

    monkeypatch.setattr(SavedLayers, "capture", failing)
    with pytest.raises(RuntimeError, match="the update lane died"):
        make_trainer(tmp_path).train()
    assert list(tmp_path.iterdir()) == []


# Callbacks


class Looks(TrainerCallback):
    """Of the user's own: saves the model beside the checkpoint, as many do."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, torch.Tensor]] = {}

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        assert damage_of(Path(args.output_dir) / f"checkpoint-{state.global_step}") == []
        self.seen[state.global_step] = {name: value.clone() for name, value in model.state_dict().items()}


class OfTransformers(Looks):
    on_save = lambda self, args, state, control, **kwargs: Looks.on_save(self, args, state, control, **kwargs)  # noqa: E731
    on_save.__module__ = "transformers.integrations.integration_utils"


@pytest.mark.parametrize("callback", [Looks, OfTransformers])
def test_callbacks_find_the_checkpoint_complete(tmp_path: Path, callback: type[Looks]) -> None:
    looks = callback()
    make_trainer(tmp_path, llama(), {"callbacks": [looks]}).train()
    assert list(looks.seen) == [2, 4, 6]
    if callback is Looks:
        for step, seen in looks.seen.items():
            assert_equal_weights(load_weights(tmp_path / f"checkpoint-{step}"), seen)


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

    assert said(2e9, 40e9, Planned()).endswith("takes 20.0 s, of which training waits 10.0 s (predicted)")
    assert said(2e9, 40e9, Planned(), is_behind=False).endswith("of which training waits 20.0 s (predicted)")
    assert said(2e9, 40e9).endswith("a checkpoint has 37.3 GiB and takes 20.0 s (predicted)")
    assert said(2e9, 1e9) == said(None, 40e9) == ""


def test_a_saving_that_never_began_holds_nobody_back(tmp_path: Path) -> None:
    model = mt.stream(llama())
    trainer = make_trainer(tmp_path, model)
    Saving(model, trainer.engine, None, tmp_path)
    assert all(home.captured.is_recorded for home in trainer.engine.homes)
