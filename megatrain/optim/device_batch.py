"""Segments that one launch of the device kernel updates, and the table on the device that tells them apart.

The kernel gets the tensors of a batch's first segment as its arguments, so that it is compiled for their dtypes and
alignment, and of each segment a column of the table: where its tensors begin, counted in elements from those of the
first one, and its numbers. A program finds its segment by the first program of each.

Rule: the segments of a batch differ in what the table holds alone. Their tensors begin at multiples of OFFSET_DIVISOR
elements from those of the first one, and all or none have a multiple of it, so that loads are as wide as with one.

What it gives up: a table goes up for each batch, a few KB from page-locked memory, even where the batch is one segment.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatrain.optim.segment import Segment

OFFSET_DIVISOR = 16
MAX_SEGMENTS = 256
"""Of one batch. Every program compares with the first programs of all of them."""
MIN_ROWS = 16
"""One length of tables for most homes: the kernel is compiled for each."""

NUM_TENSORS = 8
NUMEL, FIRST, KEY0, KEY1, FIRST_PROGRAM, EMA_DECAY, EMA_SHARE, SCALARS = range(NUM_TENSORS, NUM_TENSORS + 8)
"""Fields of the table behind the offsets. Those from EMA_DECAY on are fp32, by their bits."""
MAX_SCALARS = 9
NUM_FIELDS = SCALARS + MAX_SCALARS
_NO_PROGRAM = np.iinfo(np.int64).max


class Batch:
    """Segments in the order in which programs go through them.

    Args:
        place: of the first segment, in what the batches are made of.
    """

    def __init__(self, segment: Segment, place: int = 0) -> None:
        self.segments, self.places = [segment], [place]
        self.tensors = _tensors(segment)
        self.divisor = _divisor(segment)
        """Of the number of parameters of each, as far as the kernel may rely on it."""
        self._addresses = _addresses(self.tensors)
        self._offsets = [(0,) * NUM_TENSORS]

    def takes(self, segment: Segment, place: int) -> bool:
        """Add `segment`, which differs in numbers and places alone, if it is placed as the kernel wants it."""
        if len(self.segments) == MAX_SEGMENTS:
            return False
        offsets = []
        for tensor, there, here in zip(self.tensors, _addresses(_tensors(segment)), self._addresses, strict=True):
            offset, rest = (0, 0) if tensor is None else divmod(there - here, tensor.itemsize)
            if rest or offset % OFFSET_DIVISOR:
                return False
            offsets.append(offset)
        self.segments.append(segment)
        self.places.append(place)
        self._offsets.append(tuple(offsets))
        return True

    @property
    def num_rows(self) -> int:
        """Segments that the table has room for, a power of two."""
        return max(MIN_ROWS, 1 << (len(self.segments) - 1).bit_length())

    def table(self, num_programs: Sequence[int], device: torch.device) -> Tensor:
        """(NUM_FIELDS, num_rows) int64 on the device, on its way there on the current stream.

        num_programs: that each segment has.
        """
        # From PyTorch's page-locked memory, which it reuses once the copy is over.
        is_pinned = device.type == "cuda"
        host = torch.empty(NUM_FIELDS, self.num_rows, dtype=torch.int64, device="cpu", pin_memory=is_pinned)
        table, count = host.numpy(), len(self.segments)
        table[FIRST_PROGRAM] = _NO_PROGRAM
        table[FIRST_PROGRAM, :count] = np.cumsum([0, *num_programs[:-1]])
        table[:NUM_TENSORS, :count] = np.array(self._offsets, dtype=np.int64).T
        whole = [(one.numel, one.first, *one.key) for one in self.segments]
        table[NUMEL : KEY1 + 1, :count] = np.array(whole, dtype=np.int64).T
        floats = np.array(_floats(self.segments), dtype=np.float32).T
        table[EMA_DECAY : EMA_DECAY + len(floats), :count] = floats.view(np.int32)
        return host.to(device, non_blocking=True)


def batches(segments: Sequence[Segment]) -> list[Batch]:
    """As few as may be, of segments with at least 1 parameter each. In one order for the same segments."""
    made: list[Batch] = []
    open_: dict[tuple[object, ...], Batch] = {}
    for place, segment in enumerate(segments):
        kind = _kind(segment)
        if kind not in open_ or not open_[kind].takes(segment, place):
            open_[kind] = Batch(segment, place)
            made.append(open_[kind])
    return made


def _kind(segment: Segment) -> tuple[object, ...]:
    """What the kernel is compiled for."""
    format_ = segment.states[0].format.name if segment.states else None
    dtypes = segment.weights.dtype, segment.grad.dtype
    return segment.rule.name, *dtypes, format_, segment.low is None, segment.ema is None, _divisor(segment)


def _divisor(segment: Segment) -> int:
    return 1 if segment.numel % OFFSET_DIVISOR else OFFSET_DIVISOR


def _tensors(segment: Segment) -> tuple[Tensor | None, ...]:
    """NUM_TENSORS of them, as the kernel takes them."""
    first, second = (*segment.states, None, None)[:2]
    return (
        segment.weights,
        segment.low,
        segment.grad,
        *((None, None) if first is None else (first.codes, first.scales)),
        *((None, None) if second is None else (second.codes, second.scales)),
        None if segment.ema is None else segment.ema.average,
    )


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _floats(segments: Sequence[Segment]) -> list[tuple[float, ...]]:
    """Of each segment EMA_DECAY, EMA_SHARE and its scalars in their order."""
    decays = [0.0 if one.ema is None else one.ema.decay for one in segments]
    return [(decay, 1.0 - decay, *vars(one.scalars).values()) for decay, one in zip(decays, segments, strict=True)]
