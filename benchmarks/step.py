"""Times whole training steps of a Qwen2.5-shaped model with random weights, built straight into their homes.

    python benchmarks/step.py --model 7B --batch 64 --micro-batch 16 --seq 1024 --steps 4

Prints one JSON line: step seconds (the first step is left out), model TFLOPS as published (6 x parameters x tokens) and
as counted (no look-ups, causal attention), peak device memory, host memory, stalls of the compute lane.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from typing import Any

import psutil
import torch
from accelerate import init_empty_weights
from transformers import Qwen2Config, Qwen2ForCausalLM

import megatrain as mt
from megatrain.base.config import StreamOptions
from megatrain.base.units import GIB
from megatrain.execute.engine import Engine, engine_of
from megatrain.optim.base import HomeOptimizer
from megatrain.plan.flops import counted_flops, model_work, published_flops
from megatrain.plan.placement import Place

# hidden, intermediate, layers, heads, key-value heads, tied, vocabulary
SHAPES = {
    "tiny": (256, 512, 4, 4, 2, False, 1024),
    "0.5B": (896, 4864, 24, 14, 2, True, 151936),
    "1.5B": (1536, 8960, 28, 12, 2, True, 151936),
    "3B": (2048, 11008, 36, 16, 2, True, 151936),
    "7B": (3584, 18944, 28, 28, 4, False, 152064),
    "14B": (5120, 13824, 48, 40, 8, False, 152064),
    "32B": (5120, 27648, 64, 40, 8, False, 152064),
}


def build(shape: str, seq: int, options: StreamOptions, workload: mt.Workload | None) -> torch.nn.Module:
    """A streamed model in bf16 with normal(0, 0.02) matrices; nothing is held twice."""
    hidden, intermediate, layers, heads, kv_heads, tied, vocabulary = SHAPES[shape]
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        vocab_size=vocabulary,
        max_position_embeddings=max(seq, 4096),
        attn_implementation="sdpa",
    )
    with init_empty_weights(include_buffers=False):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.tie_weights()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def initialize(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        if len(shape) > 1:
            return torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)
        return torch.ones(shape, dtype=dtype) if "norm" in name else torch.zeros(shape, dtype=dtype)

    return mt.stream(model, initialize=initialize, options=options, workload=workload)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--max-vram-gb", type=float)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--threads", type=int, help="threads of the CPU update")
    parser.add_argument("--hbm-home-gb", type=float, help="device memory for layers that live and are updated there")
    parser.add_argument("--max-ram-gb", type=float)
    parser.add_argument("--places", choices=("cpu", "stream", "hbm", "disk"), help="where all homes live")
    parser.add_argument("--planned", action="store_true", help="homes, slots and inputs on the device by the planner")
    parser.add_argument("--offload-dir", nargs="*", help="for what does not fit in host memory")
    parser.add_argument("--moments-on-disk", type=int, default=0, help="of so many blocks, the last ones")
    parser.add_argument("--moments", default="fp32", choices=("fp32", "bf16", "8bit", "4bit", "lossless"))
    parser.add_argument("--master", choices=("split", "bf16"))
    parser.add_argument("--verify-transfers", action="store_true", help="check sums of all that is copied")
    parser.add_argument("--clip", default="global", choices=("global", "layer"))
    parser.add_argument("--replan", action="store_true", help="let the run change homes and slots after five steps")
    return parser.parse_args()


def initialise(args: argparse.Namespace) -> None:
    mt.init(
        max_vram_gb=args.max_vram_gb,
        max_ram_gb=args.max_ram_gb,
        offload_dir=args.offload_dir or None,
        compile=args.compile,
        optimizer_compression=False if args.moments == "fp32" else args.moments,
        master=args.master,
        clip=args.clip,
        hbm_home_gb=args.hbm_home_gb,
        replan=args.replan,
        verify_transfers=args.verify_transfers,
    )


def main() -> None:
    args = parse_arguments()
    started = time.perf_counter()
    initialise(args)
    workload = mt.Workload(num_sequences=args.batch, length=args.seq, rows=args.micro_batch)
    model = build(args.model, args.seq, StreamOptions(places=_places(args)), workload if args.planned else None)
    engine = engine_of(model)
    max_norm = {"max_norm": 1.0} if args.clip == "layer" else {}
    optimizer = mt.optim.AdamW(model, lr=1e-5, weight_decay=0.01, num_threads=args.threads, **max_norm)
    print(f"built in {time.perf_counter() - started:.1f} s", flush=True)

    torch.manual_seed(1)
    vocabulary = SHAPES[args.model][-1]
    ids = torch.randint(0, vocabulary - 64, (args.batch, args.seq)).to(engine.device)
    batches = [{"input_ids": part, "labels": part} for part in ids.split(args.micro_batch)]
    seconds, losses = [], []
    stalls_before: dict[str, float] = {}
    for step in range(args.steps):
        if step == 1:
            _synchronize(engine)
            stalls_before = engine.transport.stall_seconds()
        started = time.perf_counter()
        step_losses = mt.accumulate(model, batches)
        accumulated = time.perf_counter() - started
        norm = engine.consumed_norm if args.clip == "layer" else mt.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in step_losses))
        # The update of the last layers goes on under the next step's forward: no synchronisation between steps.
        seconds.append(time.perf_counter() - started)
        print(
            f"step {step}: {seconds[-1]:.2f} s (forward+backward {accumulated:.2f}), loss {losses[-1]:.4f}, "
            f"norm {norm:.3f}",
            flush=True,
        )
    started = time.perf_counter()
    engine.wait()
    last_update = time.perf_counter() - started
    stalls = {
        name: round((value - stalls_before.get(name, 0.0)) / (args.steps - 1), 3)
        for name, value in engine.transport.stall_seconds().items()
    }
    share = 100 * stalls.get("weights", 0.0) / statistics.median(seconds[1:])
    waits = {
        "last_update_seconds": round(last_update, 3),
        "stall_seconds_per_step": stalls,
        "weights_stall_percent": round(share, 2),
        "num_checks": engine.transport.hops.counts.num_checks,
        "homes": dict(Counter(str(home.place) for home in engine.homes)),
        "home_bytes_per_parameter": round(_home_bytes(engine, optimizer), 3),
    }
    print(
        json.dumps(
            figures(args, model, seconds)
            | waits
            | predicted(engine, workload)
            | {"losses": [round(x, 4) for x in losses]}
        ),
        flush=True,
    )


def figures(args: argparse.Namespace, model: torch.nn.Module, seconds: list[float]) -> dict[str, Any]:
    """seconds: of each step; the first one warms up and does not count."""
    work, num_tokens, median = model_work(model), args.batch * args.seq, statistics.median(seconds[1:])
    return {
        "args": vars(args),
        "parameters": work.num_parameters,
        "step_seconds": [round(s, 3) for s in seconds],
        "median_seconds": round(median, 3),
        "tflops_published": round(published_flops(work, num_tokens) / median / 1e12, 1),
        "tflops_counted": round(counted_flops(work, [args.seq] * args.batch) / median / 1e12, 1),
        "tokens_per_second": round(num_tokens / median),
        "peak_device_gib": round(_peak_device_bytes() / GIB, 2),
        "host_rss_gib": round(psutil.Process().memory_info().rss / GIB, 1),
    }


def predicted(engine: Engine, workload: mt.Workload) -> dict[str, float]:
    """What the planner says of this placement, in the units of `figures`."""
    plan = engine.plan or engine.report.predict(workload)
    if plan is None:
        return {}
    peaks = {
        name: plan.timeline.peak(tier) / GIB for name, tier in (("device", "hbm"), ("host", "ram"), ("disk", "disk"))
    }
    seconds = {"predicted_seconds": round(plan.step_seconds, 3)}
    return seconds | {f"predicted_{name}_gib": round(gib, 1) for name, gib in peaks.items()}


def _places(args: argparse.Namespace) -> Any:
    if not args.moments_on_disk:
        return args.places
    num_layers = SHAPES[args.model][2]
    last = range(num_layers - args.moments_on_disk, num_layers)
    return {f"model.layers.{number}": Place(moments="disk") for number in last}


def _home_bytes(engine: Engine, optimizer: HomeOptimizer) -> float:
    """Bytes a parameter of masters and moments, as allocated, scales included; gradients apart."""
    num_parameters = sum(home.num_parameters for home in engine.homes)
    master_bytes = sum(home.wire.nbytes + home.low.nbytes for home in engine.homes)
    return (master_bytes + optimizer.num_state_bytes()) / num_parameters


def _synchronize(engine: Engine) -> None:
    engine.wait()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _peak_device_bytes() -> int:
    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0


if __name__ == "__main__":
    main()
    # Unmapping and unlocking a hundred GiB in order takes longer than the measurement.
    sys.stdout.flush()
    os._exit(0)
