"""Host memory at exact sizes: anonymous or file-backed mappings, optionally page-locked for the GPU.

PyTorch's pinned allocator rounds to powers of two, which at this scale wastes up to half the host. A mapping of the
exact size plus `cudaHostRegister` transfers at full speed and takes 0.05-0.1 s/GiB.
Rule: a buffer is released only after every tensor that views it is gone (the mapping is kept alive by the tensors).
Mappings are shared with forked processes, not copied on write: else every page that an update writes while a data
loader's workers live would be there twice, and page-locked ones would be copied by the fork itself.
So a forked process must not write (`check_process`).
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import weakref

import psutil
import torch

from megatrain.base.errors import RefusedError, UserError
from megatrain.base.paths import existing_parent, user_path
from megatrain.base.units import format_bytes

logger = logging.getLogger("megatrain")

PAGE_BYTES = 4096


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class HostMemory:
    """Hands out host buffers within a budget; what does not fit goes to files in `offload_dir`.

    Args:
        max_bytes: budget for anonymous memory. None: what is free when the first buffer is asked for.
        offload_dir: folder for the rest. The files are unlinked as soon as they are mapped: nothing is left behind,
            not even after a kill.
        pin: page-lock anonymous buffers that are asked for with `pinned=True` (a CUDA device is used).
    """

    device = torch.device("cpu")

    def __init__(self, *, max_bytes: int | None, offload_dir: str | os.PathLike[str] | None, pin: bool) -> None:
        self.max_bytes = max_bytes
        self.offload_dir = None if offload_dir is None else user_path(offload_dir, "offload_dir")
        self.ram_bytes = 0
        self.disk_bytes = 0
        self.pinned_bytes = 0
        self._pin = pin
        self._process_id = os.getpid()
        self._reserved_bytes = 0

    def check_process(self) -> None:
        """Raise RefusedError in a forked process: what it writes, its parent reads."""
        if os.getpid() != self._process_id:
            raise RefusedError(
                "a forked process cannot change a streamed model, whose weights it shares with its parent: change it "
                "in the process that called mt.stream, or call mt.stream in this one"
            )

    def empty(self, num_bytes: int, *, pinned: bool = False) -> torch.Tensor:
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
                self._page_lock(tensor, mapping)
            return tensor[:num_bytes]
        mapping = self._map_file(mapped_bytes)
        self._account("disk_bytes", mapped_bytes, mapping)
        return torch.frombuffer(mapping, dtype=torch.uint8)[:num_bytes]

    def _account(self, counter: str, num_bytes: int, mapping: mmap.mmap) -> None:
        """Count `num_bytes` for as long as `mapping` lives."""
        self._add(counter, num_bytes)
        weakref.finalize(mapping, self._add, counter, -num_bytes).atexit = False

    def _add(self, counter: str, num_bytes: int) -> None:
        setattr(self, counter, getattr(self, counter) + num_bytes)

    def require(self, num_bytes: int, what: str) -> None:
        """Refuse `what` before any work when `num_bytes` more fit nowhere. Raises UserError with the missing bytes."""
        self._check_folder()
        free_bytes = self._free_ram_bytes()
        if num_bytes <= free_bytes:
            return
        missing_bytes = num_bytes - free_bytes
        if self.offload_dir is None:
            left = "are free" if self.max_bytes is None else "are left within the limit max_ram_gb"
            raise UserError(
                f"{what} needs {format_bytes(num_bytes)} of host memory and {format_bytes(free_bytes)} {left}: "
                f"add {format_bytes(missing_bytes)}, raise max_ram_gb, or give offload_dir a folder with as much space"
            )
        free_disk_bytes = psutil.disk_usage(str(existing_parent(self.offload_dir))).free
        if missing_bytes > free_disk_bytes:
            raise UserError(
                f"{what} needs {format_bytes(missing_bytes)} in offload_dir={str(self.offload_dir)!r}, which has "
                f"{format_bytes(free_disk_bytes)} free: make room there, choose a folder on a larger disk, or raise "
                "max_ram_gb"
            )

    def reserve(self, num_bytes: int, what: str) -> None:
        """Keep room in memory for what is not allocated here and cannot go to `offload_dir`.

        Raises UserError when there is not as much.
        """
        if num_bytes > self._free_ram_bytes():
            raise UserError(
                f"{what} need {format_bytes(num_bytes)} of host memory, and offload_dir cannot take them; "
                f"{format_bytes(self._free_ram_bytes())} are left: raise max_ram_gb, or choose another format"
            )
        self._reserved_bytes += num_bytes

    def _free_ram_bytes(self) -> int:
        if self.max_bytes is not None:
            return max(0, self.max_bytes - self.ram_bytes - self._reserved_bytes)
        return max(0, psutil.virtual_memory().available - self._reserved_bytes)

    def _fits_in_ram(self, num_bytes: int) -> bool:
        # Without a folder there is no second choice: what was let through by `require` is taken from memory.
        return self.offload_dir is None or num_bytes <= self._free_ram_bytes()

    def _check_folder(self) -> None:
        """Raise UserError when `offload_dir` cannot be written. It is made when it is needed."""
        if self.offload_dir is None:
            return
        try:
            tempfile.TemporaryFile(dir=existing_parent(self.offload_dir)).close()
        except OSError as error:
            raise UserError(
                f"offload_dir={str(self.offload_dir)!r} cannot be written ({error.strerror}): give a folder that can"
            ) from error

    def _map_file(self, num_bytes: int) -> mmap.mmap:
        assert self.offload_dir is not None
        try:
            self.offload_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.offload_dir) as file:
                # posix_fallocate and not truncate: a full disk must be an error here, not a SIGBUS later.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                return mmap.mmap(file.fileno(), num_bytes)
        except OSError as error:
            raise UserError(
                f"offload_dir={str(self.offload_dir)!r}: cannot reserve {format_bytes(num_bytes)} ({error.strerror}): "
                "make room there, or choose a folder on a larger disk"
            ) from error

    def _page_lock(self, tensor: torch.Tensor, mapping: mmap.mmap) -> None:
        code = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
        if int(code) != 0:
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
    """Device memory for homes that live there. The same verbs as `HostMemory`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def check_process(self) -> None:
        """Nothing: CUDA itself refuses a forked process."""

    def empty(self, num_bytes: int, *, pinned: bool = False) -> torch.Tensor:
        """A zeroed uint8 tensor of exactly `num_bytes`."""
        del pinned
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)


def _unlock(pointer: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(pointer)
