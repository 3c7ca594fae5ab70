"""What one step costs, in numbers that no clock has a part in: visits, copies, bytes each way, waits, allocations.

Of a fixed small model under fixed plans, in its fifth step. A change that makes a step dearer shows here as a number;
one that makes it cheaper too, and is then written down.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from comparing import closed_later
from update_training import batches, start, train

import megatrain as mt
from megatrain.base.config import StreamOptions
from megatrain.base.fence import Fence
from megatrain.execute.engine import engine_of
from megatrain.execute.layer import StreamedLayer, Views
from megatrain.store.buffers import BufferPool
from megatrain.store.memory import HostMemory
from megatrain.transport.stream import LaneStream

BLOCK, EDGE, REST = 57_472, 11_520, 128
"""Bytes of a block's weights, of embedding and head each, and of what is in no layer: fp32, each field aligned."""
GRADIENTS = 3 * BLOCK + 2 * EDGE + REST


class Counts(NamedTuple):
    block_visits: int
    """Of each block."""
    edge_visits: int
    """Of embedding and head."""
    fetches: int
    """Weights that went to the device."""
    fetched_bytes: int
    drains: int
    waits: int
    """How often the thread that trains looked at a fence, over or not: with lanes as fast as can be, a step's own time
    for them."""
    views: int
    """How often a layer's parameters were made of a slot: once a visit, however many micro-batches it has."""


PLANS: dict[str, tuple[dict[str, Any], Counts]] = {
    # One slot serves all five layers in turn. Head and embedding are smaller and take the same.
    "one slot": ({"num_slots": 1}, Counts(2, 1, 9, 6 * BLOCK + 3 * EDGE, 6, 76, 9)),
    # The last two layers of the forward are still there for their backward.
    "three slots": ({}, Counts(2, 1, 7, 4 * BLOCK + 3 * EDGE, 6, 76, 9)),
    # Twice the visits, and gradients leave once all the same.
    "two groups": ({"micro_batches_a_visit": 1}, Counts(4, 2, 11, 6 * BLOCK + 5 * EDGE, 6, 81, 18)),
    "kept": (
        {"kept_layers": {"model.layers.1": "all", "model.layers.2": "all"}},
        Counts(2, 1, 7, 4 * BLOCK + 3 * EDGE, 6, 76, 9),
    ),
    "on the device": ({"places": "hbm"}, Counts(2, 1, 0, 0, 6, 88, 9)),
}


def num_trainings(model: Any) -> Counter[str]:
    stats = mt.stats(model)
    numbers = Counter({name: value for name, value in stats.items() if isinstance(value, int)})
    return numbers + Counter({f"visits of {name}": value for name, value in stats["visits"].items()})


@pytest.mark.parametrize("name", PLANS)
def test_a_step_costs_what_it_did(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, expected = PLANS[name]
    model, optimizer = start(StreamOptions(**options))
    engine, many = engine_of(closed_later(model)), batches(5)
    train(model, optimizer, [next(many) for _ in range(4)])
    engine.wait()
    before, counts = num_trainings(model), Counter()
    wait, views, drain = Fence._wait_recorded, StreamedLayer.views, LaneStream.drain

    def counted(self: Fence) -> None:
        counts["waits"] += threading.current_thread() is threading.main_thread()
        wait(self)

    def viewed(self: StreamedLayer, weights: torch.Tensor) -> Views:
        counts["views"] += 1
        return views(self, weights)

    def drained(self: LaneStream, *drain_of: Any) -> None:
        # On a busy machine lanes are late, and it would have to wait for earlier drains.
        num_waits = counts["waits"]
        self._d2h.flush()
        counts["waits"] = num_waits
        drain(self, *drain_of)

    monkeypatch.setattr(LaneStream, "drain", drained)
    monkeypatch.setattr(Fence, "_wait_recorded", counted)
    monkeypatch.setattr(StreamedLayer, "views", viewed)
    for owner, method in ((HostMemory, "empty"), (BufferPool, "_grow")):
        monkeypatch.setattr(owner, method, lambda *_, what=f"{owner.__name__}.{method}", **__: pytest.fail(what))
    train(model, optimizer, [next(many)])
    monkeypatch.undo()
    engine.wait()
    cost = num_trainings(model) - before
    found = Counts(
        block_visits=cost["visits of model.layers.1"],
        edge_visits=cost["visits of lm_head"],
        fetches=cost["num_transfers"],
        fetched_bytes=cost["transferred_bytes"],
        drains=cost["num_drains"],
        waits=counts["waits"],
        views=counts["views"],
    )
    assert found == expected
    assert cost["drained_bytes"] == engine.homes[0].grad_dtype.itemsize * sum(
        home.gradient_layout().numel for home in engine.homes
    )
    assert cost["visits of model.embed_tokens"] == expected.edge_visits
    assert not cost["num_fetches"], "nothing is brought that was not foreseen"


def test_the_thread_that_trains_asks_for_no_value_that_the_device_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for one waits until the device has caught up. What it reads is in host memory, and always was."""
    model, optimizer = start(StreamOptions())
    many, read = batches(5), Counter()
    closed_later(model)
    train(model, optimizer, [next(many) for _ in range(4)])

    def reading(name: str) -> Any:
        method = getattr(torch.Tensor, name)

        def read_(self: torch.Tensor, *args: Any) -> Any:
            is_engine = "megatrain" in sys._getframe(1).f_globals["__name__"]
            if is_engine and threading.current_thread() is threading.main_thread():
                read[name, tuple(self.shape)] += 1
            return method(self, *args)

        return read_

    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, reading(name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("the device was synchronised"))
    train(model, optimizer, [next(many)])
    monkeypatch.undo()
    # Each parameter's count of updates, twice; and the seeds of two micro-batches. Both were made on the host.
    assert read == {("__int__", ()): 2 * len(list(model.parameters())), ("tolist", (2,)): 1}
