"""What lanes and the link are said to have done."""

from __future__ import annotations

import types

import pytest
import torch

from megatrain.base.fence import Fence
from megatrain.plan.placement import RAM
from megatrain.spec.layout import Field
from megatrain.store.home import Home
from megatrain.store.memory import HostMemory
from megatrain.transport import hops, stall
from megatrain.transport.lane import Lane


def make_home(numel: int) -> Home:
    field = Field(
        name="weight",
        shape=(numel,),
        dtype=torch.float32,
        saved_dtype=torch.float32,
        is_split=False,
        offset=0,
        wire_offset_bytes=0,
    )
    return Home("layer", [field], {RAM: HostMemory(max_bytes=None, pin=False)}, torch.float32)


def test_bytes_over_the_link_are_counted_by_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hops, "copy_", lambda target, source: None)
    home, counted = make_home(300), hops.Hops()
    host, device = torch.zeros(100), torch.zeros(100, device="meta")
    counted.fill(home, 0, torch.empty(1200, dtype=torch.uint8, device="meta"))
    counted.bring(host, device, "layer")
    counted.move(device, host, "states")
    assert counted.link.stats() == {"link_to_device_bytes": 1200 + 400 + 400, "link_to_host_bytes": 0}
    counted.send(device, host, "layer")
    counted.begin(host[:50], device[:50], "states")
    counted.move(host, host.clone(), "a copy within host memory")
    counted.fill(home, 0, torch.empty(1200, dtype=torch.uint8))
    assert counted.link.stats() == {"link_to_device_bytes": 2000, "link_to_host_bytes": 400 + 200}


def test_a_lane_is_busy_while_it_works_and_not_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(stall, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))

    def work(seconds: float) -> None:
        clock[0] += seconds

    lane, fence = Lane("h2d", torch.device("cpu")), Fence()
    waited = lane.submit(lambda: work(3.0), after=(fence,))
    work(5.0)
    fence.record()
    waited.wait()
    lane.submit(lambda: work(4.0))
    lane.flush()
    lane.close()
    assert lane.busy_seconds == 7.0
