"""Speed of the AdamW update on the CPU: every format and path beside PyTorch's fused AdamW, in one run.

    python benchmarks/update.py                     # 50M parameters, the updater's own number of threads
    python benchmarks/update.py --deepspeed         # and DeepSpeedCPUAdam in bf16, where it is installed

Rule: paths take turns, one step each a round, so that a busy neighbour slows all of them alike; the table gives the
median over the rounds and the best one. "B/param" is what one step reads and writes, in place, for one parameter; GB/s
is that over the median time. GB are 1e9 bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain.optim import compiler
from megatrain.optim.formula import AdamWScalars
from megatrain.optim.kernel import supported_variants
from megatrain.optim.segment import Segment
from megatrain.optim.update import CpuUpdater
from megatrain.store import masters

SCALARS = AdamWScalars.at(10, lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    num_threads: int
    bytes_per_param: int
    step: Callable[[], object]


def main() -> None:
    """Read the options, run every case in turn, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=50_000_000, help="parameters (default: 50 million)")
    parser.add_argument("--threads", type=int, default=None, help="threads (default: the updater's own number)")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each path (default: 15)")
    parser.add_argument("--measure", action="store_true", help="add rows that also measure the update-to-weight ratio")
    parser.add_argument("--deepspeed", action="store_true", help="add DeepSpeedCPUAdam in bf16, where installed")
    options = parser.parse_args()
    num_threads = CpuUpdater(options.threads).num_threads
    torch.set_num_threads(num_threads)
    print(f"{options.params / 1e6:.0f}M parameters, {num_threads} threads, {cpu_name()}, torch {torch.__version__}")
    print(f"kernel flags: {' '.join(compiler.FLAGS)}")
    cases = list(kernel_cases(options.params, num_threads, options.measure))
    cases.append(torch_case(options.params, num_threads))
    if options.deepspeed:
        cases.extend(deepspeed_cases(options.params, num_threads))
    print_table(cases, run_rounds(cases, options.rounds), options.params)


def kernel_cases(num_params: int, num_threads: int, measure: bool) -> Iterator[Case]:
    """The updater of this library: both master formats, every variant that this processor runs, and PyTorch."""
    segments = {
        "fp32 master, fp32 grad": fp32_segment(num_params),
        "split master, bf16 grad": split_segment(num_params),
    }
    for path in (*supported_variants(), "torch"):
        for format_name, segment in segments.items():
            updater = CpuUpdater(num_threads, path)
            size = bytes_per_param(segment)
            yield Case(f"{format_name}, {path}", num_threads, size, lambda u=updater, s=segment: u.run([s]))
            if measure:
                name = f"{format_name}, {path}, measured"
                yield Case(name, num_threads, size, lambda u=updater, s=segment: u.run([s], measure=True))


def torch_case(num_params: int, num_threads: int) -> Case:
    """torch.optim.AdamW(fused=True), everything fp32."""
    weight = torch.nn.Parameter(torch.randn(num_params))
    weight.grad = torch.randn(num_params).mul_(1e-3)
    optimizer = torch.optim.AdamW([weight], lr=1e-5, weight_decay=0.01, fused=True)
    return Case("torch.optim.AdamW fused, fp32", num_threads, 28, optimizer.step)


def deepspeed_cases(num_params: int, num_threads: int) -> Iterator[Case]:
    """DeepSpeedCPUAdam with bf16 parameters and gradients, fp32 moments, no fp32 master; nothing if not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        print("deepspeed is not installed: its row is left out", file=sys.stderr)
        return
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weight = torch.nn.Parameter(torch.randn(num_params).bfloat16())
    weight.grad = torch.randn(num_params).mul_(1e-3).bfloat16()
    optimizer = DeepSpeedCPUAdam([weight], lr=1e-5, weight_decay=0.01, fp32_optimizer_states=True)
    yield Case("DeepSpeedCPUAdam, bf16 weight and grad", num_threads, 22, optimizer.step)


def fp32_segment(num_params: int) -> Segment:
    weights, grad = torch.randn(num_params), torch.randn(num_params).mul_(1e-3)
    return Segment(weights, None, grad, *moments(num_params), SCALARS)


def split_segment(num_params: int) -> Segment:
    hi, lo = torch.empty(num_params, dtype=torch.bfloat16), torch.empty(num_params, dtype=torch.int16)
    masters.split_(torch.randn(num_params), hi, lo)
    grad = torch.randn(num_params).mul_(1e-3).bfloat16()
    return Segment(hi, lo, grad, *moments(num_params), SCALARS)


def moments(num_params: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First and second moments as a run leaves them: ordinary numbers, every page written."""
    return torch.randn(num_params).mul_(1e-3), torch.rand(num_params).mul_(1e-6)


def bytes_per_param(segment: Segment) -> int:
    """Bytes that a step reads and writes: the gradient once, all else twice."""
    low = 0 if segment.low is None else segment.low.element_size()
    state = segment.weights.element_size() + low + segment.m.element_size() + segment.v.element_size()
    return 2 * state + segment.grad.element_size()


def run_rounds(cases: list[Case], num_rounds: int) -> list[list[float]]:
    """Seconds of every step, by case. One round warms up and is not counted."""
    seconds: list[list[float]] = [[] for _ in cases]
    for number in range(num_rounds + 1):
        for case, times in zip(cases, seconds, strict=True):
            start = time.perf_counter()
            case.step()
            if number:
                times.append(time.perf_counter() - start)
    return seconds


def print_table(cases: list[Case], seconds: list[list[float]], num_params: int) -> None:
    width = max(len(case.name) for case in cases)
    print(f"{'':{width}}  threads  B/param  ns/param: median   best   GB/s")
    for case, times in zip(cases, seconds, strict=True):
        median, best = (value / num_params * 1e9 for value in (statistics.median(times), min(times)))
        row = f"{case.name:{width}}  {case.num_threads:7d}  {case.bytes_per_param:7d}"
        print(f"{row}  {median:16.3f}  {best:5.3f}  {case.bytes_per_param / median:5.1f}")


def cpu_name() -> str:
    """The processor's name where Linux tells it, and what PyTorch uses of it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"


if __name__ == "__main__":
    main()
