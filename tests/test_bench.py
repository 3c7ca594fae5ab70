"""`megatrain bench`: figures against plain truths, rows that could not be measured, processes that die. On the CPU."""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_helpers import command
from planning_helpers import llama_config
from rich.console import Console
from transformers import AutoModelForCausalLM

import megatrain as mt
from megatrain.base.errors import UserError
from megatrain.bench import peers, timing, worker
from megatrain.bench.peers import FIRST_UPDATE, INITIALISING, Variant, measure_peer, variants
from megatrain.bench.process import Outcome, listen
from megatrain.bench.streamed import measure_streamed
from megatrain.bench.work import Work, empty_model, micro_batches, random_values, read_config
from megatrain.commands import bench
from megatrain.commands.bench_tables import Row, print_bench
from megatrain.spec.layout import ALIGN_ELEMENTS

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
             vocab_size=96)  # fmt: skip
Tell = Callable[[dict[str, Any]], None]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    mt.init()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder without weights, under a name that a terminal could take for markup."""
    llama_config(**SMALL).save_pretrained(tmp_path / "[bold]model")
    return tmp_path / "[bold]model"


@pytest.fixture
def work(folder: Path) -> Work:
    return Work(
        config_folder=str(folder), num_sequences=4, length=8, num_micro_batches=2, num_steps=5, device="cpu"
    )  # fmt: skip


def silent(event: dict[str, Any]) -> None:
    del event


# Figures


def test_rows_in_processes_of_their_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setitem(peers.ROWS, "hbm", ("hbm bf16",))
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    code, out, err = command(
        capsys, "bench", folder, "--tokens", "4x8", "--vs", "zero3,hbm", "--device", "cpu", "--json"
    )
    assert code == 0
    # How far it is stands on the other output.
    assert [line.split()[1] for line in err.splitlines() if line.startswith("measuring")] == ["megatrain", "hbm"]
    assert "warming up, step 2: " in err and "measuring, step 5: " in err
    found = json.loads(out)
    own, zero3, plain = found["rows"]
    assert [row["row"] for row in found["rows"]] == ["megatrain", "zero3", "hbm bf16"]
    assert zero3["figures"] is None and "not installed" in zero3["problem"]

    model = AutoModelForCausalLM.from_config(llama_config(**SMALL))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    looked_up = model.get_input_embeddings().weight.numel()
    norms = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    pairs = 4 * (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8)
    attention = 3 * 2 * (16 + 16)  # layers x heads x (key + value)
    counted = 6 * (num_parameters - looked_up - norms) * 32 + 3 * 2 * attention * pairs
    assert found["model"]["parameters"] == num_parameters
    for row in (own, plain):
        of = row["figures"]
        assert len(of["step_seconds"]) == 5 and of["median_seconds"] == statistics.median(of["step_seconds"])
        assert of["tokens_per_second"] * of["median_seconds"] == pytest.approx(32)
        assert of["tflops_published"] * of["median_seconds"] * 1e12 == pytest.approx(6 * num_parameters * 32)
        assert of["tflops_counted"] * of["median_seconds"] * 1e12 == pytest.approx(counted)
        assert of["peak_device_bytes"] == 0 and of["peak_host_bytes"] > 2**26
        assert of["num_micro_batches"] == 4
    assert plain["figures"]["losses"][0] == pytest.approx(own["figures"]["losses"][0], rel=0.01)
    assert own["device"] == "cpu" and own["figures"]["predicted"] is None


def test_the_streamed_row_tells_what_its_lanes_did(work: Work) -> None:
    told: list[dict[str, Any]] = []
    found = measure_streamed(work, told.append)
    assert [event["phase"] for event in told if "phase" in event] == ["building", "warming up", "measuring"]
    num_steps = len(found["warm_up_seconds"]) + 5
    assert sum("step" in event for event in told) == num_steps == len(found["losses"])
    assert found["num_skipped_steps"] == 0
    waits, busy = sum(found["stall_seconds"].values()), found["busy_seconds"]
    assert busy["compute"] + waits == pytest.approx(sum(found["step_seconds"]) / 5)
    assert {"h2d", "d2h", "cpu"} <= busy.keys() and all(seconds > 0 for seconds in busy.values())
    sizes = [parameter.numel() for parameter in empty_model(read_config(work)).parameters()]
    # In bf16, each on its way home once a step, each on a boundary of its own.
    padded = sum(-(-numel // ALIGN_ELEMENTS) * ALIGN_ELEMENTS for numel in sizes)
    assert found["slot_bytes"]["gradients"] == 2 * padded
    assert found["link_bytes"] == {"to_device": 0, "to_host": 0}
    assert sum(found["homes"].values()) == 6
    assert 12 <= found["home_bytes_per_parameter"] <= 12 * padded / sum(sizes)


@pytest.mark.parametrize("row", ["hbm bf16", "hbm fp32"])
def test_a_peer_takes_the_steps_of_plain_pytorch(work: Work, row: str) -> None:
    told: list[dict[str, Any]] = []
    found = measure_peer(Variant(row=row, num_micro_batches=2), work, told.append)
    phases = [event["phase"] for event in told if "phase" in event]
    assert phases == ["building", "warming up", FIRST_UPDATE, "warming up", "measuring"]
    model = empty_model(read_config(work))
    values = random_values(torch.device("cpu"))
    drawn = {name: values(name, p.shape, p.dtype) for name, p in model.named_parameters()}
    plain = AutoModelForCausalLM.from_config(read_config(work), dtype=torch.bfloat16)
    plain.load_state_dict(drawn)
    plain.to(torch.float32 if row == "hbm fp32" else torch.bfloat16).train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-5, weight_decay=0.01)
    for expected in found["losses"][:3]:
        losses = []
        for batch in micro_batches(work, 2, plain):
            with torch.autocast("cpu", torch.bfloat16, enabled=row == "hbm fp32"):
                losses.append(plain(**batch).loss / 2)
            losses[-1].backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert sum(loss.item() for loss in losses) == pytest.approx(expected, rel=1e-3)


def test_every_row_begins_with_the_same_model(work: Work) -> None:
    streamed = measure_streamed(work, silent)["losses"]
    plain = measure_peer(Variant(row="hbm fp32", num_micro_batches=2), work, silent)["losses"]
    assert streamed[:3] == pytest.approx(plain[:3], rel=0.01)
    assert streamed[0] != streamed[1]


@pytest.mark.parametrize(
    ("seconds", "num_warm_up", "has_settled"),
    [([9, 4, 2, 2.05], 4, True), ([3, 3], 2, True), ([1, 2] * 5, 10, False)],
)
def test_warm_up_ends_when_steps_have_settled(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], num_warm_up: int, has_settled: bool
) -> None:
    clock, coming = [0.0], iter([*seconds, 7, 5, 6])
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))

    def step() -> float:
        clock[0] += next(coming)
        return 1.0

    found = timing.warm_up(step, torch.device("cpu"), silent)
    assert found.warm_up_seconds == pytest.approx(seconds[:num_warm_up]) and found.has_settled == has_settled
    timing.measure(step, found, 3, silent)
    assert (found.step_seconds, found.median_seconds) == (pytest.approx([7, 5, 6]), pytest.approx(6))


# Peers


def on_gpu(work: Work, **changes: Any) -> Work:
    return Work(**{**vars(work), "device": "cuda", "num_sequences": 16, "num_micro_batches": None, **changes})


def test_peers_may_do_what_helps_them(work: Work) -> None:
    def tried(row: str, of: Work) -> list[tuple[int, bool, bool]]:
        return [(v.num_micro_batches, v.is_compiled, v.is_checkpointed) for v in variants(row, of, 4)]

    free, fixed = on_gpu(work), on_gpu(work, num_micro_batches=4)
    kept = [(4, True, False), (8, True, False), (16, True, False)]
    assert tried("hbm bf16", free) == [*kept, (4, True, True), (4, False, True)]
    assert tried("hbm fp32", fixed) == [(4, True, False), (4, True, True), (4, False, True)]
    assert tried("zero3", free) == [(n, False, True) for n in (1, 2, 4, 8, 16)]
    assert tried("zero3", fixed) == [(4, False, True)]
    assert tried("hbm bf16", work) == [(2, False, False)], "on the CPU"


@pytest.mark.parametrize(
    ("phase", "num_tried"), [("warming up", 2), ("measuring", 2), ("building", 0), (FIRST_UPDATE, 0), (INITIALISING, 0)]
)
def test_what_does_not_fit_is_tried_smaller_and_told(work: Work, phase: str, num_tried: int) -> None:
    work, asked = on_gpu(work), []

    def run(variant: Variant, words: str) -> Outcome:
        asked.append(variant)
        if len(asked) <= 2:
            return Outcome(problem="out of device memory (by 1 GiB)", kind=worker.DEVICE_MEMORY, phase=phase)
        return Outcome(figures={"median_seconds": 1.0})

    row = bench._peer_row("hbm bf16", work, 4, run)
    assert asked == variants("hbm bf16", work, 4)[: num_tried + 1]
    assert row.how == asked[-1].words(work)
    assert len(row.tried) == num_tried and all("by 1 GiB" in words for words in row.tried)
    assert (row.figures is None) == (num_tried == 0) == ("by 1 GiB" in row.problem)


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
    monkeypatch: pytest.MonkeyPatch, work: Work, make: Callable[[], Exception], kind: str, words: str
) -> None:
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
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    asked: list[Any] = []

    def refuse(work: Work, variant: Variant | None, limit_seconds: float, tell: Tell) -> Outcome:
        asked.append((variant, limit_seconds))
        return Outcome(problem="add 14 GiB", kind=worker.REFUSED)

    monkeypatch.setattr("megatrain.bench.process.run_row", refuse)
    code, out, err = command(capsys, "bench", folder, "--tokens", "4x8", "--vs", "hbm", "--limit-minutes", "2")
    assert code == 1 and err.count("measuring") == 3
    assert out.count(": NOT MEASURED: add 14 GiB") == 3 and "nothing was measured" in out
    assert [limit for _, limit in asked] == [120.0] * 3
    assert [variant and variant.num_micro_batches for variant, _ in asked] == [None, 4, 4]
