"""The likely length of a dataset's rows, without asking code that might draw random numbers."""

from __future__ import annotations

import datasets
import pytest
import torch
from trainer_helpers import arguments
from update_training import tiny_llama

import megatrain as mt
from megatrain import api
from megatrain.base.errors import PlanError
from megatrain.data.lengths import NUM_LOOKED_AT, ROOM, likely_length
from megatrain.plan.workload import Workload


def rows(*lengths: int) -> list[dict[str, list[int]]]:
    return [{"input_ids": [1] * length, "labels": [1] * length} for length in lengths]


def test_rows_of_one_length_are_taken_at_their_word() -> None:
    assert likely_length(rows(*[12] * 500)) == 12
    assert likely_length(datasets.Dataset.from_list(rows(*[12] * 500))) == 12


def test_rows_of_several_lengths_get_room() -> None:
    assert likely_length(rows(3, 40, 7)) == int(ROOM * 40)
    many = rows(*range(1, 1001))
    assert likely_length(many) == likely_length(datasets.Dataset.from_list(many)) == int(ROOM * 1000)
    assert NUM_LOOKED_AT < 1000


def test_what_may_have_side_effects_is_not_asked() -> None:
    class Own(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> dict:
            raise AssertionError("nobody asked for a row")

    made = datasets.Dataset.from_list(rows(4, 4))
    for dataset in (
        Own(),
        made.with_transform(lambda row: 1 / 0),
        made.to_iterable_dataset(),
        made.rename_column("input_ids", "text"),
        made.select([]),
        [],
        None,
        [3, 4],
    ):
        assert likely_length(dataset) is None


def test_the_trainer_tells_the_plan_what_it_trains_on(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    mt.init(device="cpu")
    given: list[Workload | None] = []
    plain = api.stream
    too_much = Workload(num_sequences=1, length=999, rows=1)

    def stream(*args: object, **named: object) -> torch.nn.Module:
        given.append(named.get("workload"))
        if given[-1] == too_much:
            raise PlanError("does not fit")
        return plain(*args, **named)

    monkeypatch.setattr(api, "stream", stream)
    args = arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=3)
    mt.Trainer(model=tiny_llama(), args=args, train_dataset=rows(*[9] * 20))
    mt.Trainer(model=tiny_llama(), args=args, train_dataset=rows(9, 9, 9, 9))
    mt.Trainer(model=tiny_llama(), args=args)
    assert given == [
        Workload(num_sequences=6, length=9, rows=2),
        Workload(num_sequences=4, length=9, rows=2),
        None,
    ]
    told = Workload(num_sequences=1, length=5)
    mt.init(device="cpu", workload=told)
    mt.Trainer(model=tiny_llama(), args=args, train_dataset=rows(9, 9, 9, 9))
    assert given[-1] == told
    smooth = arguments(tmp_path, label_smoothing_factor=0.1)
    mt.Trainer(model=tiny_llama(), args=smooth, train_dataset=rows(9, 9, 9, 9))
    assert given[-1] == Workload(num_sequences=1, length=5, reads_logits=True), "its loss is not the model's"
    mt.Trainer(model=tiny_llama(), args=args, train_dataset=rows(9), compute_loss_func=lambda *given: given[0].loss)
    assert given[-1].reads_logits
    mt.init(device="cpu")
    mt.Trainer(model=tiny_llama(), args=args, train_dataset=rows(999))
    assert given[-2:] == [too_much, None], "a guess that does not fit refuses nothing"
