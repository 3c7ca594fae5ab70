"""Tiny models, data and runs for the tests of megatrain.Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import megatrain as mt

torch.set_num_threads(1)  # matrices are so small here that threads only wait for each other
mt.init(device="cpu")

LOSS_RTOL = 2e-6
"""Two AdamW that differ by one rounding a step (torch contracts to FMA): measured 3e-7 over 8 steps on these models."""


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = dict(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(LlamaConfig(**(config | changes)))


def rows(count: int = 14, length: int = 9) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 64, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    settings = dict(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        num_train_epochs=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=0.5,
        warmup_steps=1,
        lr_scheduler_type="cosine",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    return TrainingArguments(**(settings | changes))


class Recorder(transformers.TrainerCallback):
    """Every event with the step it came at, and the logs."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.logs: list[dict[str, float]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return object.__getattribute__(self, name)

        def record(args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            self.events.append((name, state.global_step))
            if name == "on_log":
                self.logs.append(dict(logs))

        return record


def train(
    trainer_class: type,
    folder: Path,
    model: nn.Module | None = None,
    given: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[transformers.Trainer, Recorder]:
    recorder = Recorder()
    trainer = trainer_class(
        model=llama() if model is None else model,
        args=arguments(folder, **changes),
        train_dataset=rows(),
        callbacks=[recorder],
        **(given or {}),
    )
    trainer.train()
    return trainer, recorder


def assert_same_logs(plain: transformers.Trainer, streamed: transformers.Trainer) -> None:
    """Same entries with same keys; the first loss is bit-equal (same weights), the later ones within LOSS_RTOL."""
    timed = ("runtime", "per_second", "preparation_time")
    kept = [
        [{k: v for k, v in entry.items() if not k.endswith(timed)} for entry in trainer.state.log_history]
        for trainer in (plain, streamed)
    ]
    assert len(kept[0]) == len(kept[1])
    assert kept[0][0]["loss"] == kept[1][0]["loss"]
    for expected, got in zip(*kept, strict=True):
        assert got.keys() == expected.keys()
        assert got == pytest.approx(expected, rel=LOSS_RTOL, abs=0)
        assert got.get("learning_rate") == expected.get("learning_rate")


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal_weights(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


class Blocks(nn.Module):
    """A model of the user's own."""

    def __init__(self, output: str, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(16, 64)
        if tied:
            self.head.weight = self.embedding.weight
        self.output = output

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"dict": {"loss": loss, "logits": logits}, "tuple": (loss, logits), "tensor": loss}[self.output]


class SeededMicroBatches(transformers.Trainer):
    """transformers.Trainer with a generator for each micro-batch of a step, seeded as the stream seeds it."""

    def get_batch_samples(self, *args: Any) -> Any:
        batches, num_items = super().get_batch_samples(*args)
        self.seeds = torch.randint(2**62, (len(batches),)).tolist() if len(batches) > 1 else [None]
        return batches, num_items

    def training_step(self, *args: Any) -> torch.Tensor:
        seed = self.seeds.pop(0)
        if seed is None:
            return super().training_step(*args)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return super().training_step(*args)
