"""Folders that appear whole or not at all, and saved weights read back into a streamed model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trainer_helpers import assert_equal_weights, llama, weights
from transformers import MixtralConfig, MixtralForCausalLM

import megatrain as mt
from megatrain.save.folder import whole_folder
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
    for name in ("notes", "model.safetensors.index.json", "model-00001-of-00002.safetensors", "extra/old"):
        (target / name).touch()
    with whole_folder(target, keep_others=True) as folder:
        (folder / "model.safetensors").write_text("new")
        (folder / "extra").mkdir()
        (folder / "extra" / "new").touch()
    names = {str(path.relative_to(target)) for path in target.rglob("*")}
    assert names == {"notes", "model.safetensors", "extra", "extra/new"}


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
