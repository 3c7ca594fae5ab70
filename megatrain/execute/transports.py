"""Makes the transport of an engine: lanes or the serial twin, with the slabs and slots that its homes need."""

from __future__ import annotations

import torch

from megatrain.base.config import StreamOptions
from megatrain.execute.layer import StreamedLayer
from megatrain.plan.placement import HBM
from megatrain.plan.rows import Placement
from megatrain.store.home import Home
from megatrain.store.memory import DeviceMemory, HostMemory
from megatrain.transport.ring import SlabRing
from megatrain.transport.serial import SerialStream
from megatrain.transport.stream import LaneStream


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
    blocks = (layer.home for layer in layers if layer.kind == "block" and layer.home.place != HBM)
    block_bytes = max((home.wire.numel() for home in blocks), default=0)
    rings = _rings(homes, memory, device, options) if placement.config.clip == "layer" else None
    streamed = [home for home in homes if home is not resident]
    return LaneStream(streamed, block_bytes, device, options, rings)


def _rings(homes: list[Home], memory: HostMemory, device: torch.device, options: StreamOptions) -> dict[str, SlabRing]:
    rings = {}
    for kind, source in ((memory.device.type, memory), (device.type, DeviceMemory(device))):
        sizes = [
            home.gradient_layout().numel * home.grad_dtype.itemsize
            for home in homes
            if home.wire.device.type == kind and home.is_trainable
        ]
        if sizes and kind not in rings:
            slabs = [source.empty(max(sizes), pinned=True) for _ in range(options.max_drains + 1)]
            rings[kind] = SlabRing(slabs)
    return rings
