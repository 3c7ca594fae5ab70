"""The benchmark of whole documents against pieces: both see the same tokens, and losses are those of plain PyTorch."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from command_helpers import save_tiny_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = __import__("long_documents")
    texts = [{"text": "a b c d 1 2 3 " * (1 + number % 7)} for number in range(30)]
    monkeypatch.setattr(module, "python_source", lambda: texts)
    yield module
    sys.modules.pop("long_documents")


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    model = str(save_tiny_model(tmp_path / "model"))
    sizes = ["--length", "60", "--shortest", "20", "--short", "16", "--steps", "3", "--held-out", "4"]
    return ["--model", model, "--device", "cpu", *sizes]


def test_pieces_hold_the_tokens_of_the_whole_documents(script: ModuleType) -> None:
    documents = [torch.arange(33), torch.arange(100, 140), torch.arange(200, 216)]
    whole = script.micro_batches(documents, None)
    pieces = script.micro_batches(documents, 16)
    assert [batch["input_ids"].shape for batch in whole] == [(1, 33), (1, 40), (1, 16)]
    assert sorted(tuple(batch["input_ids"].shape) for batch in pieces) == [(1, 8), (1, 17), (4, 16)]
    tokens = [torch.cat([batch["input_ids"].flatten() for batch in of]).sort().values for of in (whole, pieces)]
    assert torch.equal(*tokens)
    assert [len(piece) for piece in script.cut(torch.arange(33), 16)] == [16, 17]


def test_losses_are_those_of_plain_pytorch_and_training_with_a_rate_of_0_changes_none(
    script: ModuleType, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = script.read_options([*options, "--lr", "0"])
    documents = script.read_documents(asked.model, asked)
    assert len(documents.held_out) == 4
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32).eval()
    for name in script.VARIANTS:
        for tokens, found in zip(documents.held_out, script.run(asked.model, documents, name, asked), strict=True):
            logits = model(input_ids=tokens[None]).logits[0, :-1]
            assert torch.equal(found, cross_entropy(logits, tokens[1:], reduction="none"))


def test_documents_are_whole_files_and_none_is_held_out_and_trained_on(script: ModuleType, options: list[str]) -> None:
    asked = script.read_options(options)
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    documents = script.read_documents(asked.model, asked)
    every = [*documents.train, *documents.held_out]
    texts = [document["text"] for document in script.python_source()]
    fitting = [text for text in texts if 20 <= len(tokenizer(text)["input_ids"]) + 1 <= 60]
    assert sorted(tokenizer.decode(tokens[:-1]) for tokens in every) == sorted(fitting)
    assert all(tokens[-1] == tokenizer.eos_token_id for tokens in every)


def test_both_ways_learn_and_the_table_tells_how_much(
    script: ModuleType, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    script.main([*options, "--lr", "1e-2"])
    out = capsys.readouterr().out
    rows = re.findall(r"^\| ([\d,]+) to ([\d,]+) \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (\S+) ±", out, re.M)
    assert [row[:2] for row in rows] == [("1", "15"), ("16", "31"), ("32", "59"), ("1", "59")]
    counts = [int(row[2]) for row in rows]
    assert counts[-1] == sum(counts[:-1])
    before, whole, cut = (float(value) for value in rows[-1][3:6])
    assert whole < before - 0.1 and cut < before - 0.1 and whole != cut


def test_too_few_files_end_it_in_a_line(script: ModuleType, options: list[str]) -> None:
    with pytest.raises(SystemExit, match="only 0 files have 500 to 600 tokens"):
        script.main([*options, "--shortest", "500", "--length", "600"])
