"""Folders that appear whole or not at all, and saved weights read back into a streamed model."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from trainer_helpers import assert_equal_weights, llama, weights
from transformers import MixtralConfig, MixtralForCausalLM

import megatrain as mt
from megatrain.save.folder import check_place, whole_folder
from megatrain.save.weights import read_weights


def test_a_folder_appears_with_all_of_its_files(tmp_path: Path) -> None:
    target = tmp_path / "runs" / "target"
    with whole_folder(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_a_killed_writer_leaves_no_folder_and_the_next_one_clears_up(tmp_path: Path) -> None:
    target = tmp_path / "target"
    code = f"""
import os
from megatrain.save.folder import whole_folder
with whole_folder({str(target)!r}) as folder:
    (folder / "a").write_text("1")
    os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    assert not target.exists()
    with whole_folder(target) as folder:
        (folder / "b").write_text("2")
    assert [path.name for path in target.iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_an_old_folder_is_replaced_as_a_whole_and_kept_on_failure(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").touch()
    with pytest.raises(RuntimeError), whole_folder(target) as folder:
        (folder / "new").touch()
        raise RuntimeError
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "old"]
    with whole_folder(target) as folder:
        (folder / "new").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "new"]


def test_files_are_merged_where_others_are_kept(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (target / "extra").mkdir(parents=True)
    stale = ("model.safetensors.index.json", "model-00001-of-00002.safetensors")
    stale += ("adapter_model.safetensors", "adapter_config.json")
    for name in ("notes", *stale, "extra/old"):
        (target / name).touch()
    with whole_folder(target, keep_others=True) as folder:
        (folder / "model.safetensors").write_text("new")
        (folder / "extra").mkdir()
        (folder / "extra" / "new").touch()
    names = {str(path.relative_to(target)) for path in target.rglob("*")}
    assert names == {"notes", "model.safetensors", "extra", "extra/new"}


def other_disk() -> Path:
    """A folder on another file system than the temporary one, or a skipped test."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or shared.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev:
        pytest.skip("needs a second file system")
    return Path(tempfile.mkdtemp(dir=shared))


@pytest.mark.parametrize("keep_others", [False, True])
@pytest.mark.parametrize("content", [(), ("model.safetensors", "notes")])
def test_a_symbolic_link_to_another_disk_is_followed(
    tmp_path: Path, content: tuple[str, ...], keep_others: bool
) -> None:
    disk = other_disk()
    try:
        folder = disk / "target"
        folder.mkdir()
        for name in content:
            (folder / name).write_text("old")
        link = tmp_path / "link"
        link.symlink_to(folder)
        with whole_folder(link, keep_others=keep_others) as staging:
            (staging / "model.safetensors").write_text("new")
            assert staging.stat().st_dev == folder.stat().st_dev
        assert link.is_symlink()
        assert (folder / "model.safetensors").read_text() == "new"
        kept = set(content) if keep_others else set()
        assert {path.name for path in folder.iterdir()} == {"model.safetensors"} | kept
        assert [path.name for path in disk.iterdir()] == ["target"]
    finally:
        shutil.rmtree(disk)


@pytest.mark.parametrize("keep_others", [False, True])
def test_a_mount_point_is_written_from_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_others: bool
) -> None:
    target = tmp_path / "mount"
    (target / "notes").mkdir(parents=True)
    (target / "model.safetensors").write_text("old")
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) in (target, Path("/")))
    tmp_path.chmod(0o555)  # as nothing can be made beside a mount point, or renamed across it
    with whole_folder(target, keep_others=keep_others) as staging:
        assert staging.parent == target
        (staging / "model.safetensors").write_text("new")
    tmp_path.chmod(0o755)
    assert (target / "model.safetensors").read_text() == "new"
    assert {path.name for path in target.iterdir()} == {"model.safetensors"} | ({"notes"} if keep_others else set())


@pytest.mark.parametrize("keep_others", [False, True])
def test_old_files_are_back_when_the_new_ones_cannot_take_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_others: bool
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        (target / name).write_text("old")
    rename = os.rename

    def fail_at_entry(source: Path, place: Path) -> None:
        if Path(source).parent.name.endswith("incomplete") or Path(source).name.endswith("incomplete"):
            if Path(place).name in ("model.safetensors", "target"):
                raise OSError("no")
        rename(source, place)

    monkeypatch.setattr(os, "rename", fail_at_entry)
    with pytest.raises(OSError, match="no"), whole_folder(target, keep_others=keep_others) as staging:
        for name in ("config.json", "model.safetensors"):
            (staging / name).write_text("new")
    assert {path.name: path.read_text() for path in target.iterdir() if path.is_file()} == {
        "config.json": "old",
        "model.safetensors": "old",
    }


def test_what_killed_saves_left_is_removed_by_the_next_save(tmp_path: Path) -> None:
    for name in (".checkpoint-3.incomplete", ".checkpoint-9.incomplete", ".incomplete", "checkpoint-1"):
        (tmp_path / name).mkdir()
    with whole_folder(tmp_path / "checkpoint-6") as folder:
        (folder / "a").touch()
    assert {path.name for path in tmp_path.iterdir()} == {".incomplete", "checkpoint-1", "checkpoint-6"}
    (tmp_path / ".checkpoint-9.incomplete").mkdir()
    with whole_folder(tmp_path, keep_others=True) as folder:
        (folder / "a").touch()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "checkpoint-1", "checkpoint-6"}


def test_a_full_disk_is_named_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match=r"disk at / is full: .* missing for the 1024\.0 GiB") as caught:
        monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == Path("/"))
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**40, 2**40, 2**30))
        with whole_folder(tmp_path / "a", needed_bytes=2**40):
            raise AssertionError("nothing is written")
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**40, 2**40, 0))
    with pytest.raises(OSError, match=r"disk at / is full: 3 B were written and more is needed") as caught:
        with whole_folder(tmp_path / "a") as folder:
            (folder / "part").write_text("abc")
            raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["/proc/nothing", "a\0b", "file/below"])
def test_a_place_that_cannot_be_written_is_refused_by_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(mt.UserError, match="output.dir: cannot write in .*choose another folder"):
        check_place(name, "output.dir")
    (tmp_path / "link").symlink_to(tmp_path / "not" / "there")
    check_place("link", "output.dir")
    assert (tmp_path / "not" / "there").is_dir()


@pytest.mark.parametrize("max_shard_size", ["1GB", "6KB"])
def test_weights_are_read_back(tmp_path: Path, max_shard_size: str) -> None:
    model = mt.stream(llama(tie_word_embeddings=True))
    expected = weights(model)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    read_weights(model, tmp_path)
    assert_equal_weights(weights(model), expected)


def test_fused_experts_are_read_back_from_files_that_name_them_one_by_one(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_local_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    model = mt.stream(MixtralForCausalLM(MixtralConfig(**sizes, **heads)))
    expected = weights(model)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    read_weights(model, tmp_path)
    assert_equal_weights(weights(model), expected)


def test_a_folder_without_weights_or_of_another_model_is_refused(tmp_path: Path) -> None:
    model = mt.stream(llama())
    with pytest.raises(mt.UserError, match="neither model.safetensors nor its index"):
        read_weights(model, tmp_path)
    llama(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(mt.UserError, match=r"lacks 9 weights of this model, such as model\.layers\.1\."):
        read_weights(model, tmp_path)
