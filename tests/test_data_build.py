"""From files to training: build_datasets with DataLoader workers and the transformers Trainer."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from data_helpers import CHATML, tiny_tokenizer
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from megatrain.base.errors import UserError
from megatrain.data.build import Datasets, build_datasets
from megatrain.data.config import DataConfig
from megatrain.data.rows import RowDataset

TOKENIZER = tiny_tokenizer(CHATML)
RECORDS = [{"prompt": f"say {number}:", "completion": " hello there" * (1 + number % 7)} for number in range(40)]


def build(path: object = RECORDS, **settings: object) -> Datasets:
    return build_datasets(DataConfig(**{"path": path, "sequence_length": 64, **settings}), TOKENIZER)


def samples_of(dataset: RowDataset) -> list[str]:
    """The text of each sample: what stands between two ends of text."""
    text = "".join(TOKENIZER.decode(item["input_ids"]) for item in dataset)
    return sorted(text.split("<|end|>")[:-1])


def texts_of(records: list[dict]) -> list[str]:
    return sorted(record["prompt"] + record["completion"] for record in records)


def tiny_model(**settings: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**{"vocab_size": 320, "max_position_embeddings": 64, **sizes, **settings})
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("packing", [True, False])
def test_all_samples_are_there_once(packing: bool) -> None:
    datasets = build(packing=packing)
    assert samples_of(datasets.train) == texts_of(RECORDS)
    assert datasets.eval is None
    assert (len(datasets.train) < 40) == packing
    report = datasets.report.train
    assert report.num_samples == 40
    assert report.num_rows == len(datasets.train)
    assert report.num_tokens == sum(len(item["input_ids"]) for item in datasets.train)
    assert report.num_targets == sum(int((item["labels"] != -100).sum()) for item in datasets.train)
    assert report.padding_share == pytest.approx(1 - report.num_tokens / (64 * report.num_rows))


@pytest.mark.parametrize(("count", "shown"), [(1, "1 (0.bin)"), (5, "5 (0.bin, 1.bin, 2.bin, ...)")])
def test_files_that_are_not_text_are_named(tmp_path: Path, count: int, shown: str) -> None:
    (tmp_path / "text").write_text("hello there")
    for number in range(count):
        (tmp_path / f"{number}.bin").write_bytes(b"\0")
    assert str(build(tmp_path).report).endswith(f"files that are not text: {shown}")


def test_held_out_samples_are_whole_and_apart() -> None:
    datasets = build(eval_fraction=0.25, seed=3)
    train, held_out = samples_of(datasets.train), samples_of(datasets.eval)
    assert len(held_out) == 10
    assert sorted(train + held_out) == texts_of(RECORDS)
    again, other = build(eval_fraction=0.25, seed=3), build(eval_fraction=0.25, seed=4)
    assert samples_of(again.eval) == held_out != samples_of(other.eval)


def test_one_text_holds_out_its_end(tmp_path: Path) -> None:
    text = "".join(f"{number} and " for number in range(400))
    (tmp_path / "book.txt").write_text(text)
    datasets = build(tmp_path / "book.txt", eval_fraction=0.2)
    parts = [[TOKENIZER.decode(item["input_ids"]) for item in part] for part in (datasets.train, datasets.eval)]
    assert "".join(sum(parts, [])) == text + "<|end|>"
    assert len(parts[1]) == round(0.2 * (len(parts[0]) + len(parts[1])))


def test_held_out_from_its_own_source() -> None:
    datasets = build(RECORDS[:30], eval_path=RECORDS[30:], eval_samples=2, packing=False)
    assert samples_of(datasets.train) == texts_of(RECORDS[:30])
    assert samples_of(datasets.eval) == texts_of(RECORDS[30:32])


def test_max_samples_reads_no_further() -> None:
    datasets = build([*RECORDS[:5], {"bad": 1}], max_samples=5)
    assert samples_of(datasets.train) == texts_of(RECORDS[:5])


def test_several_sources_join(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a b c")
    datasets = build([tmp_path / "a.txt", [{"text": "1 2 3"}]])
    assert samples_of(datasets.train) == ["1 2 3", "a b c"]


def test_nothing_to_train_on_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.bin").write_bytes(b"\0")
    for name in ("empty.txt", "empty.jsonl"):
        with pytest.raises(UserError, match=rf"nothing to train on in .*{name}"):
            build(tmp_path / name)
    with pytest.raises(UserError, match=r"nothing to train on in .*folder \(0 empty samples, 1 files that are not"):
        build(tmp_path / "folder")
    with pytest.raises(UserError, match="empty list"):
        build([])
    with pytest.raises(UserError, match=r"all 1 samples reach sequence_length 64 .*raise data\.sequence_length"):
        build([{"prompt": "a " * 200, "completion": "b"}])
    with pytest.raises(UserError, match="one sample of one piece only"):
        build(RECORDS[:1], eval_fraction=0.5)
    with caplog.at_level(logging.WARNING):
        report = build([*RECORDS, {"prompt": "a", "completion": " b" * 200}]).report
    assert "1 samples are longer than data.sequence_length and were cut" in caplog.text
    assert "cut at sequence_length: 1" in str(report)


def test_workers_give_what_the_main_process_gives() -> None:
    datasets = build()
    loaders = [DataLoader(datasets.train, 4, collate_fn=datasets.collator, num_workers=workers) for workers in (0, 2)]
    for here, there in zip(*loaders, strict=True):
        assert here.keys() == there.keys()
        assert all(torch.equal(here[name], there[name]) for name in ("input_ids", "labels", "position_ids"))


@pytest.mark.parametrize("keep_columns", [True, False])
@pytest.mark.parametrize("packing", [True, False])
def test_transformers_trainer(packing: bool, keep_columns: bool, tmp_path: Path) -> None:
    """The Trainer's first loss is the mean over targets of samples run alone: nothing is dropped on the way."""
    model = tiny_model()
    datasets = build(RECORDS[:12], packing=packing, eval_path=RECORDS[:12]).fit_to(model)
    alone = build(RECORDS[:12], packing=False).train
    total, count = 0.0, 0
    with torch.no_grad():
        for item in alone:
            num_targets = int((item["labels"] != -100).sum())
            total += model(item["input_ids"][None], labels=item["labels"][None]).loss.item() * num_targets
            count += num_targets
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=2, logging_steps=1, report_to=[],
        use_cpu=True, gradient_accumulation_steps=-(-len(datasets.train) // 2), remove_unused_columns=not keep_columns,
        save_strategy="no", disable_tqdm=True, learning_rate=1e-3,
    )  # fmt: skip
    trainer = Trainer(
        model,
        arguments,
        train_dataset=datasets.train,
        eval_dataset=datasets.eval,
        data_collator=datasets.collator,
    )
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(total / count, abs=1e-3)
    assert trainer.evaluate()["eval_loss"] < total / count


def test_data_that_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"token id \d+ is beyond the model's vocabulary of 100; .*tokenizer"):
        build().fit_to(tiny_model(vocab_size=100))
    with pytest.raises(UserError, match=r"sequence_length is 64, but the model has 32 positions; lower it"):
        build().fit_to(tiny_model(max_position_embeddings=32))
