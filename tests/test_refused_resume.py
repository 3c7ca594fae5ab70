"""A checkpoint from which training cannot go on leaves model, optimizer and schedule as they were."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from saving_helpers import make_trainer
from torch import nn
from trainer_helpers import arguments, assert_equal_weights, llama, rows

import megatrain as mt
from megatrain.save.checkpoints import MANIFEST_NAME


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """checkpoint-2 of this library, of a model in bf16 with exact masters; plain/checkpoint-2 of plain transformers."""
    folder = tmp_path_factory.mktemp("saved")
    mt.init(device="cpu")
    make_trainer(folder, max_steps=2).train()
    settings = arguments(folder / "plain", save_strategy="steps", save_steps=2, max_steps=2)
    transformers.Trainer(model=llama().bfloat16(), args=settings, train_dataset=rows()).train()
    return folder


def frozen() -> nn.Module:
    model = llama().bfloat16()
    model.model.layers[0].requires_grad_(False)
    return model


def resized() -> nn.Module:
    model = llama()
    model.resize_token_embeddings(70)
    return model.bfloat16()


def without(path: Path, part: str) -> None:
    save_file({name: value for name, value in load_file(path).items() if part not in name}, path, {"format": "pt"})


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def check_refused(folder: Path, told: str, make: Callable[[], nn.Module] | None = None, **changes: Any) -> None:
    """folder: a checkpoint."""
    given = changes.pop("given", {})
    trainer = make_trainer(folder.parent, make() if make else None, given, **changes)
    optimizer = trainer.create_optimizer()
    before = mt.full_state_dict(trainer.model)
    with pytest.raises(mt.UserError, match=told):
        trainer.train(resume_from_checkpoint=str(folder))
    assert_equal_weights(mt.full_state_dict(trainer.model), before)
    assert all(not value.any() for state in optimizer.state_dict()["state"].values() for value in state.values())
    assert trainer.lr_scheduler is None or trainer.lr_scheduler.last_epoch == 0


LION = {"optimizer_cls_and_kwargs": (mt.optim.Lion, {"lr": 1e-3})}
PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2}


CASES = {
    "rule": ({"given": LION}, "the saved optimizer is of another rule: AdamW or Adam was saved, and this one is Lion"),
    "frozen": ({"make": frozen}, "the saved optimizer has groups of .* parameters, this one of"),
    "resized": ({"make": resized}, r"lm_head.weight was saved with the shape \(64, 16\), and this .* is \(70, 16\)"),
    "schedule": ({"given": {"eval_dataset": rows(4)}, **PLATEAU}, "scheduler.pt is of another schedule than Reduce"),
}


@pytest.mark.parametrize("whose", ["ours", "ours without manifest", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_what_does_not_go_on_changes_nothing(saved: Path, tmp_path: Path, whose: str, case: str) -> None:
    of = saved / "plain" if whose == "plain" else saved
    folder = Path(shutil.copytree(of / "checkpoint-2", tmp_path / "checkpoint-2"))
    assert (folder / MANIFEST_NAME).exists() == (whose != "plain")
    if whose == "ours without manifest":
        (folder / MANIFEST_NAME).unlink()
    changes, told = CASES[case]
    check_refused(folder, told, **changes)


WEIGHT = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("name", "harm", "told"),
    [
        ("model.safetensors", lambda p: without(p, WEIGHT), f"lacks 1 weights of this model, such as {WEIGHT}"),
        ("optimizer.safetensors", lambda p: without(p, f"{WEIGHT}/exp_avg_sq"), "the saved .*no 'exp_avg_sq'"),
        ("optimizer.safetensors", lambda p: without(p, f"{WEIGHT}/master"), f"lacks {WEIGHT}/master_low_half, "),
        ("optimizer.json", lambda p: edited(p, moments="9bit", steps={}), "optimizer.json is not what was written"),
        ("trainer_state.json", lambda p: edited(p, global_step=-1), "global_step is -1, and must be a whole number"),
        ("trainer_state.json", lambda p: edited(p, surprise=1), "trainer_state.json is not what was written"),
        ("rng_state.pth", lambda p: torch.save({"python": 1}, p), "rng_state.pth is not what was written"),
        ("scheduler.pt", lambda p: torch.save([1], p), "scheduler.pt is (not what was written|of another schedule)"),
    ],
)  # fmt: skip
def test_what_was_changed_is_named_before_it_is_taken(
    saved: Path, tmp_path: Path, name: str, harm: Callable[[Path], None], told: str
) -> None:
    folder = Path(shutil.copytree(saved / "checkpoint-2", tmp_path / "checkpoint-2"))
    (folder / MANIFEST_NAME).unlink()
    harm(folder / name)
    check_refused(folder, told)


@pytest.mark.parametrize("name", ["rng_state.pth", "scheduler.pt", "optimizer.pt", "model.safetensors"])
def test_a_damaged_checkpoint_of_plain_transformers(saved: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(saved / "plain" / "checkpoint-2", tmp_path / "checkpoint-2"))
    if name == "model.safetensors":
        without(folder / name, WEIGHT)
    else:
        torch.save(nn.Linear(1, 1), folder / name)
    check_refused(folder, "lacks 1 weights" if name == "model.safetensors" else f"{name} is not what was written")


def test_the_best_model_is_not_made_up_either(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved / "checkpoint-2", tmp_path / "checkpoint-2"))
    (folder / MANIFEST_NAME).unlink()
    without(folder / "model.safetensors", WEIGHT)
    trainer = make_trainer(tmp_path)
    trainer.state.best_model_checkpoint = str(folder)
    before = mt.full_state_dict(trainer.model)
    with pytest.raises(mt.UserError, match="lacks 1 weights of this model"):
        trainer._load_best_model()
    assert_equal_weights(mt.full_state_dict(trainer.model), before)
