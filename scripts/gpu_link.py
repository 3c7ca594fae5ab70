"""The link, for gpu_check.py: held down to a rate; and that what computes waits for nothing of the device."""

from __future__ import annotations

import os
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from gpu_models import llama
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain as mt
from megatrain.api import stream
from megatrain.base.config import StreamOptions
from megatrain.execute.engine import engine_of

SLOW_GB_S = 4
LEAST_SHARE = 0.95
"""Of the rate, that weights which are all streamed must reach."""
NUM_STEPS = 3


def wide() -> torch.nn.Module:
    """Blocks of 100 MB in bf16, with little to compute."""
    config = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=8, num_attention_heads=16,
                         num_key_value_heads=16, vocab_size=1000)  # fmt: skip
    return LlamaForCausalLM(config)


def check_throttle(trained: Callable[..., dict[str, torch.Tensor]]) -> str:
    """Bits are those of the free link, and weights that stream go at the rate and no faster."""
    options = StreamOptions(places={"model.layers.1": "stream"}, activation_bytes=0, lane_delay_seconds=0.002)
    truth = trained(llama, "bf16", options)
    held = trained(llama, "bf16", options, max_link_gb_s=0.5)
    different = [name for name in truth if not torch.equal(truth[name], held[name])]
    if different:
        return f"{len(different)} weights and moments differ: {different[:3]}"
    mt.init(precision="bf16", hbm_home_gb=0, max_link_gb_s=SLOW_GB_S)
    model = stream(wide())
    optimizer, engine = mt.optim.AdamW(model, lr=1e-3), engine_of(model)
    _train(model, optimizer)
    engine.transport.quiesce()
    before, started = mt.stats(model), time.perf_counter()
    _train(model, optimizer)
    engine.transport.quiesce()
    seconds, after = time.perf_counter() - started, mt.stats(model)
    engine.close()
    moved = after["link_to_device_bytes"] - before["link_to_device_bytes"]
    busy = after["busy_seconds"]["h2d"] - before["busy_seconds"]["h2d"]
    rates = [1e-9 * moved / of for of in (busy, seconds)]
    print(f"     to the device: {rates[0]:.2f} GB/s while it was busy, {rates[1]:.2f} over all", flush=True)
    return "" if LEAST_SHARE * SLOW_GB_S <= rates[0] and max(rates) <= 1.001 * SLOW_GB_S else "it is another rate"


def _train(model: torch.nn.Module, optimizer: Any) -> None:
    ids = torch.randint(0, 1000, (1, 128), device="cuda")
    for _ in range(NUM_STEPS):
        mt.accumulate(model, [{"input_ids": ids, "labels": ids, "use_cache": False}])
        optimizer.step()
        optimizer.zero_grad()


def check_waits(data: list[dict[str, torch.Tensor]]) -> str:
    """Nothing that the engine does in a step's forward and backward makes their threads wait for the device. (The exact
    norm is waited for behind them, on a fence.)"""
    torch.manual_seed(0)
    mt.init(precision="bf16", hbm_home_gb=0)
    model = stream(llama())
    optimizer, found = mt.optim.AdamW(model, lr=1e-3), Counter()

    def note(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        """Lanes may wait; so may the model's own code, in which no frame of the engine is the innermost."""
        others = (f"{os.path.dirname(torch.__file__)}/", "/warnings.py")
        frames = [of for of in traceback.extract_stack()[:-1] if not any(name in of.filename for name in others)]
        is_lane = threading.current_thread().name.startswith("megatrain-")
        if not is_lane and "/megatrain/" in frames[-1].filename:
            found[f"{frames[-1].filename.rpartition('/megatrain/')[2]}:{frames[-1].lineno}"] += 1

    for is_watched in (False, False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn" if is_watched else "default")
            try:
                mt.accumulate(model, data)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        mt.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    engine_of(model).close()
    return f"waits: {dict(found)}" if found else ""
