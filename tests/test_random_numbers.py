"""What a step leaves of the global generator: as plain training does, where its micro-batches draw nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from comparing import closed_later
from model_zoo import make_batch, make_model
from trainer_helpers import SeededMicroBatches, arguments, llama

import megatrain as mt


def batches() -> list[dict[str, torch.Tensor]]:
    return [make_batch(), make_batch()]


def own_loss(outputs: Any, batch: Any) -> torch.Tensor:
    return outputs.loss


def noisy_loss(outputs: Any, batch: Any) -> torch.Tensor:
    return outputs.loss * torch.rand(())


def test_a_step_that_draws_nothing_leaves_the_generator_as_it_was() -> None:
    model = closed_later(mt.stream(make_model("llama").train()))
    before = torch.get_rng_state()
    mt.accumulate(model, batches(), own_loss)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("dropout", "loss_of"), [(0.3, own_loss), (0.0, noisy_loss)])
def test_steps_that_draw_get_numbers_of_their_own(dropout: float, loss_of: Callable[..., torch.Tensor]) -> None:
    """Each step other ones, and those of seeds drawn in one go from the global generator."""
    model = closed_later(mt.stream(make_model("llama", attention_dropout=dropout).train()))
    torch.manual_seed(5)
    losses = [loss for _ in range(3) for loss in mt.accumulate(model, batches(), loss_of)]
    assert len(set(map(float, losses))) == 6
    after = torch.get_rng_state()
    torch.manual_seed(5)
    for _ in range(3):
        torch.randint(2**62, (2,))
    assert torch.equal(torch.get_rng_state(), after)


def order(trainer_class: type, folder: Path, model: Any, sampling: str) -> list[list[int]]:
    """First tokens of each micro-batch of three epochs."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(5, 20, (120,), generator=generator).tolist()
    data = [{"input_ids": (row := [index % 64] * length), "labels": row} for index, length in enumerate(lengths)]
    seen: list[list[int]] = []

    def collate(features: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        seen.append([feature["input_ids"][0] for feature in features])
        length = min(len(feature["input_ids"]) for feature in features)
        return {key: torch.tensor([feature[key][:length] for feature in features]) for key in ("input_ids", "labels")}

    settings = arguments(
        folder, num_train_epochs=3, gradient_accumulation_steps=3, train_sampling_strategy=sampling, seed=7
    )
    trainer_class(model=model, args=settings, train_dataset=data, data_collator=collate).train()
    return seen


@pytest.mark.parametrize("sampling", ["random", "group_by_length"])
def test_the_order_of_data_is_that_of_transformers_in_every_epoch(sampling: str, tmp_path: Path) -> None:
    plain = order(transformers.Trainer, tmp_path, llama(), sampling)
    assert order(mt.Trainer, tmp_path, llama(), sampling) == plain
    assert len(plain) == 180 and plain[:60] != plain[60:120]


def test_with_dropout_it_is_that_of_the_same_seeds(tmp_path: Path) -> None:
    models = [llama(attention_dropout=0.2) for _ in range(2)]
    plain = order(SeededMicroBatches, tmp_path, models[0], "group_by_length")
    assert order(mt.Trainer, tmp_path, models[1], "group_by_length") == plain


@pytest.mark.parametrize("step", [5, 7, 12])
def test_an_epoch_whose_order_is_drawn_anew_is_told(step: int, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """7 steps are an epoch."""
    rows = [
        {"input_ids": [index % 64] * (5 + index % 7), "labels": [index % 64] * (5 + index % 7)} for index in range(20)
    ]
    changes = {"max_steps": 13, "per_device_train_batch_size": 1, "save_strategy": "steps", "save_steps": step}
    settings = arguments(tmp_path, train_sampling_strategy="group_by_length", **changes)
    mt.Trainer(llama(), settings, train_dataset=rows).train()
    capsys.readouterr()
    trainer = mt.Trainer(llama(), settings, train_dataset=rows)
    trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    said = capsys.readouterr().out
    assert ("the rows of this epoch come in another order" in said) == (step == 12)
    assert ("bit for bit as if it had never stopped" in said) == (step != 12)
