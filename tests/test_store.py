"""Homes and host memory: exact sizes, budgets, files that leave nothing, gradients of several passes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatrain.base.config import MASTERS
from megatrain.base.errors import RefusedError, UserError
from megatrain.base.folder_lock import LOCK_NAME
from megatrain.plan.placement import RAM
from megatrain.spec.discover import find_layers
from megatrain.spec.homes import Formats, plan_homes
from megatrain.store.disk_memory import DiskMemory
from megatrain.store.home import Home
from megatrain.store.memory import HostMemory
from megatrain.store.tier import PAGE_BYTES


class Blocks(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 5, dtype=dtype) for _ in range(2))


def make_homes(model: nn.Module, precision: str) -> list[Home]:
    memory = HostMemory(max_bytes=None, pin=False)
    formats = Formats(precision=precision, master=MASTERS[precision][0])
    plans = plan_homes(model, find_layers(model), formats)
    return [Home(plan.name, plan.fields, {RAM: memory}, plan.grad_dtype) for plan in plans]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_written_is_read_back_exactly(precision: str) -> None:
    home = make_homes(Blocks(), precision)[0]
    values = {field: torch.randn(field.shape) for field in home.fields}
    for field, value in values.items():
        home.write(field, value)
    for field, value in values.items():
        assert torch.equal(home.read(field), value)
        assert torch.equal(home.saved(field), value)


def test_a_home_knows_whether_its_weights_are_lent() -> None:
    home = make_homes(Blocks(), "fp32")[0]
    assert not home.is_lent
    held = [home.saved(field) for field in home.fields]
    assert home.is_lent
    view = held.pop()[:1]
    held.clear()
    assert home.is_lent, "a view of a lent tensor reads the home as well"
    del view
    assert not home.is_lent
    copied = make_homes(Blocks(), "bf16")[0]
    held = [copied.saved(field) for field in copied.fields]
    assert not copied.is_lent, "fp32 weights joined from their halves are copies"


def test_weights_loaded_in_bf16_are_taken_over_exactly() -> None:
    home = make_homes(Blocks(torch.bfloat16), "bf16")[0]
    field = home.fields[0]
    home.write(field, torch.randn(field.shape))
    value = torch.randn(field.shape, dtype=torch.bfloat16)
    home.write(field, value)
    assert torch.equal(home.weights(field), value)
    assert torch.equal(home.read(field), value.float())


def test_buffers_have_exact_sizes_within_the_budget(tmp_path) -> None:
    memory = HostMemory(max_bytes=3 * PAGE_BYTES, disk=DiskMemory([tmp_path]), pin=False)
    first = memory.empty(2 * PAGE_BYTES)
    second = memory.empty(2 * PAGE_BYTES)  # does not fit any more
    assert first.numel() == second.numel() == 2 * PAGE_BYTES
    assert (memory.ram_bytes, memory.disk.disk_bytes) == (2 * PAGE_BYTES, 2 * PAGE_BYTES)
    second.fill_(7)
    assert int(second.sum()) == 7 * second.numel()
    assert os.listdir(tmp_path) == [LOCK_NAME], "files have no names"


def test_memory_that_is_given_back_is_counted_back(tmp_path) -> None:
    memory = HostMemory(max_bytes=3 * PAGE_BYTES, disk=DiskMemory([tmp_path]), pin=False)
    kept = memory.empty(PAGE_BYTES)
    for _ in range(3):
        buffers = [memory.empty(2 * PAGE_BYTES) for _ in range(2)]
        assert (memory.ram_bytes, memory.disk.disk_bytes) == (3 * PAGE_BYTES, 2 * PAGE_BYTES)
        view = buffers[0][5:6].view(1, 1)
        del buffers
        assert (memory.ram_bytes, memory.disk.disk_bytes) == (3 * PAGE_BYTES, 0), "a view keeps its buffer"
        del view
        assert memory.ram_bytes == kept.numel()


def test_a_forked_process_neither_changes_nor_reads_the_weights_of_its_parent() -> None:
    home = make_homes(Blocks(), "fp32")[0]
    field = home.fields[0]
    value = torch.randn(field.shape)
    home.write(field, value)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(RefusedError, match="forked"):
                home.write(field, torch.zeros(field.shape))
            with pytest.raises(RefusedError, match="forked"):
                home.read(field)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(home.read(field), value)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shapes", [[(0,), (5,)], [(5,), (0, 3)], [(0,)], [()], [(), (0,), (3, 2), (0,), ()]])
def test_parameters_without_elements_or_dimensions(shapes: list[tuple[int, ...]], precision: str) -> None:
    model = Blocks()
    for block in model.blocks:
        block.extra = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)
        del block.weight, block.bias
    for home in make_homes(model, precision):
        values = {field: torch.randn(field.shape) for field in home.fields}
        for field, value in values.items():
            home.write(field, value)
        for field, value in values.items():
            assert torch.equal(home.read(field), value)


def test_too_much_is_refused_with_the_missing_bytes(tmp_path) -> None:
    with pytest.raises(UserError, match="free"):
        HostMemory(max_bytes=0, disk=DiskMemory([tmp_path]), pin=False).require(2**60, "training")


GIB_4 = 4 * 2**30


@pytest.mark.parametrize(
    ("limit_gib", "needed_gib", "remedy"),
    [
        (None, 6, "4.0 GiB are free: add 2.0 GiB, or give offload_dir"),
        (1, 3, "1.0 GiB are left within the limit max_ram_gb: raise max_ram_gb by 2.0 GiB, or give offload_dir"),
        (1, 6, "limit max_ram_gb: add 2.0 GiB and raise max_ram_gb by 5.0 GiB, or give offload_dir"),
    ],
)
def test_a_limit_of_memory_is_to_be_raised_where_there_is_one(
    limit_gib: int | None, needed_gib: int, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain.store.memory.free_host_bytes", lambda: GIB_4)
    memory = HostMemory(max_bytes=None if limit_gib is None else limit_gib * 2**30, pin=False)
    with pytest.raises(UserError, match=re.escape(remedy)):
        memory.require(needed_gib * 2**30, "training")


@pytest.mark.parametrize(
    ("limit_gib", "needed_gib", "remedies"),
    [
        (None, 7, "make room there, or choose a folder on a larger disk"),
        (1, 4, "make room there, choose a folder on a larger disk, or raise max_ram_gb by 2.0 GiB"),
        (1, 7, "make room there, or choose a folder on a larger disk"),  # free memory is less than what lacks
    ],
)
def test_a_disk_too_small_names_the_limit_of_memory_only_where_raising_it_is_enough(
    limit_gib: int | None, needed_gib: int, remedies: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain.store.memory.free_host_bytes", lambda: GIB_4)
    free = {tmp_path / "small": 2**29, tmp_path / "large": 2**40}
    for folder in free:
        folder.mkdir()
    monkeypatch.setattr(
        "megatrain.store.disk_memory.psutil.disk_usage", lambda path: SimpleNamespace(free=free[Path(path)])
    )
    max_bytes = None if limit_gib is None else limit_gib * 2**30
    memory = HostMemory(max_bytes=max_bytes, disk=DiskMemory(list(free)), pin=False)
    with pytest.raises(UserError, match=f"small', which has 512.0 MiB free: {remedies}$"):
        memory.require(needed_gib * 2**30, "training")


def test_the_offload_folder_is_made_when_something_goes_there(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    memory = HostMemory(max_bytes=2 * PAGE_BYTES, disk=DiskMemory(["~/below/folder"]), pin=False)
    memory.require(3 * PAGE_BYTES, "training")
    kept = [memory.empty(2 * PAGE_BYTES)]
    assert os.listdir(tmp_path) == []
    kept.append(memory.empty(PAGE_BYTES))
    assert (tmp_path / "below" / "folder").is_dir()


def test_a_second_pass_adds_in_fp32() -> None:
    home = make_homes(Blocks(), "bf16")[0]
    layout = home.gradient_layout()
    weight, bias = home.fields
    slab = home.grads.slab(layout)
    first = torch.randn(layout.numel, dtype=torch.bfloat16)
    slab.copy_(first)
    home.grads.receive(layout, {weight: 1.0})
    second = torch.randn(layout.numel, dtype=torch.bfloat16)
    home.grads.add(layout, frozenset([weight, bias]), second)
    expected = layout.view(first, weight).float() + layout.view(second, weight).float()
    assert torch.equal(home.grads.flat(weight), expected.view(-1))
    assert torch.equal(home.grads.flat(bias), layout.flat(second, bias).float())
    assert home.grads.norms()[weight] == float(torch.linalg.vector_norm(expected))
    home.grads.clear()
    assert home.grads.flat(weight) is None


def test_frozen_fields_take_no_room_in_the_slab() -> None:
    home = make_homes(Blocks(), "fp32")[0]
    whole = home.gradient_layout().numel
    home.trainable[home.fields[0]] = False
    part = home.gradient_layout()
    assert list(part.offsets) == [home.fields[1]]
    assert part.numel < whole
