"""What checkpoints cost a run: the same steps, without them, with training waiting for them, and beside it.

    python benchmarks/saving.py --model qwen2.5-1.5b --batch 32 --micro-batch 8 --folder runs/saving

Prints what each checkpoint says of itself (bytes, seconds, pause predicted and measured) and, for each way, the wall
time from the end of the first step to that of the last, and what a checkpoint adds to it. The one behind the last step
is not in it. At first, what the disk gives to plain threads that write new files past the page cache in blocks of the
same size: as they grow, and with their space reserved before.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments

import megatrain as mt
from megatrain.bench.work import empty_model, random_values
from megatrain.planning import outline_model
from megatrain.save.checkpoints import PIECE_BYTES
from megatrain.save.tensor_files import DISK_CALLS

WAYS = ("none", "waiting", "beside")
PLAIN_BYTES, PLAIN_THREADS = 4 * 2**30, 4


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def plain_rate(folder: Path, *, is_reserved: bool) -> float:
    """GB/s."""
    path, block = folder / "plain", mmap.mmap(-1, PIECE_BYTES)
    torch.frombuffer(block, dtype=torch.int64).random_()  # some disks are faster with zeros
    offsets = range(0, PLAIN_BYTES, PIECE_BYTES)
    started = time.perf_counter()
    fd = DISK_CALLS.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    try:
        if is_reserved:
            DISK_CALLS.reserve(fd, 0, PLAIN_BYTES)
        with ThreadPoolExecutor(PLAIN_THREADS) as pool:
            list(pool.map(lambda offset: DISK_CALLS.write(fd, memoryview(block), offset), offsets))
        os.fsync(fd)
    finally:
        os.close(fd)
        path.unlink()
    return 1e-9 * PLAIN_BYTES / (time.perf_counter() - started)


def run(args: argparse.Namespace, model: torch.nn.Module, way: str) -> float:
    """Seconds of all steps but the first."""
    folder = args.folder / way
    ids = torch.randint(0, model.config.vocab_size, (args.batch * args.steps, args.seq))
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=not torch.cuda.is_available(),
        bf16=True,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.batch // args.micro_batch,
        max_steps=args.steps,
        learning_rate=1e-6,
        save_strategy="no" if way == "none" else "steps",
        save_steps=args.save_steps,
        save_total_limit=1,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = mt.Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.add_callback(clock := Clock())
    trainer.train()
    trainer.optimizer.close()
    shutil.rmtree(folder, ignore_errors=True)
    return clock.ends[-1] - clock.ends[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-tiny", help="as `megatrain plan` takes it")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-steps", type=int, default=4)
    parser.add_argument("--moments", default="fp32", choices=("fp32", "bf16", "8bit", "4bit", "lossless"))
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    plain = {f"reserved: {flag}": round(plain_rate(args.folder, is_reserved=flag), 2) for flag in (False, True)}
    print(f"plain threads, GB/s: {plain}", flush=True)
    seconds = {}
    for way in args.ways:
        moments = False if args.moments == "fp32" else args.moments
        mt.init(optimizer_compression=moments, save_in_background=way == "beside", replan=False)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = mt.stream(empty_model(outline_model(args.model).config), initialize=random_values(device))
        seconds[way] = run(args, model, way)
        print(f"{way}: {seconds[way]:.1f} s for {args.steps - 1} steps", flush=True)
        del model
    num_saves = (args.steps - 1) // args.save_steps
    added = {way: (seconds[way] - seconds["none"]) / num_saves for way in seconds if "none" in seconds}
    print(
        json.dumps(
            {
                "args": {name: str(value) for name, value in vars(args).items()},
                "seconds": {way: round(value, 2) for way, value in seconds.items()},
                "num_saves": num_saves,
                "plain_gb_per_second": plain,
                "added_seconds_a_save": {way: round(value, 2) for way, value in added.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
