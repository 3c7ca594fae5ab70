"""The end of a process, or of a model, with work still in its lanes: it is finished, and nothing hangs or aborts."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from model_zoo import make_batch
from surface_helpers import streamed

from megatrain.execute.engine import engine_of
from megatrain.transport.lane import Lane

BUSY = """
import torch
from megatrain.transport.lane import Lane

def work():
    for _ in range(100):
        torch.randn(300, 300) @ torch.randn(300, 300)
    print("done", flush=True)

lane = Lane("cpu", torch.device("cpu"))
lane.submit(work)
"""


def test_a_process_ends_after_its_lanes() -> None:
    result = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


def test_a_closed_lane_refuses_work() -> None:
    lane = Lane("h2d", torch.device("cpu"))
    done = []
    lane.submit(lambda: done.append(1))
    lane.close()
    assert done == [1]
    with pytest.raises(RuntimeError, match="h2d lane is closed"):
        lane.submit(lambda: None)
    lane.close()


def test_a_closed_model_raises_and_does_not_hang() -> None:
    model = streamed()
    engine = engine_of(model)
    assert engine is not None
    engine.close()
    with pytest.raises(RuntimeError, match="lane is closed"):
        model(**make_batch())
