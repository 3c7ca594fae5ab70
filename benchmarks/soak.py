"""Runs that are killed, stopped and damaged at random, each against the same run left in peace.

    python benchmarks/soak.py --minutes 60

A round draws a setting (precision, moments, clipping), trains a tiny Llama in peace, then again with faults at random
moments: kill -9, SIGTERM, a bit flipped in the newest checkpoint, a disk that is full while a checkpoint is written.
What is left goes on each time, from other tiers and budgets than before. The weights at the end must be those of the
run in peace, bit for bit, and nothing may be left beside checkpoints. Exit code 1 if a bit was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import megatrain as mt
from megatrain.base.folder_lock import LOCK_NAME
from megatrain.run_log import LOG_NAME
from megatrain.save.checkpoints import checkpoints_in
from megatrain.save.tensor_files import Shards

NUM_STEPS, SAVE_STEPS = 12, 2
MAX_FAULTS = 4
FLIP_SHARE, TERM_SHARE, FULL_SHARE = 0.3, 0.3, 0.3
TIMEOUT_SECONDS = 120

servers = multiprocessing.get_context("forkserver")


def drawn_setting(draws: random.Random) -> dict[str, Any]:
    """Keywords of mt.init that bits depend on."""
    setting: dict[str, Any] = {"device": "cpu", "precision": draws.choice(("fp32", "bf16"))}
    setting["optimizer_compression"] = draws.choice((False, "8bit", "4bit", "lossless"))
    setting["clip"] = draws.choice(("global", "layer"))
    return setting


def drawn_places(draws: random.Random) -> dict[str, Any]:
    """Keywords of mt.init that no bit depends on: each start has its own."""
    places: dict[str, Any] = {"save_in_background": draws.random() < 0.7}
    if draws.random() < 0.5:
        places |= {"max_ram_gb": draws.choice((4e-5, 2e-4)), "offload_dir": "homes"}
    return places


def fill_the_disk(at: int) -> None:
    """For the layer of that number that is written from now on."""
    write, num_written = Shards.write_group, 0

    def write_group(shards: Shards, tensors: Any) -> None:
        nonlocal num_written
        num_written += 1
        if num_written == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(shards, tensors)

    Shards.write_group = write_group


def work(folder: Path, setting: dict[str, Any], full_at: int | None) -> None:
    """In a child: the run, or the rest of it."""
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as anything may write
    mt.init(**setting)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                         num_attention_heads=2, num_key_value_heads=2, attention_dropout=0.2)  # fmt: skip
    ids = torch.randint(0, 64, (40, 9), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir="run", use_cpu=True, per_device_train_batch_size=2, gradient_accumulation_steps=3,
        max_steps=NUM_STEPS, learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5, logging_steps=1,
        report_to=[], disable_tqdm=True, save_strategy="steps", save_steps=SAVE_STEPS, save_total_limit=3,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = mt.Trainer(LlamaForCausalLM(config), arguments, train_dataset=data)
    if full_at is not None:
        fill_the_disk(full_at)
    trainer.train(resume_from_checkpoint=bool(checkpoints_in(Path("run"))))
    trainer.save_model("final")


def start(folder: Path, setting: dict[str, Any], full_at: int | None = None) -> Any:
    folder.mkdir(exist_ok=True)
    process = servers.Process(target=work, args=(folder, setting, full_at))
    process.start()
    return process


def finish(process: Any) -> int:
    process.join(TIMEOUT_SECONDS)
    if process.exitcode is None:
        process.kill()
        raise SystemExit(f"a run hangs: it did not end within {TIMEOUT_SECONDS} s")
    return process.exitcode


def flip_a_bit(folder: Path, draws: random.Random) -> bool:
    """In the newest of two checkpoints or more."""
    known = checkpoints_in(folder / "run")
    if len(known) < 2:
        return False
    path = draws.choice([path for path in known[-1].iterdir() if path.is_file() and path.stat().st_size])
    data = bytearray(path.read_bytes())
    data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
    path.write_bytes(data)
    return True


def with_faults(folder: Path, setting: dict[str, Any], seconds: float, draws: random.Random, counts: Counter) -> None:
    """The run to its end. seconds: that it takes in peace."""
    for _ in range(draws.randint(1, MAX_FAULTS)):
        full_at = draws.randint(1, 60) if draws.random() < FULL_SHARE else None
        counts["full disks"] += full_at is not None
        process = start(folder, setting | drawn_places(draws), full_at)
        process.join(draws.random() * seconds)
        number = signal.SIGTERM if draws.random() < TERM_SHARE else signal.SIGKILL
        if process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
            counts[number.name] += 1
        code = finish(process)
        # Before the run listens, SIGTERM does what it always did.
        is_full = code == 1 and full_at is not None  # a full disk at the last word: what a signal or the end saves
        if code not in (0, -signal.SIGKILL, -signal.SIGTERM) and not is_full:
            raise SystemExit(f"a run ended with {code}: {setting}")
        if draws.random() < FLIP_SHARE:
            counts["bits flipped"] += flip_a_bit(folder, draws)
    if finish(start(folder, setting | drawn_places(draws))) != 0:
        raise SystemExit(f"what was left cannot be resumed from: {setting}")


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "final" / "model.safetensors").read_bytes()).hexdigest()


def litter(folder: Path) -> set[str]:
    names = {path.name for path in (*folder.iterdir(), *(folder / "run").iterdir(), *folder.glob("homes/*"))}
    known = {path.name for path in checkpoints_in(folder / "run")}
    return names - known - {"run", "final", "homes", LOCK_NAME, LOG_NAME}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    servers.set_forkserver_preload(["megatrain.trainer", "megatrain.optim.optimizers", "transformers.models.llama"])
    draws, counts = random.Random(args.seed), Counter[str]()
    ends = time.monotonic() + 60 * args.minutes
    most_kib = []
    while time.monotonic() < ends:
        setting = drawn_setting(draws)
        base = Path(tempfile.mkdtemp(prefix="soak-"))
        started = time.monotonic()
        if finish(start(base / "peace", setting)) != 0:
            raise SystemExit(f"a run in peace failed: {setting}")
        with_faults(base / "faults", setting, time.monotonic() - started, draws, counts)
        counts["rounds"] += 1
        counts["rounds that lost bits"] += digest(base / "peace") != digest(base / "faults")
        counts["rounds that left litter"] += bool(litter(base / "faults"))
        most_kib.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        shutil.rmtree(base)
        print(dict(counts), setting, flush=True)
    print(
        f"memory of this process grew by {(most_kib[-1] - most_kib[0]) / 1024:.1f} MiB from the first round to the last"
    )
    sys.exit(1 if counts["rounds that lost bits"] or counts["rounds that left litter"] else 0)


if __name__ == "__main__":
    main()
