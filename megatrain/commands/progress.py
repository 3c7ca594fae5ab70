"""What a run shows while it trains: a bar on a terminal, a line for each log elsewhere.

Figures: tokens are those trained on, without padding; model TFLOPS are 6 x parameters x tokens / time, as published,
and counted TFLOPS what had to be computed and nothing else (megatrain/plan/flops.py); the stall share is the part of
the time for which the compute lane waited for weights, gradients or updates.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import TrainerCallback

from megatrain.base.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

WINDOW_STEPS = 10
"""The bar shows the mean speed of so many steps."""


GAP = "  "
LEAST_BAR_COLUMNS = 8
"""A shorter bar shows nothing."""


class Figure(NamedTuple):
    text: str
    rank: int
    """Where the line is short, figures of higher rank go first."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Counters since the run began."""

    num_tokens: int = 0
    counted_flops: int = 0
    stall_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Work done in a stretch of time."""

    num_steps: int
    seconds: float
    num_tokens: int
    counted_flops: int
    stall_seconds: float
    num_parameters: int

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def model_tflops(self) -> float:
        return 6 * self.num_parameters * self.tokens_per_second / 1e12

    @property
    def counted_tflops(self) -> float:
        return self.counted_flops / self.seconds / 1e12 if self.seconds else 0.0

    @property
    def stall_share(self) -> float:
        return self.stall_seconds / self.seconds if self.seconds else 0.0

    def figures(self) -> list[Figure]:
        return [
            Figure(f"{self.tokens_per_second:,.0f} tokens/s", rank=3),
            Figure(f"{self.model_tflops:.3g} TFLOPS", rank=5),
            Figure(f"stall {self.stall_share:.0%}", rank=4),
        ]


class SpeedMeter:
    """Reads counters and clock after each step.

    Args:
        work: the counters.
        clock: seconds, for tests.
    """

    def __init__(
        self, num_parameters: int, work: Callable[[], Work], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._num_parameters = num_parameters
        self._read = lambda: (clock(), work())
        self._start = self._read()
        self._recent = deque([self._start], maxlen=WINDOW_STEPS + 1)
        self._num_steps = 0

    def start(self) -> None:
        """Counts from now on."""
        self._start = self._read()
        self._recent.clear()
        self._recent.append(self._start)
        self._num_steps = 0

    def step(self) -> None:
        """A step is done."""
        self._recent.append(self._read())
        self._num_steps += 1

    def recent(self) -> Speed:
        """Of the last steps."""
        return self._between(self._recent[0], len(self._recent) - 1)

    def total(self) -> Speed:
        """Since `start`, up to the last step."""
        return self._between(self._start, self._num_steps)

    def _between(self, first: tuple[float, Work], num_steps: int) -> Speed:
        (start, before), (end, after) = first, self._recent[-1]
        return Speed(
            num_steps=num_steps,
            seconds=end - start,
            num_tokens=after.num_tokens - before.num_tokens,
            counted_flops=after.counted_flops - before.counted_flops,
            stall_seconds=after.stall_seconds - before.stall_seconds,
            num_parameters=self._num_parameters,
        )


class ProgressDisplay(TrainerCallback):
    """Shows the run of a transformers.Trainer. Use it as a context around `train`, so that the bar always ends."""

    def __init__(self, console: Console, meter: SpeedMeter) -> None:
        self._console, self._meter = console, meter
        self._progress: Progress | None = None
        self.last_loss: float | None = None
        """Of training: mean over the micro-batches since the log before."""

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._meter.start()
        if self._console.is_terminal:
            self._progress = _bar(self._console)
            done, total = state.global_step, state.max_steps
            self._task = self._progress.add_task(_step(state), completed=done, total=total, figures=())
            self._progress.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._meter.step()
        self._refresh(state)
        if state.global_step >= state.max_steps:
            control.should_log = True  # however short the run is: its last loss is told
        is_first = self._meter.total().num_steps == 1
        if is_first and self._progress is None and not control.should_log:
            # The first log may be far off. The first step is slower than the others: it learns the order of the layers.
            seconds = format_seconds(self._seconds_a_step())
            self._console.print(f"{_step(state)}  {seconds} for the first step  about {self._left(state)}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "eval_loss" in logs and state.global_step:
            self._console.print(f"{_step(state)}  held-out loss {logs['eval_loss']:.4f}")
        if "loss" not in logs:
            return
        self.last_loss = float(logs["loss"])
        if self._progress is not None:
            self._refresh(state)
            return
        self._console.print(GAP.join([_step(state), *(figure.text for figure in self._figures(state))]))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _refresh(self, state: Any) -> None:
        if self._progress is not None:
            figures = self._figures(state)
            self._progress.update(self._task, description=_step(state), completed=state.global_step, figures=figures)

    def _figures(self, state: Any) -> list[Figure]:
        loss = [] if self.last_loss is None else [Figure(f"loss {self.last_loss:.4f}", rank=1)]
        return [*loss, *self._meter.recent().figures(), Figure(self._left(state), rank=2)]

    def _left(self, state: Any) -> str:
        return f"{format_seconds(self._seconds_a_step() * (state.max_steps - state.global_step))} left"

    def _seconds_a_step(self) -> float:
        recent = self._meter.recent()
        return recent.seconds / max(recent.num_steps, 1)


def _step(state: Any) -> str:
    return f"step {state.global_step}/{state.max_steps}"


def fitting(figures: Sequence[Figure], num_columns: int) -> list[str]:
    """Texts of the figures that fit beside each other, each behind a gap; the others go by their rank."""
    kept = list(figures)
    while kept and sum(len(GAP) + len(figure.text) for figure in kept) > num_columns:
        kept.remove(max(kept, key=lambda figure: figure.rank))
    return [figure.text for figure in kept]


def _bar(console: Console) -> Progress:
    from rich.progress import Progress, ProgressColumn, Task
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    class Line(ProgressColumn):
        """The step, a bar in what is left of the line, figures. The step stays; the bar is the first to go."""

        def render(self, task: Task) -> Table:
            texts = fitting(task.fields["figures"], console.width - len(task.description))
            used_columns = len(GAP.join([task.description, *texts]))
            bar_columns = console.width - used_columns - len(GAP)
            cells: list[Any] = [task.description, *texts]
            if bar_columns >= LEAST_BAR_COLUMNS:
                cells.insert(1, ProgressBar(total=task.total, completed=task.completed, width=bar_columns))
            line = Table.grid(padding=(0, len(GAP), 0, 0), pad_edge=False)
            for _ in cells:
                line.add_column(no_wrap=True)
            line.add_row(*cells)
            return line

    return Progress(Line(), console=console, expand=True)
