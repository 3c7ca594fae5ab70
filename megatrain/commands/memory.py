"""The most memory that this process has used so far."""

from __future__ import annotations

import sys


def peak_host_bytes() -> int:
    """Largest resident size of the process."""
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def peak_device_bytes() -> int:
    """Most bytes of tensors on the CUDA device; 0 without one."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
