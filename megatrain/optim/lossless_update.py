"""Updates of parameters whose moments are losslessly coded: piece by piece decoded, updated in fp32, coded again.

Rule: no result depends on the number of threads, and a moment is never decoded whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.optim.marks import Marks, undone_on_fault
from megatrain.optim.rules import Rule, Scalars
from megatrain.optim.segment import Ema, Segment
from megatrain.optim.torch_update import wait_or_raise
from megatrain.optim.update import CpuUpdater, Measure
from megatrain.spec.formats import FORMATS
from megatrain.store.codecs import Stored
from megatrain.store.lossless import PIECE, LosslessMoment
from megatrain.store.rounding import Key


@dataclass(frozen=True, kw_only=True)
class LosslessSegment:
    """As `Segment`, with moments in the rule's order."""

    rule: Rule
    scalars: Scalars
    weights: Tensor
    low: Tensor | None = None
    grad: Tensor
    moments: tuple[LosslessMoment, ...]
    ema: Ema | None = None
    key: Key = (0, 0)

    @property
    def numel(self) -> int:
        return self.grad.numel()

    def decoded(self, start: int, stop: int) -> Segment:
        """The parameters [start, stop) with their moments in fp32."""
        format_ = FORMATS["fp32"]
        cut = slice(start, stop)
        return Segment(
            rule=self.rule,
            scalars=self.scalars,
            weights=self.weights[cut],
            low=None if self.low is None else self.low[cut],
            grad=self.grad[cut],
            states=tuple(Stored(format_, moment.decode(start, stop)) for moment in self.moments),
            ema=None if self.ema is None else Ema(average=self.ema.average[cut], decay=self.ema.decay),
            key=self.key,
            first=start,
        )


def update_lossless(
    updater: CpuUpdater,
    pool: ThreadPoolExecutor,
    segments: Sequence[Segment | LosslessSegment],
    measure: bool,
    marks: Marks,
) -> list[Measure | None]:
    """One step in place, as `updater.run`; pieces go over the threads of `pool`."""
    pieces = [
        (index, start, min(start + PIECE, segment.numel))
        for index, segment in enumerate(segments)
        for start in range(0, segment.numel, PIECE)
    ]

    def update(piece: tuple[int, int, int]) -> Measure | None:
        index, start, stop = piece
        segment = segments[index]
        with torch.no_grad():
            if isinstance(segment, Segment):
                part, of_piece = segment.part(start, stop), marks.within(piece)
                return updater.run([part], measure, num_threads=1, marks=of_piece)[0]
            return marks.once(piece, lambda: _update_piece(updater, segment, start, stop, measure))

    futures = [pool.submit(update, piece) for piece in pieces]
    wait_or_raise(futures)
    results = [future.result() for future in futures]
    if not measure:
        return [None] * len(segments)
    sums = [Measure(0.0, 0.0)] * len(segments)
    for (index, _, _), result in zip(pieces, results, strict=True):
        assert result is not None
        before = sums[index]
        sums[index] = Measure(
            before.change_squares + result.change_squares, before.weight_squares + result.weight_squares
        )
    return list(sums)


def _update_piece(
    updater: CpuUpdater, segment: LosslessSegment, start: int, stop: int, measure: bool
) -> Measure | None:
    """All of it or nothing: a moment may be coded when there is no memory left to code the next."""
    decoded = segment.decoded(start, stop)
    average = None if decoded.ema is None else decoded.ema.average
    with contextlib.ExitStack() as undo:
        undo.enter_context(undone_on_fault((decoded.weights, decoded.low, average)))
        (result,) = updater.run([decoded], measure, num_threads=1)
        for moment, stored in zip(segment.moments, decoded.states, strict=True):
            undo.enter_context(moment.undone_on_fault(start))
            moment.encode_(start, stored.codes)
    return result
