"""Recipes that train a shape: random weights, a tokenizer from elsewhere, and what of it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command_helpers import command, files_below, write_chats
from comparing import assert_equal, closed_later
from data_helpers import CHATML, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import megatrain as mt
from megatrain.base.errors import UserError
from megatrain.base.units import format_count
from megatrain.commands.trial import check_runs
from megatrain.models import resolve_tokenizer
from megatrain.planning import read_config
from megatrain.recipe import load_recipe

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shape")
    tiny_tokenizer(CHATML).save_pretrained(folder / "tokenizer")
    write_chats(folder / "chats.jsonl")
    changes = ", ".join(f"{key}: {value}" for key, value in SIZES.items())
    file = folder / "recipe.yaml"
    file.write_text(
        f"model: {{shape: llama-3-8b, tokenizer: {folder / 'tokenizer'}, seed: 3, config: {{{changes}}}}}\n"
        f"data: {{path: {folder / 'chats.jsonl'}, sequence_length: 64, eval_fraction: 0.2}}\n"
        "training: {max_steps: 2, learning_rate: 1e-2, lr_scheduler_type: constant, save_strategy: no}\n"
        "engine: {device: cpu}\n",
        encoding="utf-8",
    )
    return file


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    code, out, err = command(capsys, *arguments)
    assert code == 0, err
    return out


def weights(folder: str) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def test_it_begins_with_the_weights_of_from_config(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "train", recipe, "training.learning_rate=0", "output.dir=out")
    assert "llama-3-8b, " in out and "random weights, seed 3" in out
    tokenizer = AutoTokenizer.from_pretrained("out")
    config = LlamaConfig(**SIZES, max_position_embeddings=8192, pad_token_id=None)
    assert_equal(weights("out"), dict(closed_later(mt.from_config(config, dtype="float32", seed=3)).state_dict()))
    saved = AutoModelForCausalLM.from_pretrained("out").config
    assert (saved.bos_token_id, saved.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    card = Path("out/README.md").read_text(encoding="utf-8")
    assert "| shape | llama-3-8b |" in card and "| first weights | random, seed 3 |" in card
    run(capsys, "train", recipe, "training.learning_rate=0", "output.dir=other", "model.seed=4")
    assert not torch.equal(*(weights(name)["lm_head.weight"] for name in ("out", "other")))


def test_it_learns_and_goes_on_as_the_whole_run(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "train", recipe, "output.dir=whole", "training.max_steps=12")
    before, after = (float(part) for part in out.rpartition("held-out loss ")[2].split("\n")[0].split("->"))
    assert after < before - 0.5
    saves = ("training.save_strategy=steps", "training.save_steps=6")
    run(capsys, "train", recipe, "output.dir=parts", "training.max_steps=6", *saves)
    run(capsys, "resume", "parts", "training.max_steps=12")
    assert_equal(weights("whole"), weights("parts"))


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.name=some/model", ["model.name is 'some/model'", "model.shape is 'llama-3-8b'", "keep one"]),
        ("model.shape=", ["model.name is missing", "model.shape"]),
        ("model.shape=' '", ["model.shape is ' '", "megatrain plan"]),
        ("model.tokenizer=", ["model.tokenizer is missing", "llama-3-8b"]),
        ("model.revision=main", ["model.revision is for model.name"]),
        ("model.dtype=auto", ["model.dtype is 'auto'", "never saved"]),
        ("model.config=3", ["model.config: wants a section"]),
    ],
)
def test_keys_that_do_not_go_together_are_refused(recipe: Path, override: str, told: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(recipe, [override])
    assert all(words in str(caught.value) for words in told), caught.value


@pytest.mark.parametrize("key", ["tokenizer=some/model", "seed=0", "config.vocab_size=3"])
def test_keys_of_a_shape_are_none_of_a_model_with_a_name(recipe: Path, key: str) -> None:
    base = ["model.shape=", "model.tokenizer=", "model.seed=", "model.config={}", "model.name=some/model"]
    assert load_recipe(recipe, base).model.name == "some/model"
    with pytest.raises(UserError, match=f"model.{key.partition('=')[0].partition('.')[0]} is for model.shape"):
        load_recipe(recipe, [*base, f"model.{key}"])


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.shape=llama-3-8", ["model.shape: there is no folder or file llama-3-8", "llama-3-8b"]),
        ("model.config.hiden_size=3", ["model.shape: the config of llama-3-8b has no hiden_size", "hidden_size"]),
        ("model.config.model_type=gpt2", ["model.shape: the config of llama-3-8b has no model_type"]),
        ("model.config.num_attention_heads=x", ["model.shape: transformers refuses llama-3-8b", "expected int"]),
        (
            "model.config.num_hidden_layers=0",
            ["model.config: the shape llama-3-8b", "no repeated blocks", "at least 1"],
        ),
        ("model.config.num_hidden_layers=-1", ["model.config: the shape llama-3-8b", "no repeated blocks"]),
        ("model.config.hidden_act=nonsense", ["model.config: the shape llama-3-8b", "KeyError: 'nonsense'"]),
        ("model.config.rope_parameters={rope_type: nonsense}", ["model.config: the shape", "KeyError: 'nonsense'"]),
        ("model.config.num_key_value_heads=3", ["model.config: the shape llama-3-8b", "(4)", "(3)"]),
        ("model.config.attention_dropout=2.0", ["model.config: the shape llama-3-8b", "dropout probability", "got 2"]),
        ("model.config.return_dict=false", ["model.config: the shape llama-3-8b", "AttributeError", "last_hidden"]),
        ("model.tokenizer=no/such/place", ["model.tokenizer: no/such/place does not exist"]),
        ("model.config.vocab_size=99", ["ids up to", "the shape llama-3-8b a vocabulary of 99;", "config.vocab_size="]),
        ("data.sequence_length=8193", ["data.sequence_length is 8193", "8192 positions"]),
        ("engine.max_ram_gb=0.0001", ["max_ram_gb"]),
    ],
)
@pytest.mark.parametrize("how", [[], ["--dry-run"]])
def test_a_shape_that_cannot_work_is_refused_before_work(
    recipe: Path, capsys: pytest.CaptureFixture[str], override: str, told: list[str], how: list[str]
) -> None:
    code, out, err = command(capsys, "train", recipe, override, "output.dir=out", *how)
    assert code == 2 and all(words in err for words in told), err
    assert "reading the data" not in out
    assert not Path("out").exists()


@pytest.mark.parametrize("told", ["of every config", "for want of numbers"])
def test_what_fails_without_the_changes_too_or_lacks_numbers_is_not_refused(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    """A forward that cannot run on the meta device says nothing about the changes."""
    model = load_recipe(recipe).model
    forward, tried = LlamaForCausalLM.forward, []

    def fails(self: LlamaForCausalLM, *args: Any, **keywords: Any) -> Any:
        tried.append(self.config.hidden_size)
        if told == "of every config":
            raise ValueError(told)
        if self.config.hidden_size == SIZES["hidden_size"]:
            self.lm_head.weight.sum().item()
        return forward(self, *args, **keywords)

    monkeypatch.setattr(LlamaForCausalLM, "forward", fails)
    check_runs(model, read_config(model.shape, model.config), 64)
    assert tried == ([32, 4096] if told == "of every config" else [32])


def test_the_last_id_of_the_tokenizer_is_the_last_of_the_least_vocabulary(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    largest = max(AutoTokenizer.from_pretrained(recipe.parent / "tokenizer").get_vocab().values())
    run(capsys, "train", recipe, f"model.config.vocab_size={largest + 1}", "--dry-run")
    code, _, err = command(capsys, "train", recipe, f"model.config.vocab_size={largest}", "--dry-run")
    assert code == 2 and f"ids up to {largest}, " in err and f"set model.config.vocab_size={largest + 1}" in err


def test_a_config_of_a_file_takes_changes_too(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaConfig(**{**SIZES, "num_hidden_layers": 9}).save_pretrained(tmp_path / "folder")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "num_hidden_layers": 3}))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    for shape in ("folder", "folder/config.json"):
        out = run(capsys, "train", recipe, f"model.shape={shape}", "model.config={num_hidden_layers: 3}", "--dry-run")
        assert f"{shape}, {format_count(num_parameters)} parameters" in out


def test_a_model_that_is_not_to_be_saved_needs_no_disk(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("megatrain.commands.disk.shutil.disk_usage", lambda path: usage)
    code, _, err = command(capsys, "train", recipe, "output.dir=out")
    assert code == 2 and "trained model" in err
    out = run(capsys, "train", recipe, "output.dir=out", "output.save_model=false", "--dry-run")
    assert "saving was not tried" in out and not Path("out").exists()
    out = run(capsys, "train", recipe, "output.dir=out", "output.save_model=false")
    assert "held-out loss" in out and "load it" not in out
    assert not [name for name in files_below(Path("out")) if name.endswith((".safetensors", "config.json"))]


def test_the_tokenizer_may_come_from_a_folder_without_weights(recipe: Path) -> None:
    given: Any = load_recipe(recipe).model.tokenizer
    assert resolve_tokenizer(given).path == recipe.parent / "tokenizer"
