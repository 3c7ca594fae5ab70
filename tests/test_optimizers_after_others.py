"""One optimizer after another over one model: the memory of a dead one is taken again, and nothing of it is seen."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from disk_helpers import reserved_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tiers import ANY_HOME
from update_training import assert_same, batches, result, start, train

import megatrain as mt
from megatrain.base.config import StreamOptions
from megatrain.execute.engine import engine_of
from megatrain.store.disk_memory import DiskMemory
from megatrain.store.memory import HostMemory
from megatrain.store.tier import PAGE_BYTES
from megatrain.transport.disk import DiskWindow


def in_stages(makers: list, options: StreamOptions, **config) -> list[dict[str, torch.Tensor]]:
    """Weights and states behind each stage, which begins when the optimizer before it is gone."""
    model, optimizer = start(options, **config)
    results = []
    for number, maker in enumerate(makers):
        optimizer = None
        gc.collect()
        optimizer = maker(model)
        train(model, optimizer, batches(2, seed=number))
        results.append({name: tensor.clone() for name, tensor in result(model, optimizer).items()})
    return results


def test_stages_on_disk_have_the_bits_of_stages_in_memory(tmp_path: Path) -> None:
    adam = lambda model: mt.optim.AdamW(model, lr=1e-2)  # noqa: E731
    sgd = lambda model: mt.optim.SGD(model, lr=1e-2, momentum=0.9)  # noqa: E731
    makers = [adam, sgd, adam]
    in_memory = in_stages(makers, StreamOptions(serial=True))
    on_disk = in_stages(makers, StreamOptions(places="disk"), offload_dir=tmp_path)
    for expected, actual in zip(in_memory, on_disk, strict=True):
        assert_same(actual, expected)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num_slots=st.integers(1, 4), order=st.lists(st.integers(0, 4), min_size=1, max_size=25))
def test_a_window_is_a_plain_array_whose_memory_is_given_back(num_slots: int, order: list[int], tmp_path: Path) -> None:
    """4: all is dropped, and as much is asked for again, which the system maps where the other was."""
    disk = DiskMemory([tmp_path])
    data, truth = disk.empty(4 * PAGE_BYTES), torch.zeros(4 * PAGE_BYTES, dtype=torch.uint8)
    fresh = torch.zeros(1)
    window = DiskWindow(disk, HostMemory(max_bytes=None, pin=False), num_slots=num_slots, slot_bytes=2 * PAGE_BYTES)
    for turn, number in enumerate(order):
        if number == 4:
            window.rest()
            opened = data = None
            data = disk.empty(4 * PAGE_BYTES)
            truth.zero_()
            continue
        piece = slice(number * PAGE_BYTES, (number + 1) * PAGE_BYTES)
        opened, _ = window.open(ANY_HOME, [data[piece], fresh], fresh)
        assert torch.equal(opened, truth[piece]), turn
        opened.add_(turn + 1)
        truth[piece].add_(turn + 1)
        window.close()
    window.flush()
    assert torch.equal(data, truth)


def test_the_space_of_a_dead_optimizer_is_given_back(tmp_path: Path) -> None:
    model, optimizer = start(StreamOptions(places="disk"), offload_dir=tmp_path)
    store = engine_of(model).memory.disk.store
    used = []
    for number in range(3):
        train(model, optimizer, batches(2, seed=number))
        optimizer = None
        gc.collect()
        used.append(sum(reserved_bytes(store)))
        optimizer = mt.optim.AdamW(model, lr=1e-2)
    assert len(set(used)) == 1, used
