"""Links between host memory and the GPU: page-locked as the library makes it, and pageable."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.base.units import format_bytes
from megatrain.probe.arithmetic import synchronize
from megatrain.probe.facts import BYTES_PER_SECOND, Rate, attempt
from megatrain.probe.timing import Effort, median_seconds
from megatrain.store.memory import HostMemory

NUM_COPIES = 4
"""Of one timed round, one after the other on their stream."""

Copy = tuple[torch.cuda.Stream, Tensor, Tensor]
"""On which stream, target, source."""


def measure_links(device: torch.device, effort: Effort) -> tuple[list[Rate], bool]:
    """The rows of a GPU's links, and whether host memory can be page-locked."""
    rates, is_locked = _page_locked_rates(device, effort)
    return [*rates, *_pageable_rates(device, effort)], is_locked


def _page_locked_rates(device: torch.device, effort: Effort) -> tuple[list[Rate], bool]:
    labels = {"h2d": "host to device, page-locked", "d2h": "device to host, page-locked"}
    labels["both_ways"] = "both ways at once, page-locked"
    memory = HostMemory(max_bytes=None, pin=True)
    hosts = [memory.empty(effort.link_bytes, pinned=True) for _ in range(2)]
    if memory.pinned_bytes < memory.ram_bytes:
        note = f"{format_bytes(effort.link_bytes)} of host memory could not be page-locked"
        return [Rate(key=k, label=v, unit=BYTES_PER_SECOND, value=None, note=note) for k, v in labels.items()], False
    devices = [torch.empty(effort.link_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    up: Copy = (torch.cuda.Stream(device), devices[0], hosts[0])
    down: Copy = (torch.cuda.Stream(device), hosts[1], devices[1])
    copies: dict[str, list[Copy]] = {"h2d": [up], "d2h": [down], "both_ways": [up, down]}
    return [
        attempt(key, label, BYTES_PER_SECOND, lambda c=copies[key]: _copy_rate(device, c, effort.seconds))
        for key, label in labels.items()
    ], True


def _pageable_rates(device: torch.device, effort: Effort) -> list[Rate]:
    def measure(is_up: bool) -> float:
        host = HostMemory(max_bytes=None, pin=False).empty(effort.link_bytes).fill_(1)
        there = torch.empty(effort.link_bytes, dtype=torch.uint8, device=device)
        pair = (there, host) if is_up else (host, there)
        return _copy_rate(device, [(torch.cuda.Stream(device), *pair)], effort.seconds)

    return [
        attempt("pageable_h2d", "host to device, pageable", BYTES_PER_SECOND, lambda: measure(True)),
        attempt("pageable_d2h", "device to host, pageable", BYTES_PER_SECOND, lambda: measure(False)),
    ]


def _copy_rate(device: torch.device, copies: list[Copy], seconds: float) -> float:
    """Bytes a second over all of `copies`, which run at once."""

    def run() -> None:
        for _ in range(NUM_COPIES):
            for stream, target, source in copies:
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
        synchronize(device)

    num_bytes = NUM_COPIES * sum(source.nbytes for _, _, source in copies)
    return num_bytes / median_seconds(run, seconds)
