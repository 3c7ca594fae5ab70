"""Runs that save, and what is in their files."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_helpers import arguments, llama, rows
from transformers import TrainerCallback, TrainerState

import megatrain as mt
from megatrain.save.tensor_files import Shards


def make_trainer(folder: Path, model: Any = None, given: dict[str, Any] | None = None, **changes: Any) -> mt.Trainer:
    settings = {"save_strategy": "steps", "save_steps": 2} | changes
    model = llama().bfloat16() if model is None else model
    return mt.Trainer(model=model, args=arguments(folder, **settings), train_dataset=rows(), **(given or {}))


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


class Gate:
    """Holds back the writing of groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        write = Shards.write_group

        def held_back(shards: Shards, tensors: Any) -> None:
            self.reached.set()
            assert self.opened.wait(60)
            write(shards, tensors)

        monkeypatch.setattr(Shards, "write_group", held_back)


class AtStep(TrainerCallback):
    """Calls something at the end of a step."""

    def __init__(self, step: int, call: Any) -> None:
        self.step, self.call = step, call

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.call()
