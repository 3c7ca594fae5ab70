"""Memory that goes when weights go home, or when a model is dropped, counts for the model that is streamed."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from trainer_helpers import assert_equal_weights, llama, weights

import megatrain as mt
from megatrain import leaving
from megatrain.base.config import StreamOptions
from megatrain.execute.dropped import collect_dropped
from megatrain.execute.engine import engine_of
from megatrain.leaving import loaded_bytes
from megatrain.plan.rows import host_bytes
from megatrain.store import memory


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    mt.init(device="cpu")
    monkeypatch.setattr(leaving, "SLACK_BYTES", 0)


def have(monkeypatch: pytest.MonkeyPatch, free_bytes: Callable[[], int]) -> None:
    for module in (leaving, memory):
        monkeypatch.setattr(module, "free_host_bytes", free_bytes)


def needed_beside_weights() -> int:
    """Host memory that a model needs when its own weights have left theirs."""
    plain = llama()
    held_bytes = loaded_bytes(plain)
    return host_bytes(engine_of(mt.stream(plain)).placement) - held_bytes


def num_parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_a_loaded_models_own_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What homes take of it on the way, parameters give: what is free stays the same."""
    model = llama()
    expected = weights(model)
    needed_bytes = needed_beside_weights()
    have(monkeypatch, lambda: needed_bytes)
    mt.stream(model)
    assert_equal_weights(weights(model), expected)


def test_too_little_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    needed_bytes = needed_beside_weights()
    have(monkeypatch, lambda: needed_bytes - 1)
    with pytest.raises(mt.UserError, match="needs .* of host memory and .* are free"):
        mt.stream(model)
    assert engine_of(model) is None


def test_weights_that_somebody_else_holds_are_told_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory shrinks then by what homes take."""
    model = llama()
    expected = weights(model)
    originals = list(model.parameters())
    held_bytes = loaded_bytes(model)
    needed_bytes = needed_beside_weights()

    def free_bytes() -> int:
        taken_bytes = held_bytes - sum(parameter.untyped_storage().nbytes() for parameter in originals)
        return needed_bytes - taken_bytes

    have(monkeypatch, free_bytes)
    with pytest.raises(mt.UserError, match="something else holds them"):
        mt.stream(model)
    assert engine_of(model) is None
    assert_equal_weights(weights(model), expected)
    monkeypatch.undo()
    mt.stream(model)
    assert_equal_weights(weights(model), expected)


def test_a_limit_is_not_of_the_loaded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    mt.init(device="cpu", max_ram_gb=13 * num_parameters(model) / 1e9)
    with pytest.raises(mt.UserError, match="left within the limit max_ram_gb"):
        mt.stream(model)


def test_what_counts_as_loaded(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    assert loaded_bytes(model) == 4 * num_parameters(model)
    part = torch.nn.Linear(8, 8, bias=False)
    part.weight = torch.nn.Parameter(torch.zeros(100, 8)[:8])
    assert loaded_bytes(part) == 4 * 64
    assert loaded_bytes(llama().to("meta")) == 0
    # A tensor that views a mapped file takes no memory that could go.
    save_file({"weight": torch.zeros(64, 64)}, tmp_path / "a.safetensors")
    torch.zeros(4096).numpy().tofile(tmp_path / "raw")
    part.weight = torch.nn.Parameter(torch.from_file(str(tmp_path / "raw"), size=4096).view(64, 64))
    assert loaded_bytes(part) == 0
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        part.weight = torch.nn.Parameter(file.get_tensor("weight").clone())
    assert loaded_bytes(part) == 4 * 64 * 64


# Models that were dropped


def dropped_with_updates_queued() -> list[weakref.ref]:
    """Its homes."""
    model = mt.stream(llama(), options=StreamOptions(lane_delay_seconds=0.2)).train()
    optimizer = mt.optim.AdamW(model, lr=1e-2)
    ids = torch.arange(8)[None]
    mt.accumulate(model, [{"input_ids": ids, "labels": ids}])
    optimizer.step()
    return [weakref.ref(home) for home in engine_of(model).homes]


def test_a_dropped_model_gives_its_memory_back_when_it_is_asked_for() -> None:
    homes = dropped_with_updates_queued()
    assert any(home() is not None for home in homes)
    collect_dropped()
    assert not any(home() is not None for home in homes)


def test_a_model_is_streamed_in_the_place_of_a_dropped_one(monkeypatch: pytest.MonkeyPatch) -> None:
    homes = dropped_with_updates_queued()
    have(monkeypatch, lambda: 0 if any(home() is not None for home in homes) else 10**9)
    model = mt.stream(llama())
    assert engine_of(model) is not None


def test_models_that_are_held_stay() -> None:
    model = mt.stream(llama())
    before = copy.deepcopy(weights(model))
    collect_dropped()
    assert_equal_weights(weights(model), before)
