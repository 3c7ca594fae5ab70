"""kill -9 at any instant, of training, saving or going on: what is left goes on bit for bit and leaves no litter.

Children come from a fork server that has everything imported, so that a run takes a second and not ten.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_helpers import arguments, llama, rows

import megatrain as mt
from megatrain.run_log import LOG_NAME
from megatrain.save.checkpoints import checkpoints_in, damage_of

NUM_KILLS = 3
SETTINGS = {
    "in memory": {},
    "8-bit moments, on disk": {"optimizer_compression": "8bit", "max_ram_gb": 4e-5, "offload_dir": "homes"},
}
OURS = ("megatrain/", "safetensors/", "shutil.py", "pathlib.py", "torch/serialization.py")

servers = multiprocessing.get_context("forkserver")
# Installed modules: a fork server looks for no others where this process does (Python 3.11 to 3.13), and says nothing.
servers.set_forkserver_preload(["megatrain.trainer", "megatrain.optim.optimizers", "transformers.models.llama"])


def train_and_save(folder: Path, settings: dict[str, Any], kill_at: int | None, counted: Any) -> None:
    """In a child: a run, or the rest of one. It is killed at the `kill_at`-th call of a function that matters."""
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    count = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        if event == "call" and any(part in frame.f_code.co_filename for part in OURS):
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    mt.init(device="cpu", precision="bf16", **settings)
    trainer = mt.Trainer(
        llama(attention_dropout=0.2),
        arguments(folder / "run", save_strategy="steps", save_steps=2, save_total_limit=2),
        train_dataset=rows(),
    )
    sys.setprofile(profile)
    threading.setprofile(profile)  # of those that write checkpoints
    trainer.train(resume_from_checkpoint=bool(checkpoints_in(folder / "run")))
    trainer.save_model(str(folder / "final"))
    threading.setprofile(None)
    sys.setprofile(None)
    counted.value = count


def child(folder: Path, settings: dict[str, Any], kill_at: int | None) -> tuple[int | None, int]:
    """(exit code, calls that were counted)."""
    folder.mkdir(exist_ok=True)
    counted = servers.Value("q", 0)
    process = servers.Process(target=train_and_save, args=(folder, settings, kill_at, counted))
    process.start()
    process.join(timeout=120)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode, counted.value


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SETTINGS)
def test_killed_runs_go_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    settings = SETTINGS[name]
    code, num_calls = child(tmp_path / "whole", settings, None)
    assert code == 0 and num_calls > 1000
    truth = load_file(tmp_path / "whole" / "final" / "model.safetensors")
    draws = random.Random(name)
    folder = tmp_path / "killed"
    for _ in range(NUM_KILLS):
        code, _ = child(folder, settings, draws.randint(1, num_calls))
        assert code in (-signal.SIGKILL, 0)
        assert not any(map(damage_of, checkpoints_in(folder / "run")))
    code, _ = child(folder, settings, None)
    assert code == 0
    found = load_file(folder / "final" / "model.safetensors")
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[key], truth[key]) for key in truth)
    left = {path.name for path in (folder / "run").iterdir()} | {path.name for path in folder.iterdir()}
    assert left <= {"run", "final", "homes", "checkpoint-4", "checkpoint-6", LOG_NAME}
    assert {path.name for path in folder.glob("homes/*")} <= {".megatrain.lock"}
