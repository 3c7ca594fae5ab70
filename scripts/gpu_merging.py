"""Merged micro-batches on a GPU: near the same ones apart, and fewer forwards."""

from __future__ import annotations

from typing import Any

import torch
from gpu_models import llama

import megatrain as mt
from megatrain.execute.engine import engine_of

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}
"""Of a gradient, as a share of its norm: other shapes of products, other orders of sums."""


def check_merged(precision: str) -> str:
    """Eight micro-batches of one length and one of another: the gradients of exact=True, within rounding."""
    generator = torch.Generator().manual_seed(3)
    made = [torch.randint(0, 1000, (1, length), generator=generator).cuda() for length in (96,) * 8 + (70,)]
    data = [{"input_ids": ids, "labels": ids, "use_cache": False} for ids in made]
    found, counts = zip(*(gradients_of(data, precision, exact) for exact in (True, False)), strict=True)
    if counts != (9, 2):
        return f"{counts} forwards instead of 9, and 2 where they are merged"
    apart, merged = found
    worst = max(float((apart[n] - merged[n]).norm() / apart[n].norm().clamp(min=1e-6)) for n in apart)
    return "" if worst < TOLERANCE[precision] else f"relative difference {worst:.1e}"


def gradients_of(data: list[dict[str, Any]], precision: str, exact: bool) -> tuple[dict[str, torch.Tensor], int]:
    """And how many micro-batches went through the model."""
    torch.manual_seed(0)
    mt.init(precision=precision, exact=exact)
    model = mt.stream(llama()).train()
    losses = mt.accumulate(model, data)
    gradients = {name: gradient.float() for name, gradient in mt.named_gradients(model)}
    count = mt.stats(model)["num_micro_batches_run"]
    engine_of(model).close()
    return {**gradients, "losses": torch.stack(losses).sum().cpu()}, count
