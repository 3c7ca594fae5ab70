"""The tiers that are memory: of the host, at exact sizes, optionally page-locked for the GPU; and of the device.

PyTorch's pinned allocator rounds to powers of two, which at this scale wastes up to half the host. A mapping of the
exact size plus `cudaHostRegister` transfers at full speed and takes 0.05-0.1 s/GiB.
Rule: a buffer is released only after every tensor that views it is gone (the mapping is kept alive by the tensors).
Mappings are shared with forked processes, not copied on write: else every page that an update writes while a data
loader's workers live would be there twice, and page-locked ones would be copied by the fork itself.
So a forked process must not write, nor read what its parent may be writing (`check_process`).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from collections.abc import Iterator

import torch

from megatrain.base.cgroup import free_host_bytes
from megatrain.base.errors import UserError
from megatrain.base.units import format_bytes
from megatrain.store.disk_memory import DiskMemory
from megatrain.store.tier import PAGE_BYTES, OwnProcess, round_up

logger = logging.getLogger("megatrain")


class HostMemory:
    """Hands out host buffers within a budget; what nobody planned for and does not fit goes to `disk`.

    Args:
        max_bytes: budget for anonymous memory. None: what is free when a buffer is asked for.
        disk: None: there is no second choice, and what `require` let through is taken from memory.
        pin: page-lock buffers that are asked for with `pinned=True` (a CUDA device is used).
    """

    device = torch.device("cpu")

    def __init__(self, *, max_bytes: int | None, pin: bool, disk: DiskMemory | None = None) -> None:
        self.max_bytes = max_bytes
        self.disk = disk
        self.ram_bytes = 0
        self.pinned_bytes = 0
        self._reserved_bytes = 0
        self._pin = pin
        self._locks_later = False
        self._unlocked: dict[int, tuple[torch.Tensor, mmap.mmap]] = {}
        """Buffers that are still to be page-locked, by address."""
        self._owner = OwnProcess()

    def check_process(self) -> None:
        self._owner.check()

    def expose(self) -> None:
        """Nothing: no one reads ahead in memory."""

    def empty(self, num_bytes: int, *, pinned: bool = False, owner: str = "") -> torch.Tensor:
        """A zeroed uint8 tensor of exactly `num_bytes` (page-aligned start).

        Raises UserError when it fits neither in memory nor on disk.
        """
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        mapped_bytes = round_up(num_bytes, PAGE_BYTES)
        if self._fits_in_ram(mapped_bytes):
            mapping = mmap.mmap(-1, mapped_bytes)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                mapping.madvise(mmap.MADV_HUGEPAGE)
            self._account("ram_bytes", mapped_bytes, mapping)
            tensor = torch.frombuffer(mapping, dtype=torch.uint8)
            if pinned and self._pin:
                self._unlocked[tensor.data_ptr()] = tensor, mapping
                if not self._locks_later:
                    self.lock(tensor)
            return tensor[:num_bytes]
        assert self.disk is not None
        return self.disk.empty(num_bytes, owner=owner)

    @contextlib.contextmanager
    def locking_later(self) -> Iterator[None]:
        """Pinned buffers that are asked for inside take no memory until they are written, and have to be `lock`ed."""
        self._locks_later = True
        try:
            yield
        finally:
            self._locks_later = False

    def lock(self, *buffers: torch.Tensor) -> None:
        """Page-lock those of `buffers` that came from `empty` inside `locking_later`, whole as they came."""
        for buffer in buffers:
            if buffer.data_ptr() in self._unlocked:
                tensor, mapping = self._unlocked.pop(buffer.data_ptr())
                # Touched by all threads first: page-locking does it with one.
                tensor.view(-1, PAGE_BYTES)[:, 0].add_(0)
                self._page_lock(tensor, mapping)

    def _account(self, counter: str, num_bytes: int, mapping: mmap.mmap) -> None:
        """Count `num_bytes` for as long as `mapping` lives."""
        self._add(counter, num_bytes)
        weakref.finalize(mapping, self._add, counter, -num_bytes).atexit = False

    def _add(self, counter: str, num_bytes: int) -> None:
        setattr(self, counter, getattr(self, counter) + num_bytes)

    def require(self, num_bytes: int, what: str) -> None:
        """Refuse `what` before any work when `num_bytes` more fit nowhere. Raises UserError with the missing bytes."""
        missing_bytes = num_bytes - self.free_bytes()
        if missing_bytes <= 0:
            return
        if self.disk is not None:
            self.disk.require(missing_bytes, what, self.raisable_bytes())
            return
        left = "are free" if self.max_bytes is None else "are left within the limit max_ram_gb"
        raise UserError(
            f"{what} needs {format_bytes(num_bytes)} of host memory and {format_bytes(self.free_bytes())} {left}: "
            f"{self._remedy(missing_bytes)}, or give offload_dir a folder with as much space"
        )

    def _remedy(self, missing_bytes: int) -> str:
        """A limit is raised where there is one, memory added where the machine has too little."""
        lacking_bytes = missing_bytes - self.raisable_bytes()
        add = [f"add {format_bytes(lacking_bytes)}"] if lacking_bytes > 0 else []
        limit = [] if self.max_bytes is None else [f"raise max_ram_gb by {format_bytes(missing_bytes)}"]
        return " and ".join(add + limit)

    def reserve(self, num_bytes: int) -> None:
        """Keep room for what is not allocated here."""
        self._reserved_bytes += num_bytes

    def free_bytes(self) -> int:
        """What may still be taken from memory."""
        if self.max_bytes is not None:
            return max(0, self.max_bytes - self.ram_bytes - self._reserved_bytes)
        return self._machine_bytes()

    def raisable_bytes(self) -> int:
        """What the machine has free beyond the limit; 0 without one."""
        return 0 if self.max_bytes is None else max(0, self._machine_bytes() - self.free_bytes())

    def _machine_bytes(self) -> int:
        promised_bytes = sum(tensor.numel() for tensor, _ in self._unlocked.values())
        return max(0, free_host_bytes() - self._reserved_bytes - promised_bytes)

    def _fits_in_ram(self, num_bytes: int) -> bool:
        return self.disk is None or num_bytes <= self.free_bytes()

    def _page_lock(self, tensor: torch.Tensor, mapping: mmap.mmap) -> None:
        code = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
        if int(code) != 0:
            # CUDA keeps the error, and the next kernel would raise it.
            with contextlib.suppress(RuntimeError, AssertionError):
                torch.zeros(1, device="cuda")
            logger.warning(
                "could not page-lock %s of host memory (CUDA error %s): transfers from it run at about 8 GB/s instead "
                "of 50. Raise the limit of locked memory (ulimit -l) to mend it.",
                format_bytes(tensor.numel()),
                int(code),
            )
            return
        self._account("pinned_bytes", tensor.numel(), mapping)
        # Every view of the tensor keeps the mapping alive; the pages are unlocked just before they are unmapped.
        weakref.finalize(mapping, _unlock, tensor.data_ptr()).atexit = False


class DeviceMemory:
    """Device memory, for what lives there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def check_process(self) -> None:
        """Nothing: CUDA itself refuses a forked process."""

    def expose(self) -> None:
        """Nothing: no one reads ahead in memory."""

    def empty(self, num_bytes: int, *, pinned: bool = False, owner: str = "") -> torch.Tensor:
        """A zeroed uint8 tensor of exactly `num_bytes`. Raises torch.OutOfMemoryError."""
        del pinned, owner
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def free_bytes(self) -> int:
        """What may still be taken: free, or kept by PyTorch's allocator for what comes."""
        if self.device.type != "cuda":
            return free_host_bytes()
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        kept_bytes = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free_bytes + kept_bytes


def _unlock(pointer: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(pointer)
