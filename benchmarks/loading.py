"""Time to load a checkpoint, beside a plain read of the same files, and time to initialise.

    python benchmarks/loading.py                       # a Llama of 0.8 GB in bf16, made in a temporary folder
    python benchmarks/loading.py --gigabytes 15 --folder /nvme --rounds 3
    python benchmarks/loading.py --warm                # with the files in the page cache

Rows take turns, once a round, so that a busy neighbour slows all of them alike; the table gives the median. Before each
turn the files leave the page cache, unless `--warm`. "plain read" reads the files with as many threads and blocks of
the same size as loading does, into memory that is thrown away. GB/s are bytes of files (of weights, for `from_config`)
over seconds; GB are 1e9 bytes. Homes are host memory, not page-locked: this needs no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import megatrain as mt
from megatrain.execute.engine import engine_of
from megatrain.load.shards import CHUNK_BYTES, NUM_THREADS

BYTES_PER_WEIGHT = 2


def make_files(folder: Path, num_bytes: int) -> LlamaConfig:
    """A checkpoint of about `num_bytes` in bf16, in shards of a tenth of it. Returns its config."""
    width = 2048 if num_bytes < 4e9 else 4096
    layer_bytes = BYTES_PER_WEIGHT * width * width * (2.5 + 3 * 2.75)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=max(2, round(num_bytes / layer_bytes)),
        num_attention_heads=width // 64,
        num_key_value_heads=width // 256,
        vocab_size=4096,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    values = {name: torch.randn(value.shape).bfloat16() for name, value in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=values, max_shard_size=num_bytes // 10)
    return config


def plain_read(files: list[Path]) -> None:
    def read(path: Path) -> None:
        block = bytearray(CHUNK_BYTES)
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(read, files))


def leave_cache(files: list[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def closing(load: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        engine_of(load()).close()

    return run


def seconds_of(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        run()
    return time.perf_counter() - start


def plain_then_stream(folder: Path) -> Any:
    mt.init(device="cpu", defer_loading=False)
    try:
        return mt.stream(AutoModelForCausalLM.from_pretrained(folder, dtype="float32"))
    finally:
        mt.init(device="cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.8, help="of files")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the system's temporary folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", action="store_true", help="leave the files in the page cache")
    options = parser.parse_args()
    logging.disable_progress_bar()
    mt.init(device="cpu")
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        config = make_files(folder, int(options.gigabytes * 1e9))
        files = sorted(folder.glob("*.safetensors"))
        num_bytes = sum(path.stat().st_size for path in files)
        rows: dict[str, tuple[int, Callable[[], Any]]] = {
            "plain read": (num_bytes, lambda: plain_read(files)),
            "mt.from_pretrained, as saved": (num_bytes, closing(lambda: mt.from_pretrained(folder))),
            "mt.from_pretrained, to fp32": (num_bytes, closing(lambda: mt.from_pretrained(folder, dtype="float32"))),
            "plain to fp32, then mt.stream": (num_bytes, closing(lambda: plain_then_stream(folder))),
            "mt.from_config, fp32": (2 * num_bytes, closing(lambda: mt.from_config(config, dtype="float32"))),
        }
        times: dict[str, list[float]] = {row: [] for row in rows}
        for _ in range(options.rounds):
            for row, (_, run) in rows.items():
                (plain_read if options.warm else leave_cache)(files)
                times[row].append(seconds_of(run))
    state = "in the page cache" if options.warm else "not in the page cache"
    print(f"{num_bytes / 1e9:.2f} GB in {len(files)} files, {state}; {platform.machine()}, {os.cpu_count()} cores")
    plain = statistics.median(times["plain read"])
    for row, (row_bytes, _) in rows.items():
        seconds = statistics.median(times[row])
        share = "" if row == "mt.from_config, fp32" else f"  {plain / seconds:4.0%} of a plain read"
        print(f"{row:32} {seconds:7.2f} s {row_bytes / seconds / 1e9:7.2f} GB/s{share}")


if __name__ == "__main__":
    main()
