"""Cores are divided by one rule, within what the process may use, and no result depends on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import closed_later
from torch import nn
from trainer_helpers import arguments, llama, rows
from update_training import assert_same

import megatrain as mt
from megatrain.base import cgroup
from megatrain.base.cgroup import usable_cores, whole_cores
from megatrain.optim import update, updaters
from megatrain.optim.update import CpuUpdater
from megatrain.plan.threads import divide_cores


@pytest.mark.parametrize(
    ("num_cores", "has_disk", "num_loading", "num_update"),
    [
        # As measured on 16 cores: two cost the update little. On few cores the others take turns with it.
        *[(n, False, 0, of) for n, of in {1: 1, 2: 2, 7: 7, 8: 6, 16: 14, 96: 94}.items()],
        *[(4, True, 0, 4), (16, True, 0, 13)],
        *[(16, False, 4, 10), (16, True, 4, 9), (4, False, 1, 3)],
        # Never less than half.
        *[(16, True, 32, 8), (7, False, 8, 4), (1, True, 2, 1)],
    ],
)
def test_how_cores_are_divided(num_cores: int, has_disk: bool, num_loading: int, num_update: int) -> None:
    threads = divide_cores(num_cores, has_disk=has_disk, num_loading=num_loading)
    assert threads.update == num_update
    said = threads.describe()
    assert (str(num_update) in said) == (num_cores > 1)
    is_divided = num_update < num_cores
    assert ("load data" in said or "loads data" in said) == (is_divided and num_loading > 0)
    assert ("the disk" in said) == (is_divided and has_disk and num_cores >= 8)


def test_quotas_and_affinity_bound_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup.os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    assert usable_cores(tmp_path) == 6
    monkeypatch.setattr(cgroup, "cpu_quota", lambda _: 3.5)
    assert usable_cores(tmp_path) == 3
    assert [whole_cores(6, quota) for quota in (None, 0.5, 2.0, 64.0)] == [6, 1, 2, 6]


def on_cores(monkeypatch: pytest.MonkeyPatch, num_cores: int) -> None:
    for module in (cgroup, update, updaters):
        monkeypatch.setattr(module, "usable_cores", lambda: num_cores)


def threads_of(optimizer: Any) -> int:
    return optimizer._updaters._cpu.num_threads


def test_who_takes_how_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_cores(monkeypatch, 16)
    assert (CpuUpdater().num_threads, CpuUpdater(96).num_threads) == (14, 96)
    assert threads_of(mt.optim.AdamW(closed_later(mt.stream(llama())))) == 14
    given = {"train_dataset": rows()}
    trainer = mt.Trainer(llama(), arguments(tmp_path, dataloader_num_workers=4), **given)
    closed_later(trainer.model)
    assert threads_of(trainer.create_optimizer()) == 10
    own = (mt.optim.AdamW, {"lr": 1e-3, "num_threads": 3})
    trainer = mt.Trainer(llama(), arguments(tmp_path, dataloader_num_workers=4), optimizer_cls_and_kwargs=own, **given)
    closed_later(trainer.model)
    assert threads_of(trainer.create_optimizer()) == 3
    mt.init(device="cpu", offload_dir=tmp_path / "offload", max_ram_gb=1e-5)
    on_disk = closed_later(mt.stream(llama()))
    assert threads_of(mt.optim.AdamW(on_disk)) == 13


class Wide(nn.Module):
    """Layers of more numbers than a thread of the update takes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(384, 384) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x.square().mean()


@pytest.mark.parametrize("compression", [False, "lossless", "4bit"])
def test_no_result_depends_on_threads(compression: bool | str) -> None:
    states = []
    for num_threads in (1, 2, 5):
        torch.manual_seed(0)
        mt.init(device="cpu", precision="bf16", optimizer_compression=compression)
        model = closed_later(mt.stream(Wide()))
        optimizer = mt.optim.AdamW(model, lr=1e-2, num_threads=num_threads)
        for step in range(3):
            x = torch.randn(4, 384, generator=torch.Generator().manual_seed(step)).bfloat16()
            mt.accumulate(model, [{"x": x}], lambda loss, _: loss)
            mt.clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        moments = {f"{i} {name}": t for i, of in optimizer.state_dict()["state"].items() for name, t in of.items()}
        states.append({**mt.full_state_dict(model), **{name: t.clone() for name, t in moments.items()}})
    for state in states[1:]:
        assert_same(states[0], state)
