"""The tensors of a segment as a list, and a segment with others in their place: what staging works with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import Tensor

from megatrain.optim.segment import Segment
from megatrain.store.codecs import Stored


def tensors_of(segment: Segment) -> list[Tensor]:
    """All tensors of a segment, always in one order."""
    found: list[Tensor] = []

    def add(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with_tensors(segment, add)
    return found


def written(segment: Segment) -> list[Tensor]:
    """Those that an update writes."""
    return [tensor for tensor in tensors_of(segment) if tensor is not segment.grad]


def with_tensors(segment: Segment, change: Callable[[Tensor], Tensor]) -> Segment:
    """The segment with `change(tensor)` in place of each of its tensors."""
    ema = segment.ema
    return dataclasses.replace(
        segment,
        weights=change(segment.weights),
        low=None if segment.low is None else change(segment.low),
        grad=change(segment.grad),
        states=tuple(Stored(stored.format, *map(change, stored.tensors)) for stored in segment.states),
        ema=None if ema is None else dataclasses.replace(ema, average=change(ema.average)),
    )
