"""Where updates run: by the CPU, on the device, or streamed through it, after the place of the home."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from megatrain.optim.device_update import DeviceUpdater
from megatrain.optim.lossless_update import LosslessSegment, update_lossless
from megatrain.optim.segment import Segment
from megatrain.optim.update import CpuUpdater, Measure
from megatrain.plan.placement import CPU, HBM


class Updaters:
    """
    Args:
        device: where homes of the places "hbm" and "stream" are updated.
        num_threads, kernel: of the CPU update (see `CpuUpdater`).
    """

    def __init__(self, device: torch.device, num_threads: int | None, kernel: str) -> None:
        self._cpu = CpuUpdater(num_threads, kernel)
        self._device = DeviceUpdater(device)
        self._pool: ThreadPoolExecutor | None = None

    def run(self, place: str, segments: Sequence[Segment | LosslessSegment], measure: bool) -> Sequence[Measure | None]:
        """Update the segments of a home that lives in `place`. Returns a Measure for each, if asked for."""
        if place == HBM:
            return self._device.run(segments, measure)
        if place != CPU:
            return self._device.run_streamed(segments, measure)
        if any(isinstance(segment, LosslessSegment) for segment in segments):
            if self._pool is None:
                # Kept from step to step: its threads hold the scratch memory of the code.
                self._pool = ThreadPoolExecutor(self._cpu.num_threads, thread_name_prefix="megatrain-lossless")
            return update_lossless(self._cpu, self._pool, segments, measure)
        return self._cpu.run(segments, measure)

    def close(self) -> None:
        self._cpu.close()
        if self._pool is not None:
            self._pool.shutdown()
