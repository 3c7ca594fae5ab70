"""Ways of the update, and where each can fail: for the tests of how a step commits."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from update_training import start

import megatrain as mt
from megatrain.base.config import StreamOptions
from megatrain.optim import average, kernel, orthogonal, torch_update
from megatrain.optim.base import HomeOptimizer
from megatrain.plan.placement import Place
from megatrain.store.disk_calls import DiskCalls
from megatrain.store.lossless import LosslessMoment


class Fault:
    """In place of a function: raises at the calls [first, first + num_times), after it has done its work in part.

    spoil: what it leaves behind then, from its arguments.
    """

    def __init__(self, real: Callable[..., Any], error: Exception, spoil: Callable[..., None]) -> None:
        self.num_calls, self.first, self.num_times = 0, 1 << 62, 0
        self._real, self._error, self._spoil = real, error, spoil

    def at(self, first: int, num_times: int) -> None:
        self.num_calls, self.first, self.num_times = 0, first, num_times

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        number, self.num_calls = self.num_calls, self.num_calls + 1
        if self.first <= number < self.first + self.num_times:
            self._spoil(*args, **kwargs)
            raise copy.copy(self._error)  # one that is raised again would hold the frames of every model
        return self._real(*args, **kwargs)


def nothing(*_: Any, **__: Any) -> None:
    """It fails before it begins."""


def spoil_piece(segment: Any, measure: bool = False) -> None:
    """Every tensor that the update writes is half written."""
    for tensor in torch_update.written(segment):
        tensor[: tensor.numel() // 2 + 1].fill_(7)


@dataclass(frozen=True)
class Case:
    """A path of the update, and where it fails."""

    owner: Any
    name: str
    error: Exception
    spoil: Callable[..., None] = nothing
    settings: dict[str, Any] = field(default_factory=dict)
    optimizer: Any = None
    numbers: dict[str, Any] = field(default_factory=dict)
    places: Any = None
    freezes: bool = False
    """A parameter has no gradient: its average moves on."""

    def fault(self, monkeypatch: pytest.MonkeyPatch) -> Fault:
        fault = Fault(getattr(self.owner, self.name), self.error, self.spoil)
        # A function as an attribute, so that it binds as the real one does.
        monkeypatch.setattr(self.owner, self.name, lambda *args, **kwargs: fault(*args, **kwargs))
        return fault

    def start(self, folder: Path, *, serial: bool = False, **settings: Any) -> tuple[nn.Module, HomeOptimizer]:
        if "disk" in str(self.places):
            settings["offload_dir"] = folder
        options = StreamOptions(places=self.places, serial=serial)
        model, optimizer = start(options, self.optimizer, self.numbers, **{**self.settings, **settings})
        if self.freezes:
            dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"].requires_grad_(False)
        return model, optimizer


def memory() -> MemoryError:
    return MemoryError("no memory for this")


TORCH = {"kernel": "torch"}
SPLIT = {"precision": "bf16"}


def on_kernel(**changes: Any) -> Case:
    return Case(kernel.Kernel, "update", memory(), **changes)


def on_torch(**changes: Any) -> Case:
    return Case(torch_update, "update_", memory(), spoil_piece, **{"numbers": TORCH, **changes})


def spoil_code(moment: LosslessMoment, start: int, values: torch.Tensor) -> None:
    moment._piece_memory(0)[:64] = 255


LOSSLESS = {"optimizer_compression": "lossless"}
ENCODE = {"owner": LosslessMoment, "name": "encode_", "error": memory(), "spoil": spoil_code}
PRODUCTS = {"owner": orthogonal, "name": "orthogonalise", "error": torch.OutOfMemoryError("out of memory")}
DISK_READ = {"owner": DiskCalls, "name": "read", "error": OSError(errno.EIO, os.strerror(errno.EIO))}
CASES = {
    "kernel": on_kernel(),
    "kernel split": on_kernel(settings=SPLIT),
    "kernel bf16 8bit": on_kernel(settings={"precision": "bf16", "master": "bf16", "optimizer_compression": "8bit"}),
    "kernel 4bit": on_kernel(settings={"optimizer_compression": "4bit"}),
    "kernel averages": on_kernel(numbers={"ema_decay": 0.9}),
    "kernel on disk": on_kernel(places="disk"),
    "torch": on_torch(),
    "torch split": on_torch(settings=SPLIT, numbers={**TORCH, "ema_decay": 0.9}),
    "torch bf16 8bit": on_torch(settings={"precision": "bf16", "master": "bf16", "optimizer_compression": "8bit"}),
    "torch 4bit": on_torch(settings={"optimizer_compression": "4bit"}),
    "torch states on disk": on_torch(places=Place(moments="disk")),
    "torch lion": on_torch(optimizer=mt.optim.Lion),
    "lossless": Case(**ENCODE, settings={**LOSSLESS, **SPLIT}, numbers={"ema_decay": 0.9}),
    "lossless torch": Case(torch_update, "update_", memory(), spoil_piece, LOSSLESS, numbers=TORCH),
    "lossless on disk": Case(**ENCODE, settings=LOSSLESS, places="disk"),
    "muon": Case(**PRODUCTS, optimizer=mt.optim.Muon),
    "muon 8bit": Case(**PRODUCTS, optimizer=mt.optim.Muon, settings={"optimizer_compression": "8bit"}),
    "muon halves": on_torch(optimizer=mt.optim.Muon, numbers={}),
    "muon lossless": Case(**PRODUCTS, optimizer=mt.optim.Muon, settings=LOSSLESS),
    "muon on disk": Case(**PRODUCTS, optimizer=mt.optim.Muon, places="disk"),
    "averages": Case(average, "ema_", memory(), lambda average, *_: average.fill_(7), numbers={"ema_decay": 0.9},
                     freezes=True),
    "hbm": on_torch(places="hbm", numbers={}),
    "streamed": on_torch(places="stream", numbers={}, settings=SPLIT),
    "streamed, weights on the device": on_torch(
        places=Place(weights="hbm", low="hbm", update="device"), numbers={}, settings=SPLIT
    ),
    "disk read": Case(**DISK_READ, places=Place(moments="disk")),
    "disk read split": Case(
        **DISK_READ, places=Place(low="disk", moments="disk"), settings={**SPLIT, "optimizer_compression": "8bit"}
    ),
}  # fmt: skip
