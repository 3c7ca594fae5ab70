"""save_pretrained of a streamed model writes what plain transformers loads: every weight, bit for bit, once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_zoo import Block, Stack, make_batch, make_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from surface_helpers import assert_like, assert_same_state, plain, streamed

import megatrain as mt

# dense; tied; fused experts that are saved one by one; experts saved fused; other names in the files; encoder-decoder.
NAMES = ["llama", "gpt2", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "mamba2", "t5"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def folder_content(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """File -> tensors, of the safetensors files."""
    return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


def assert_same_folders(got: Path, expected: Path) -> None:
    assert sorted(path.name for path in got.iterdir()) == sorted(path.name for path in expected.iterdir())
    for path in expected.glob("*.json"):
        assert json.loads((got / path.name).read_text()) == json.loads(path.read_text()), path.name
    files, expected_files = folder_content(got), folder_content(expected)
    for name, tensors in expected_files.items():
        assert_same_state(dict(sorted(files[name].items())), dict(sorted(tensors.items())))


def train_a_step(model: Any) -> None:
    optimizer = mt.optim.AdamW(model, lr=1e-3)
    model(**make_batch()).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_folder_is_that_of_the_plain_model(name: str, dtype: str, tmp_path: Path) -> None:
    make_model(name).to(DTYPES[dtype]).save_pretrained(tmp_path / "plain")
    mt.stream(make_model(name).to(DTYPES[dtype])).save_pretrained(tmp_path / "streamed")
    assert_same_folders(tmp_path / "streamed", tmp_path / "plain")


@pytest.mark.parametrize("name", NAMES)
def test_shards_are_those_of_the_plain_model(name: str, tmp_path: Path) -> None:
    for kind, model in (("plain", plain(name)), ("streamed", streamed(name))):
        model.save_pretrained(tmp_path / kind, max_shard_size="20KB")
    assert len(folder_content(tmp_path / "plain")) > 2
    assert_same_folders(tmp_path / "streamed", tmp_path / "plain")


@pytest.mark.parametrize("name", NAMES)
def test_exact_masters_of_a_bf16_run_are_saved_and_load_back(name: str, tmp_path: Path) -> None:
    mt.init(device="cpu", precision="bf16")
    model = streamed(name)
    train_a_step(model)
    # No wait in between: saving waits for the updates itself.
    model.save_pretrained(tmp_path)
    masters = mt.full_state_dict(model)
    plain(name).save_pretrained(tmp_path / "plain")
    loaded = type(plain(name)).from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32
    assert_same_state(loaded.state_dict(), masters)
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in masters.values())
    sizes = [
        sum(t.nbytes for f in folder_content(f).values() for t in f.values()) for f in (tmp_path, tmp_path / "plain")
    ]
    assert sizes[0] == sizes[1]


def test_a_model_loaded_in_bf16_is_saved_in_bf16(tmp_path: Path) -> None:
    plain().bfloat16().save_pretrained(tmp_path / "start")
    model = mt.stream(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "start"))
    train_a_step(model)
    model.save_pretrained(tmp_path / "end")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "end")
    assert loaded.dtype == torch.bfloat16
    assert_same_state(loaded.state_dict(), {n: w.bfloat16() for n, w in mt.full_state_dict(model).items()})


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    model = streamed("gpt2")
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
    assert "transformer.wte.weight" in names and "lm_head.weight" not in names
    assert_like(mt.stream(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train()), plain("gpt2"))


def test_saving_changes_nothing_and_can_go_on(tmp_path: Path) -> None:
    model = streamed()
    optimizer = mt.optim.AdamW(model, lr=1e-2)
    for _ in range(2):
        model(**make_batch()).loss.backward()
        model.save_pretrained(tmp_path)
        optimizer.step()
        optimizer.zero_grad()
    other = streamed()
    optimizer = mt.optim.AdamW(other, lr=1e-2)
    for _ in range(2):
        other(**make_batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_state(mt.full_state_dict(model), mt.full_state_dict(other))
    assert model.dtype == torch.float32


def test_the_dtype_is_told_again_after_a_failed_save(tmp_path: Path) -> None:
    mt.init(device="cpu", precision="bf16")
    model = streamed()
    with pytest.raises(TypeError):
        model.save_pretrained(tmp_path, max_shard_size=None)
    assert model.dtype == torch.bfloat16


def test_a_given_state_dict_is_saved_instead(tmp_path: Path) -> None:
    other = {name: torch.full_like(weight, 2.0) for name, weight in plain().state_dict().items()}
    streamed().save_pretrained(tmp_path, state_dict=dict(other))
    assert_same_state(transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict(), other)


def test_the_streamed_class_loads_a_plain_model(tmp_path: Path) -> None:
    model = streamed()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).train()
    assert type(loaded) is transformers.LlamaForCausalLM
    assert_like(mt.stream(loaded), plain())


def test_an_own_module_is_saved_with_torch_and_with_safetensors(tmp_path: Path) -> None:
    def make() -> Stack:
        torch.manual_seed(0)
        return Stack([Block(16) for _ in range(3)], lambda self, x: x)

    model, twin = mt.stream(make()), make()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for loaded in (torch.load(tmp_path / "model.pt"), load_file(tmp_path / "model.safetensors")):
        assert_same_state(dict(sorted(loaded.items())), dict(sorted(twin.state_dict().items())))
        twin.load_state_dict(loaded)
    one = {"embed.weight": model.state_dict()["embed.weight"]}
    torch.save(one, tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < 2 * one["embed.weight"].nbytes
