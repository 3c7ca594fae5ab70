"""Long rows on a GPU: blocks in tiles of tokens are right there, what a 7B layer takes of memory, what tiles cost.

For gpu_check.py.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import NamedTuple

import torch
from gpu_models import gemma, llama
from gpu_running import run_checks
from transformers import Qwen2Config, Qwen2ForCausalLM

import megatrain as mt
from megatrain.api import stream
from megatrain.base.config import StreamOptions
from megatrain.base.units import GB
from megatrain.execute.engine import engine_of
from megatrain.plan.cost import working_bytes
from megatrain.plan.timeline import INPUTS_ON_THEIR_WAY
from megatrain.plan.workload import Workload
from megatrain.spec.model import ModelSpec, model_spec

NUM_LAYERS, VOCABULARY = 2, 1024
ROUNDING = {"fp32": 1e-5, "bf16": 0.03}
"""Relative difference of all gradients that sums in another order, and tiles' gradients rounded before them, leave."""


def run_long() -> bool:
    """Prints one line a check, and the figures."""
    checks = {f"{make.__name__} {precision}": (make, precision) for make in (llama, gemma) for precision in ROUNDING}
    found = {f"tiles {name}": lambda of=of: check_tiles(*of) for name, of in checks.items()}
    found |= {"7B layers, 1 x 131,072": check_memory, "7B layers, 1 x 32,768": check_time}
    return run_checks({f"long: {name}": check for name, check in found.items()})


def check_tiles(make: type, precision: str) -> str:
    """Gradients in tiles near those of whole blocks, and in tiles the same bits by lanes, serially, and kept inside."""
    names = {f"model.layers.{number}": "all" for number in range(6)}
    whole = _gradients(make, precision, False, StreamOptions())
    twin, *others = (
        _gradients(make, precision, 48, options)
        for options in (
            StreamOptions(serial=True),
            StreamOptions(num_slots=1, poison=True, lane_delay_seconds=0.002),
            StreamOptions(num_slots=1, poison=True, kept_layers=names),
        )
    )
    for other in others:
        if different := [name for name in twin if not torch.equal(twin[name], other[name])]:
            return f"{len(different)} gradients differ from those of the serial twin: {different[:3]}"
    difference = sum(float((twin[n] - whole[n]).float().norm()) ** 2 for n in whole) ** 0.5
    relative = difference / sum(float(gradient.float().norm()) ** 2 for gradient in whole.values()) ** 0.5
    return "" if 0 < relative < ROUNDING[precision] else f"relative difference {relative:.1e}"


def _gradients(make: type, precision: str, tile: int | bool, options: StreamOptions) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    mt.init(precision=precision, hbm_home_gb=0, tile_tokens=tile)
    model = stream(make(), options=options).train()
    ids = torch.randint(0, 500, (2, 200), generator=torch.Generator().manual_seed(3)).cuda()
    mt.accumulate(model, [{"input_ids": ids, "labels": ids}] * 2)
    gradients = {name: gradient.clone() for name, gradient in mt.named_gradients(model)}
    engine_of(model).close()
    return gradients


class _Measured(NamedTuple):
    seconds: float
    """Median of a step's forward and backward."""
    peak_bytes: int
    """Of the device, above what was allocated between steps."""
    spec: ModelSpec


def _measure(length: int, tile: int | bool | None, num_steps: int = 3) -> _Measured:
    """Layers of Qwen2-7B in one row, their inputs in host memory."""
    torch.manual_seed(0)
    mt.init(precision="bf16", hbm_home_gb=0, tile_tokens=tile)
    config = Qwen2Config(hidden_size=3584, intermediate_size=18944, num_hidden_layers=NUM_LAYERS,
                         num_attention_heads=28, num_key_value_heads=4, vocab_size=VOCABULARY,
                         max_position_embeddings=1 << 20, attn_implementation="sdpa")  # fmt: skip
    model = stream(Qwen2ForCausalLM(config).bfloat16(), options=StreamOptions(activation_bytes=0)).train()
    engine = engine_of(model)
    ids = torch.randint(0, VOCABULARY, (1, length)).cuda()
    seconds, peaks = [], []
    for _ in range(1 + num_steps):
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, started = torch.cuda.memory_allocated(), time.perf_counter()
        mt.accumulate(model, [{"input_ids": ids, "labels": ids}])
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    spec = model_spec(model, engine.formats, "qwen2-7b layers")
    engine.close()
    torch.cuda.empty_cache()
    # The first step learns, and tries the modules.
    return _Measured(statistics.median(seconds[1:]), max(peaks), dataclasses.replace(spec, tile_tokens=tile))


def check_memory() -> str:
    """In tiles, the peak is within what is planned for a layer at work and for inputs on their way."""
    work = Workload(num_sequences=1, length=1 << 17)
    found = _measure(work.length, None, num_steps=1)
    layer = next(layer for layer in found.spec.layers if layer.kind == "block")
    at_work = working_bytes(found.spec, layer, work, 1, compiled=False)
    inputs = INPUTS_ON_THEIR_WAY * work.length * found.spec.hidden_size * 2
    # fp32 sums of the layer's gradients, and these in bf16 before and behind them.
    sums = (4 + 2 + 2) * found.spec.homes[layer.home].numel
    planned = at_work + inputs + sums
    print(
        f"peak {found.peak_bytes / GB:.1f} GB, {found.peak_bytes / work.length / 1e3:.1f} KB a token; planned: "
        f"{at_work / GB:.1f} at work, {inputs / GB:.1f} of inputs, {sums / GB:.1f} of gradients; a step of "
        f"{NUM_LAYERS} layers {found.seconds:.2f} s",
        flush=True,
    )
    return "" if found.peak_bytes <= planned else f"more than the {planned / GB:.1f} GB that are planned"


def check_time() -> str:
    """Figures: tiles of several sizes beside whole blocks."""
    whole = _measure(1 << 15, False)
    print(f"whole: {whole.seconds:.3f} s, peak {whole.peak_bytes / GB:.1f} GB", flush=True)
    for tile in (2048, 4096, 8192):
        tiled = _measure(1 << 15, tile)
        share = tiled.seconds / whole.seconds - 1
        print(f"tiles of {tile}: {tiled.seconds:.3f} s ({share:+.1%}), peak {tiled.peak_bytes / GB:.1f} GB", flush=True)
    return "" if tiled.peak_bytes < whole.peak_bytes else "tiles take as much memory as whole blocks"
