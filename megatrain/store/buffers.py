"""Host buffers of varied sizes that are used again and again, such as those of activations.

Rule: the pool never holds more than the most that was in use at one time, however sizes vary. A buffer serves a tensor
of at least half its size. It gives up: a new size may page-lock memory anew (0.05-0.1 s/GiB).
"""

from __future__ import annotations

import torch

from megatrain.store.memory import HostMemory

MAX_WASTE = 2


class BufferPool:
    """Page-locked buffers out of `memory`, which accounts for them."""

    def __init__(self, memory: HostMemory) -> None:
        self.used_bytes = 0
        self.peak_bytes = 0
        self.memory = memory
        self._free: list[torch.Tensor] = []  # the one that came back first stands first

    @property
    def free_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._free)

    def take(self, num_bytes: int) -> torch.Tensor:
        """A flat uint8 buffer of `num_bytes` or more, with any content. The smallest free one that fits, or a new one.

        Raises UserError when a new one is needed and fits nowhere.
        """
        fitting = [buffer for buffer in self._free if num_bytes <= buffer.numel() <= MAX_WASTE * num_bytes]
        if fitting:
            buffer = min(fitting, key=torch.Tensor.numel)
            self._free = [other for other in self._free if other is not buffer]
        else:
            self._trim(self.peak_bytes - self.used_bytes - num_bytes)
            buffer = self.memory.empty(num_bytes, pinned=True)
        self.used_bytes += buffer.numel()
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """A buffer from `take` that nothing reads or writes any more."""
        self.discard(buffer)
        self._free.append(buffer)

    def discard(self, buffer: torch.Tensor) -> None:
        """A buffer from `take` that must not be used again."""
        self.used_bytes -= buffer.numel()

    def _trim(self, num_bytes: int) -> None:
        """Unmap free buffers, the longest idle first, until at most `num_bytes` are left."""
        while self._free and self.free_bytes > num_bytes:
            self._free.pop(0)
