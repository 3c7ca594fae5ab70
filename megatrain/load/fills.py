"""Random fills of large tensors on all cores, with numbers that do not depend on how many there are.

PyTorch draws a tensor's random numbers on one core. Inside `ParallelFills` this thread's `normal_` and `uniform_` from
the global generator fill pieces of a fixed size instead, each from a generator of its own, seeded from the global one.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PIECE_NUMEL = 2**20

_FILLS = ("normal_", "uniform_")


class ParallelFills(TorchDispatchMode):
    """A context; as many threads as PyTorch uses."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _FILLS and kwargs.get("generator") is None and _is_large(args[0]):
            _fill(func, *args, **kwargs)
            return args[0]
        return func(*args, **kwargs)


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.numel() > PIECE_NUMEL and tensor.is_contiguous()


def _fill(func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    pieces = tensor.view(-1).split(PIECE_NUMEL)
    seeds = torch.randint(2**62, (len(pieces),), dtype=torch.int64).tolist()

    def fill(piece: torch.Tensor, seed: int) -> None:
        func(piece, *args, **{**kwargs, "generator": torch.Generator().manual_seed(seed)})

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(fill, pieces, seeds))
