"""Files of tensors that are written as they come hold what safetensors itself reads, in the layout of transformers."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatrain.base.errors import UserError
from megatrain.save import checkpoints, tensor_files
from megatrain.save.checkpoints import MANIFEST_NAME, write_manifest
from megatrain.save.tensor_files import Entry, MappedTensors, Shards, TensorFile
from megatrain.store.disk_calls import DiskCalls

DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.uint8, torch.int64, torch.bool]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def groups(draw: st.DrawFn) -> list[dict[str, torch.Tensor]]:
    made = []
    for group in range(draw(st.integers(1, 5))):
        tensors = {}
        for number in range(draw(st.integers(0, 4))):
            shape, dtype = draw(SHAPES), draw(st.sampled_from(DTYPES))
            values = torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)
            tensors[f"{group}.{number}"] = values.transpose(0, -1) if draw(st.booleans()) and shape else values
        made.append(tensors)
    return made


@settings(max_examples=60)
@given(groups=groups(), shard_bytes=st.integers(1, 400), unknown=st.sets(st.integers(0, 4)))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, groups: list[dict], shard_bytes: int, unknown: set[int]
) -> None:
    folder = tmp_path_factory.mktemp("files")
    entries = [
        None if i in unknown else [Entry.of(name, tensor) for name, tensor in group.items()]
        for i, group in enumerate(groups)
    ]
    shards = Shards(folder, "model", entries, shard_bytes=shard_bytes)
    for group in groups:
        shards.write_group(group)
    shards.close()
    expected = {name: tensor for group in groups for name, tensor in group.items()}
    paths = sorted(folder.glob("*.safetensors"))
    read = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    mapped = MappedTensors(folder, "model")
    assert read.keys() == mapped.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(read[name], tensor) and torch.equal(mapped[name], tensor), name
        assert read[name].dtype == tensor.dtype
    assert shards.written.keys() == {path.name for path in paths}
    for path in paths:
        data = path.read_bytes()
        assert shards.written[path.name].num_bytes == len(data)
        assert shards.written[path.name].checksum == hashlib.sha256(data).hexdigest()
    if len(paths) > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        places = index["weight_map"]
        assert places.keys() == expected.keys()
        assert all(name in load_file(folder / place) for name, place in places.items())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())


class ShortWrites(DiskCalls):
    """Writes a page at a time."""

    def write(self, fd: int, view: memoryview, offset: int) -> int:
        return super().write(fd, view[:4096], offset)


class NoDirect(DiskCalls):
    """A file system that refuses O_DIRECT."""

    def open(self, path: object, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().open(path, flags)


@pytest.mark.parametrize("calls", [DiskCalls(), ShortWrites(), NoDirect()], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("num_pieces", [1, 2, 7, 13])
def test_files_of_many_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: DiskCalls, num_pieces: int, extra: int
) -> None:
    piece_bytes = 8192
    for module in (checkpoints, tensor_files):
        monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)
    head = TensorFile(tmp_path / "head", [Entry(name="a", dtype=torch.uint8, shape=(10**5,))], lambda: None)
    header_bytes = head._num_bytes + head._filled_bytes
    head.abandon()
    sizes = [5001, num_pieces * piece_bytes - header_bytes + extra - 5001]
    tensors = {
        name: torch.randint(0, 256, (max(0, size),), dtype=torch.uint8) for name, size in zip("ab", sizes, strict=True)
    }
    path = tmp_path / "model.safetensors"
    file = TensorFile(path, [Entry.of(*item) for item in tensors.items()], lambda: None, calls)
    for item in tensors.items():
        file.write(*item)
    written = file.close()
    read = load_file(path)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert written.num_bytes == path.stat().st_size
    write_manifest(tmp_path, {})
    (tmp_path / "head").unlink()
    assert json.loads((tmp_path / MANIFEST_NAME).read_text())["files"][path.name]["sha256"] == written.checksum


def test_a_write_that_fails_ends_the_file(tmp_path: Path) -> None:
    class Full(DiskCalls):
        def write(self, fd: int, view: memoryview, offset: int) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    tensor = torch.zeros(1000)
    file = TensorFile(tmp_path / "x", [Entry.of("a", tensor)], lambda: None, Full())
    file.write("a", tensor)
    with pytest.raises(OSError, match="No space left"):
        file.close()
    file.abandon()
    assert not any(thread.name.startswith("megatrain-save") for thread in threading.enumerate())


def test_a_small_file_is_that_of_safetensors(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(3, 2), "a": torch.zeros(2), "c": torch.arange(3, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    order = list(load_file(tmp_path / "theirs.safetensors"))
    shards = Shards(tmp_path, "ours", [[Entry.of(name, tensors[name]) for name in order]])
    shards.write_group(tensors)
    shards.close()
    ours, theirs = (load_file(tmp_path / f"{name}.safetensors") for name in ("ours", "theirs"))
    assert all(torch.equal(ours[name], theirs[name]) for name in tensors) and list(ours) == order


def test_transformers_reads_the_shards(tmp_path: Path) -> None:
    from trainer_helpers import llama

    model = llama()
    model.config.save_pretrained(tmp_path)
    layers = [dict(module.state_dict(prefix=f"{name}.")) for name, module in model.model.named_children()]
    layers = [{f"model.{name}": tensor for name, tensor in layer.items()} for layer in layers]
    layers.append({"lm_head.weight": model.lm_head.weight.detach()})
    shards = Shards(tmp_path, "model", [[Entry.of(*item) for item in layer.items()] for layer in layers], shard_bytes=1)
    for layer in layers:
        shards.write_group(layer)
    shards.close()
    assert len(list(tmp_path.glob("model-0000*"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_a_dtype_that_files_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.b: safetensors files cannot hold torch.complex128"):
        TensorFile(tmp_path / "x", [Entry(name="a.b", dtype=torch.complex128, shape=(2,))], lambda: None)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        MappedTensors(tmp_path, "model")
    assert len(MappedTensors(tmp_path, "optimizer")) == 0
