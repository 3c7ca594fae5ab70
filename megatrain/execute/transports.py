"""Makes the transport of an engine: lanes or the serial twin, with the slabs and slots that its homes need."""

from __future__ import annotations

import torch

from megatrain.base.config import StreamOptions
from megatrain.execute.layer import StreamedLayer
from megatrain.plan.placement import DISK_TIER
from megatrain.plan.rows import NUM_WEIGHT_SLOTS, Placement
from megatrain.store.home import Home
from megatrain.store.memory import DeviceMemory, HostMemory
from megatrain.transport.disk import DiskWindow, WeightReader
from megatrain.transport.hops import Hops
from megatrain.transport.ring import SlabRing
from megatrain.transport.serial import SerialStream
from megatrain.transport.stream import LaneStream
from megatrain.transport.throttle import Throttle


def make_transport(
    homes: list[Home],
    resident: Home | None,
    layers: list[StreamedLayer],
    memory: HostMemory,
    device: torch.device,
    placement: Placement,
) -> LaneStream | SerialStream:
    """resident: the home whose weights are never acquired, or None."""
    options = placement.options
    if options.serial:
        return SerialStream(device)
    blocks = (layer.home for layer in layers if layer.kind == "block" and not layer.home.place.is_resident)
    block_bytes = max((home.wire.numel() for home in blocks), default=0)
    rings = _rings(homes, memory, device, options) if placement.config.clip == "layer" else None
    streamed = [home for home in homes if home is not resident]
    window, reader = _disk(streamed, memory, placement)
    verifies, rate = placement.config.verify_transfers, placement.config.max_link_bytes_per_second
    hops = Hops(verifies=verifies, throttle=None if rate is None else Throttle(rate))
    stream = LaneStream(streamed, block_bytes, device, options, rings, window, reader, resident, hops)
    # Coded moments are written where they are mapped, and what lies beside them with them.
    if verifies and memory.disk is not None and placement.config.moments != "lossless":
        memory.disk.verify(hops.counts)
    return stream


def _disk(homes: list[Home], memory: HostMemory, placement: Placement) -> tuple[DiskWindow | None, WeightReader | None]:
    if not placement.has_disk:
        return None, None
    assert memory.disk is not None
    num_slots, slot_bytes = placement.num_update_slots, placement.update_slot_bytes
    window = DiskWindow(memory.disk, memory, num_slots=num_slots, slot_bytes=slot_bytes)
    on_disk = [home for home in homes if home.place.weights == DISK_TIER]
    if not on_disk:
        return window, None
    delay_seconds = placement.options.lane_delay_seconds
    reader = WeightReader(on_disk, memory.disk, memory, num_slots=NUM_WEIGHT_SLOTS, delay_seconds=delay_seconds)
    return window, reader


def _rings(homes: list[Home], memory: HostMemory, device: torch.device, options: StreamOptions) -> dict[str, SlabRing]:
    rings = {}
    for kind, source in ((memory.device.type, memory), (device.type, DeviceMemory(device))):
        sizes = [
            home.gradient_layout().numel * home.grad_dtype.itemsize
            for home in homes
            if home.grads.device.type == kind and home.is_trainable
        ]
        if sizes and kind not in rings:
            slabs = [source.empty(max(sizes), pinned=True) for _ in range(options.max_drains + 1)]
            rings[kind] = SlabRing(slabs)
    return rings
