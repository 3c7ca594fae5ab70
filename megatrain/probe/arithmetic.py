"""Matrix rate of the compute device, and how fast its memory and the host's are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from megatrain.base.units import format_number
from megatrain.probe.facts import BYTES_PER_SECOND, FLOPS_PER_SECOND, HostFacts, Rate, attempt
from megatrain.probe.timing import Effort, median_seconds
from megatrain.store.memory import HostMemory

NUM_PRODUCTS = 8
"""Of one timed round on a GPU: waiting for its end costs as much as a small product."""
SMALLEST_PRODUCT = 256
"""Rows of the first matrices that are tried."""
LONG_PRODUCT_SECONDS = 0.05
RAM_SHARE = 8
"""A probe takes at most this part of the memory that is free."""


def measure_arithmetic(device: torch.device, effort: Effort) -> list[Rate]:
    """Matrix products in bf16 and in fp32 with TF32 off."""
    threads = f", {format_number(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else ""
    note = device.type + threads
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return [
            attempt(key, label, FLOPS_PER_SECOND, partial(_matmul_rate, device, dtype, effort), note)
            for key, label, dtype in (
                ("matmul.bf16", "matrix products, bf16", torch.bfloat16),
                ("matmul.fp32", "matrix products, fp32 (TF32 off)", torch.float32),
            )
        ]
    finally:
        torch.set_float32_matmul_precision(precision)


def _matmul_rate(device: torch.device, dtype: torch.dtype, effort: Effort) -> float:
    largest = effort.matmul_size if device.type == "cuda" else effort.cpu_matmul_size
    num_products = NUM_PRODUCTS if device.type == "cuda" else 1
    # Some processors are a thousand times slower than others, and some have no bf16: grow while there is time.
    size = min(SMALLEST_PRODUCT, largest)
    while size < largest and _product_seconds(device, dtype, size, 1, 0.0) < LONG_PRODUCT_SECONDS:
        size *= 2
    return 2 * size**3 * num_products / _product_seconds(device, dtype, size, num_products, effort.seconds)


def _product_seconds(device: torch.device, dtype: torch.dtype, size: int, num_products: int, seconds: float) -> float:
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)

    def multiply() -> None:
        for _ in range(num_products):
            torch.mm(left, right, out=out)
        synchronize(device)

    return median_seconds(multiply, seconds)


def measure_device_memory(device: torch.device, effort: Effort) -> list[Rate]:
    """Device memory, read and written bytes together; nothing on a machine without a GPU."""
    if device.type != "cuda":
        return []

    def measure() -> float:
        source, target = (torch.ones(effort.ram_bytes, dtype=torch.uint8, device=device) for _ in range(2))

        def copy() -> None:
            for _ in range(NUM_PRODUCTS):
                target.copy_(source)
            synchronize(device)

        return 2 * source.nbytes * NUM_PRODUCTS / median_seconds(copy, effort.seconds)

    return [attempt("hbm", "device memory, read + write", BYTES_PER_SECOND, measure)]


def measure_host_memory(host: HostFacts, effort: Effort) -> list[Rate]:
    """Host memory as homes have it, copied by all cores at once: read and written bytes together."""
    num_bytes = min(effort.ram_bytes, host.available_bytes // RAM_SHARE)

    def measure() -> float:
        memory = HostMemory(max_bytes=None, pin=False)
        source, target = (memory.empty(num_bytes).numpy() for _ in range(2))
        parts = list(zip(np.array_split(target, host.num_cores), np.array_split(source, host.num_cores), strict=True))
        with ThreadPoolExecutor(host.num_cores) as pool:
            # The pages come into being here, by the threads that use them.
            list(pool.map(lambda part: part[1].fill(1), parts))
            seconds = median_seconds(lambda: list(pool.map(lambda part: np.copyto(*part), parts)), effort.seconds)
        return 2 * num_bytes / seconds

    note = format_number(host.num_cores, "thread")
    return [attempt("ram", "host memory, read + write", BYTES_PER_SECOND, measure, note)]


def synchronize(device: torch.device) -> None:
    """Wait for all that the device was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
