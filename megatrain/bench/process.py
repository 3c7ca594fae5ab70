"""Runs one row in a process of its own and listens to it. Its death, its silence and its lack of memory are outcomes,
in words, like any other.

Rule: whatever happens here, the process and all that it began are gone when `run_row` returns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from megatrain.base.units import format_seconds
from megatrain.bench import worker
from megatrain.bench.worker import FAILED

if TYPE_CHECKING:
    from megatrain.bench.peers import Variant
    from megatrain.bench.work import Work

LAST_SECONDS = 60.0
"""For which a process may take to end, once it has told all."""
POLL_SECONDS = 0.5
LOG_BYTES = 1 << 16
"""Of the end of what a process printed, to find out why it died."""


@dataclass(kw_only=True)
class Outcome:
    """Of one row: figures, or the reason why there are none."""

    figures: dict[str, Any] | None = None
    problem: str = ""
    kind: str = ""
    phase: str = "starting"
    """The last that it told."""
    device: str = ""
    """The name of the GPU, or `cpu`; where that was told."""
    notes: list[str] = field(default_factory=list)
    """What this library said of the run, in lines."""


def run_row(
    work: Work, variant: Variant | None, limit_seconds: float, tell: Callable[[dict[str, Any]], None]
) -> Outcome:
    """variant: of a peer; None for this library. limit_seconds: of silence, after which it is ended."""
    job = {"work": dataclasses.asdict(work), "variant": None if variant is None else dataclasses.asdict(variant)}

    def command(descriptor: int) -> list[str]:
        return [sys.executable, "-m", worker.__name__, str(descriptor), json.dumps(job)]

    return listen(command, limit_seconds, tell)


def listen(
    command: Callable[[int], list[str]], limit_seconds: float, tell: Callable[[dict[str, Any]], None]
) -> Outcome:
    """command: file descriptor for its lines -> what is run."""
    outcome, (reading, writing) = Outcome(), os.pipe()
    # The import paths that hold here must hold there.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log, open(reading, "rb", buffering=0):
        child = subprocess.Popen(
            command(writing),
            env=environment,
            pass_fds=(writing,),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(writing)
        try:
            for event in _events(child, reading, limit_seconds):
                _take(event, outcome, tell)
            if outcome.figures is None and not outcome.problem:
                outcome.kind, outcome.problem = FAILED, _death(child, outcome.phase, limit_seconds, log)
        finally:
            _end(child)
        outcome.notes = [line for line in _last_lines(log) if line.startswith("megatrain: ")]
    return outcome


def _take(event: dict[str, Any], outcome: Outcome, tell: Callable[[dict[str, Any]], None]) -> None:
    if "figures" in event or "problem" in event:
        outcome.figures = event.get("figures")
        outcome.problem, outcome.kind = event.get("problem", ""), event.get("kind", "")
        return
    outcome.phase = event.get("phase", outcome.phase)
    outcome.device = event.get("device", outcome.device)
    tell(event)


def _events(child: subprocess.Popen[bytes], reading: int, limit_seconds: float) -> Iterator[dict[str, Any]]:
    """Until it has ended, or was silent for too long."""
    rest, heard = b"", time.monotonic()
    while time.monotonic() - heard < limit_seconds:
        has_ended = child.poll() is not None  # asked first: what it wrote before is there then
        if not select.select([reading], [], [], 0 if has_ended else min(POLL_SECONDS, limit_seconds))[0]:
            if has_ended:
                return
            continue
        data = os.read(reading, 1 << 16)
        if not data:
            # It has closed its end: all is told, or it is about to die.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(LAST_SECONDS)
            return
        heard = time.monotonic()
        *lines, rest = (rest + data).split(b"\n")
        yield from map(json.loads, lines)


def _death(child: subprocess.Popen[bytes], phase: str, limit_seconds: float, log: TextIO) -> str:
    """Why there is no outcome."""
    code = child.poll()
    if code is None:
        return f"gave no sign for {format_seconds(limit_seconds)} while {phase}, and was ended"
    if code == -signal.SIGKILL:
        return f"was killed while {phase}: most likely by the kernel, for want of host memory"
    said = next((line for line in reversed(_last_lines(log)) if line.strip()), "nothing was printed")
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"{how} while {phase}: {said.strip()}"


def _last_lines(log: TextIO) -> list[str]:
    log.flush()
    log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_BYTES))
    return log.read().splitlines()


def _end(child: subprocess.Popen[bytes]) -> None:
    """With all that it began: they are of one session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
