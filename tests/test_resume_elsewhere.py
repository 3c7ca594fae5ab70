"""A checkpoint goes on under other plans bit for bit; where formats or rows are others, it is converted and told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from saving_helpers import load_weights, make_trainer
from trainer_helpers import assert_equal_weights, llama
from transformers import TrainerCallback

import megatrain as mt
from megatrain import cli
from megatrain.base.config import StreamOptions
from megatrain.base.errors import UserError
from megatrain.save.checkpoints import MANIFEST_NAME

PLACES = ["cpu", "hbm", "disk"]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    mt.init(device="cpu")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("other", PLACES)
def test_a_checkpoint_goes_on_elsewhere_bit_for_bit(
    tmp_path: Path, place: str, other: str, capsys: pytest.CaptureFixture
) -> None:
    mt.init(device="cpu", precision="bf16", offload_dir=tmp_path, optimizer_compression="8bit")

    def model(where: str, slots: int) -> Any:
        options = StreamOptions(places=where, num_slots=slots)
        return mt.stream(llama(attention_dropout=0.2).bfloat16(), options=options)

    whole = make_trainer(tmp_path / "run", model(place, 3))
    whole.train()
    expected = mt.full_state_dict(whole.model)
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    resumed = make_trainer(tmp_path / "run", model(other, 2))
    resumed.train(resume_from_checkpoint=True)
    assert_equal_weights(mt.full_state_dict(resumed.model), expected)
    assert "going on from checkpoint-4, bit for bit as if it had never stopped" in capsys.readouterr().out


def test_what_changes_the_bits_is_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make_trainer(tmp_path).train()
    shutil.rmtree(tmp_path / "checkpoint-6")
    mt.init(device="cpu", clip="layer")
    changes = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1}
    make_trainer(tmp_path, **changes).train(resume_from_checkpoint=True)
    told = capsys.readouterr().out
    assert "it is another training: clip was global, is layer; per_device_train_batch_size was 2, is 6." in told


SAME, ROUNDED, OTHER = "bit for bit as if it had never stopped", "equal within rounding", "it is another training"


@pytest.mark.parametrize(
    ("settings", "changes", "told"),
    [
        ({}, {}, [SAME]),
        ({"optimizer_compression": "lossless"}, {}, [SAME]),
        ({}, {"learning_rate": 1e-4}, [SAME, "Not used, the checkpoint's goes on: learning_rate was 0.01, is 0.0001."]),
        ({}, {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}, [ROUNDED, "was 2, is 3."]),
        ({}, {"per_device_train_batch_size": 4}, [OTHER, "sequences a step was 6, is 12"]),
        ({}, {"num_train_epochs": 4}, [OTHER, "steps in all was 6, is 12"]),
        ({}, {"seed": 7}, [OTHER, "seed was 42, is 7"]),
        ({}, {"warmup_steps": 2}, [OTHER, "warmup_steps was 1, is 2"]),
        ({"optimizer_compression": "4bit"}, {}, [OTHER, "moments was exact fp32, is 4bit"]),
        ({"logits_in_pieces": True}, {}, [ROUNDED, "logits_in_pieces was None, is True"]),
        ({"tile_tokens": 4}, {}, [ROUNDED, "tile_tokens was None, is 4"]),
        ({}, {"lr_scheduler_kwargs": {"num_cycles": 3}}, [OTHER, "lr_scheduler_kwargs was"]),
        ({}, {"neftune_noise_alpha": 5}, [OTHER, "neftune_noise_alpha was None, is 5"]),
        ({}, {"train_sampling_strategy": "sequential"}, [OTHER, "train_sampling_strategy was random, is sequential"]),
        ({}, {"dataloader_drop_last": True}, [OTHER, "dataloader_drop_last was False, is True"]),
        ({}, {"adam_beta1": 0.5}, [SAME, "Not used, the checkpoint's goes on: adam_beta1 was 0.9, is 0.5."]),
        ({}, {"logging_steps": 2, "eval_steps": 3, "report_to": []}, [SAME]),
    ],
    ids=str,
)
def test_what_goes_on_is_told(
    stopped: Path,
    tmp_path: Path,
    settings: dict[str, Any],
    changes: dict[str, Any],
    told: list[str],
    capsys: pytest.CaptureFixture,
) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    mt.init(device="cpu", precision="bf16", **settings)
    trainer = make_trainer(tmp_path / "run", **changes)
    trainer.add_callback(StopsAtOnce())
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    out = capsys.readouterr().out
    assert all(part in out for part in told), out


def test_without_random_numbers_nothing_goes_on(stopped: Path, tmp_path: Path) -> None:
    """Nor is it taken for a sound checkpoint, with a manifest or without."""
    shutil.copytree(stopped, tmp_path / "run")
    for step in (4, 6):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{step}")
    checkpoint = tmp_path / "run" / "checkpoint-2"
    (checkpoint / "rng_state.pth").unlink()
    (checkpoint / MANIFEST_NAME).unlink()
    with pytest.raises(UserError, match=r"checkpoint-2 has no rng_state\.pth"):
        make_trainer(tmp_path / "run").train(resume_from_checkpoint=str(checkpoint))
    with pytest.raises(UserError, match=r"rng_state\.pth"):
        make_trainer(tmp_path / "run").train(resume_from_checkpoint=True)


def test_what_no_manifest_vouches_for_is_told(stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint-2"
    (checkpoint / MANIFEST_NAME).unlink()
    mt.init(device="cpu", precision="bf16")
    trainer = make_trainer(tmp_path / "run")
    trainer.add_callback(StopsAtOnce())
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert "It has no manifest: nothing tells whether its files are whole" in capsys.readouterr().out


class StopsAtOnce(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a checkpoint of its second of six steps."""
    folder = tmp_path_factory.mktemp("stopped")
    mt.init(device="cpu", precision="bf16")
    make_trainer(folder, save_steps=2).train()
    return folder


MASTERS = [("split", "bf16", "were rounded to bf16"), ("bf16", "split", "the saved masters are bf16")]


@pytest.mark.parametrize(("before", "after", "told"), MASTERS)
def test_masters_are_converted_and_it_is_said(
    tmp_path: Path, before: str, after: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    mt.init(device="cpu", precision="bf16", master=before)
    first = make_trainer(tmp_path, max_steps=2)
    first.train()
    mt.init(device="cpu", precision="bf16", master=after)
    resumed = make_trainer(tmp_path, max_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert told in caplog.text
    saved = load_weights(tmp_path / "checkpoint-2")
    assert all(torch.equal(value.bfloat16(), saved[name]) for name, value in mt.full_state_dict(resumed.model).items())


def test_split_masters_go_on_in_fp32_exactly(tmp_path: Path) -> None:
    mt.init(device="cpu", precision="bf16")
    first = make_trainer(tmp_path, max_steps=2)
    first.train()
    mt.init(device="cpu", precision="fp32")
    resumed = make_trainer(tmp_path, llama(), max_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert_equal_weights(mt.full_state_dict(resumed.model), mt.full_state_dict(first.model))


def test_a_rule_with_the_same_numbers_is_refused_by_name_too(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=2).train()
    with pytest.raises(mt.UserError, match="the saved optimizer is adamw, this one adam: go on with the one"):
        make_trainer(tmp_path, given={"optimizer_cls_and_kwargs": (mt.optim.Adam, {"lr": 1e-3})}).train(
            resume_from_checkpoint=True
        )


def test_other_parameters_are_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=2).train()
    frozen = llama().bfloat16()
    frozen.lm_head.requires_grad_(False)
    with pytest.raises(mt.UserError, match=r"has groups of .* parameters, this one of"):
        make_trainer(tmp_path, frozen).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("moments", [False, "lossless"])
@pytest.mark.parametrize("place", PLACES[:2])
def test_masters_of_weights_that_are_saved_in_fewer_bits_go_on_exactly(
    tmp_path: Path, place: str, moments: bool | str
) -> None:
    """A model that was loaded in bf16 and trains in fp32: its files are bf16."""
    if place == "hbm" and moments:
        pytest.skip("lossless moments do not live on a device")
    mt.init(device="cpu", precision="fp32", optimizer_compression=moments)

    def model() -> Any:
        return mt.stream(llama().bfloat16(), options=StreamOptions(places=place))

    whole = make_trainer(tmp_path / "run", model())
    whole.train()
    expected = mt.full_state_dict(whole.model)
    for step in (4, 6):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{step}")
    assert load_weights(tmp_path / "run" / "checkpoint-2")["lm_head.weight"].dtype == torch.bfloat16
    resumed = make_trainer(tmp_path / "run", model())
    resumed.train(resume_from_checkpoint=True)
    assert_equal_weights(mt.full_state_dict(resumed.model), expected)
    checkpoint = tmp_path / "run" / "checkpoint-6"
    assert cli.run_command(["export", str(checkpoint), str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    assert_equal_weights(load_weights(tmp_path / "out"), expected)


EDITS = [
    lambda settings: [],
    lambda settings: {**settings, "steps": {}},
    lambda settings: {**settings, "steps": {**settings["steps"], "nobody": 1.0}},
    lambda settings: {**settings, "steps": dict.fromkeys(settings["steps"])},
    lambda settings: {key: value for key, value in settings.items() if key != "groups"},
    lambda settings: {**settings, "groups": [{"parameters": g["parameters"]} for g in settings["groups"]]},
    lambda settings: {**settings, "format": 99},
]


@pytest.mark.parametrize("edit", EDITS, ids=range(len(EDITS)))
def test_settings_that_were_edited_are_refused_by_name(stopped: Path, tmp_path: Path, edit: Any) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint-2"
    (checkpoint / MANIFEST_NAME).unlink()
    settings = json.loads((checkpoint / "optimizer.json").read_text())
    (checkpoint / "optimizer.json").write_text(json.dumps(edit(settings)))
    mt.init(device="cpu", precision="bf16")
    with pytest.raises(mt.UserError, match=r"optimizer\.json (is not what|has no)|the saved optimizer"):
        make_trainer(tmp_path / "run").train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize("save_strategy", ["steps", "no"])
def test_a_group_that_cannot_be_saved_is_told_before_the_first_step(
    tmp_path: Path, save_strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path, save_strategy=save_strategy, max_steps=1)
    trainer.create_optimizer().param_groups[0]["mine"] = {"a": 1}
    if save_strategy == "no":
        trainer.train()
        assert "mine={'a': 1} cannot be saved" in caplog.text
        return
    with pytest.raises(mt.UserError, match="mine=.* cannot be saved: make it a number"):
        trainer.train()
    assert trainer.state.global_step == 0
