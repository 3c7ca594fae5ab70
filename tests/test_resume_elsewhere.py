"""A checkpoint goes on under other plans bit for bit; where formats or rows are others, it is converted and told."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from saving_helpers import load_weights, make_trainer
from trainer_helpers import assert_equal_weights, llama

import megatrain as mt
from megatrain.base.config import StreamOptions

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
    assert "equal within rounding, not bit for bit: per_device_train_batch_size was 2, is 6;" in told
    assert "gradient_accumulation_steps was 3, is 1; clip was global, is layer" in told


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


def test_another_rule_is_refused_by_name(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=2).train()
    with pytest.raises(mt.UserError, match="the saved optimizer is adamw, this one lion: go on with the one"):
        make_trainer(tmp_path, given={"optimizer_cls_and_kwargs": (mt.optim.Lion, {"lr": 1e-3})}).train(
            resume_from_checkpoint=True
        )


def test_other_parameters_are_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=2).train()
    frozen = llama().bfloat16()
    frozen.lm_head.requires_grad_(False)
    with pytest.raises(mt.UserError, match=r"has groups of .* parameters, this one of"):
        make_trainer(tmp_path, frozen).train(resume_from_checkpoint=True)
