"""Check sums of the bytes of a tensor, the same on every device: exact sums of integers, whatever their order.

Bytes are summed as words of 64 bits, modulo 2^64, in rows of 4096 bytes. A flipped bit changes its row's sum and so the
first number; rows that changed places change the second, where each row counts an odd number of times. One read of the
bytes at the speed of memory.

What it gives up: it finds accidents, not intent. Words that changed places within a row have the same sums.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatrain.store.tier import PAGE_BYTES

_WORD_BYTES = 8
_ROW_WORDS = PAGE_BYTES // _WORD_BYTES


def checksum(tensor: Tensor) -> Tensor:
    """(2,) int64 on the tensor's device, behind what is enqueued there. tensor: any dtype, shape and strides, of which
    those without gaps cost no copy."""
    content = _flat_bytes(tensor.detach())
    if content.numel() == 0:
        return torch.zeros(2, dtype=torch.int64, device=content.device)
    num_whole = content.numel() // PAGE_BYTES * PAGE_BYTES
    rows = content[:num_whole].view(torch.int64).view(-1, _ROW_WORDS).sum(1)
    if num_whole < content.numel():
        last = content.new_zeros(PAGE_BYTES)
        last[: content.numel() - num_whole] = content[num_whole:]
        rows = torch.cat([rows, last.view(torch.int64).sum().view(1)])
    odd = torch.arange(1, 2 * rows.numel() + 1, 2, device=rows.device)
    return torch.stack([rows.sum(), (rows * odd).sum()])


def page_sums(view: memoryview) -> np.ndarray:
    """(pages,) int64: the sum of each row of `view`, bytes; the last one as if filled up with zeros."""
    num_whole = len(view) // PAGE_BYTES * PAGE_BYTES
    sums = np.frombuffer(view[:num_whole], dtype=np.int64).reshape(-1, _ROW_WORDS).sum(1)
    if num_whole == len(view):
        return sums
    last = np.zeros(PAGE_BYTES, dtype=np.uint8)
    last[: len(view) - num_whole] = np.frombuffer(view[num_whole:], dtype=np.uint8)
    return np.append(sums, last.view(np.int64).sum())


def _flat_bytes(tensor: Tensor) -> Tensor:
    """The elements in the order of memory, (n,) uint8 that starts on a word."""
    tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        tensor = tensor.permute(order).contiguous()
    content = tensor.view(-1).view(torch.uint8)
    is_aligned = content.data_ptr() % _WORD_BYTES == 0 and content.storage_offset() % _WORD_BYTES == 0
    return content if is_aligned else content.clone()
