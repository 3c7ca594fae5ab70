"""Checkpoints of megatrain.Trainer: complete or absent, loadable by plain transformers, resumable bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
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
from megatrain.run_log import LOG_NAME
from megatrain.save.weights import checkpoint_bytes

# Saving


def checkpoint_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {LOG_NAME}


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


def test_the_space_of_a_checkpoint_is_known_before_it_is_written(tmp_path: Path) -> None:
    mt.init(device="cpu", precision="bf16")
    trainer, _ = train(mt.Trainer, tmp_path, llama().bfloat16(), save_strategy="epoch", save_total_limit=1)
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    written_bytes = sum(path.stat().st_size for path in checkpoint.iterdir() if "config" not in path.name)
    counted_bytes = checkpoint_bytes(trainer.model, trainer.engine, trainer.optimizer)
    # Names, shapes and small files are not counted.
    assert counted_bytes == sum(12 * parameter.numel() for parameter in trainer.model.parameters())
    assert counted_bytes <= written_bytes <= counted_bytes + 2**17


def test_save_model_beside_checkpoints_keeps_them(tmp_path: Path) -> None:
    trainer, _ = train(mt.Trainer, tmp_path, save_strategy="epoch", save_only_model=True, save_total_limit=1)
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    (tmp_path / "model.safetensors.index.json").touch()
    trainer.save_model()
    assert {"checkpoint-6", "model.safetensors", "config.json"} <= checkpoint_names(tmp_path)
    assert not {"checkpoint-3", "model.safetensors.index.json"} & checkpoint_names(tmp_path)
    assert_equal_weights(weights(LlamaForCausalLM.from_pretrained(tmp_path)), weights(trainer.model))


def test_a_plain_module_with_tied_weights_is_saved_and_read_back(tmp_path: Path) -> None:
    changes = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    changes |= {"metric_for_best_model": "loss", "greater_is_better": True}
    given = {"eval_dataset": rows(4)}
    trainer, _ = train(mt.Trainer, tmp_path, Blocks("dict", tied=True), given, **changes)
    saved = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    state = weights(trainer.model)
    assert state.keys() - saved.keys() == {"head.weight"}
    assert_equal_weights(saved | {"head.weight": saved["embedding.weight"]}, state)


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


def test_a_checkpoint_is_pushed_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = []

    def push(self: mt.Trainer, folder: str) -> None:
        pushed.append((Path(folder).name, (Path(folder) / "trainer_state.json").is_file()))

    monkeypatch.setattr(mt.Trainer, "init_hf_repo", lambda self: None)
    monkeypatch.setattr(mt.Trainer, "_push_from_checkpoint", push)
    monkeypatch.setattr(mt.Trainer, "_finish_current_push", lambda self: None)
    train(mt.Trainer, tmp_path, save_strategy="epoch", push_to_hub=True, hub_token="a")
    assert pushed == [("checkpoint-3", True), ("checkpoint-6", True)]


def test_a_checkpoint_on_a_signal_takes_the_place_of_its_marker(tmp_path: Path) -> None:
    from transformers.trainer_jit_checkpoint import CheckpointManager

    trainer, _ = train(mt.Trainer, tmp_path, max_steps=2)
    CheckpointManager(trainer).execute_jit_checkpoint()
    names = checkpoint_names(tmp_path / "checkpoint-2")
    assert "trainer_state.json" in names
    assert "checkpoint-is-incomplete.txt" not in names


# Resuming


@pytest.mark.parametrize(
    ("at_step", "dtype"),
    [(2, torch.float32), (3, torch.float32), (2, torch.bfloat16)],
    ids=["within_an_epoch", "between_epochs", "loaded_in_bf16"],
)
def test_a_resumed_run_ends_bit_equal(tmp_path: Path, at_step: int, dtype: torch.dtype) -> None:
    def make() -> LlamaForCausalLM:
        return llama(attention_dropout=0.2).to(dtype)

    whole, _ = train(mt.Trainer, tmp_path / "whole", make())
    train(mt.Trainer, tmp_path / "part", make(), save_strategy="steps", save_steps=at_step)
    resumed = mt.Trainer(model=make(), args=arguments(tmp_path / "part"), train_dataset=rows())
    resumed.train(resume_from_checkpoint=str(tmp_path / "part" / f"checkpoint-{at_step}"))
    assert_equal_weights(mt.full_state_dict(resumed.model), mt.full_state_dict(whole.model))
    assert mt.full_state_dict(whole.model)["lm_head.weight"].dtype == torch.float32  # the exact masters
    assert [e["loss"] for e in resumed.state.log_history if "loss" in e] == [
        e["loss"] for e in whole.state.log_history if "loss" in e
    ]


@pytest.mark.parametrize("clip", ["global", "layer"])
@pytest.mark.parametrize(
    ("compression", "master", "optimizer_class"),
    [
        ("bf16", "split", mt.optim.AdamW),
        ("8bit", "split", mt.optim.Lion),
        ("4bit", "bf16", mt.optim.AdamW),
        ("4bit", "split", mt.optim.Muon),
        ("lossless", "split", mt.optim.AdamW),
    ],
)
def test_a_resumed_run_ends_bit_equal_in_every_format(
    tmp_path: Path, compression: str, master: str, optimizer_class: type, clip: str
) -> None:
    mt.init(device="cpu", precision="bf16", master=master, optimizer_compression=compression, clip=clip)
    given = {"optimizer_cls_and_kwargs": (optimizer_class, {"lr": 1e-2, "ema_decay": 0.9})}
    whole, _ = train(mt.Trainer, tmp_path / "whole", llama().bfloat16(), given)
    train(mt.Trainer, tmp_path / "part", llama().bfloat16(), given, save_strategy="steps", save_steps=2)
    resumed = mt.Trainer(model=llama().bfloat16(), args=arguments(tmp_path / "part"), train_dataset=rows(), **given)
    resumed.train(resume_from_checkpoint=str(tmp_path / "part" / "checkpoint-2"))
    assert_equal_weights(mt.full_state_dict(resumed.model), mt.full_state_dict(whole.model))
    states = [trainer.optimizer.state_dict()["state"] for trainer in (whole, resumed)]
    assert all(torch.equal(states[0][i][key], states[1][i][key]) for i in states[0] for key in states[0][i])
    mt.init()


def test_resuming_from_weights_alone_is_refused(tmp_path: Path) -> None:
    train(mt.Trainer, tmp_path, save_strategy="steps", save_steps=2, save_only_model=True)
    trainer = mt.Trainer(model=llama(), args=arguments(tmp_path), train_dataset=rows())
    with pytest.raises(mt.UserError, match="save_only_model"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
