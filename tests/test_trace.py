"""A trace of real lanes: its pieces nest, every visit is there, sums are those of the counters, no bit changes."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_equal, stream
from trainer_helpers import llama

import megatrain as mt
from megatrain.base.trace import Piece, blamed, chrome_trace
from megatrain.execute.trace import Trace, _host_seconds


def micro_batches() -> list[dict[str, torch.Tensor]]:
    ids = torch.arange(36).remainder(64).view(4, 9)
    return [{"input_ids": row.view(1, -1), "labels": row.view(1, -1)} for row in ids]


class Run:
    """A tiny model with its optimizer."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(1)
        _, self.model = stream(llama(num_hidden_layers=3), **options)
        self.model.train()
        self.optimizer = mt.optim.AdamW(self.model, lr=1e-3)

    def step(self, *, layer_major: bool = True) -> None:
        if layer_major:
            mt.accumulate(self.model, micro_batches())
        else:
            self.model(**micro_batches()[0]).loss.backward()
        if self.optimizer._engine.config.clip == "global":
            mt.clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def traced(run: Run, file: Path | None = None, *, layer_major: bool = True) -> tuple[Trace, Counter[str]]:
    """Two steps after two others, and the visits that the stream counted in them."""
    for _ in range(2):
        run.step(layer_major=layer_major)
    before = Counter(mt.stats(run.model)["visits"])
    with mt.trace(run.model, file) as found:
        for _ in range(2):
            run.step(layer_major=layer_major)
    return found, Counter(mt.stats(run.model)["visits"]) - before


def visits(found: Trace) -> list[Piece]:
    """Pieces of the compute lane that lie in no other."""
    outermost, end = [], float("-inf")
    compute = [piece for piece in found.pieces if piece.lane == "compute" and piece.what != "stall"]
    for piece in sorted(compute, key=lambda piece: (piece.start, -piece.end)):
        if piece.end > end:
            outermost.append(piece)
            end = piece.end
    return outermost


def assert_nested(events: list[dict[str, Any]]) -> None:
    """Of one track: whichever two of them overlap, one holds the other."""
    ends: list[float] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        end = event["ts"] + event["dur"]
        while ends and ends[-1] <= event["ts"] + 2e-3:  # times are rounded to nanoseconds
            ends.pop()
        assert not ends or end <= ends[-1] + 2e-3, event
        ends.append(end)


@pytest.mark.parametrize("options", [{}, {"serial": True}], ids=["lanes", "serial"])
@pytest.mark.parametrize("layer_major", [True, False])
def test_every_visit_of_a_step_is_there_once(options: dict[str, Any], layer_major: bool) -> None:
    found, counted = traced(Run(**options), layer_major=layer_major)
    names = [f"model.layers.{index}" for index in range(3)]
    forward = ["model.embed_tokens", *names, "lm_head"]
    # The head's backward lies in the visit of its forward, which ends the forward.
    backward = [*names[::-1], "model.embed_tokens"]
    step = [("forward", name) for name in forward] + [("backward", name) for name in backward]
    seen = [(piece.what, piece.name) for piece in visits(found)]
    if not layer_major:
        step[len(forward) - 1] = ("forward and backward", "lm_head")
    assert seen == step * 2
    # The embedding, with which one step ends and the next begins, the stream counts once.
    of_visits = Counter(piece.name for piece in visits(found))
    of_visits["model.embed_tokens"] -= 2
    assert of_visits == counted
    assert found.summary()["num_visits"] == sum(of_visits.values()) + 2
    assert found.summary()["num_calls"] == len(step) * 2 * (4 if layer_major else 1) + 2 * (4 if layer_major else 1)


def test_each_micro_batch_of_a_visit_is_named_in_the_order_in_which_it_ran() -> None:
    found, _ = traced(Run())
    inside = [piece for piece in found.pieces if piece.facts.get("layer") == "model.layers.1"]
    inside.sort(key=lambda piece: piece.start)
    # Forwards from the last to the first, backwards the other way round (`execute/runs.py`).
    step = [("forward", f"micro-batch {n}") for n in (3, 2, 1, 0)]
    step += [("backward", f"micro-batch {n}") for n in (0, 1, 2, 3)]
    assert [(piece.what, piece.name) for piece in inside] == step * 2
    for piece in inside:
        assert any(visit.start <= piece.start and piece.end <= visit.end for visit in visits(found))


def test_the_file_is_one_that_chrome_opens_and_its_tracks_nest(tmp_path: Path) -> None:
    file = tmp_path / "lanes.json"
    found, _ = traced(Run(lane_delay_seconds=1e-3), file)
    trace = json.loads(file.read_text())
    events = trace["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(tracks.values()) == ["steps", "compute", "h2d", "d2h", "cpu", "host thread"]
    work = [event for event in events if event["ph"] == "X"]
    for track in tracks:
        assert_nested([event for event in work if event["tid"] == track])
    assert len(work) == sum(piece.is_shown for piece in found.pieces)
    ids = {kind: sorted(event["id"] for event in events if event["ph"] == kind) for kind in "sf"}
    assert ids["s"] == ids["f"] != []
    for start in (event for event in events if event["ph"] == "s"):
        (end,) = (event for event in events if event["ph"] == "f" and event["id"] == start["id"])
        assert start["ts"] <= end["ts"] and start["tid"] != end["tid"]
    assert trace["otherData"]["summary"] == json.loads(json.dumps(found.summary()))


def test_what_is_waited_for_is_named_by_its_work_and_layer() -> None:
    found, _ = traced(Run())
    updates = {piece.name: piece for piece in found.pieces if piece.what == "update"}
    assert updates.keys() >= {"model.embed_tokens", *(f"model.layers.{index}" for index in range(3)), "lm_head"}
    for name, piece in updates.items():
        waited = {found.pieces[other].title for other in piece.after}
        assert f"drain {name}" in waited, (name, waited)
        assert all(found.pieces[other].end <= piece.start for other in piece.after)
    drains = [piece for piece in found.pieces if piece.what == "drain"]
    assert drains and all(piece.lane == "d2h" for piece in drains)


@pytest.mark.parametrize("options", [{}, {"num_slots": 1, "lane_delay_seconds": 2e-3}])
def test_the_sum_of_spans_is_what_the_counters_say(options: dict[str, Any]) -> None:
    run = Run(**options)
    run.step()
    run.optimizer._engine.wait()
    before, counted = mt.stats(run.model), run.optimizer._engine.transport.counters
    num_before = counted.num_transfers, counted.num_drains
    with mt.trace(run.model) as found:
        run.step()
    after, summary = mt.stats(run.model), found.summary()
    for cause, seconds in summary["stall_seconds"].items():
        assert seconds == pytest.approx(after["stall_seconds"][cause] - before["stall_seconds"][cause], abs=1e-9)
    assert sum(summary["stall_behind_seconds"].values()) == pytest.approx(sum(summary["stall_seconds"].values()))
    whats = Counter(piece.what for piece in found.pieces)
    assert whats["drain"] == counted.num_drains - num_before[1]
    assert whats["fetch"] == counted.num_transfers - num_before[0]
    assert summary["num_steps"] == whats["step"] == 1
    compute = summary["busy_seconds"]["compute"]
    assert 0 < compute <= summary["seconds"]
    assert 0 < summary["host_seconds_per_visit"]["median"] <= summary["host_seconds_per_visit"]["max"]


@pytest.mark.parametrize("options", [{}, {"serial": True}], ids=["lanes", "serial"])
def test_a_trace_changes_no_bit(options: dict[str, Any]) -> None:
    results = []
    for is_traced in (False, True):
        run = Run(**options)
        with mt.trace(run.model) if is_traced else contextlib.nullcontext():
            for _ in range(3):
                run.step()
        results.append(mt.full_state_dict(run.model))
    assert_equal(*results)


def test_reads_and_writes_of_the_disk_are_there(tmp_path: Path) -> None:
    mt.init(device="cpu", offload_dir=tmp_path, max_ram_gb=0.0003)
    found, _ = traced(Run(), tmp_path / "lanes.json")
    disk = [piece for piece in found.pieces if piece.lane == "disk"]
    assert {"read states", "write states"} <= {piece.what for piece in disk}
    assert all(piece.facts["bytes"] > 0 for piece in disk if piece.what != "read weights")
    events = json.loads((tmp_path / "lanes.json").read_text())["traceEvents"]
    for track in {event["tid"] for event in events}:
        assert_nested([event for event in events if event["ph"] == "X" and event["tid"] == track])


def test_nothing_is_recorded_outside_of_the_block_and_blocks_follow_one_another() -> None:
    run = Run()
    with mt.trace(run.model) as first:
        run.step()
    transport, num_pieces = run.optimizer._engine.transport, len(first.pieces)
    assert transport.recorder is None and all(lane.recorder is None for lane in transport._lanes)
    run.step()
    assert len(first.pieces) == num_pieces
    with mt.trace(run.model) as second:
        run.step()
    assert len(visits(second)) == len(visits(first))


def test_a_block_that_raises_writes_nothing_and_training_goes_on(tmp_path: Path) -> None:
    run, file = Run(), tmp_path / "lanes.json"
    with pytest.raises(ZeroDivisionError), mt.trace(run.model, file):
        run.step()
        raise ZeroDivisionError
    assert not file.exists() and run.optimizer._engine.transport.recorder is None
    run.step()


def test_what_cannot_be_traced_is_said_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    with pytest.raises(mt.UserError, match="is not streamed"), mt.trace(llama()):
        raise AssertionError
    with pytest.raises(mt.UserError, match="mt.trace: .*nowhere.*cannot be written"):
        mt.trace(run.model, tmp_path / "nowhere" / "lanes.json").__enter__()
    for file in (5, b"lanes.json", "", "a\0b"):
        with pytest.raises(mt.UserError, match=f"mt.trace: {re.escape(repr(file))} is not the path of a file"):
            mt.trace(run.model, file).__enter__()
    full = "/dev/full"
    with pytest.raises(mt.UserError, match=f"mt.trace: {full} cannot be used .No space"), mt.trace(run.model, full):
        run.step()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(mt.UserError, match="mt.trace: you may not write .*lanes.json"):
        mt.trace(run.model, tmp_path / "lanes.json").__enter__()
    with mt.trace(run.model), pytest.raises(mt.UserError, match="traced already"):
        mt.trace(run.model).__enter__()


# The format


def piece(lane: str, what: str, name: str, start: float, end: float, *after: int) -> Piece:
    return Piece(lane=lane, what=what, name=name, start=start, end=end, after=after)


def test_pieces_of_a_lane_that_overlap_get_tracks_of_their_own() -> None:
    pieces = [piece("disk", "read", "a", 0, 2), piece("disk", "read", "b", 1, 3), piece("disk", "read", "c", 2, 4)]
    events = chrome_trace(pieces)["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {event["name"]: tracks[event["tid"]] for event in events if event["ph"] == "X"} == {
        "read a": "disk",
        "read b": "disk (2)",
        "read c": "disk",
    }


def test_pythons_time_of_a_visit_is_the_engines_alone() -> None:
    host = "host thread"
    pieces = [
        piece(host, "acquire", "x", 0, 4),
        piece(host, "wait", "weights", 1, 3),
        piece(host, "switch", "x", 4, 5),
        piece(host, "call", "x", 5, 15),
        piece(host, "model code", "x", 6, 14),
        piece(host, "acquire", "x", 7, 8),  # inside of what is left out
        piece(host, "release", "x", 16, 17),
        piece(host, "queue updates", "", 18, 30),
        piece(host, "backward call", "x", 31, 40),
        piece(host, "autograd", "x", 33, 36),
        piece("compute", "forward", "x", 5, 15),
    ]
    assert _host_seconds(pieces) == [2 + 1 + 2 + 1, 6]


def test_a_stall_is_blamed_on_what_was_waited_for_in_the_end() -> None:
    pieces = [
        piece("cpu", "update", "x", 0, 5),
        piece("h2d", "fetch", "x", 5, 6, 0),
        piece("compute", "stall", "weights", 3, 6, 1),
        piece("h2d", "fetch", "y", 6, 9),
        piece("compute", "stall", "weights", 8, 9, 3),
        piece("compute", "stall", "weights", 10, 10.1, 3),
    ]
    assert [blamed(pieces, number) for number in (2, 4, 5)] == [0, 3, None]
    events = chrome_trace(pieces)["traceEvents"]
    assert [event["args"].get("behind") for event in events if event.get("cat") == "stall"] == [
        "update x",
        "fetch y",
        None,
    ]
