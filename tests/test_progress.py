"""What a run shows: figures from counters and a clock, plain lines or a bar."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from megatrain.base.units import format_count, format_number, format_seconds
from megatrain.commands.console import make_console, print_fact, print_table
from megatrain.commands.length import RunLength
from megatrain.commands.progress import WINDOW_STEPS, ProgressDisplay, SpeedMeter, Work
from megatrain.data.collate import Collator, count_batch, sample_lengths
from megatrain.run_logger import count_tokens


class Counters:
    """A clock and counters that the test moves."""

    seconds = 100.0
    work = Work(num_tokens=3, counted_flops=4, stall_seconds=5.0)

    def meter(self) -> SpeedMeter:
        return SpeedMeter(1_000_000, lambda: self.work, lambda: self.seconds)

    def step(self, meter: SpeedMeter, seconds: float, num_tokens: int, stall_seconds: float = 0.0) -> None:
        self.seconds += seconds
        self.work = Work(
            num_tokens=self.work.num_tokens + num_tokens,
            counted_flops=self.work.counted_flops + 5_000_000 * num_tokens,
            stall_seconds=self.work.stall_seconds + stall_seconds,
        )
        meter.step()


def test_figures_are_what_their_definitions_say() -> None:
    counters = Counters()
    meter = counters.meter()
    counters.seconds += 1000  # before the training: loading, evaluation
    meter.start()
    counters.step(meter, seconds=2.0, num_tokens=500, stall_seconds=0.5)
    counters.step(meter, seconds=2.0, num_tokens=300, stall_seconds=0.5)
    total = meter.total()
    assert (total.num_steps, total.num_tokens, total.seconds) == (2, 800, 4.0)
    assert total.tokens_per_second == 200
    assert total.model_tflops == pytest.approx(6 * 1_000_000 * 200 / 1e12)
    assert total.counted_tflops == pytest.approx(5_000_000 * 200 / 1e12)
    assert total.stall_share == 0.25


def test_the_bar_shows_the_last_steps_and_the_summary_all() -> None:
    counters = Counters()
    meter = counters.meter()
    meter.start()
    counters.step(meter, seconds=1000.0, num_tokens=1)
    for _ in range(WINDOW_STEPS):
        counters.step(meter, seconds=1.0, num_tokens=7)
    assert meter.recent().tokens_per_second == 7
    assert meter.recent().num_steps == WINDOW_STEPS
    assert meter.total().num_tokens == 1 + 7 * WINDOW_STEPS


def test_no_time_and_no_steps_divide_by_nothing() -> None:
    speed = Counters().meter().total()
    assert (speed.tokens_per_second, speed.model_tflops, speed.counted_tflops, speed.stall_share) == (0, 0, 0, 0)


def run_display(console: Console) -> None:
    """Two steps, a log of each, an evaluation."""
    counters = Counters()
    meter = counters.meter()
    state = SimpleNamespace(global_step=0, max_steps=2)
    with ProgressDisplay(console, meter) as display:
        display.on_train_begin(None, state, None)
        for step in (1, 2):
            state.global_step = step
            counters.seconds += 2.0
            counters.work = Work(num_tokens=counters.work.num_tokens + 100, stall_seconds=5.0)
            display.on_step_end(None, state, SimpleNamespace(should_log=True))
            display.on_log(None, state, None, {"loss": 3.0 - step})
        display.on_log(None, state, None, {"eval_loss": 1.5})
        display.on_log(None, state, None, {"train_runtime": 4.0})
        display.on_train_end(None, state, None)
        console.print("afterwards")


@pytest.mark.parametrize("packed", [True, False])
def test_sample_lengths_leave_padding_out(packed: bool) -> None:
    rows = [
        {"input_ids": torch.arange(5), "labels": torch.arange(5), "position_ids": torch.tensor([0, 1, 0, 1, 2])},
        {"input_ids": torch.arange(2), "labels": torch.arange(2), "position_ids": torch.tensor([0, 1])},
    ]
    batch = Collator(pad_token_id=0, packed=packed)(rows)
    assert sample_lengths(batch) == ([2, 3, 2] if packed else [5, 2])
    assert sum(sample_lengths(batch)) == count_batch(batch).num_tokens
    assert count_tokens(batch) == 7, "the report counts the same"
    assert count_tokens({"input_ids": batch["input_ids"]}) == 10, "nothing tells it"


def test_without_a_terminal_each_log_is_a_line() -> None:
    file = io.StringIO()
    run_display(make_console(file))
    assert file.getvalue().splitlines() == [
        "step 1/2  loss 2.0000  50 tokens/s  0.0003 TFLOPS  stall 0%  2.0 s left",
        "step 2/2  loss 1.0000  50 tokens/s  0.0003 TFLOPS  stall 0%  0.0 s left",
        "step 2/2  held-out loss 1.5000",
        "afterwards",
    ]


def test_the_first_step_tells_how_long_the_run_will_take_when_its_log_is_far_off() -> None:
    file = io.StringIO()
    counters = Counters()
    control = SimpleNamespace(should_log=False)
    state = SimpleNamespace(global_step=4, max_steps=8)  # goes on from a checkpoint
    with ProgressDisplay(make_console(file), counters.meter()) as display:
        display.on_train_begin(None, state, None)
        for step in (5, 6):
            state.global_step = step
            counters.seconds += 20.0
            display.on_step_end(None, state, control)
    assert file.getvalue() == "step 5/8  20.0 s for the first step  about 1 min 00 s left\n"


def test_the_last_step_is_logged_whatever_the_interval() -> None:
    meter = Counters().meter()
    display = ProgressDisplay(make_console(io.StringIO()), meter)
    state, control = SimpleNamespace(global_step=0, max_steps=2), SimpleNamespace(should_log=False)
    display.on_train_begin(None, state, None)
    for step, is_last in ((1, False), (2, True)):
        state.global_step = step
        display.on_step_end(None, state, control)
        assert control.should_log is is_last
    assert display.last_loss is None
    display.on_log(None, state, None, {"loss": "0.5"})
    assert display.last_loss == 0.5


def test_a_terminal_gets_a_bar_that_ends_with_the_training() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None, legacy_windows=False)
    run_display(console)
    printed = console.file.getvalue()
    bar, after = printed.rsplit("afterwards", 1)
    assert "\u2501  loss 1.0000  50 tokens/s  0.0003 TFLOPS  stall 0%  0.0 s left" in bar
    assert "loss" not in after, "the bar was drawn again after its end"
    assert "step 1/2  loss" not in printed, "a log was printed as a line"


def test_an_error_ends_the_bar_too() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    display = ProgressDisplay(console, Counters().meter())
    with pytest.raises(RuntimeError), display:
        display.on_train_begin(None, SimpleNamespace(global_step=0, max_steps=2), None)
        raise RuntimeError
    assert "\x1b[?25h" in console.file.getvalue(), "the cursor was not shown again"


def test_plain_output_is_never_cut_or_padded() -> None:
    file = io.StringIO()
    console = make_console(file)
    long_path = "/".join(["folder"] * 60)
    print_fact(console, "saved", long_path)
    print_fact(console, "data", "first\nsecond")
    print_table(console, "summary", {"where": long_path[:50], "steps": "7"})
    lines = file.getvalue().splitlines()
    assert lines[:3] == [f"saved       {long_path}", "data        first", "            second"]
    assert any(line.split() == ["where", long_path[:50]] for line in lines)


def test_counts_read_well_at_every_size() -> None:
    sizes = (640, 999_499, 224_800, 999_500, 134_515_008, 999_950_000, 7_615_616_512, 999_999_500_000)
    shown = ["640", "999K", "225K", "1.0M", "134.5M", "1.000B", "7.616B", "1.000T"]
    assert [format_count(size) for size in sizes] == shown
    assert [format_number(number, "row") for number in (0, 1, 1200)] == ["0 rows", "1 row", "1,200 rows"]


def arguments(**changes: object) -> SimpleNamespace:
    settings = dict(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        dataloader_drop_last=False,
        max_steps=-1,
        num_train_epochs=2.0,
        eval_strategy="no",
        eval_steps=None,
        save_strategy="no",
        save_steps=500,
        save_total_limit=None,
    )
    return SimpleNamespace(**(settings | changes))


@pytest.mark.parametrize(
    ("changes", "num_steps", "num_epochs", "tokens_per_step"),
    [
        ({}, 8, 2.0, 600),  # 20 rows: 10 batches, 4 steps an epoch
        ({"max_steps": 10}, 10, 2.5, 600),
        ({"num_train_epochs": 0.5}, 2, 0.5, 600),
        ({"per_device_train_batch_size": 8}, 2, 2.0, 2000),
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}, 6, 2.0, 800),
        (
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "dataloader_drop_last": True},
            4,
            2.0,
            800,
        ),
    ],
)
def test_the_length_of_a_run(
    changes: dict[str, object], num_steps: int, num_epochs: float, tokens_per_step: float
) -> None:
    length = RunLength.of(arguments(**changes), num_rows=20, num_tokens=2000)
    assert (length.num_steps, length.num_epochs, length.tokens_per_step) == (num_steps, num_epochs, tokens_per_step)


@pytest.mark.parametrize(
    ("changes", "num_checkpoints"),
    [
        ({}, 0),
        ({"save_strategy": "steps"}, 1),
        ({"save_strategy": "steps", "save_steps": 2}, 4),
        ({"save_strategy": "steps", "save_steps": 0.25}, 4),
        ({"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}, 2),
        ({"save_strategy": "epoch"}, 2),
        ({"save_strategy": "epoch", "save_total_limit": 5}, 2),
        ({"save_strategy": "best"}, 2),
    ],
)
def test_checkpoints_on_the_disk_at_one_time(changes: dict[str, object], num_checkpoints: int) -> None:
    length = RunLength.of(arguments(**changes), num_rows=20, num_tokens=2000)
    assert length.num_checkpoints(arguments(**changes)) == num_checkpoints


@pytest.mark.parametrize(
    ("num_columns", "told"),
    [
        (15, ["step 123/4567"]),
        (30, ["step 123/4567", "loss 3.5000"]),
        (60, ["step 123/4567", "loss 3.5000", "50 tokens/s", "2 h 28 min left"]),
        (80, ["step 123/4567", "loss 3.5000", "50 tokens/s", "stall 10%", "2 h 28 min left"]),
        (
            120,
            ["step 123/4567", "\u2501", "loss 3.5000", "50 tokens/s", "0.0003 TFLOPS", "stall 10%", "2 h 28 min left"],
        ),
    ],
)
def test_the_step_is_the_last_to_leave_a_short_line(num_columns: int, told: list[str]) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=num_columns, color_system=None, highlight=False)
    counters = Counters()
    state = SimpleNamespace(global_step=122, max_steps=4567)
    with ProgressDisplay(console, counters.meter()) as display:
        display.on_train_begin(None, state, None)
        state.global_step = 123
        counters.seconds += 2.0
        counters.work = Work(num_tokens=counters.work.num_tokens + 100, stall_seconds=5.2)
        display.on_step_end(None, state, SimpleNamespace(should_log=True))
        display.on_log(None, state, None, {"loss": 3.5})
    (line,) = re.findall(r"(?:^|\r|\x1b\[2K)(step 123/[^\n\r\x1b]*)", file.getvalue())[-1:]
    assert len(line) <= num_columns
    shown = re.split(r"  +", line.strip())
    assert [re.sub("[\u2501\u2578]+", "\u2501", text) for text in shown] == told


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (59.97, "1 min 00 s"),
        (98.98, "1 min 39 s"),
        (119.6, "2 min 00 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (7199, "2 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_times_are_rounded_to_their_last_figure(seconds: float, told: str) -> None:
    assert format_seconds(seconds) == told
