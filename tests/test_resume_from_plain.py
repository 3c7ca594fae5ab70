"""A checkpoint that plain transformers.Trainer wrote: weights, moments, step counts and schedule are carried over."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from comparing import closed_later
from model_zoo import make_model
from safetensors.torch import load_file
from torch import nn
from trainer_helpers import arguments, llama, rows

import megatrain as mt
import megatrain.load.deferral as deferral
from megatrain.save.checkpoints import MANIFEST_NAME

AT_STEP = 3
ROUNDING = 2.0**-24
"""Of a number in fp32, relative."""


def run(trainer_class: Any, model: nn.Module, folder: Path, resume: Path | None = None, **changes: Any) -> Any:
    settings = {"max_steps": 2 * AT_STEP, "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": AT_STEP}
    trainer = trainer_class(model=model, args=arguments(folder, **(settings | changes)), train_dataset=rows())
    if trainer_class is mt.Trainer:
        closed_later(model)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    if isinstance(trainer, mt.Trainer):
        return mt.full_state_dict(trainer.model)
    return {name: value.float() for name, value in trainer.model.state_dict().items()}


def logged(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def distance(left: Any, right: Any, start: dict[str, torch.Tensor]) -> float:
    """Of the weights of two trainers, relative to how far training moved them from `start`."""
    one, other = weights(left), weights(right)
    apart = sum((one[name].double() - other[name].double()).square().sum() for name in other)
    moved = sum((other[name].double() - start[name].double()).square().sum() for name in other)
    return float((apart / moved).sqrt())


def without_moments(checkpoint: Path) -> Path:
    folder = checkpoint.with_name("checkpoint-without-moments")
    shutil.copytree(checkpoint, folder)
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    torch.save({**saved, "state": {}}, folder / "optimizer.pt")
    return folder


# Three steps of updates whose few operations round in another order; moments that a code keeps to 1/16 (8 bits) on
# average; forwards that autocast rounds to bf16 (2^-9) in other places; weights that plain training rounds to bf16.
@pytest.mark.parametrize(
    ("make", "settings", "moments", "bound"),
    [
        (llama, {}, False, 3 * 16 * ROUNDING),
        (lambda: llama(tie_word_embeddings=True), {}, False, 3 * 16 * ROUNDING),
        (llama, {}, "8bit", 1 / 16),
        (llama, {"bf16": True}, False, 8 * 2.0**-9),
        (llama, {"bf16": True}, "8bit", 1 / 16),
    ],
    ids=["fp32", "tied", "fp32-8bit", "bf16", "bf16-8bit"],
)
def test_three_steps_more_are_those_of_the_plain_trainer(
    tmp_path: Path,
    make: Callable[[], nn.Module],
    settings: dict[str, Any],
    moments: bool | str,
    bound: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mt.init(device="cpu", optimizer_compression=moments)
    plain = run(transformers.Trainer, make(), tmp_path, **settings)
    checkpoint = tmp_path / f"checkpoint-{AT_STEP}"
    start = {name: value.float() for name, value in load_file(checkpoint / "model.safetensors").items()}
    start = {name: start.get(name, start["model.embed_tokens.weight"]) for name in weights(plain)}
    resumed = run(mt.Trainer, make(), tmp_path / "ours", checkpoint, **settings)
    assert ("the saved moments are fp32 and were converted to 8bit" in caplog.text) == (moments == "8bit")
    assert {state["step"].item() for state in resumed.optimizer.state_dict()["state"].values()} == {2 * AT_STEP}
    assert logged(resumed, "learning_rate") == logged(plain, "learning_rate")
    assert logged(resumed, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-3 if settings or moments else 2e-6)
    assert distance(resumed, plain, start) < bound
    fresh = run(mt.Trainer, make(), tmp_path / "fresh", without_moments(checkpoint), **settings)
    assert distance(fresh, plain, start) > 4 * bound  # so the moments were there


@pytest.mark.parametrize("moments", [False, "8bit"])
def test_weights_and_moments_in_bf16(tmp_path: Path, moments: bool | str, caplog: pytest.LogCaptureFixture) -> None:
    """Plain training in bf16 has no finer master: the weights are taken over whole, and moments in bf16 converted."""
    mt.init(device="cpu", optimizer_compression=moments)
    run(transformers.Trainer, llama().bfloat16(), tmp_path)
    checkpoint = tmp_path / f"checkpoint-{AT_STEP}"
    saved = load_file(checkpoint / "model.safetensors")
    resumed = run(mt.Trainer, llama().bfloat16(), tmp_path / "ours", checkpoint, max_steps=AT_STEP)
    assert all(torch.equal(weights(resumed)[name], value.float()) for name, value in saved.items())
    assert "was saved by plain transformers" in caplog.text
    assert f"the saved moments are bf16 and were converted to {moments or 'fp32'}" in caplog.text
    # The truth: the same weights and moments in a plain run in fp32, whose forward alone is finer.
    whole = llama().bfloat16()
    whole.load_state_dict(saved)
    reference = transformers.Trainer(model=whole.float(), args=arguments(tmp_path / "fp32"), train_dataset=rows())
    run_on = run(transformers.Trainer, reference.model, tmp_path / "fp32", _in_fp32(checkpoint))
    further = run(mt.Trainer, llama().bfloat16(), tmp_path / "further", checkpoint)
    start = {name: value.float() for name, value in saved.items()}
    assert distance(further, run_on, start) < (1 / 16 if moments else 16 * 2.0**-9)
    assert logged(further, "learning_rate") == logged(run_on, "learning_rate")


def _in_fp32(checkpoint: Path) -> Path:
    """The same checkpoint with weights and moments as fp32."""
    from safetensors.torch import save_file

    folder = checkpoint.with_name("checkpoint-in-fp32")
    shutil.copytree(checkpoint, folder)
    tensors = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    saved["state"] = {i: {key: v.float() for key, v in state.items()} for i, state in saved["state"].items()}
    torch.save(saved, folder / "optimizer.pt")
    return folder


def test_a_checkpoint_of_ours_that_lost_its_low_halves_is_refused(tmp_path: Path) -> None:
    run(mt.Trainer, llama().bfloat16(), tmp_path)
    for name in ("optimizer.safetensors", MANIFEST_NAME):  # the manifest would tell it first
        (tmp_path / f"checkpoint-{AT_STEP}" / name).unlink()
    with pytest.raises(mt.UserError, match="has no optimizer.safetensors"):
        run(mt.Trainer, llama().bfloat16(), tmp_path, tmp_path / f"checkpoint-{AT_STEP}")


def test_files_that_name_weights_otherwise_than_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused experts. The plain trainer itself does not find them when it resumes (transformers 5.24)."""
    monkeypatch.setattr(deferral, "PLAIN_BYTES", 0)
    plain = run(transformers.Trainer, make_model("mixtral"), tmp_path)
    checkpoint = tmp_path / f"checkpoint-{AT_STEP}"
    start = transformers.MixtralForCausalLM.from_pretrained(checkpoint).state_dict()
    resumed = run(mt.Trainer, make_model("mixtral"), tmp_path / "ours", checkpoint)
    assert distance(resumed, plain, start) < 3 * 16 * ROUNDING


class AllDecayed(nn.Module):
    """Every parameter has weight decay: the second of transformers' groups is empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(2)])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.embedding(input_ids)
        for block in self.blocks:
            h = h + block(h).tanh()
        logits = h @ self.embedding(torch.arange(64)).T
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def test_groups_are_those_of_the_plain_trainer(tmp_path: Path) -> None:
    plain = run(transformers.Trainer, AllDecayed(), tmp_path)
    resumed = run(mt.Trainer, AllDecayed(), tmp_path / "ours", tmp_path / f"checkpoint-{AT_STEP}")
    sizes = [[len(group["params"]) for group in each.optimizer.param_groups] for each in (plain, resumed)]
    assert sizes == [[3, 0], [3, 0]]
    start = load_file(tmp_path / f"checkpoint-{AT_STEP}" / "model.safetensors")
    assert distance(resumed, plain, start) < 3 * 16 * ROUNDING
