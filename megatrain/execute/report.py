"""What happened: predicted against measured, once a run (seconds of a step, memory of each tier); and layer by layer.

What a step trains on is seen, not told: the inputs of the first block of every forward under grad mode.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psutil
import torch

from megatrain.base.units import format_bytes, format_number
from megatrain.plan.calibrate import Measured
from megatrain.plan.outcome import Plan
from megatrain.plan.placement import DISK_TIER, HBM_TIER, RAM
from megatrain.plan.timeline import CONTEXT_BYTES
from megatrain.plan.workload import Workload

if TYPE_CHECKING:
    from megatrain.execute.engine import Engine

NUM_STEPS = 5
"""After as many, the report (or at the end of a shorter run); the first one warms up and does not count."""
MOST_SEEN = 1 << 16
"""Micro-batches of a step: more are forwards without a step."""


def say_on_a_line_of_its_own(line: str) -> None:
    """Between the frames of a progress bar (the Trainer's), where there is one."""
    from tqdm import tqdm

    tqdm.write(line)


class RunReport:
    """
    Args:
        say: is told the report's line.
    """

    def __init__(self, engine: Engine, say: Callable[[str], None] = say_on_a_line_of_its_own) -> None:
        self.predict: Callable[[Workload], Plan | None] = lambda _: None
        """The prediction for what runs here, if this is a machine of which one can be made."""
        self.learn: Callable[[Plan, Measured], str] = lambda *_: ""
        """Takes what was measured into account for the next plan, and says so in a line."""
        self.step_seconds: list[float] = []
        """Of each step but the first, from the end of the last."""
        self.said: list[str] = []
        """Lines, so far."""
        self.outcome: dict[str, Any] | None = None
        """What the first of them says, for programs: `predicted` (None: nothing could be) and `measured`."""
        self._engine, self._say = engine, say
        self._seen: list[tuple[int, int]] = []
        self._workload: Workload | None = None
        self._ended = 0.0
        self._before = (0.0, 0.0)
        self._is_over = False

    def see(self, hidden_states: torch.Tensor) -> None:
        """The input of the first block: (rows, tokens, hidden) of one micro-batch, or (tokens, hidden)."""
        if self._is_over or len(self._seen) == MOST_SEEN:
            return
        if hidden_states.dim() > 2:
            self._seen.append((hidden_states.shape[0], hidden_states.shape[1]))
        elif hidden_states.dim() == 2:
            self._seen.append((1, hidden_states.shape[0]))

    @property
    def num_seen(self) -> int:
        """Micro-batches of this step so far."""
        return len(self._seen)

    def forget(self, num_seen: int) -> None:
        """Of a try that is undone: all but the first `num_seen` micro-batches."""
        del self._seen[num_seen:]

    def end_step(self) -> None:
        """The optimizer has queued its updates."""
        self._engine.changes.end_step()
        if self._is_over:
            return
        now = time.perf_counter()
        if self._ended:
            self.step_seconds.append(now - self._ended)
        elif len(self.step_seconds) == 0:
            self._before = self._waited_and_updated()
        self._ended = now
        self._workload = self._workload_seen() or self._workload
        self._seen.clear()
        if len(self.step_seconds) == NUM_STEPS - 1:
            plan = self._tell()
            if plan is not None:
                self._engine.changes.consider(plan, self._measured(), self.step_seconds)

    def finish(self) -> None:
        """The run is over: say what there is still to say."""
        self._tell()
        self._engine.changes.finish()

    def _tell(self) -> Plan | None:
        """Say what was predicted and measured, once, and learn from it. Returns the prediction, if there is one."""
        if self._is_over or self._workload is None or not self.step_seconds:
            return None
        self._is_over = True
        plan = self._engine.plan or self.predict(self._workload)
        self.outcome = self._outcome(self._workload, plan)
        self.say(self.line(self._workload, plan))
        learnt = "" if plan is None else self.learn(plan, self._measured())
        if learnt:
            self.say(learnt)
        return plan

    def say(self, line: str) -> None:
        self.said.append(line)
        self._say(line)

    def silence(self) -> None:
        """Neither say nor learn anything: for a run whose steps are none that anybody waits for."""
        self._is_over = True

    def line(self, workload: Workload, plan: Plan | None) -> str:
        """predicted -> measured, of what is predicted; else what was measured."""
        measured = measured_bytes(self._engine)
        names = {HBM_TIER: "device", RAM: "host in use", DISK_TIER: "disk"}
        planned = {} if plan is None else {tier: plan.timeline.peak(tier) for tier in names}
        parts = [f"step {_pair(_seconds, plan and plan.step_seconds, statistics.median(self.step_seconds))}"]
        parts += [
            f"{names[tier]} {_pair(format_bytes, planned.get(tier), num_bytes)}"
            for tier, num_bytes in measured.items()
            if num_bytes or planned.get(tier)
        ]
        if plan is not None and plan.kept_bytes:
            parts.append(f"kept in layers {_pair(format_bytes, plan.kept_bytes, self._engine.insides.most_kept_bytes)}")
        parts += self._faults()
        head = "measured" if plan is None else f"predicted ({plan.machine.source}) -> measured"
        return f"megatrain: {head}, {workload.num_sequences} x {workload.length} tokens a step: {', '.join(parts)}"

    def _faults(self) -> list[str]:
        """What went wrong on the way between device, host and disk, if anything did."""
        counts, disk = self._engine.transport.hops.counts, self._engine.memory.disk
        num_retries = counts.num_retries + (0 if disk is None else int(disk.stats()["disk_num_retries"]))
        changed = f", {counts.num_mismatches} of which arrived changed" if counts.num_mismatches else ""
        return [f"{format_number(num_retries, 'transfer')} made again{changed}"] if num_retries else []

    def _workload_seen(self) -> Workload | None:
        if not self._seen:
            return None
        num_sequences = sum(rows for rows, _ in self._seen)
        num_tokens = sum(rows * length for rows, length in self._seen)
        rows = max(rows for rows, _ in self._seen)
        plan = self._engine.plan
        return Workload(
            num_sequences=num_sequences,
            length=max(1, round(num_tokens / num_sequences)),
            rows=rows,
            reads_logits=plan is not None and plan.workload.reads_logits,
        )

    def _measured(self) -> Measured:
        stalls, updates = (
            (now - before) / len(self.step_seconds)
            for now, before in zip(self._waited_and_updated(), self._before, strict=True)
        )
        has_disk = self._engine.placement.has_disk
        step = statistics.fmean(self.step_seconds)
        return Measured(step=step, stalls=stalls, cpu_update=0.0 if has_disk else updates)

    def _waited_and_updated(self) -> tuple[float, float]:
        """Seconds so far in which the compute lane waited, and in which the CPU's update lane worked."""
        transport = self._engine.transport
        return sum(transport.stall_seconds().values()), transport.busy_seconds().get("cpu", 0.0)

    def _outcome(self, workload: Workload, plan: Plan | None) -> dict[str, Any]:
        measured = {"step_seconds": statistics.median(self.step_seconds), "bytes": measured_bytes(self._engine)}
        return {
            "num_sequences": workload.num_sequences,
            "length": workload.length,
            "num_steps": len(self.step_seconds),
            "predicted": None if plan is None else predicted(plan),
            "measured": measured,
        }


def predicted(plan: Plan) -> dict[str, Any]:
    """Seconds of a step and the most bytes of each tier, and where the machine's rates are from."""
    peaks = {tier: plan.timeline.peak(tier) for tier in (HBM_TIER, RAM, DISK_TIER)}
    return {"step_seconds": plan.step_seconds, "bytes": peaks, "source": plan.machine.source}


def measured_bytes(engine: Engine) -> dict[str, int]:
    """Of each tier: the most that the device's allocator held so far, and what this process has in memory now."""
    disk = engine.memory.disk
    is_cuda = engine.device.type == "cuda"
    return {
        HBM_TIER: torch.cuda.max_memory_reserved(engine.device) + CONTEXT_BYTES if is_cuda else 0,
        RAM: psutil.Process().memory_info().rss,
        DISK_TIER: 0 if disk is None else disk.disk_bytes,
    }


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"


def _pair(format_: Callable[[float], str], planned: float | None, measured: float) -> str:
    return format_(measured) if planned is None else f"{format_(planned)} -> {format_(measured)}"


def run_stats(engine: Engine) -> dict[str, Any]:
    """Counts since the model was streamed: visits a home, transfers, bytes, predictions, stalls, the disk."""
    transport, counters = engine.transport, engine.transport.counters
    return {
        "steps": engine.num_steps,
        "visits": dict(counters.visits),
        "num_transfers": counters.num_transfers,
        "transferred_bytes": counters.transferred_bytes,
        "num_drains": counters.num_drains,
        "drained_bytes": counters.drained_bytes,
        "num_fetches": counters.num_fetches,
        **engine.transport.hops.counts.stats(),
        **engine.transport.hops.link.stats(),
        "offloaded_activation_bytes": engine.activations.offloaded_bytes,
        **engine.merging.stats(),
        "stall_seconds": transport.stall_seconds(),
        "busy_seconds": transport.busy_seconds(),
        **transport.prediction_stats(),
        **({} if engine.memory.disk is None else engine.memory.disk.stats()),
    }


def layer_report(engine: Engine) -> dict[str, dict[str, float]]:
    """Gradient norm of each home, and |dw| / |w| of its last update if `measure_updates` was set before it."""
    norms = {home.name: sum(n * n for n in of.values()) ** 0.5 for home, of in engine.gradient_norms().items()}
    norms |= {home.name: home.grads.arrived_norm for home in engine.consumed}
    parts = {"grad_norm": norms, "update_ratio": engine.update_ratios}
    names = dict.fromkeys((*norms, *engine.update_ratios))
    return {name: {part: of[name] for part, of in parts.items() if name in of} for name in names}
