"""Keeps the log of a run of `megatrain.Trainer` (`run_log.py`), at its logging steps.

Rule: it waits for nothing that the log of transformers does not wait for anyway, and reads counters alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

import megatrain
from megatrain.base.cgroup import usable_cores
from megatrain.data.collate import sample_lengths
from megatrain.execute.engine import Engine, engine_of
from megatrain.execute.report import measured_bytes, predicted
from megatrain.run_log import RunLog
from megatrain.save.checkpoints import PREFIX

FAULTS = ("num_retries", "num_mismatches", "disk_num_retries")
"""Of `mt.stats`: transfers that were made again, those of them that arrived changed, reads and writes of the disk."""


class RunLogger(TrainerCallback):
    """One a trainer. Its folder is that of the arguments."""

    def __init__(self) -> None:
        self._log: RunLog | None = None
        self._engine: Engine | None = None
        self._step = 0
        self._began = 0.0
        self._seconds, self._num_steps, self._num_tokens = 0.0, 0, 0
        self._counts: dict[str, float] = {}
        self._num_said = 0
        self._has_measured = False
        self._early: list[dict[str, float]] = []
        """Evaluations before any training."""

    # What the trainer tells.

    def see(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """The micro-batches of the coming step."""
        self._num_tokens += sum(map(count_tokens, batches))

    def begin_step(self) -> None:
        """Logs, evaluations and checkpoints between two steps are over."""
        self._began = time.perf_counter()

    def note_checkpoint(self, facts: Mapping[str, Any]) -> None:
        """One is complete, or failed. facts: with its name, which ends with its step."""
        if self._log is not None:
            self._log.add("checkpoint", int(facts["name"].removeprefix(PREFIX)), facts)

    # What transformers tells.

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._engine = engine_of(model)
        assert self._engine is not None, "mt.Trainer streams its model"
        self._log = RunLog(Path(args.output_dir))
        self._step = state.global_step
        self._num_said, self._has_measured = len(self._engine.report.said), False
        self._seconds, self._num_steps, self._num_tokens = 0.0, 0, 0
        self._counts = _counts(self._engine, kwargs.get("optimizer"))
        self._log.add("begin", state.global_step, _of_run(self._engine, args, state, model))
        for numbers in self._early if state.global_step == 0 else ():
            self._log.add("eval", 0, numbers)
        self._early.clear()
        self.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._seconds += time.perf_counter() - self._began
        self._num_steps += 1
        self._step = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        # Layer by layer they are many; integrations keep those.
        numbers = {name: value for name, value in logs.items() if "/" not in name and isinstance(value, int | float)}
        if self._log is None:
            self._early += [numbers] if "eval_loss" in numbers else []
        elif "loss" in logs:
            self._log.add("log", state.global_step, numbers | self._since_last(kwargs.get("optimizer")))
            self._tell()
        elif any(name.startswith("eval_") for name in logs):
            self._log.add("eval", state.global_step, numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._log is None:
            return
        self._tell()
        rest = self._since_last(kwargs.get("optimizer"))
        self._log.add("end", state.global_step, {"is_complete": state.global_step >= state.max_steps, **rest})

    def finish(self) -> None:
        """The engine has said all that it says."""
        self._tell()

    def _since_last(self, optimizer: Any) -> dict[str, Any]:
        engine = self._engine
        assert engine is not None
        counts = _counts(engine, optimizer)
        changes = {name: value - self._counts.get(name, 0) for name, value in counts.items()}
        self._counts = counts
        facts: dict[str, Any] = {
            "num_steps": self._num_steps,
            "seconds": round(self._seconds, 6),
            "num_tokens": self._num_tokens,
            "memory_bytes": measured_bytes(engine),
            "stall_seconds": {
                name.removeprefix(_STALL): round(value, 6) for name, value in changes.items() if name.startswith(_STALL)
            },
            "faults": {name: value for name, value in changes.items() if value and not name.startswith(_STALL)},
        }
        self._seconds, self._num_steps, self._num_tokens = 0.0, 0, 0
        return facts

    def _tell(self) -> None:
        """What the engine has found out of itself since."""
        if self._log is None or self._engine is None:
            return
        report = self._engine.report
        for line in report.said[self._num_said :]:
            self._log.add("said", self._step, {"line": line})
        self._num_said = len(report.said)
        if report.outcome is not None and not self._has_measured:
            self._has_measured = True
            self._log.add("measured", self._step, report.outcome)


_STALL = "stall "


def _counts(engine: Engine, optimizer: Any) -> dict[str, float]:
    stats = engine.stats()
    stalls = {f"{_STALL}{name}": seconds for name, seconds in stats["stall_seconds"].items()}
    faults = {name: stats[name] for name in FAULTS if name in stats}
    return {**stalls, **faults, "num_skipped_steps": getattr(optimizer, "num_skipped_steps", 0)}


def _of_run(engine: Engine, args: Any, state: Any, model: Any) -> dict[str, Any]:
    device = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else str(engine.device)
    plan = engine.plan
    planned = {} if plan is None else {"planned": predicted(plan)}
    return {
        "is_resumed": state.global_step > 0,
        "version": megatrain.__version__,
        "model": type(model).__name__,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "device": device,
        "num_cores": usable_cores(),
        "precision": engine.precision,
        "moments": engine.config.moments,
        "max_steps": state.max_steps,
        "sequences_per_step": args.per_device_train_batch_size * args.gradient_accumulation_steps,
        "first_line": engine.summary(),
        **planned,
    }


def count_tokens(batch: Mapping[str, Any]) -> int:
    """Of one micro-batch, without padding where a mask, or the positions of packed rows, tell it; 0 where there are
    none."""
    ids, mask, positions = (batch.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if not isinstance(ids, torch.Tensor):
        return 0
    if _is_of_each_token(mask, ids):
        return int(mask.sum())
    if ids.ndim == 2 and _is_of_each_token(positions, ids):
        return sum(sample_lengths({"position_ids": positions}))
    return ids.numel()


def _is_of_each_token(told: Any, ids: torch.Tensor) -> bool:
    return isinstance(told, torch.Tensor) and told.device.type == "cpu" and told.shape == ids.shape
