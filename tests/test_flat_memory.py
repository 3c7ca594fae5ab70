"""Host memory stays flat over many steps of random lengths and micro-batches, with eval, generate and saves in between.

`scripts/gpu_check.py flat` does the same on a GPU, over 500 steps.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from comparing import closed_later, the_engine
from update_training import MAX_NORM, VOCABULARY, start

import megatrain as mt
from megatrain.base.config import StreamOptions
from megatrain.plan.placement import Place
from megatrain.store.memory import HostMemory

MAX_LENGTH, MAX_MICRO_BATCHES = 24, 3
NUM_WARM_UP, NUM_STEPS = 21, 101
RSS_TOLERANCE_BYTES = 8 << 20
"""Of what C allocators and PyTorch keep. The gradients of one step are 150 KB: of each step, they would be 18 MB."""

PLACES = {
    "model.embed_tokens": Place(moments="disk"),
    "model.layers.0": Place(low="hbm", moments="hbm", update="device"),
    "model.layers.1": "disk",
    "lm_head": "stream",
}


class Counts:
    """What was asked for since the start."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_asked = 0
        self._engine = the_engine(model)
        empty = HostMemory.empty

        def counted(memory: HostMemory, *args: Any, **keywords: Any) -> torch.Tensor:
            self.num_asked += 1
            return empty(memory, *args, **keywords)

        monkeypatch.setattr(HostMemory, "empty", counted)

    def now(self) -> dict[str, int]:
        memory = self._engine.memory
        assert memory.disk is not None
        return {
            "host bytes": memory.ram_bytes,
            "disk bytes": memory.disk.disk_bytes,
            "pool bytes": self._engine.activations.buffers.total_bytes,
            "buffers asked for": self.num_asked,
            "slab bytes": sum(home.grads.slab_bytes for home in self._engine.homes),
            "slot bytes": self._engine.transport.total_device_bytes,
        }


def batch(length: int, rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (rows, length))
    return {"input_ids": ids, "labels": ids}


def train_step(model: Any, optimizer: Any, lengths: list[int]) -> None:
    mt.accumulate(model, [batch(length) for length in lengths])
    mt.clip_grad_norm_(model, MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()


def look_up(model: Any, folder: Path) -> None:
    """What comes between steps."""
    model.eval()
    with torch.no_grad():
        model(**batch(MAX_LENGTH))
    model.generate(batch(4)["input_ids"], max_new_tokens=4, do_sample=False, pad_token_id=0)
    model.save_pretrained(folder)
    model.train()


def test_host_memory_is_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.transport.activations.MIN_BYTES", 1)
    options = StreamOptions(activation_bytes=0, places=PLACES)
    model, optimizer = start(options, precision="bf16", optimizer_compression="8bit", offload_dir=tmp_path / "homes")
    counts = Counts(closed_later(model), monkeypatch)
    draws = random.Random(0)
    seen, rss_bytes = [], []
    # The most that comes is among the first steps, as with a longest length that is known.
    train_step(model, optimizer, [MAX_LENGTH] * MAX_MICRO_BATCHES)
    # On some processors oneDNN makes code for each length that is new, and keeps it.
    for length in range(2, MAX_LENGTH):
        train_step(model, optimizer, [length])
    for number in range(NUM_STEPS):
        lengths = [draws.randint(2, MAX_LENGTH) for _ in range(draws.randint(1, MAX_MICRO_BATCHES))]
        train_step(model, optimizer, lengths)
        if number % 40 == 20:
            look_up(model, tmp_path / "saved")
        if number >= NUM_WARM_UP:
            seen.append(counts.now())
            rss_bytes.append(psutil.Process().memory_info().rss)
    assert the_engine(model).activations.num_offloaded > NUM_STEPS
    assert all(counts == seen[0] for counts in seen), [one for one in seen if one != seen[0]][:3]
    assert max(rss_bytes) - rss_bytes[0] < RSS_TOLERANCE_BYTES
