"""Processes that were forked while a model is streamed: they have its memory, but none of its threads."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from trainer_helpers import llama, rows

import megatrain as mt
from megatrain.base.config import StreamOptions

BATCH = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
HANG_SECONDS = 30
"""After which a child is ended by a signal."""


def in_fork(use: Callable[[], Any]) -> str:
    """What `use` raises in a forked process: its type and message. Empty where it raises nothing."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(HANG_SECONDS)
        try:
            use()
        except BaseException as error:  # noqa: BLE001 - told to the parent
            os.write(writer, f"{type(error).__name__}: {error}".encode()[:1000])
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        said = file.read().decode()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "it hung"
    return said


@pytest.fixture(params=[False, True], ids=["lanes", "serial"])
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    mt.init(device="cpu")
    return mt.stream(llama(), options=StreamOptions(serial=request.param))


def test_a_forked_process_that_uses_a_streamed_model_is_refused(model: torch.nn.Module) -> None:
    optimizer = mt.optim.AdamW(model, lr=1e-3)
    mt.accumulate(model, [BATCH])
    optimizer.step()
    weight = next(model.parameters())
    loss = model(**BATCH).loss
    uses = {
        "a weight": lambda: weight.sum(),
        "a master": lambda: weight.master(),
        "a gradient": lambda: weight.grad,
        "all weights": lambda: mt.full_state_dict(model),
        "a forward": lambda: model(**BATCH),
        "a forward without a graph": lambda: torch.no_grad()(model)(**BATCH),
        "a backward": lambda: loss.backward(),
        "a step": lambda: mt.accumulate(model, [BATCH]),
        "tokens": lambda: model.generate(BATCH["input_ids"], max_new_tokens=2, do_sample=False),
    }
    for name, use in uses.items():
        said = in_fork(use)
        assert said.startswith("RefusedError: a forked process"), f"{name}: {said or 'nothing raised'}"
        assert "the process that streamed it" in said and "spawn" in said
    loss.backward()
    assert optimizer.step() is None, "its parent goes on"


def test_a_forked_process_that_leaves_the_model_alone_goes_its_way(model: torch.nn.Module) -> None:
    loader = DataLoader(
        rows(count=4), batch_size=2, num_workers=2, multiprocessing_context=multiprocessing.get_context("fork")
    )
    assert len([mt.accumulate(model, [dict(batch)]) for batch in loader]) == 2
