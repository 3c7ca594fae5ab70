"""`megatrain export`: what comes out loads with plain transformers, and has the checkpoint's bits, or what it says."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from trainer_helpers import arguments, llama, rows
from transformers import AutoModelForCausalLM

import megatrain as mt
from megatrain import cli
from megatrain.save.checkpoints import MANIFEST_NAME
from megatrain.save.layers import LOW_HALF


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """(a checkpoint with shards, its exact masters). The model was loaded in either dtype."""
    folder = tmp_path_factory.mktemp("run")
    mt.init(device="cpu", precision="bf16")
    trainer = mt.Trainer(llama().to(request.param), arguments(folder, save_strategy="epoch"), train_dataset=rows())
    trainer.train()
    checkpoint = folder / "checkpoint-6"
    shards = folder / "shards"
    trainer.model.save_pretrained(shards, max_shard_size="8KB")
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "megatrain_manifest.json").unlink()
    for path in shards.glob("model*"):
        shutil.copy(path, checkpoint)
    return checkpoint, {name: value.clone() for name, value in mt.full_state_dict(trainer.model).items()}


def exported(checkpoint: Path, target: Path, *options: str) -> dict[str, torch.Tensor]:
    assert cli.run_command(["export", str(checkpoint), str(target), *options]) == 0
    return AutoModelForCausalLM.from_pretrained(target, dtype="auto").state_dict()


def test_an_exact_master_comes_out(trained: tuple[Path, dict], tmp_path: Path) -> None:
    checkpoint, masters = trained
    found = exported(checkpoint, tmp_path / "out", "--dtype", "fp32")
    assert found.keys() == masters.keys()
    assert all(torch.equal(found[name], masters[name]) for name in masters)
    assert any(bool((value != value.bfloat16().float()).any()) for value in masters.values())


def test_bf16_is_the_nearest(trained: tuple[Path, dict], tmp_path: Path) -> None:
    checkpoint, _ = trained
    saved = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").state_dict()
    found = exported(checkpoint, tmp_path / "out", "--dtype", "bf16")
    assert all(torch.equal(found[name], saved[name].bfloat16()) for name in saved)


@pytest.mark.parametrize("dtype", ["bf16", "fp32", None])
def test_the_card_says_what_the_weights_are(trained: tuple[Path, dict], dtype: str | None, tmp_path: Path) -> None:
    checkpoint, _ = trained
    saved = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").dtype
    exported(checkpoint, tmp_path / "out", *(() if dtype is None else ("--dtype", dtype)))
    told = {
        (torch.float32, "bf16"): "bfloat16, rounded to nearest from float32",
        (torch.bfloat16, "bf16"): "bfloat16, as saved",
        (torch.bfloat16, "fp32"): "float32, the exact masters",
        (torch.float32, "fp32"): "float32, as saved",
    }.get((saved, dtype), f"{str(saved).removeprefix('torch.')}, as saved")
    assert f"| weights | {told} |" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_every_file_follows_the_umask(trained: tuple[Path, dict], mask: int, tmp_path: Path) -> None:
    checkpoint, _ = trained
    before = os.umask(mask)
    try:
        exported(checkpoint, tmp_path / "out")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert set(modes.values()) == {0o666 & ~mask}, modes


def test_nothing_of_training_comes_out(trained: tuple[Path, dict], tmp_path: Path) -> None:
    checkpoint, _ = trained
    exported(checkpoint, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".safetensors"}
    assert names == {"config.json", "generation_config.json", "model.safetensors.index.json", "README.md"}
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| steps | 6 of 6 |" in card and "| last training loss | " in card
    assert cli.run_command(["verify", str(tmp_path / "out")]) == 0


def test_the_config_names_the_dtype(trained: tuple[Path, dict], tmp_path: Path) -> None:
    checkpoint, _ = trained
    exported(checkpoint, tmp_path / "out", "--dtype", "fp32")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_low_halves_under_other_names_are_refused(
    trained: tuple[Path, dict], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    checkpoint = Path(shutil.copytree(trained[0], tmp_path / "checkpoint"))
    for path in checkpoint.glob("optimizer*.safetensors*"):
        path.unlink()
    (checkpoint / MANIFEST_NAME).unlink(missing_ok=True)
    save_file({f"fused.weight{LOW_HALF}": torch.zeros(4, dtype=torch.int16)}, checkpoint / "optimizer.safetensors")
    assert cli.run_command(["export", str(checkpoint), str(tmp_path / "out"), "--dtype", "fp32"]) == 2
    assert "name differently" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("source", "target", "options", "told"),
    [
        ("nowhere", "out", (), "CHECKPOINT: no such folder"),
        (".", "out", (), "holds checkpoints; give one of them"),
        ("checkpoint-6", "checkpoint-6", (), "is there already and not empty"),
        ("checkpoint-6", "out", ("--dtype", "fp8"), "--dtype fp8 is not known: use bf16 or fp32"),
        ("empty", "out", (), "has neither model.safetensors nor its index"),
    ],
)
def test_what_cannot_be_exported(
    trained: tuple[Path, dict],
    source: str,
    target: str,
    options: tuple[str, ...],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    run = Path(shutil.copytree(trained[0].parent, tmp_path / "run"))
    (run / "empty").mkdir()
    assert cli.run_command(["export", str(run / source), str(run / target), *options]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
