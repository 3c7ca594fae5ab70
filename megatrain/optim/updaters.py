"""Where updates run, by the place of the home: by the CPU, from disk too, or on the device, streamed through it too."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from megatrain.base.cgroup import usable_cores
from megatrain.optim.device_update import DeviceUpdater
from megatrain.optim.disk_update import DiskUpdater
from megatrain.optim.lossless_update import LosslessSegment, update_lossless
from megatrain.optim.marks import Marks
from megatrain.optim.segment import Segment
from megatrain.optim.update import CpuUpdater, Measure
from megatrain.plan.placement import DISK_TIER, HBM
from megatrain.plan.threads import divide_cores
from megatrain.transport.disk import DiskWindow

if TYPE_CHECKING:
    from megatrain.execute.engine import Engine
    from megatrain.store.home import Home


def update_order(engine: Engine, members: Collection[Home]) -> list[Home]:
    """Those of `members`, as the next forward needs them."""
    # The resident weights are few, and a wait for them would be a wait for all that is queued before.
    resident = engine.fetcher.resident
    return [home for home in sorted(engine.homes, key=lambda home: home is not resident) if home in members]


class Updaters:
    """
    Args:
        device: where homes whose place says so are updated.
        num_threads, kernel: of the CPU update (see `CpuUpdater`). num_threads None: as `plan/threads.py` says.
        window: to the disk; None: what lies there is updated where it is mapped.
    """

    def __init__(self, device: torch.device, num_threads: int | None, kernel: str, window: DiskWindow | None) -> None:
        if num_threads is None:
            num_threads = divide_cores(usable_cores(), has_disk=window is not None).update
        self._cpu = CpuUpdater(num_threads, kernel)
        self._device = DeviceUpdater(device)
        self._disk = None if window is None else DiskUpdater(self._cpu, window)
        # Kept from step to step: its threads, which it starts when there is work, hold the scratch memory of the code.
        self._pool = ThreadPoolExecutor(self._cpu.num_threads, thread_name_prefix="megatrain-lossless")

    def run(
        self, home: Home, segments: Sequence[Segment | LosslessSegment], measure: bool, marks: Marks
    ) -> Sequence[Measure | None]:
        """Update what is not marked of segments of a home. Returns a Measure for each, if asked for.

        Several threads may be here at once: one for homes on disk, one for those updated on the device, one for others.
        """
        place = home.place
        if place == HBM:
            return self._device.run(segments, measure, marks)
        if place.update == "device":
            return self._device.run_streamed(segments, measure, marks)
        if any(isinstance(segment, LosslessSegment) for segment in segments):
            return update_lossless(self._cpu, self._pool, segments, measure, marks)
        if self._disk is not None and DISK_TIER in place.tiers.values():
            # The next visit reads weights from there.
            return self._disk.run(home, segments, measure, marks, waits=place.weights == DISK_TIER)
        return self._cpu.run(segments, measure, marks=marks)

    def close(self) -> None:
        self._cpu.close()
        self._pool.shutdown()
