"""Arguments of mt.from_pretrained and mt.from_config that cannot be: a UserError with the thing and the remedy."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import make_model
from transformers import AutoConfig, GPT2LMHeadModel

import megatrain as mt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    mt.init(device="cpu")
    path = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "bf16"}, "dtype='bf16' is not known: use 'bfloat16'"),
        ({"dtype": "foo"}, "dtype='foo' is not known"),
        ({"dtype": {"model": "float32"}}, "must be one dtype"),
        ({"dtype": torch.float64}, "float64: full-parameter training needs float32"),
        ({"model_class": "LlamaForCausalLM"}, "model_class='LlamaForCausalLM' must be a class"),
        ({"model_class": torch.nn.Linear}, "must be a class of models"),
        ({"model_class": AutoConfig}, "must be a class of models"),
        ({"key_mapping": 3}, "cannot be loaded"),
        ({"precision": "bf16"}, r"say it with mt.init\(precision=...\)"),
        ({"max_vram_gb": 3}, r"say it with mt.init\(max_vram_gb=...\)"),
        ({"attn_implementation": "flash_attention_2"}, "needs a package that is not here|cannot be loaded"),
    ],
)
def test_from_pretrained_refuses(folder: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(mt.UserError, match=message):
        mt.from_pretrained(folder, **arguments)


@pytest.mark.parametrize("path", [None, 3, ["a"]])
def test_what_is_no_path_is_no_model(path: object) -> None:
    for load in (mt.from_pretrained, mt.from_config):
        with pytest.raises(mt.UserError, match="is no model: give a folder"):
            load(path)


def test_a_missing_folder_is_a_missing_folder(tmp_path: Path) -> None:
    for load in (mt.from_pretrained, mt.from_config):
        with pytest.raises(mt.UserError, match="nothing-here: there is no such folder"):
            load(tmp_path / "nothing-here")


def test_from_config_refuses(folder: Path) -> None:
    with pytest.raises(mt.UserError, match="dtype='foo' is not known"):
        mt.from_config(folder, dtype="foo")
    with pytest.raises(mt.UserError, match="cannot be loaded: .*embd_pdrop"):
        mt.from_config(AutoConfig.from_pretrained(folder), model_class=GPT2LMHeadModel)
    assert mt.from_config(folder, dtype="auto").dtype == torch.float32


def test_a_new_model_of_a_quantised_config_is_not_quantised(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        model = mt.from_config(config)
    assert "names a quantisation, which is left out" in caplog.text
    assert config.quantization_config is not None, "the caller's stays as it is"
    model.save_pretrained(tmp_path / "saved")
    again = mt.from_pretrained(tmp_path / "saved")
    for (name, left), (_, right) in zip(mt.named_parameters(model), mt.named_parameters(again), strict=True):
        assert torch.equal(left, right), name


def test_a_quantised_checkpoint_names_its_quantisation(folder: Path, tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    config.save_pretrained(tmp_path)
    with pytest.raises(mt.UserError, match="quantis"):
        mt.from_pretrained(tmp_path)
