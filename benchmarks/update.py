"""Speed of the AdamW update on the CPU: every master and format of moments, beside PyTorch's and DeepSpeed's.

    python benchmarks/update.py                             # 50M parameters, the updater's own number of threads
    python benchmarks/update.py --deepspeed --no-torch      # and DeepSpeedCPUAdam, without the slow fall-back
    python benchmarks/update.py --formats fp32 8bit --variants avx2 avx512 --measure

Rows come in groups, one a format of moments. Rule: the rows of a group take turns, one step each a round, so that a
busy neighbour slows all of them alike; the table gives the median over the rounds and the best one. A step starts after
a pause, when no pool of threads spins on any more. "B/param" is what one step reads and writes, in place, for one
parameter: the gradient once, all else twice; GB/s is that over the median time. GB are 1e9 bytes.

With DeepSpeed its defaults for bf16 and for fp32 parameters take their turns in every group, and the last columns
compare with the faster of these: how many times as many parameters a row updates in a second, and bytes it moves. Both
sides run on as many threads.

All rows share one set of weights and gradients (16 bytes a parameter, of which each row uses its own), the rows of a
group one set of moments; each optimizer of another library has its own, and all are freed with their group.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain.optim import compiler, rules
from megatrain.optim.kernel import supported_variants
from megatrain.optim.segment import Segment
from megatrain.optim.update import CpuUpdater
from megatrain.probe.update import SCALARS, TILE, repeat, stored_moments
from megatrain.store import masters
from megatrain.store.codecs import Stored

KERNEL_FORMATS = ("fp32", "bf16", "8bit", "4bit")
FALLBACK_PARAMS = 1 << 21
"""Parameters of a step of the fall-back, which is some hundred times slower."""
PAUSE_SECONDS = 0.005
BASELINE = "DeepSpeedCPUAdam"


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    num_params: int
    bytes_per_param: float
    step: Callable[[], object]


@dataclass(frozen=True)
class Weights:
    """Masters of each kind and the gradients that go with them; every page is written."""

    fp32: Tensor
    hi: Tensor
    lo: Tensor
    bf16: Tensor
    grad_fp32: Tensor
    grad_bf16: Tensor

    def segments(self, states: tuple[Stored, ...]) -> dict[str, Segment]:
        """By the kind of master."""
        common: dict[str, Any] = {"rule": rules.ADAMW, "scalars": SCALARS, "states": states, "key": (1, 2)}
        return {
            "fp32 master, fp32 grad": Segment(weights=self.fp32, grad=self.grad_fp32, **common),
            "split master, bf16 grad": Segment(weights=self.hi, low=self.lo, grad=self.grad_bf16, **common),
            "bf16 master, bf16 grad": Segment(weights=self.bf16, grad=self.grad_bf16, **common),
        }


def main() -> None:
    """Read the options, run group after group, print the tables and one line of JSON."""
    options = parse_options()
    num_threads = CpuUpdater(options.threads).num_threads
    torch.set_num_threads(num_threads)
    facts = {"params": options.params, "threads": num_threads, "cpu": cpu_name(), "torch": torch.__version__}
    facts["kernel_flags"] = " ".join(compiler.FLAGS)
    if options.deepspeed:
        facts |= load_deepspeed(num_threads)
    for name, fact in facts.items():
        print(f"{name}: {fact}")
    weights = make_weights(options.params)
    rows: list[dict[str, Any]] = []
    for format_name in options.formats:
        cases = list(group(weights, format_name, num_threads, options, "deepspeed" in facts))
        rows += measure(cases, format_name, options.rounds)
        print_table([row for row in rows if row["moments"] == format_name])
        del cases
        gc.collect()
    print(json.dumps({**facts, "rounds": options.rounds, "rows": rows}))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=50_000_000, help="parameters (default: 50 million)")
    parser.add_argument("--threads", type=int, default=None, help="threads (default: the updater's own number)")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each row (default: 15)")
    parser.add_argument("--formats", nargs="+", choices=KERNEL_FORMATS, default=KERNEL_FORMATS, help="of moments")
    variants = supported_variants()
    parser.add_argument("--variants", nargs="+", choices=variants, default=variants[-1:], help="of the kernel")
    parser.add_argument("--measure", action="store_true", help="add rows that also measure the update-to-weight ratio")
    parser.add_argument("--no-torch", action="store_true", help="leave out the fall-back in PyTorch")
    parser.add_argument("--deepspeed", action="store_true", help="add DeepSpeedCPUAdam, where installed")
    return parser.parse_args()


# --- what is updated ---


def make_weights(num_params: int) -> Weights:
    values, grad = torch.randn(TILE), torch.randn(TILE).mul_(1e-3)
    hi, lo = torch.empty(TILE, dtype=torch.bfloat16), torch.empty(TILE, dtype=torch.int16)
    masters.split_(values, hi, lo)
    tiles = (values, hi, lo, values.bfloat16(), grad, grad.bfloat16())
    return Weights(*(repeat(tile, num_params) for tile in tiles))


# --- the rows ---


def group(
    weights: Weights, format_name: str, num_threads: int, options: argparse.Namespace, has_deepspeed: bool
) -> Iterator[Case]:
    """The rows of one format of moments: of this library, then of others."""
    segments = weights.segments(stored_moments(format_name, options.params))
    for path in options.variants:
        updater = CpuUpdater(num_threads, path)
        for master, segment in segments.items():
            yield own_case(f"{master}, {path}", updater, segment)
            if options.measure:
                yield own_case(f"{master}, {path}, measured", updater, segment, measure=True)
    if not options.no_torch:
        updater = CpuUpdater(num_threads, "torch")
        for master, segment in segments.items():
            part = segment.part(0, min(segment.numel, FALLBACK_PARAMS))
            yield own_case(f"{master}, PyTorch fall-back", updater, part)
    if format_name == "fp32":
        fused = torch.optim.AdamW(parameters(weights.fp32, weights.grad_fp32), lr=1e-5, weight_decay=0.01, fused=True)
        yield Case("torch.optim.AdamW fused, fp32", options.params, 28, fused.step)
    if has_deepspeed:
        yield from deepspeed_cases(weights, format_name)


def own_case(name: str, updater: CpuUpdater, segment: Segment, measure: bool = False) -> Case:
    states = [tensor for stored in segment.states for tensor in stored.tensors]
    in_place = [segment.weights, *([] if segment.low is None else [segment.low]), *states]
    num_bytes = segment.grad.nbytes + 2 * sum(tensor.nbytes for tensor in in_place)
    return Case(name, segment.numel, num_bytes / segment.numel, lambda: updater.run([segment], measure=measure))


def deepspeed_cases(weights: Weights, format_name: str) -> Iterator[Case]:
    """DeepSpeedCPUAdam as AdamW: its defaults, and the rest in the group that has its moments. bf16 parameters have no
    master beside them."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    def case(name: str, weight: Tensor, grad: Tensor, num_bytes: int, **settings: Any) -> Case:
        optimizer = DeepSpeedCPUAdam(parameters(weight, grad), lr=1e-5, weight_decay=0.01, **settings)
        return Case(name, weight.numel(), num_bytes, optimizer.step)

    yield case(f"{BASELINE}, bf16 weight and grad", weights.bf16, weights.grad_bf16, 22)
    yield case(f"{BASELINE}, fp32 weight and grad", weights.fp32, weights.grad_fp32, 28)
    if format_name == "bf16":
        settings = {"fp32_optimizer_states": False}
        yield case(f"{BASELINE}, all bf16", weights.bf16, weights.grad_bf16, 14, **settings)


def parameters(weight: Tensor, grad: Tensor) -> list[torch.nn.Parameter]:
    """A list of one parameter: a view of the weight, with this gradient."""
    parameter = torch.nn.Parameter(weight)
    parameter.grad = grad
    return [parameter]


def load_deepspeed(num_threads: int) -> dict[str, str]:
    """Compile and load DeepSpeed's kernel. Returns its version and flags, or nothing where it is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        print("deepspeed is not installed: its rows are left out", file=sys.stderr)
        return {}
    # Read when its kernel is loaded, which may bring an OpenMP of its own, that torch.set_num_threads does not reach.
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    import deepspeed
    from deepspeed.ops.op_builder import CPUAdamBuilder

    builder = CPUAdamBuilder()
    builder.load(verbose=False)
    return {"deepspeed": deepspeed.__version__, "deepspeed_flags": " ".join(builder.cxx_args())}


# --- time ---


def measure(cases: list[Case], format_name: str, num_rounds: int) -> list[dict[str, Any]]:
    """A row for each case. One round warms up and is not counted."""
    seconds: list[list[float]] = [[] for _ in cases]
    for number in range(num_rounds + 1):
        for case, times in zip(cases, seconds, strict=True):
            time.sleep(PAUSE_SECONDS)
            start = time.perf_counter()
            case.step()
            if number:
                times.append(time.perf_counter() - start)
    rows = [make_row(case, format_name, times) for case, times in zip(cases, seconds, strict=True)]
    theirs = [row for row in rows if row["name"].startswith(BASELINE)]
    baseline = min(theirs, key=lambda row: row["median_ns_per_param"], default=None)
    for row in rows if baseline is not None else []:
        row["times_deepspeed_params"] = baseline["median_ns_per_param"] / row["median_ns_per_param"]
        row["times_deepspeed_bytes"] = row["gb_per_second"] / baseline["gb_per_second"]
    return rows


def make_row(case: Case, format_name: str, seconds: list[float]) -> dict[str, Any]:
    median, best = (value / case.num_params * 1e9 for value in (statistics.median(seconds), min(seconds)))
    return {
        "moments": format_name,
        "name": case.name,
        "bytes_per_param": case.bytes_per_param,
        "median_ns_per_param": median,
        "best_ns_per_param": best,
        "gb_per_second": case.bytes_per_param / median,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    width = max(len(row["name"]) for row in rows)
    title = f"{'moments: ' + rows[0]['moments']:{width}}  B/param  ns/param: median   best   GB/s"
    print("\n" + title + ("  times DeepSpeed: params  bytes" if "times_deepspeed_params" in rows[0] else ""))
    for row in rows:
        line = f"{row['name']:{width}}  {row['bytes_per_param']:7.2f}  {row['median_ns_per_param']:16.3f}"
        line += f"  {row['best_ns_per_param']:5.3f}  {row['gb_per_second']:5.1f}"
        if "times_deepspeed_params" in row:
            line += f"  {row['times_deepspeed_params']:23.2f}  {row['times_deepspeed_bytes']:5.2f}"
        print(line)
    print(flush=True)


def cpu_name() -> str:
    """The processor's name where Linux tells it, and what PyTorch uses of it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"


if __name__ == "__main__":
    main()
