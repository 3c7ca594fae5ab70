"""Saved models are complete, and their card says what was trained. A card of somebody else's stays as it is."""

from __future__ import annotations

import copy
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from data_helpers import CHATML, tiny_tokenizer
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from trainer_helpers import arguments, assert_equal_weights, llama, rows, train, weights
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import megatrain as mt
from megatrain import cli
from megatrain.save.card import FACTS_NAME, MARK, base_model_name

INSTALLED = next((one.version for one in importlib.metadata.distributions(name="megatrain")), None)
THEIRS = "# My card\n\nWords of my own.\n"


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    mt.init(device="cpu")


def card_of(folder: Path) -> dict[str, str]:
    """The lines of its table."""
    text = (folder / "README.md").read_text()
    assert MARK in text and ModelCard(text).data.library_name == "transformers"
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    return {line[0]: line[1] for line in lines if len(line) == 2}


def trained_model(**changes: Any) -> Any:
    model = mt.stream(llama(**changes)).train()
    optimizer = mt.optim.AdamW(model, lr=1e-3)
    for _ in range(2):
        ids = torch.arange(8)[None]
        mt.accumulate(model, [{"input_ids": ids, "labels": ids}])
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_a_saved_model_is_complete(tmp_path: Path) -> None:
    """In the dtype that it was loaded in, tied weights once, with its generation config, tokenizer and template."""
    mt.init(device="cpu", precision="bf16")
    model = llama(vocab_size=320, tie_word_embeddings=True).bfloat16()
    model.generation_config = GenerationConfig(max_new_tokens=7, temperature=0.3, do_sample=True)
    tokenizer = tiny_tokenizer(CHATML)
    tokenizer.pad_token = tokenizer.eos_token
    changes = {"num_train_epochs": 1, "bf16": True}
    trainer = mt.Trainer(model, arguments(tmp_path, **changes), train_dataset=rows(), processing_class=tokenizer)
    trainer.train()
    for save in (trainer.save_model, trainer.model.save_pretrained):
        folder = tmp_path / save.__name__
        save(str(folder))
        tensors = load_file(folder / "model.safetensors")
        assert "lm_head.weight" not in tensors and {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        assert_equal_weights(weights(loaded), weights(trainer.model))
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert loaded.generation_config.max_new_tokens == 7 and loaded.generation_config.temperature == 0.3
    messages = [{"role": "user", "content": "hello"}]
    again = AutoTokenizer.from_pretrained(tmp_path / "save_model")
    render = {"conversation": messages, "tokenize": False}
    assert again.apply_chat_template(**render) == tokenizer.apply_chat_template(**render)


def test_the_card_of_a_trainer_says_what_was_trained(tmp_path: Path) -> None:
    model = llama()
    model.config._name_or_path = "owner/Small-Model"
    trainer, _ = train(mt.Trainer, tmp_path, model, {"eval_dataset": rows(4)}, eval_strategy="epoch")
    trainer.card_facts = {"data": "letters of mine"}
    trainer.save_model()
    card = card_of(tmp_path)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert card["base model"] == "owner/Small-Model"
    assert card["data"] == "letters of mine"
    assert card["parameters trained"].startswith("all of ")
    assert card["precision"] == "float32 throughout" and card["moments"] == "exact float32"
    assert card["weights"] == "float32"
    assert card["optimizer"] == "AdamW, learning rate 0.01, cosine schedule"
    assert card["tokens, padding included"] == f"{2 * 14 * 9:,}"  # two epochs of 14 rows of 9 tokens
    assert card["steps"] == "6 of 6" and card["epochs"] == "2"
    assert card["last training loss"] == f"{losses[-1]:.4f}" and "last evaluation loss" in card
    assert card.get("megatrain") == INSTALLED
    assert ModelCard.load(tmp_path / "README.md").data.base_model == "owner/Small-Model"


def test_tokens_are_those_of_the_whole_run(tmp_path: Path) -> None:
    train(mt.Trainer, tmp_path, save_strategy="steps", save_steps=2)
    resumed = mt.Trainer(llama(), arguments(tmp_path), train_dataset=rows())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    resumed.save_model()
    assert card_of(tmp_path)["tokens, padding included"] == "252"


def test_a_card_of_somebody_else_stays(tmp_path: Path) -> None:
    trainer, _ = train(mt.Trainer, tmp_path)
    for save in (trainer.save_model, trainer.model.save_pretrained):
        folder = tmp_path / save.__name__
        folder.mkdir()
        (folder / "README.md").write_text(THEIRS)
        save(str(folder))
        assert (folder / "README.md").read_text() == THEIRS
        assert (folder / "model.safetensors").is_file()
        # This library's is written anew, unless its mark was taken out.
        (folder / "README.md").write_text(f"{MARK}\nold\n")
        save(str(folder))
        assert "Trained with MegaTrain" in (folder / "README.md").read_text()
        (folder / "README.md").write_bytes(b"\xff\xfe not text")
        save(str(folder))
        assert (folder / "README.md").read_bytes() == b"\xff\xfe not text"


def test_a_card_of_peft_replaces_none(tmp_path: Path) -> None:
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM"))
    trainer, _ = train(mt.Trainer, tmp_path, model)
    trainer.save_model(str(tmp_path / "new"))
    assert ModelCard.load(tmp_path / "new" / "README.md").data.library_name == "peft"
    (tmp_path / "README.md").write_text(THEIRS)
    trainer.save_model()
    assert (tmp_path / "README.md").read_text() == THEIRS


def test_a_model_that_was_not_trained_gets_no_card(tmp_path: Path) -> None:
    model = mt.stream(llama())
    model.save_pretrained(tmp_path / "plain")
    mt.Trainer(model, arguments(tmp_path / "out"), train_dataset=rows()).save_model(str(tmp_path / "trainer"))
    assert not list(tmp_path.rglob("README.md"))


def test_a_model_of_a_loop_of_your_own_has_a_card(tmp_path: Path) -> None:
    trained_model().save_pretrained(save_directory=tmp_path)
    card = card_of(tmp_path)
    assert card["steps"] == "2" and card["precision"] == "float32 throughout" and "optimizer" not in card


def test_checkpoints_have_facts_and_no_card(tmp_path: Path) -> None:
    train(mt.Trainer, tmp_path, save_strategy="epoch", save_total_limit=1)
    names = {path.name for path in (tmp_path / "checkpoint-6").iterdir()}
    assert "README.md" not in names and FACTS_NAME in names
    assert cli.run_command(["export", str(tmp_path / "checkpoint-6"), str(tmp_path / "out")]) == 0
    card = card_of(tmp_path / "out")
    assert card["optimizer"] == "AdamW, learning rate 0.01, cosine schedule" and card["steps"] == "6 of 6"
    assert card["weights"] == "float32, as saved"
    assert FACTS_NAME not in {path.name for path in (tmp_path / "out").iterdir()}


def test_the_card_of_an_exported_model_is_that_of_the_model(tmp_path: Path) -> None:
    """Of the model in a run's own folder, which has a card and no facts, and beside it what is of the run alone."""
    run = tmp_path / "run"
    trainer, _ = train(mt.Trainer, run)
    trainer.card_facts = {"base model": "owner/Small-Model", "data": "letters | of mine"}
    trainer.save_model()
    (run / "megatrain_run.json").write_text("{}")
    assert cli.run_command(["export", str(run), str(tmp_path / "out")]) == 0
    expected = {**card_of(run), "weights": "float32, as saved"}
    assert card_of(tmp_path / "out") == expected and expected["data"] == "letters \\| of mine"
    assert ModelCard.load(tmp_path / "out" / "README.md").data.base_model == "owner/Small-Model"
    assert not list((tmp_path / "out").glob("megatrain_*"))
    (run / "README.md").write_text(THEIRS + "| data | mine |\n")
    assert cli.run_command(["export", str(run), str(tmp_path / "other")]) == 0
    assert card_of(tmp_path / "other") == {"weights": "float32, as saved"}


@pytest.mark.parametrize("content", ["{", "[1]", "\x00"])
def test_facts_that_cannot_be_read_are_left_out(tmp_path: Path, content: str) -> None:
    train(mt.Trainer, tmp_path, save_strategy="epoch", save_total_limit=1)
    (tmp_path / "checkpoint-6" / FACTS_NAME).write_text(content)
    (tmp_path / "checkpoint-6" / "megatrain_manifest.json").unlink()
    assert cli.run_command(["export", str(tmp_path / "checkpoint-6"), str(tmp_path / "out")]) == 0
    assert card_of(tmp_path / "out")["steps"] == "6 of 6"


def test_a_library_that_is_not_installed_has_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On PYTHONPATH alone: a run must not end because of it."""

    def unknown(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("megatrain.save.card.importlib.metadata.version", unknown)
    model = trained_model()
    model.save_pretrained(tmp_path)
    assert "megatrain" not in card_of(tmp_path)


def test_an_average_has_a_card_of_its_own(tmp_path: Path) -> None:
    given = {"optimizer_cls_and_kwargs": (mt.optim.AdamW, {"lr": 1e-2, "ema_decay": 0.9})}
    trainer, _ = train(mt.Trainer, tmp_path, given=given)
    trainer.save_model()
    assert card_of(tmp_path / "ema")["weights"] == "their average over steps (decay 0.9)"
    assert card_of(tmp_path)["weights"] == "float32"


def test_the_hubs_cards_are_as_in_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = train(mt.Trainer, tmp_path)
    trainer.save_model()
    trainer.create_model_card(model_name="mine", tags="letters", dataset="letters")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.model_name == "mine" and MARK not in card.content
    pushed: list[str] = []

    class Hub:
        def upload_folder(self, folder_path: str, **_: Any) -> None:
            pushed.append((Path(folder_path) / "README.md").read_text())

    monkeypatch.setattr("transformers.trainer.hf_api", Hub)
    trainer.hub_model_id = "owner/mine"
    monkeypatch.setattr(type(trainer), "_finish_current_push", lambda self: None)
    trainer.push_to_hub()
    assert "generated_from_trainer" in pushed[0] and MARK not in pushed[0]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("owner/model", "owner/model"),
        ("/tmp/me/.cache/hub/models--owner--model-1.5B/snapshots/0123abc", "owner/model-1.5B"),
        ("/tmp/me/secret/my-model/", "my-model"),
        ("runs/first", "runs/first"),
        ("", ""),
        (None, ""),
        (Path("here/there/it"), "it"),
    ],
)
def test_no_path_of_the_machine_is_written(given: Any, name: str) -> None:
    assert base_model_name(given) == name


# More tokens


def test_a_vocabulary_grows_before_streaming_and_not_after(tmp_path: Path) -> None:
    plain = llama()
    plain.resize_token_embeddings(70, mean_resizing=False)
    model = copy.deepcopy(plain)
    mt.stream(model)
    ids = torch.tensor([[1, 66, 69, 3]])
    assert torch.equal(model(input_ids=ids, labels=ids).loss, plain(input_ids=ids, labels=ids).loss)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == 70 and loaded.get_input_embeddings().weight.shape[0] == 70
    with pytest.raises(mt.RefusedError, match="resize the model before mt.stream"):
        model.resize_token_embeddings(80)
    assert torch.equal(model(input_ids=ids, labels=ids).loss, plain(input_ids=ids, labels=ids).loss)
