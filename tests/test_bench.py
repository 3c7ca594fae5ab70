"""`megatrain bench`: figures against plain truths, and what peers do. On the CPU."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import statistics
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_helpers import SMALL, silent, small_model, small_work
from command_helpers import command
from planning_helpers import llama_config
from transformers import AutoModelForCausalLM

import megatrain as mt
from megatrain.bench import peers, timing, worker
from megatrain.bench.peers import FIRST_UPDATE, INITIALISING, Variant, measure_peer, variants
from megatrain.bench.process import Outcome
from megatrain.bench.streamed import measure_streamed
from megatrain.bench.work import Work, empty_model, micro_batches, random_values, read_config
from megatrain.commands import bench
from megatrain.spec.layout import ALIGN_ELEMENTS


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    mt.init()


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return small_work(tmp_path)


# Figures


def test_rows_in_processes_of_their_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(peers.ROWS, "hbm", ("hbm bf16",))
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    code, out, err = command(
        capsys, "bench", small_model(tmp_path), "--tokens", "4x8", "--vs", "zero3,hbm", "--device", "cpu", "--json"
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


def test_the_trace_of_a_row_is_of_two_more_steps(work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    traced = dataclasses.replace(work, trace_file=str(tmp_path / "lanes.json"), exact=True)
    found = measure_streamed(traced, told.append)
    assert [event["phase"] for event in told if "phase" in event][-2:] == ["measuring", "tracing"]
    assert sum("step" in event for event in told) == len(found["losses"]), "those of the trace are not among them"
    summary = found["trace"]["summary"]
    events = json.loads((tmp_path / "lanes.json").read_text())["traceEvents"]
    assert summary["num_steps"] == sum(event.get("cat") == "step" for event in events) == 2
    assert summary["num_visits"] == 2 * (5 + 4)
    assert summary["num_calls"] == 2 * 2 * (5 + 5), "two micro-batches; the head's backward lies in its visit"
    updates = {event["name"] for event in events if event.get("cat") == "update"}
    assert len(updates) == 6, "of both steps, whole"

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "lanes.json")

    monkeypatch.setattr(Path, "write_text", full)
    found = measure_streamed(traced, silent)
    assert "No space left" in found["trace"]["problem"] and len(found["step_seconds"]) == 5


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


@pytest.mark.parametrize("is_tied", [False, True])
def test_every_row_begins_with_the_same_model(work: Work, is_tied: bool) -> None:
    llama_config(**SMALL, tie_word_embeddings=is_tied).save_pretrained(work.config_folder)
    streamed = measure_streamed(work, silent)["losses"]
    plain = measure_peer(Variant(row="hbm fp32", num_micro_batches=2), work, silent)["losses"]
    assert streamed[:3] == pytest.approx(plain[:3], rel=0.01)
    assert streamed[0] != streamed[1]


class ObedientDeepSpeed:
    """Trains as DeepSpeed's config says, in plain PyTorch."""

    def __init__(self, model: torch.nn.Module, config: dict[str, Any]) -> None:
        assert config["zero_optimization"]["stage"] == 3 and config["bf16"]["enabled"]
        assert all(p.device.type == "cpu" and p.dtype == torch.bfloat16 for p in model.parameters())
        self.model, self.config, self.num_calls = model, config, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), **config["optimizer"]["params"])

    def __call__(self, **batch: Any) -> Any:
        assert len(batch["input_ids"]) == self.config["train_micro_batch_size_per_gpu"]
        return self.model(**batch)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.config["gradient_accumulation_steps"]).backward()

    def step(self) -> None:
        self.num_calls += 1
        if self.num_calls % self.config["gradient_accumulation_steps"] == 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config["gradient_clipping"])
            self.optimizer.step()
            self.optimizer.zero_grad()


def test_deepspeed_is_asked_for_the_same_steps(monkeypatch: pytest.MonkeyPatch, work: Work) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")

    def initialize(model: torch.nn.Module, config: dict[str, Any], model_parameters: Any) -> tuple[Any, ...]:
        assert os.environ["RANK"] == "0" and os.environ["WORLD_SIZE"] == "1"
        assert len(list(model_parameters)) == len(list(model.parameters()))
        return ObedientDeepSpeed(model, config), None, None, None

    monkeypatch.setitem(sys.modules, "deepspeed", types.SimpleNamespace(initialize=initialize))
    one = Variant(row="zero3", num_micro_batches=2, is_checkpointed=True)
    zero3 = measure_peer(one, work, silent)["losses"]
    plain = measure_peer(Variant(row="hbm bf16", num_micro_batches=2), work, silent)["losses"]
    assert zero3[:4] == pytest.approx(plain[:4], rel=1e-3)
    assert "2 micro-batches of 2 sequences" in one.words(work) and "compiled" not in one.words(work)


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
