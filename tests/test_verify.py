"""`megatrain verify`: every checkpoint and model by its name, sound or with what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from saving_helpers import cut_short, flip_a_bit
from trainer_helpers import llama, train

import megatrain as mt
from megatrain import cli
from megatrain.save.checkpoints import MANIFEST_NAME, TRAINING, damage_of, write_manifest


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with the checkpoints 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("run")
    train(mt.Trainer, folder, save_strategy="steps", save_steps=2)
    return folder


@pytest.fixture
def run(run_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_folder, tmp_path / "run"))


def test_verify_tells_of_every_checkpoint(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.run_command(["verify", str(run)]) == 0
    assert capsys.readouterr().out.count("sound: every file is what was written") == 3
    flip_a_bit(run / "checkpoint-4" / "rng_state.pth")
    assert cli.run_command(["verify", str(run)]) == 1
    told = capsys.readouterr().out
    assert told.count("sound: ") == 2
    assert "checkpoint-4 is damaged: rng_state.pth has changed since it was written" in told


@pytest.mark.parametrize(
    "lost", ["scheduler.pt", "rng_state.pth", "optimizer.safetensors", "trainer_state.json", "model.safetensors"]
)
@pytest.mark.parametrize("is_told", [True, False])
def test_a_checkpoint_that_its_manifest_does_not_miss_a_file_of_is_not_sound(
    run: Path, lost: str, is_told: bool, capsys: pytest.CaptureFixture
) -> None:
    """As when somebody removed it before the manifest was written; also where that does not tell the kind."""
    folder = run / "checkpoint-4"
    (folder / lost).unlink()
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    del manifest["files"][lost]
    if not is_told:
        del manifest["kind"]
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    assert cli.run_command(["verify", str(run)]) == 1
    assert f"checkpoint-4 is damaged: {lost} is missing" in " ".join(capsys.readouterr().out.split())
    (folder / MANIFEST_NAME).unlink()
    with pytest.raises(OSError, match=f"{lost} is missing"):
        write_manifest(folder, kind=TRAINING)


@pytest.mark.parametrize("given", ["checkpoint-4", "."])
def test_verify_calls_one_by_its_name(
    run: Path, given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(run if given != "." else run / "checkpoint-4")
    assert cli.run_command(["verify", given]) == 0
    assert "\ncheckpoint-4" in capsys.readouterr().out
    flip_a_bit(run / "checkpoint-4" / "rng_state.pth")
    assert cli.run_command(["verify", given]) == 1
    assert "warning: checkpoint-4 is damaged: rng_state.pth has changed" in capsys.readouterr().out


def test_verify_of_a_model_without_manifest(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    llama().save_pretrained(tmp_path, max_shard_size="8KB")
    assert cli.run_command(["verify", str(tmp_path)]) == 0
    assert "there is no manifest, so nobody knows whether bits have changed" in capsys.readouterr().out
    shards = sorted(tmp_path.glob("*.safetensors"))
    kept = shards[1].read_bytes()
    cut_short(shards[1])
    assert cli.run_command(["verify", str(tmp_path)]) == 1
    assert f"{shards[1].name} cannot be read" in " ".join(capsys.readouterr().out.split())
    shards[1].write_bytes(kept)
    shards[0].unlink()
    assert cli.run_command(["verify", str(tmp_path)]) == 1
    assert "more tensors of model.safetensors.index.json are in no file" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ["trainer_state.json", "optimizer.json", "config.json"])
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (lambda _: b"", "is empty"),
        (lambda data: data[: len(data) // 2], "cannot be read"),
        (lambda _: b"\x80\x02garbage" * 50, "cannot be read"),
        (lambda _: b"[]", "is not what its name says"),
    ],
    ids=["empty", "cut", "garbage", "list"],
)
def test_json_files_are_looked_at_without_a_manifest(
    run: Path, name: str, content: Callable[[bytes], bytes], told: str, capsys: pytest.CaptureFixture
) -> None:
    folder = run / "checkpoint-6"
    (folder / MANIFEST_NAME).unlink()
    assert cli.run_command(["verify", str(folder)]) == 0
    (folder / name).write_bytes(content((folder / name).read_bytes()))
    (folder / "notes.json").write_text("mine {")
    assert cli.run_command(["verify", str(folder)]) == 1
    assert f"checkpoint-6 is damaged: {name} {told}" in " ".join(capsys.readouterr().out.split())


def test_json_files_that_lack_what_going_on_needs(run: Path) -> None:
    folder = run / "checkpoint-6"
    (folder / MANIFEST_NAME).unlink()
    for name, key in (("trainer_state.json", "global_step"), ("optimizer.json", "format")):
        (folder / name).write_text("{}")
        assert f"{name} has no {key!r}" in damage_of(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    (folder / "scheduler.pt").unlink()
    (folder / "scheduler.pt").mkdir()
    assert {told.split()[0] for told in damage_of(folder)} > {"config.json", "scheduler.pt"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("nowhere", "no such folder: nowhere"),
        ("make.py", "make.py is a file, not a folder"),
        (".", "holds no checkpoint and no model"),
    ],
)
def test_verify_of_nothing(
    given: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("make.py").touch()
    assert cli.run_command(["verify", given]) == 2
    assert told in capsys.readouterr().err.replace("\n", " ")
