"""megatrain.Trainer with layers on a GPU. Skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from trainer_helpers import arguments, assert_equal_weights, llama, rows, train

import megatrain as mt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GPU_LOSS_RTOL = 1e-5
"""fp32 on one GPU against fp32 on the same GPU: the updates round differently (CPU kernel, torch's fused AdamW)."""


@pytest.fixture(autouse=True)
def default_device() -> Iterator[None]:
    mt.init()
    yield
    mt.init(device="cpu")  # as trainer_helpers has it


def test_losses_are_those_of_transformers_on_the_same_gpu(tmp_path: Path) -> None:
    given = {"eval_dataset": rows(4)}
    logs = []
    for trainer_class in (transformers.Trainer, mt.Trainer):
        trainer, _ = train(trainer_class, tmp_path, given=given, use_cpu=False, eval_strategy="epoch")
        logs.append([entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history[:-1]])
    assert trainer.engine.device.type == "cuda"
    assert logs[1] == pytest.approx(logs[0], rel=GPU_LOSS_RTOL)


def test_losses_are_handed_back_on_the_host(tmp_path: Path) -> None:
    devices = []

    class Watched(mt.Trainer):
        def training_step(self, *args: object) -> torch.Tensor:
            loss = super().training_step(*args)
            devices.append(loss.device.type)
            return loss

    train(Watched, tmp_path, use_cpu=False, max_steps=2)
    assert devices == ["cpu"] * 6


def test_a_resumed_run_ends_bit_equal(tmp_path: Path) -> None:
    whole, _ = train(mt.Trainer, tmp_path / "whole", llama(attention_dropout=0.2), use_cpu=False)
    train(
        mt.Trainer, tmp_path / "part", llama(attention_dropout=0.2), use_cpu=False, save_strategy="steps", save_steps=2
    )
    args = arguments(tmp_path / "part", use_cpu=False)
    resumed = mt.Trainer(model=llama(attention_dropout=0.2), args=args, train_dataset=rows())
    resumed.train(resume_from_checkpoint=str(tmp_path / "part" / "checkpoint-2"))
    assert_equal_weights(mt.full_state_dict(resumed.model), mt.full_state_dict(whole.model))


def test_a_stream_on_the_cpu_of_a_machine_with_a_gpu(tmp_path: Path) -> None:
    mt.init(device="cpu")
    trainer, _ = train(mt.Trainer, tmp_path, use_cpu=False, max_steps=2)
    assert trainer.args.device == torch.device("cpu")


def test_use_cpu_needs_a_stream_on_the_cpu(tmp_path: Path) -> None:
    with pytest.raises(mt.UserError, match=r"use_cpu=True.*device='cpu'"):
        mt.Trainer(model=llama(), args=arguments(tmp_path), train_dataset=rows())
