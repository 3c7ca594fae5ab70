"""The disk as a tier: parts of homes in files of `offload_dir`.

What is asked for is an extent of the store (`store/disk.py`), seen as a tensor that maps it. Whoever comes by seldom
(loading, saving, a user who looks at a state) reads and writes that tensor, through the page cache. What every step
moves goes past the page cache: `locate` tells where in the store a tensor lies.
Rule: the two ways see the same bytes, as long as no one uses both at the same time: an update and whoever waits for it.
"""

from __future__ import annotations

import bisect
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch

from megatrain.base.errors import UserError
from megatrain.base.faults import FaultCounts
from megatrain.base.fence import Fence
from megatrain.base.paths import existing_parent, user_path
from megatrain.base.units import format_bytes
from megatrain.store.disk import DiskStore, Extent
from megatrain.store.disk_sums import DiskChecks
from megatrain.store.tier import PAGE_BYTES, OwnProcess, round_up


class DiskMemory:
    """
    Args:
        folders: of offload_dir; extents are striped over them. Nothing is made or locked there before it is needed.

    Raises UserError for a folder that cannot be written.
    """

    device = torch.device("cpu")

    def __init__(self, folders: Sequence[str | os.PathLike[str]]) -> None:
        self.folders = [user_path(folder, "offload_dir") for folder in folders]
        self.num_exposures = 0
        """How often somebody may have changed what is here: what was read ahead before is of no use."""

        self.num_given_back = 0
        """How many extents nobody maps any more: an address of theirs may be another's by now."""

        self._is_exposed = False
        self._checks: DiskChecks | None = None
        self._store: DiskStore | None = None
        self._owner = OwnProcess()
        self._writes: list[tuple[Fence, Callable[[], None]]] = []
        self._lock = threading.Lock()
        self._maps_lock = threading.Lock()
        # Outside the lock: the garbage collector may drop a tensor in the middle of anything.
        self._dropped: deque[Extent] = deque()
        self._starts: list[int] = []
        self._extents: list[Extent] = []
        for folder in self.folders:
            _check_writable(folder)

    def check_process(self) -> None:
        self._owner.check()

    def empty(self, num_bytes: int, *, pinned: bool = False, owner: str = "") -> torch.Tensor:
        """A zeroed uint8 tensor of exactly `num_bytes` that maps an extent (page-aligned start)."""
        del pinned  # transfers go through page-locked host slots
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        extent = self.store.allocate(round_up(num_bytes, PAGE_BYTES), owner)
        dropped = self._dropped
        tensor = extent.mapped(lambda: dropped.append(extent))
        with self._maps_lock:
            self._forget_dropped()
            position = bisect.bisect(self._starts, tensor.data_ptr())
            self._starts.insert(position, tensor.data_ptr())
            self._extents.insert(position, extent)
        return tensor[:num_bytes]

    def locate(self, tensor: torch.Tensor) -> tuple[Extent, int] | None:
        """The extent that a tensor of this tier lies in, and its first byte there. None for a tensor of another."""
        if tensor.device.type != "cpu" or tensor.numel() == 0:
            return None
        with self._maps_lock:
            self._forget_dropped()
            position = bisect.bisect(self._starts, tensor.data_ptr()) - 1
            if position < 0:
                return None
            offset = tensor.data_ptr() - self._starts[position]
            extent = self._extents[position]
        return (extent, offset) if offset < extent.num_bytes else None

    def stats(self) -> dict[str, float]:
        """What the store moved so far: bytes, and the seconds in which it was at it."""
        names = ("read_bytes", "written_bytes", "read_seconds", "write_seconds", "num_retries")
        return {f"disk_{name}": 0 if self._store is None else getattr(self._store, name) for name in names}

    def expose(self) -> None:
        """Somebody is about to change what is here, or to hold a view of it, at any time until `end_exposures`."""
        self.settle()
        self._is_exposed = True
        if self._checks is not None:
            self._checks.expose()

    def end_exposures(self) -> None:
        """The next update is about to be queued: whoever changed something has done so."""
        if self._is_exposed:
            self._is_exposed = False
            self.num_exposures += 1

    def verify(self, counts: FaultCounts) -> None:
        """From now on check what comes past the page cache against what went, page by page."""
        self._checks = DiskChecks(counts)
        if self._store is not None:
            self._store.checks = self._checks

    def end_step(self) -> None:
        """All updates of a step are queued, and views that somebody holds were exposed before."""
        if self._checks is not None:
            self._checks.end_step()

    def wait_for(self, write: Fence, judge: Callable[[], None]) -> None:
        """Whoever looks at tensors of this tier waits for `write` first. judge: waits, and tells its home of a failure
        without raising it."""
        with self._lock:
            self._writes = [one for one in self._writes if not one[0].is_recorded or one[0].error is not None]
            self._writes.append((write, judge))

    def settle(self) -> None:
        """Until what was written is what tensors show. What went wrong in a write is told by its home."""
        with self._lock:
            writes = list(self._writes)
        for _, judge in writes:
            judge()

    @property
    def disk_bytes(self) -> int:
        """Of all extents that are there now."""
        with self._maps_lock:
            self._forget_dropped()
            return sum(extent.num_bytes for extent in self._extents)

    def _forget_dropped(self) -> None:
        """Those that nobody maps any more."""
        while self._dropped:
            position = self._extents.index(self._dropped.popleft())
            del self._starts[position], self._extents[position]
            self.num_given_back += 1

    @property
    def store(self) -> DiskStore:
        """Opened at first use."""
        if self._store is None:
            self._store = DiskStore(self.folders)
            self._store.checks = self._checks
        return self._store

    def require(self, num_bytes: int, what: str, raisable_bytes: int = 0) -> None:
        """Refuse `what` before any work when the folders have no room for `num_bytes` more. Raises UserError.

        raisable_bytes: of host memory that a higher max_ram_gb would give.
        """
        share_bytes = -(-num_bytes // len(self.folders))
        free = {folder: psutil.disk_usage(str(existing_parent(folder))).free for folder in self.folders}
        folder = min(free, key=lambda one: free[one])
        missing_bytes = (share_bytes - free[folder]) * len(self.folders)
        if missing_bytes <= 0:
            return
        remedies = "make room there, or choose a folder on a larger disk"
        if missing_bytes <= raisable_bytes:
            remedies = (
                "make room there, choose a folder on a larger disk, or raise max_ram_gb by "
                f"{format_bytes(missing_bytes)}"
            )
        raise UserError(
            f"{what} needs {format_bytes(share_bytes)} in offload_dir={str(folder)!r}, which has "
            f"{format_bytes(free[folder])} free: {remedies}"
        )


def _check_writable(folder: Path) -> None:
    try:
        tempfile.TemporaryFile(dir=existing_parent(folder)).close()
    except OSError as error:
        raise UserError(
            f"offload_dir={str(folder)!r} cannot be written ({error.strerror}): give a folder that can"
        ) from error
