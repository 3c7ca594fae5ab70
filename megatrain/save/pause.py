"""How long training waits for a checkpoint: predicted before, measured after.

A checkpoint is written behind the next step; the last one of a run has none and is waited for whole. Its layers come in
the order of their updates, so training waits for what the disk has not taken when the last of them is due: with
clip="global" updates begin when the step's backward is over and the last one is needed at the end of the forward behind
it, with clip="layer" at the end of that backward.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

FORWARD_SHARE = 0.25
"""Of a step: a forward, and the backward with what is computed again is three times as much."""
_NUM_STEPS = 20


def predicted_pause(
    num_bytes: int, *, spare_bytes: int, bytes_per_second: float, step_seconds: float, clip: str, is_behind: bool
) -> float:
    """Seconds that training will wait for a checkpoint of `num_bytes`.

    Args:
        spare_bytes: of copies in host memory, which nobody waits for.
        bytes_per_second: at which files are written.
        clip: "global" or "layer". is_behind: it is written beside the next step, not before it.
    """
    if not is_behind:
        return num_bytes / bytes_per_second
    window = step_seconds * (1 + FORWARD_SHARE if clip == "global" else 1)
    return max(0.0, (num_bytes - spare_bytes) / bytes_per_second - window)


class PauseMeter:
    """What a checkpoint costs a run: the time in which nothing else went on, and by how much steps beside it were
    longer than others."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: float | None = None
        self._num_steps = 0
        self._alone: deque[float] = deque(maxlen=_NUM_STEPS)
        self._beside: list[float] = []
        self._foreground = 0.0

    @property
    def step_seconds(self) -> float | None:
        """Of a step beside which nothing was saved: the median of the last ones. None: not known yet."""
        return statistics.median(self._alone) if self._alone else None

    def begin_step(self) -> None:
        self._began = self._clock()

    def end_step(self, *, is_saving: bool) -> None:
        """is_saving: a checkpoint was being written when it began or ended."""
        if self._began is None:
            return
        seconds = self._clock() - self._began
        self._began = None
        self._num_steps += 1
        if is_saving:
            self._beside.append(seconds)
        elif self._num_steps > 1:  # the first one warms up
            self._alone.append(seconds)

    def add_foreground(self, seconds: float) -> None:
        """Nothing else went on."""
        self._foreground += seconds

    def take(self) -> float:
        """Seconds that the checkpoint cost, which is over."""
        usual = self.step_seconds
        longer = sum(max(0.0, seconds - usual) for seconds in self._beside) if usual is not None else 0.0
        pause = self._foreground + longer
        self._foreground, self._beside = 0.0, []
        return pause
