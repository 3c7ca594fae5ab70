"""Updates of segments that lie on disk in part or whole: piece by piece through host slots, by the CPU.

While a piece is updated the next ones are read and the last ones written, across segments, homes and steps.

Rule: the same bits as in memory, whatever the pieces and slots.

What it gives up: moments in lossless code are read and written where their file is mapped, through the page cache.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

from megatrain.optim.marks import Marks, undone_on_fault
from megatrain.optim.segment import Segment
from megatrain.optim.tensors import tensors_of, with_tensors
from megatrain.optim.update import CpuUpdater, Measure
from megatrain.store.home import Home
from megatrain.store.tier import PAGE_BYTES
from megatrain.transport.disk import DiskWindow

_STRIDE = 1 << 17
"""Parameters; in every format a multiple of them begins with a page: even scales take 4 bytes for 128 of them."""


class DiskUpdater:
    def __init__(self, updater: CpuUpdater, window: DiskWindow) -> None:
        self._updater, self._window = updater, window

    def run(
        self, home: Home, segments: Sequence[Segment], measure: bool, marks: Marks, *, waits: bool
    ) -> list[Measure | None]:
        """As `CpuUpdater.run`. waits: until all is on disk; else states may still be on their way there.

        Raises UpdateError when a write failed, which leaves the home with states that cannot be used.
        """
        sums: list[Measure | None] = [Measure(0.0, 0.0) if measure else None for _ in segments]
        with torch.no_grad():
            for index, segment in enumerate(segments):
                for piece in self._pieces(segment):
                    update = functools.partial(self._update, home, piece, measure)
                    sums[index] = _added(sums[index], marks.once((index, piece.first), update))
            if waits:
                self._window.flush()
        home.check_sound()
        return sums

    def _update(self, home: Home, piece: Segment, measure: bool) -> Measure | None:
        """All of it or nothing, as far as the disk takes what is written."""
        opened = self._window.open(home, tensors_of(piece), fresh=piece.grad)
        tensors = iter(opened)
        staged = with_tensors(piece, lambda _: next(tensors))
        is_atomic = self._updater.is_atomic([staged])
        # What is on disk is as it was until it is written.
        in_place = [one for one, at_home in zip(opened, tensors_of(piece), strict=True) if one is at_home]
        try:
            with undone_on_fault([] if is_atomic else [one for one in in_place if one is not piece.grad]):
                (result,) = self._updater.run([staged], measure)
        except BaseException:
            self._window.abandon()
            raise
        self._window.close()
        return result

    def _pieces(self, segment: Segment) -> Iterator[Segment]:
        """Parts that fit in a slot."""
        tensors = tensors_of(segment)
        bytes_per_parameter = sum(tensor.nbytes for tensor in tensors) / max(1, segment.numel)
        room = self._window.slot_bytes - 2 * PAGE_BYTES * len(tensors)
        numel = max(1, int(room / bytes_per_parameter) // _STRIDE) * _STRIDE if segment.numel else 1
        for start in range(0, segment.numel, numel):
            yield segment.part(start, min(start + numel, segment.numel))


def _added(total: Measure | None, more: Measure | None) -> Measure | None:
    if total is None or more is None:
        return None
    return Measure(total.change_squares + more.change_squares, total.weight_squares + more.weight_squares)
