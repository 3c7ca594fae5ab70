"""The figures of gpu_check.py: runs of `megatrain bench`, one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

OFFLOAD_DIR = "runs/offload"
OFFLOAD = ["--offload-dir", OFFLOAD_DIR]
FIGURES = {
    "3B": ["qwen2.5-3b", "32x1024", "4", "--exact", "--unplanned"],
    "3B-compiled": ["qwen2.5-3b", "32x1024", "4", "--exact", "--unplanned", "--compile"],
    "3B-32x1": ["qwen2.5-3b", "32x1024", "32"],
    "3B-32x1-exact": ["qwen2.5-3b", "32x1024", "32", "--exact"],
    "3B-32x1-unplanned": ["qwen2.5-3b", "32x1024", "32", "--unplanned"],
    "3B-32x1-ram": ["qwen2.5-3b", "32x1024", "32", "--unplanned", "--hbm-home-gb", "0"],
    "7B": ["qwen2.5-7b", "64x1024", "4", "--exact", "--unplanned"],
    "7B-ram": ["qwen2.5-7b", "64x1024", "4", "--exact", "--unplanned", "--hbm-home-gb", "0"],
    "7B-8x1024-ram": ["qwen2.5-7b", "8x1024", "1", "--unplanned", "--hbm-home-gb", "0"],
    "7B-8x1024-hbm": ["qwen2.5-7b", "8x1024", "1", "--unplanned", "--hbm-home-gb", "108"],
    "7B-4bit": ["qwen2.5-7b", "64x1024", "4", "--exact", "--unplanned", "--compression", "4bit"],
    "7B-compiled": ["qwen2.5-7b", "64x1024", "4", "--exact", "--unplanned", "--compile"],
    "7B-24GB": ["qwen2.5-7b", "64x1024", "32", "--exact", "--unplanned", "--vram-gb", "24"],
    "7B-24GB-12GB-s": ["qwen2.5-7b", "64x1024", "32", "--exact", "--unplanned", "--vram-gb", "24", "--link-gb-s", "12"],
    "7B-planned": ["qwen2.5-7b", "64x1024", "4", "--exact"],
    "7B-planned-compiled": ["qwen2.5-7b", "64x1024", "4", "--compile"],
    "3B-planned-compiled": ["qwen2.5-3b", "32x1024", "4", "--compile"],
    "3B-ram-compiled": ["qwen2.5-3b", "32x1024", "4", "--compile", "--hbm-home-gb", "0"],
    "3B-32x1-compiled": ["qwen2.5-3b", "32x1024", "32", "--compile"],
    "3B-32x1-exact-compiled": ["qwen2.5-3b", "32x1024", "32", "--exact", "--compile"],
    "7B-ram-compiled": ["qwen2.5-7b", "64x1024", "4", "--compile", "--hbm-home-gb", "0"],
    "7B-8x1024-compiled": ["qwen2.5-7b", "8x1024", "1", "--compile"],
    "7B-8x1024-ram-compiled": ["qwen2.5-7b", "8x1024", "1", "--compile", "--hbm-home-gb", "0"],
    "7B-24GB-compiled": ["qwen2.5-7b", "64x1024", "32", "--compile", "--vram-gb", "24"],
    "7B-24GB-12GB-s-compiled": ["qwen2.5-7b", "64x1024", "32", "--compile", "--vram-gb", "24", "--link-gb-s", "12"],
    "14B": ["qwen2.5-14b", "64x1024", "16", "--exact"],
    "14B-compiled": ["qwen2.5-14b", "64x1024", "16", "--compile"],
    "14B-24GB-8bit": ["qwen2.5-14b", "64x1024", "32", "--exact", "--vram-gb", "24", "--compression", "8bit", *OFFLOAD],
    "14B-24GB-8bit-compiled": ["qwen2.5-14b", "64x1024", "32", "--compile", "--vram-gb", "24", "--compression", "8bit",
                               *OFFLOAD],
    "32B-8bit-compiled": ["qwen2.5-32b", "64x1024", "32", "--compile", "--compression", "8bit", *OFFLOAD],
    "70B-4bit-bf16-layer": ["llama-3-70b", "32x1024", "32", "--compile", "--compression", "4bit", "--master", "bf16",
                            "--clip", "layer", *OFFLOAD],
    "32B-8bit-layer": ["qwen2.5-32b", "64x1024", "16", "--exact", "--compression", "8bit", "--clip", "layer", *OFFLOAD],
    "32B-8bit": ["qwen2.5-32b", "64x1024", "32", "--exact", "--compression", "8bit", *OFFLOAD],
    "7B-disk": ["qwen2.5-7b", "64x1024", "4", "--exact", "--unplanned", "--hbm-home-gb", "0", "--moments-on-disk", "4",
                *OFFLOAD],
    "7B-4bit-disk": ["qwen2.5-7b", "64x1024", "4", "--exact", "--unplanned", "--hbm-home-gb", "0",
                     "--compression", "4bit", "--moments-on-disk", "28", *OFFLOAD],
}  # fmt: skip
"""Name -> model, tokens and micro-batches of a step, and options of `megatrain bench`. Those with --exact were measured
before micro-batches were merged, or are to be compared with merged ones."""

FIGURE_KEYS = ("median_seconds", "step_seconds", "tflops_published", "tflops_counted", "peak_device_bytes",
               "peak_host_bytes", "stall_seconds", "homes", "home_bytes_per_parameter", "num_micro_batches_run",
               "predicted")  # fmt: skip


def run_figures(names: list[str], to: Path | None = None) -> bool:
    """to: a file that gets a line of JSON for each row (`benchmarks/sizes.py` reads it)."""
    found = []
    for name in names:
        model, tokens, accumulate, *options = FIGURES[name]
        command = ["megatrain.cli", "bench", model, "--tokens", tokens, "--accumulate", accumulate, *options, "--json"]
        print(f"== {name}: {' '.join(command)}", flush=True)
        started = time.perf_counter()
        # The parent's import paths must hold in the child too.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        done = subprocess.run([sys.executable, "-m", *command], env=environment, text=True, stdout=subprocess.PIPE)
        print(f"== {name}: {time.perf_counter() - started:.0f} s in all", flush=True)
        rows = _lines(name, json.loads(done.stdout)) if done.stdout else []
        for line in rows:
            print(line["problem"] or {key: line["figures"][key] for key in FIGURE_KEYS}, flush=True)
        if to is not None:
            with to.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in rows)
        found += rows
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}")
    return len(found) == len(names) and not any(line["problem"] for line in found)


def _lines(name: str, told: dict[str, Any]) -> list[dict[str, Any]]:
    """Of what a bench told, for each row."""
    billions = round(1e-9 * told["model"]["parameters"], 2)
    facts = {"name": name, "billions": billions, "workload": told["workload"]}
    return [
        {**facts, "row": row["row"], "how": row.get("how", ""), "problem": row["problem"], "figures": row["figures"]}
        for row in told["rows"]
    ]
