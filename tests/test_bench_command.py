"""`megatrain bench`: rows whose processes die, what is printed and refused."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_helpers import silent, small_model, small_work
from command_helpers import command
from rich.console import Console

from megatrain.base.errors import UserError
from megatrain.bench import peers, worker
from megatrain.bench.peers import Variant
from megatrain.bench.process import Outcome, listen
from megatrain.bench.work import Tell, Work
from megatrain.commands.bench_tables import Row, print_bench

# Processes


def child(script: str) -> Callable[[int], list[str]]:
    return lambda descriptor: [sys.executable, "-c", f"import os, sys, json, time\nfd = {descriptor}\n{script}"]


def is_running(process_id: int) -> bool:
    status = Path(f"/proc/{process_id}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("print('no luck'); sys.exit(3)", "ended with exit code 3 while building: no luck"),
        ("os.kill(os.getpid(), 9)", "was killed while building: most likely by the kernel, for want of host memory"),
        ("os.kill(os.getpid(), 11)", "died of SIGSEGV while building: nothing was printed"),
        ("os.close(fd); print('bad'); sys.exit(1)", "ended with exit code 1 while building: bad"),
        ("time.sleep(60)", "gave no sign for 1.5 s while building, and was ended"),
    ],
)
def test_a_row_that_dies_says_how(script: str, problem: str) -> None:
    told: list[dict[str, Any]] = []
    tell = """os.write(fd, (json.dumps({"phase": "building", "id": os.getpid()}) + "\\n").encode())\n"""
    # The limit counts from the last sign: it has to be longer than an interpreter's start.
    outcome = listen(child(tell + script), 1.5 if "sleep" in script else 60, told.append)
    if not told:
        pytest.skip("this machine took longer to start an interpreter than the limit")
    assert (outcome.problem, outcome.kind, outcome.figures) == (problem, worker.FAILED, None)
    assert not is_running(told[0]["id"])


def test_an_interrupt_ends_the_row() -> None:
    told: list[dict[str, Any]] = []

    def interrupt(event: dict[str, Any]) -> None:
        told.append(event)
        raise KeyboardInterrupt

    script = """os.write(fd, (json.dumps({"id": os.getpid()}) + "\\n").encode()); time.sleep(600)"""
    with pytest.raises(KeyboardInterrupt):
        listen(child(script), 60, interrupt)
    assert not is_running(told[0]["id"])


def test_what_a_row_began_ends_with_it() -> None:
    told: list[dict[str, Any]] = []
    script = """
import subprocess
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
for line in ({"phase": "measuring", "id": other.pid}, {"figures": {"a": 1}}):
    os.write(fd, (json.dumps(line) + "\\n").encode())
print("megatrain: what it did")
"""
    outcome = listen(child(script), 60, told.append)
    assert outcome.figures == {"a": 1} and outcome.problem == ""
    assert outcome.notes == ["megatrain: what it did"]
    deadline = time.monotonic() + 60
    while is_running(told[0]["id"]) and time.monotonic() < deadline:
        time.sleep(0.05)  # a signal takes its time
    assert not is_running(told[0]["id"])


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB. GPU 0 has"), worker.DEVICE_MEMORY, "2 GiB)"),
        (lambda: MemoryError("pages"), worker.HOST_MEMORY, "out of host memory (pages)"),
        (lambda: UserError("add 14 GiB"), worker.REFUSED, "add 14 GiB"),
        (lambda: KeyError("x"), worker.FAILED, "failed: KeyError: 'x'"),
    ],
)
def test_what_a_row_raises_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Callable[[], Exception], kind: str, words: str
) -> None:
    work = small_work(tmp_path)

    def fail(of: Work, tell: Tell) -> dict[str, Any]:
        assert of == work
        raise make()

    monkeypatch.setattr("megatrain.bench.streamed.measure_streamed", fail)
    found = worker.outcome({"work": vars(work), "variant": None}, silent)
    assert found["kind"] == kind and words in found["problem"]


# What is printed


def figures(**changes: Any) -> dict[str, Any]:
    """Of a row on a GPU, made up."""
    gpu = {"busy_seconds": {"compute": 7.0, "h2d": 1.0, "cpu": 2.0}, "stall_seconds": {"weights": 0.19, "drain": 0.0}}
    return {
        **{"step_seconds": [7.2, 7.1, 7.3, 7.19, 7.2], "median_seconds": 7.2, "mean_seconds": 7.19, "losses": [11.9]},
        **{"tokens_per_second": 9119.0, "tflops_published": 417.0, "tflops_counted": 393.0, "num_micro_batches": 4},
        **{"num_micro_batches_run": 4.0},
        **{"peak_device_bytes": 101 * 2**30, "peak_host_bytes": 75 * 2**30, "disk_bytes": 0, "has_settled": True},
        **{"warm_up_seconds": [9.0] * 10, "num_skipped_steps": 0, "formulas": {"published": "6 x parameters"}},
        **{"link_bytes": {"to_device": 3e10, "to_host": 15e9}, "homes": {"cpu": 31}},
        **{"disk_step_bytes": {"read": 0.0, "written": 0.0}, "slot_bytes": {}, "num_late_transfers": 0.0},
        **{"home_bytes_per_parameter": 12.0, "predicted": {**gpu, "step_seconds": 7.0, "device_bytes": 100 * 2**30,
           "host_bytes": 75 * 2**30, "disk_bytes": 0, "machine": "measured by doctor"}},
        **gpu, **changes,
    }  # fmt: skip


def printed(rows: list[Row], width: int) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"), force_terminal=True)
    print_bench(console, rows)
    return console.export_text()


def test_a_table_fits_80_columns_and_tells_what_was_not_measured() -> None:
    rows = [
        Row(name="megatrain", how="[bold] exact fp32 master", figures=figures(), device="NVIDIA H200"),
        Row(
            name="hbm bf16", how="compiled", figures=figures(losses=[13.0], has_settled=False), tried=("4: too large",)
        ),
        Row(name="zero3", how="DeepSpeed", problem="was killed while building"),
    ]
    text = printed(rows, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "7.10-7.30" in text and "9,119" in text and "101.0" in text
    assert "[bold] exact fp32 master" in text
    assert "zero3: NOT MEASURED: was killed while building" in text
    assert "before: 4: too large" in text
    words = " ".join(text.split())
    assert "hbm bf16: the first loss is 13.0000, and 11.9000 in the row above" in words
    assert "hbm bf16: steps had not settled after 10 of warm-up" in words
    assert "30.0 GB to the device, 15.0 GB to the host" in words
    assert "+2.9%" in text, "7.2 s measured, 7.0 predicted"
    assert printed(rows[-1:], 80).count("NOT MEASURED") == 1


def test_a_trace_is_told_with_what_the_table_does_not_say() -> None:
    summary = {
        **{"num_steps": 2, "num_visits": 124, "num_calls": 504},
        "host_seconds_per_visit": {"median": 6.1e-4, "max": 2.2e-3, "sum": 0.08},
        "stall_behind_seconds": {"update": 0.25, "fetch": 1e-7},
    }
    trace = {"file": "lanes.json", "problem": "", "summary": summary}
    words = " ".join(printed([Row(name="megatrain", how="", figures=figures(trace=trace))], 80).split())
    assert "trace lanes.json: 2 more steps" in words
    assert "Python a visit, ms: 0.61 in the median, 2.20 at most; 124 visits with 504 calls" in words
    assert "compute waited behind updates 0.2500 s" in words and "weights on the link" not in words
    trace |= {"problem": "the disk is full"}
    words = " ".join(printed([Row(name="megatrain", how="", figures=figures(trace=trace))], 80).split())
    assert "warning: the disk is full" in words and "trace lanes.json" not in words and "0.61 in the median" in words


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--vs", "zero3,fsdp"), "--vs fsdp is not known: use zero3, hbm"),
        (("--steps", "4"), "--steps 4 is too few"),
        (("--tokens", "6x8", "--accumulate", "4"), "--accumulate 4 does not divide the step's 6 sequences"),
        (("--tokens", "many"), "--tokens many is neither"),
        (("--places", "moon"), "--places moon is not known"),
        (("--places", "disk"), "--offload-dir DIR"),
        (("--moments-on-disk", "2", "--places", "cpu", "--offload-dir", "."), "give one of them"),
        (("--compression", "3bit"), "--compression 3bit is not known"),
        (("--vram-gb", "-1"), "--vram-gb -1 must be a positive number"),
        (("--limit-minutes", "0"), "--limit-minutes 0 must be above 0"),
        (("--link-gb-s", "0"), "--link-gb-s 0 must be a number of GB (1e9 bytes) a second, 0.001 at least"),
        (("--trace", "nowhere/lanes.json"), "--trace: nowhere/lanes.json cannot be written"),
        (("--trace", "."), "--trace: . cannot be written"),
    ],
)
def test_mistakes_are_told_before_any_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], words: str
) -> None:
    refuse = functools.partial(pytest.fail, "a model was looked at")
    monkeypatch.setattr("megatrain.planning.outline_model", lambda name: refuse())
    code, out, err = command(capsys, "bench", "qwen2.5-tiny", *options)
    assert (code, out) == (2, "") and words in err


def test_a_row_of_its_own_that_fails_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def refuse(work: Work, variant: Variant | None, limit_seconds: float, tell: Tell) -> Outcome:
        asked.append((variant, limit_seconds))
        return Outcome(problem="add 14 GiB", kind=worker.REFUSED)

    monkeypatch.setattr("megatrain.bench.process.run_row", refuse)
    code, out, err = command(
        capsys, "bench", small_model(tmp_path), "--tokens", "4x8", "--vs", "hbm", "--limit-minutes", "2"
    )
    assert code == 1 and err.count("measuring") == 3
    assert out.count(": NOT MEASURED: add 14 GiB") == 3 and "nothing was measured" in out
    assert [limit for _, limit in asked] == [120.0] * 3
    assert [variant and variant.num_micro_batches for variant, _ in asked] == [None, 4, 4]


def test_a_row_that_merged_its_micro_batches_says_so_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    of = figures(num_micro_batches=8, num_micro_batches_run=2.0, is_planned=True, slot_bytes={"weights": 0})
    notes = ["megatrain: as they are: exact=True", "megatrain: merged (mt.init(exact=True) runs them as they are)"]

    def run_row(work: Work, variant: Variant | None, *others: Any) -> Outcome:
        return Outcome(figures=of, notes=notes, device="NVIDIA H200") if variant is None else Outcome(figures=of)

    monkeypatch.setattr("megatrain.bench.process.run_row", run_row)
    monkeypatch.setitem(peers.ROWS, "hbm", ("hbm bf16",))
    call = ("bench", small_model(tmp_path), "--tokens", "8x8", "--accumulate", "8", "--vs", "hbm")
    code, out, _ = command(capsys, *call)
    table = out[out.index("measured, median") : out.index("as they are")]
    assert code == 0 and table.count("merged into 2") == 1 and "8 micro-batches of 1 sequence, merged into 2" in out
    assert "exact=True" not in out and out.count("--exact") == 2
    assert "lanes, a step: mean of 5 steps, 7.19 s" in out
    rows = json.loads(command(capsys, *call, "--json")[1])["rows"]
    assert [row["merged"] for row in rows] == ["merged into 2", ""]
