"""Checkpoints of megatrain.Trainer: complete or absent, loadable by plain transformers, resumable bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from trainer_helpers import (
    Blocks,
    arguments,
    assert_equal_weights,
    llama,
    rows,
    train,
    weights,
)
from transformers import LlamaForCausalLM

import megatrain as mt

# Saving


def checkpoint_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_checkpoint_is_complete_and_loads_with_plain_transformers(tmp_path: Path) -> None:
    trainer, _ = train(mt.Trainer, tmp_path, llama(tie_word_embeddings=True), save_strategy="epoch")
    assert checkpoint_names(tmp_path) == {"checkpoint-3", "checkpoint-6"}
    names = checkpoint_names(tmp_path / "checkpoint-6")
    assert {"config.json", "model.safetensors", "trainer_state.json", "scheduler.pt", "rng_state.pth"} <= names
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-6")
    assert loaded.dtype == torch.float32
    assert_equal_weights(weights(loaded), weights(trainer.model))


def test_an_interrupted_save_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, path: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.TrainerState, "save_to_json", fail)
    with pytest.raises(KeyboardInterrupt):
        train(mt.Trainer, tmp_path, save_strategy="steps", save_steps=2)
    assert not any(name.startswith("checkpoint") for name in checkpoint_names(tmp_path))


def test_save_model_beside_checkpoints_keeps_them(tmp_path: Path) -> None:
    trainer, _ = train(mt.Trainer, tmp_path, save_strategy="epoch", save_only_model=True, save_total_limit=1)
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    (tmp_path / "model.safetensors.index.json").touch()
    trainer.save_model()
    assert {"checkpoint-6", "model.safetensors", "config.json"} <= checkpoint_names(tmp_path)
    assert not {"checkpoint-3", "model.safetensors.index.json"} & checkpoint_names(tmp_path)
    assert_equal_weights(weights(LlamaForCausalLM.from_pretrained(tmp_path)), weights(trainer.model))


def test_a_plain_module_is_saved_and_read_back(tmp_path: Path) -> None:
    trainer, _ = train(mt.Trainer, tmp_path, Blocks("dict"), save_strategy="epoch")
    from safetensors.torch import load_file

    assert_equal_weights(load_file(tmp_path / "checkpoint-6" / "model.safetensors"), weights(trainer.model))


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    given = {"eval_dataset": rows(4)}
    changes = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    # A higher loss counts as better, so the first checkpoint is the best one.
    changes |= {"metric_for_best_model": "loss", "greater_is_better": True, "save_total_limit": 1}
    trainer, _ = train(mt.Trainer, tmp_path, given=given, num_train_epochs=3, **changes)
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name == "checkpoint-3"
    assert_equal_weights(weights(trainer.model), weights(LlamaForCausalLM.from_pretrained(best)))


def test_save_strategy_best(tmp_path: Path) -> None:
    changes = {"eval_strategy": "epoch", "save_strategy": "best", "metric_for_best_model": "loss"}
    trainer, _ = train(mt.Trainer, tmp_path, given={"eval_dataset": rows()}, num_train_epochs=3, **changes)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-9")


def test_a_checkpoint_on_a_signal_takes_the_place_of_its_marker(tmp_path: Path) -> None:
    from transformers.trainer_jit_checkpoint import CheckpointManager

    trainer, _ = train(mt.Trainer, tmp_path, max_steps=2)
    CheckpointManager(trainer).execute_jit_checkpoint()
    names = checkpoint_names(tmp_path / "checkpoint-2")
    assert "trainer_state.json" in names
    assert "checkpoint-is-incomplete.txt" not in names


# Resuming


@pytest.mark.parametrize("at_step", [2, 3], ids=["within_an_epoch", "between_epochs"])
def test_a_resumed_run_ends_bit_equal(tmp_path: Path, at_step: int) -> None:
    model = {"attention_dropout": 0.2}
    whole, _ = train(mt.Trainer, tmp_path / "whole", llama(**model))
    train(mt.Trainer, tmp_path / "part", llama(**model), save_strategy="steps", save_steps=at_step)
    resumed = mt.Trainer(model=llama(**model), args=arguments(tmp_path / "part"), train_dataset=rows())
    resumed.train(resume_from_checkpoint=str(tmp_path / "part" / f"checkpoint-{at_step}"))
    assert_equal_weights(weights(resumed.model), weights(whole.model))
    assert [e["loss"] for e in resumed.state.log_history if "loss" in e] == [
        e["loss"] for e in whole.state.log_history if "loss" in e
    ]


def test_resuming_from_weights_alone_is_refused(tmp_path: Path) -> None:
    train(mt.Trainer, tmp_path, save_strategy="steps", save_steps=2, save_only_model=True)
    trainer = mt.Trainer(model=llama(), args=arguments(tmp_path), train_dataset=rows())
    with pytest.raises(mt.UserError, match="save_only_model"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
