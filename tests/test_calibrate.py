"""What a run measured corrects the next prediction, and is kept with the machine's profile."""

from __future__ import annotations

import dataclasses
import io
import re
import sys
from pathlib import Path

import pytest
from planning_helpers import builtin, predicted
from tqdm import tqdm
from update_training import batches, start, train

from megatrain.base.paths import machine_profile_path
from megatrain.execute.engine import engine_of
from megatrain.plan.calibrate import Measured, calibrated
from megatrain.plan.machine import Machine
from megatrain.plan.machines import H200
from megatrain.plan.outcome import Plan
from megatrain.plan.planner import Planner
from megatrain.plan.workload import Workload
from megatrain.probe.measure import save_machine
from megatrain.run_plan import learn


def a_plan() -> Plan:
    work = Workload(num_sequences=64, length=1024, rows=16, reads_logits=True)
    return predicted(builtin("qwen2.5-7b"), work)


def again(plan: Plan, machine: Machine) -> Plan:
    planner = Planner(machine, plan.spec, plan.workload, plan.config, plan.budgets)
    return planner.plan_of(plan.choice)


@pytest.mark.parametrize("factor", [0.7, 1.15, 1.8])
def test_the_next_prediction_is_what_was_measured(factor: float) -> None:
    plan = a_plan()
    busy = plan.simulation.busy_seconds()
    stalls = sum(plan.simulation.stall_seconds().values())
    measured = Measured(step=factor * busy["compute"] + stalls, stalls=stalls, cpu_update=factor * busy["cpu"])
    now = again(plan, calibrated(plan, measured)).simulation.busy_seconds()
    # Launches and the ends of steps are constants, which no rate changes: 7 % of this step.
    assert now["compute"] == pytest.approx(factor * busy["compute"], rel=0.06)
    assert now["cpu"] == pytest.approx(factor * busy["cpu"], rel=1e-6)


def test_noise_and_what_went_wrong_change_nothing() -> None:
    plan = a_plan()
    busy = plan.simulation.busy_seconds()
    for factor in (1.01, 0.99, 3.0, 0.2):
        measured = Measured(step=factor * busy["compute"], stalls=0.0, cpu_update=factor * busy["cpu"])
        assert calibrated(plan, measured) == plan.machine
    assert calibrated(plan, Measured(step=busy["compute"], stalls=0.0, cpu_update=0.0)) == plan.machine


def test_the_profile_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path))
    plan = a_plan()
    busy = plan.simulation.busy_seconds()
    measured = Measured(step=1.2 * busy["compute"], stalls=0.0, cpu_update=0.0)
    assert "kept" not in learn(plan, measured)
    assert not machine_profile_path().exists(), "without a profile the other rates would be a guess"
    save_machine(dataclasses.replace(H200, source="measured then", num_cores=3), machine_profile_path())
    line = learn(plan, measured)
    assert "kept in the profile for the next plan" in line
    kept = Machine.from_json(machine_profile_path().read_text(encoding="utf-8"))
    assert kept.num_cores == 3, "what the run did not measure stays"
    assert kept.matmul_flops_per_second == pytest.approx(H200.matmul_flops_per_second / 1.2)
    assert kept.source.startswith("measured then; compute and update as in a run of ")


def test_a_run_says_what_was_predicted_and_learns_from_it() -> None:
    model, optimizer = start()
    report = engine_of(model).report
    said: list[str] = []
    learnt: list[Measured] = []
    report._say = said.append
    report.predict = lambda workload: a_plan()
    report.learn = lambda plan, measured: learnt.append(measured) or "learnt"
    train(model, optimizer, batches(7))
    line, last = said
    assert line.startswith("megatrain: predicted (measured (docs/performance.md); ") and last == "learnt"
    assert "4 x 8 tokens a step: step 7.2 s -> " in line, "two micro-batches of 2 x 6 and 2 x 9 tokens"
    (measured,) = learnt
    assert 0 < measured.step and 0 <= measured.stalls < measured.step and 0 < measured.cpu_update < measured.step


def test_a_short_run_says_it_at_its_end() -> None:
    model, optimizer = start()
    report, said = engine_of(model).report, []
    report._say = said.append
    train(model, optimizer, batches(1))
    report.finish()
    assert said == [], "one step alone warms up"
    train(model, optimizer, batches(2))
    report.finish()
    train(model, optimizer, batches(6))
    report.finish()
    (line,) = said
    assert line.startswith("megatrain: measured, 4 x 8 tokens a step: step ")
    assert ", host in use " in line, "the process as it is now, where a command's summary has its peak"
    assert report._seen == []


def test_the_line_stands_alone_beside_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    with tqdm(total=9, mininterval=0, file=terminal) as bar:
        model, optimizer = start()
        terminal.truncate(terminal.seek(0))
        for batch in batches(7):
            train(model, optimizer, [batch])
            bar.update()
    lines = [re.split(r"\r", line)[-1] for line in terminal.getvalue().splitlines()]
    (line,) = [line for line in lines if "megatrain:" in line]
    assert line.startswith("megatrain: measured, ")


def test_a_silenced_report_neither_says_nor_learns() -> None:
    model, optimizer = start()
    report, said = engine_of(model).report, []
    report._say = said.append
    report.predict = lambda workload: a_plan()
    report.learn = lambda plan, measured: said.append("learnt") or "learnt"
    report.silence()
    train(model, optimizer, batches(7))
    report.finish()
    assert said == []
