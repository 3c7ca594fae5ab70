"""A run's log against what transformers keeps of it, and the page that is made of it, with and without its parts."""

from __future__ import annotations

import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from command_helpers import command, write_recipe
from trainer_helpers import arguments, assert_equal_weights, llama, rows, train, weights

import megatrain as mt
from megatrain.commands.report_charts import Chart, Line, chart_html, thinned, tick_texts, ticks
from megatrain.commands.report_data import read_run, step_seconds
from megatrain.commands.report_lanes import bars
from megatrain.commands.report_page import page
from megatrain.run_log import LOG_NAME, RunLog, read_log

EVERY = dict(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, max_steps=5)


def trainer(folder: Path, **changes: Any) -> mt.Trainer:
    return mt.Trainer(
        llama(), arguments(folder, **{**EVERY, **changes}), train_dataset=rows(), eval_dataset=rows(count=4)
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Folder of a run that was killed behind step 3 and went on from step 2, and what transformers kept of it."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    mt.init(device="cpu")
    first = trainer(folder, max_steps=3)
    first.train()
    first.engine.close()
    with (folder / LOG_NAME).open("a") as file:
        file.write('{"event": "log", "st')  # as a kill leaves it
    second = trainer(folder)
    second.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    with mt.trace(second.model, folder / "trace.json"):
        for _ in range(2):
            mt.accumulate(
                second.model, [{"input_ids": r["input_ids"][None], "labels": r["labels"][None]} for r in rows(4)]
            )
            second.optimizer.step()
            second.optimizer.zero_grad()
    second.engine.close()
    return folder, second.state.log_history


@pytest.fixture
def run(finished: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> Path:
    """A copy, to change."""
    shutil.copytree(finished[0], tmp_path / "run")
    return tmp_path / "run"


class Reader(HTMLParser):
    """Titles, text and drawings of a page whose tags are all closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.headings: list[str] = []
        self.feed(html)
        assert self.tags == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.tags[-1:] in (["h2"], ["figcaption"]):
            self.headings.append(data.strip())


# The log


def test_the_log_is_what_transformers_keeps_and_each_step_is_there_once(
    finished: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, history = finished
    found = read_run(folder)
    kept = {entry["step"]: entry for entry in history if "loss" in entry}
    assert [entry["step"] for entry in found.logs] == [1, 2, 3, 4, 5] == sorted(kept)
    for entry in found.logs:
        for name in ("loss", "grad_norm", "learning_rate", "epoch"):
            assert entry[name] == pytest.approx(kept[entry["step"]][name], rel=1e-12), name
        assert entry["num_steps"] == 1 and entry["seconds"] > 0
    # 14 rows of 9 tokens, 6 rows a step, 2 left at the end of an epoch.
    assert [entry["num_tokens"] for entry in found.logs] == [54, 54, 18, 54, 54]
    losses = {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}
    assert {entry["step"]: entry["eval_loss"] for entry in found.evals} == losses
    assert {entry["step"] for entry in found.checkpoints} == {2, 4, 5}
    assert found.resumed_at == [2] and found.end is not None and found.end["is_complete"]
    assert any("1 line of" in note and "cannot be read" in note for note in found.notes)


def test_no_bit_depends_on_the_log_and_it_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged, _ = train(mt.Trainer, tmp_path / "logged")
    monkeypatch.setattr(mt.Trainer, "keeps_log", False)
    plain, _ = train(mt.Trainer, tmp_path / "plain")
    assert_equal_weights(weights(logged.model), weights(plain.model))
    assert (tmp_path / "logged" / LOG_NAME).is_file() and not (tmp_path / "plain" / LOG_NAME).exists()


def test_steps_between_two_logs_are_counted_together(tmp_path: Path) -> None:
    train(mt.Trainer, tmp_path, logging_steps=4)
    entries = read_log(tmp_path / LOG_NAME).entries
    (log,) = (entry for entry in entries if entry["event"] == "log")
    (end,) = (entry for entry in entries if entry["event"] == "end")
    assert (log["step"], log["num_steps"], log["num_tokens"]) == (4, 4, 54 + 54 + 18 + 54)
    assert (end["step"], end["num_steps"], end["num_tokens"]) == (6, 2, 54 + 18)
    assert step_seconds(log) == log["seconds"] / 4


def test_a_new_run_in_the_folder_of_another_has_none_of_its_steps(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for is_resumed, first in ((False, 0), (True, 2), (False, 0)):
        log.add("begin", first, {"is_resumed": is_resumed})
        for step in (first + 1, first + 2, first + 3):
            log.add("log", step, {"loss": float(first)})
    entries = read_log(tmp_path / LOG_NAME).entries
    assert [entry["step"] for entry in entries] == [0, 1, 2, 3]
    lines = (tmp_path / LOG_NAME).read_text().splitlines(keepends=True)
    (tmp_path / LOG_NAME).write_text("".join(lines[:8]))
    steps = [(entry["step"], entry.get("loss")) for entry in read_log(tmp_path / LOG_NAME).entries]
    assert steps == [(0, None), (1, 0.0), (2, 0.0), (2, None), (3, 2.0), (4, 2.0), (5, 2.0)]


def test_what_follows_a_torn_line_begins_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / LOG_NAME).write_bytes(b'{"event": "log", "st')
    RunLog(tmp_path).add("log", 7, {"loss": math.nan})
    ((entry,), num_unreadable, _) = read_log(tmp_path / LOG_NAME)
    assert num_unreadable == 1 and entry["step"] == 7 and math.isnan(entry["loss"])


def test_a_log_that_cannot_be_written_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / LOG_NAME).mkdir()
    log = RunLog(tmp_path)
    for step in range(3):
        log.add("log", step, {})
    assert caplog.text.count("cannot be written") == 1


# The page


def test_the_page_has_every_part_and_needs_nothing_else(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    code, out, _ = command(capsys, "report", run)
    assert code == 0 and str(run / "report.html") in out
    html = (run / "report.html").read_text()
    reader = Reader(html)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in reader.seen}
    assert "http" not in html and "url(" not in html and "@import" not in html
    for title in (
        *("Training", "Speed and memory", "Plan against actual", "Where the time of a step goes", "Checkpoints"),
        *("Waits and faults", "Loss", "Learning rate", "Gradient norm", "Throughput", "Step time", "Memory"),
        *("Lanes of a step", "What the run said of itself", "Not in this report"),
    ):
        assert title in reader.headings, title
    text = " ".join(reader.text)
    for words in ("Step 5 of 5, complete", "went on from a checkpoint 1 time (step 2)", "checkpoint-4", "h2d", "GiB"):
        assert words in text, words


def test_each_point_of_the_log_is_in_the_chart_of_the_loss(run: Path) -> None:
    found = read_run(run)
    html = page(found)
    (figure,) = re.findall(r"<figure><figcaption>Loss</figcaption>.*?</figure>", html)
    wide = figure.split("<svg")[1]
    drawn = [points.split() for points in re.findall(r'<polyline class="line c1" points="([^"]*)"', wide)]
    assert [len(points) for points in drawn] == [5]
    for entry in found.logs:
        assert f"training, step {entry['step']}: {entry['loss']:.6g}" in wide
    for entry in found.evals:
        assert f"held out, step {entry['step']}: {entry['eval_loss']:.6g}" in wide
    # Higher losses are drawn higher.
    heights = [float(point.split(",")[1]) for point in drawn[0]]
    by_loss = sorted(range(5), key=lambda index: found.logs[index]["loss"])
    assert by_loss == sorted(range(5), key=lambda index: -heights[index])


def test_an_older_run_has_what_its_checkpoints_keep(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    for name in (LOG_NAME, "trace.json"):
        (run / name).unlink()
    code, out, _ = command(capsys, "report", run, "--output", run / "page.html")
    assert code == 0
    reader = Reader((run / "page.html").read_text())
    assert {"Loss", "Learning rate", "Checkpoints"} <= set(reader.headings)
    assert not {"Throughput", "Memory", "Lanes of a step", "Plan against actual"} & set(reader.headings)
    text = " ".join(reader.text)
    for words in (f"there is no {LOG_NAME}", "there is no trace of lanes"):
        assert words in text and words in out.replace("\n", " ")


def test_a_plan_stands_beside_what_was_measured(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    planned = {"step_seconds": 2.0, "bytes": {"hbm": 4 << 30, "ram": 0, "disk": 0}, "source": "measured"}
    log.add("begin", 0, {"is_resumed": False, "max_steps": 9, "planned": planned})
    log.add("log", 1, {"loss": 1.0, "num_steps": 1, "seconds": 2.5, "memory_bytes": {"hbm": 3 << 30}})
    measured = {"step_seconds": 2.5, "bytes": {"hbm": 3 << 30, "ram": 1 << 30, "disk": 0}}
    log.add(
        "measured", 1, {"num_sequences": 8, "length": 16, "num_steps": 4, "predicted": planned, "measured": measured}
    )
    log.add("checkpoint", 1, {"name": "checkpoint-1", "error": "OSError: <full> & over"})
    html = page(read_run(tmp_path))
    cells = re.findall(r"<td>(.*?)</td>", html)
    assert cells[:8] == ["step", "2 s", "2.5 s", "+25.0%", "device memory", "4.0 GiB", "3.0 GiB", "-25.0%"]
    assert cells[8:12] == ["host memory in use", "–", "1.0 GiB", "–"]
    assert "OSError: &lt;full&gt; &amp; over" in html
    assert "it still runs, or was killed" in html


def test_a_run_stopped_between_two_logging_steps_is_where_it_stopped(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.add("begin", 360, {"is_resumed": True, "max_steps": 404})
    log.add("checkpoint", 361, {"name": "checkpoint-361", "num_bytes": 1})
    assert "Step 361 of 404; the log has no end" in page(read_run(tmp_path))
    log.add("end", 362, {"is_complete": False})
    assert "Step 362 of 404, stopped before its last step" in page(read_run(tmp_path))


def test_every_checkpoint_of_the_folder_is_listed_with_what_is_known_of_it(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.add("begin", 0, {"is_resumed": False, "max_steps": 404})
    for step in (320, 360, 380, 400):
        log.add("checkpoint", step, {"name": f"checkpoint-{step}", "num_bytes": step << 30})
    log.add("begin", 360, {"is_resumed": True, "max_steps": 404})
    log.add("checkpoint", 361, {"name": "checkpoint-361", "num_bytes": 361 << 30})
    log.add("end", 361, {"is_complete": False})
    for step in (360, 361, 400, 500):
        (tmp_path / f"checkpoint-{step}").mkdir()
    html = page(read_run(tmp_path))
    assert "<b>4</b><span>in the folder</span>" in html and "Step 361 of 404" in html
    table = re.findall(r"<tr><td>(checkpoint-\d+)</td><td>(.*?)</td>.*?<td>([^<]*)</td></tr>", html)
    assert table == [
        ("checkpoint-320", "320.0 GiB", "gone (rotated or moved)"),
        ("checkpoint-360", "360.0 GiB", "there"),
        ("checkpoint-361", "361.0 GiB", "there"),
        ("checkpoint-400", "400.0 GiB", "there, of steps that were given up"),
        ("checkpoint-500", "–", "there, not in the log"),
    ]
    log.add("checkpoint", 400, {"name": "checkpoint-400", "num_bytes": 1 << 30})
    html = page(read_run(tmp_path))
    assert html.count("<td>checkpoint-400</td>") == 1 and "given up" not in html


def test_what_is_no_run_is_refused(capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder, told in (
        (tmp_path / "nowhere", "no such folder"),
        (tmp_path / "empty", "is not the folder of a run"),
        (run / LOG_NAME, "is a file, not a folder"),
        (run / "checkpoint-2", "is a checkpoint of a run; give the run's folder"),
    ):
        code, _, err = command(capsys, "report", folder)
        assert code == 2 and err.startswith("error: DIR: ") and told in err, err
    code, _, err = command(capsys, "report", run, "--output", tmp_path / "nowhere" / "page.html")
    assert code == 2 and err.startswith("error: --output: ")


def test_files_that_are_damaged_are_left_out_and_named(run: Path) -> None:
    (run / "trace.json").write_bytes(b'{"traceEvents": [')
    (run / LOG_NAME).write_bytes(b"\xff\xfe\n[1, 2]\n" + b'{"event": "log", "step": "one"}\n')
    found = read_run(run)
    assert found.logs == [] and found.trace is None
    notes = " ".join(found.notes)
    assert "3 lines of" in notes and "trace.json is no whole trace" in notes and "no logging step" in notes
    Reader(page(found))


@pytest.mark.parametrize(
    ("event", "name", "value"),
    [
        ("log", "step", 10**30),
        ("log", "loss", 10**400),
        ("log", "loss", "low"),
        ("log", "grad_norm", 10**400),
        ("log", "learning_rate", 10**400),
        ("log", "seconds", math.nan),
        ("log", "num_steps", 0.5),
        ("log", "memory_bytes", {"ram": "much"}),
        ("log", "stall_seconds", [1.0]),
        ("log", "time", 1e300),
        ("begin", "num_parameters", "many"),
        ("begin", "planned", {"step_seconds": 1.0, "bytes": [1]}),
        ("measured", "measured", "well"),
        ("measured", "measured", {"step_seconds": "two"}),
        ("checkpoint", "num_bytes", "many"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_line_that_says_what_no_log_holds_is_left_out_and_counted(
    run: Path, event: str, name: str, value: object
) -> None:
    file = run / LOG_NAME
    whole = read_run(run)
    changed = next(json.loads(line) for line in file.read_bytes().splitlines() if f'"{event}"'.encode() in line)
    with file.open("a") as log:
        log.write(json.dumps(changed | {name: value}) + "\n" + "[" * 200_000 + "\n")
    found = read_run(run)
    assert found.logs == whole.logs and found.about == whole.about and found.outcome == whole.outcome
    assert found.checkpoints == whole.checkpoints
    assert "3 lines of megatrain_log.jsonl cannot be read and are left out" in " ".join(found.notes)
    Reader(page(found))


def test_a_loss_that_diverged_is_shown(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step, loss in enumerate((1.0, 3e38, math.inf, math.nan), start=1):
        log.add("log", step, {"loss": loss, "grad_norm": 1e42})
    assert [entry["loss"] for entry in read_run(tmp_path).logs][:3] == [1.0, 3e38, math.inf]
    Reader(page(read_run(tmp_path)))


def test_a_recipe_leaves_a_trace_of_the_step_that_it_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, sample={"prompts": []}, output={"dir": str(tmp_path / "out"), "trace_step": 3})
    code, _, _ = command(capsys, "train", recipe, "training.max_steps=4", "training.logging_steps=1")
    assert code == 0
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "step" for event in events) == 2
    code, _, _ = command(capsys, "report", tmp_path / "out")
    assert code == 0
    evals = read_run(tmp_path / "out").evals
    assert [entry["step"] for entry in evals] == [0, 4]  # before and behind the training
    code, _, err = command(capsys, "train", recipe, "output.trace_step=0")
    assert code == 2 and "output.trace_step is 0; use 1 or more" in err


# Drawings


def test_ticks_are_round_and_their_texts_tell_them_apart() -> None:
    assert tick_texts(ticks(0.0, 60.0, 6)) == ["0", "10", "20", "30", "40", "50", "60"]
    assert tick_texts(ticks(0.0, 4300.0, 5)) == ["0", "1,000", "2,000", "3,000", "4,000"]
    assert tick_texts(ticks(1.18, 1.31, 5)) == ["1.20", "1.25", "1.30"]
    assert tick_texts(ticks(0.0, 2e-5, 5)) == ["0", "5.0e-06", "1.0e-05", "1.5e-05", "2.0e-05"]
    for low, high in ((0.0, 1e-9), (-3.0, 7.0), (1e6, 1e6 + 1), (0.0, 1.0)):
        found = ticks(low, high, 5)
        assert 1 <= len(found) <= 7 and len(set(tick_texts(found))) == len(found)


def test_a_long_line_keeps_its_mean_and_what_is_not_finite_is_a_gap() -> None:
    points = [(float(step), float(step % 10)) for step in range(6000)]
    thin = thinned(points, most=600)
    assert len(thin) == 600 and all(value == pytest.approx(4.5) for _, value in thin)
    line = Line(
        title="loss", points=[(1, 1.0), (2, 2.0), (3, math.nan), (4, 1.0), (5, math.inf), (6, 3.0), (7, 1.0)], colour=1
    )
    wide = chart_html(Chart(title="Loss", lines=[line])).split("<svg")[1]
    assert [len(drawn.split()) for drawn in re.findall(r'points="([^"]*)"', wide)] == [2, 2]
    assert 'class="dot f1"' in wide  # the one between two gaps
    assert chart_html(Chart(title="Loss", lines=[Line(title="loss", points=[(1, math.nan)], colour=1)])) == ""


def test_bars_of_a_track_are_its_outermost_pieces_within_the_step() -> None:
    def piece(what: str, start: float, seconds: float) -> dict[str, Any]:
        return {"cat": what, "name": what, "ts": start, "dur": seconds}

    pieces = [piece("forward", 0, 10), piece("forward", 2, 3), piece("stall", 10, 5), piece("backward", 15, 20)]
    found = bars(pieces, 5, 30, least=0.1)
    assert [(bar.kind, bar.start, bar.end) for bar in found] == [
        ("forward", 5, 10),
        ("backward", 15, 30),
        ("stall", 10, 15),
    ]
    # Hundreds of short ones that follow one another are one bar.
    short = [piece("fetch", 0.2 * number, 0.19) for number in range(500)]
    (bar,) = bars(short, 0, 100, least=1.0)
    assert (bar.kind, bar.start) == ("to the device", 0.0) and bar.end == pytest.approx(99.99)
