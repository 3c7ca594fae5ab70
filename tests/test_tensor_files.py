"""Files of tensors that are written as they come hold what safetensors itself reads, in the layout of transformers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatrain.base.errors import UserError
from megatrain.save.tensor_files import Entry, MappedTensors, Shards, TensorFile

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


@settings(max_examples=60, deadline=None)
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
