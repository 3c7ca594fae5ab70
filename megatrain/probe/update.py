"""Cost of the AdamW update on the CPU, by format of the moments: split masters and bf16 gradients.

Rule: the library's own updaters on all the threads that they take by themselves, and numbers as a run leaves them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from megatrain.base.units import format_number
from megatrain.optim import rules
from megatrain.optim.formula import AdamWScalars
from megatrain.optim.lossless_update import LosslessSegment, update_lossless
from megatrain.optim.marks import Marks
from megatrain.optim.segment import Segment
from megatrain.optim.update import CpuUpdater
from megatrain.probe.facts import NS_PER_PARAMETER, Rate, attempt
from megatrain.probe.timing import Effort, median_seconds
from megatrain.spec.formats import FORMATS
from megatrain.store import codecs, masters, rounding
from megatrain.store.codecs import Stored
from megatrain.store.lossless import LosslessMoment

MOMENTS = ("fp32", "bf16", "8bit", "4bit", "lossless")
SCALARS = AdamWScalars.at(10, lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
TILE = 1 << 20
"""Distinct numbers: what is longer repeats them, since they take longer to make than all the steps."""
SLOW_PARAMETERS = 1 << 20
"""For updates in PyTorch, which take some hundred times as long."""
LOSSLESS_SHARE = 8
"""Lossless moments, which take some ten times as long, are measured on this part of the parameters."""


def measure_update(effort: Effort) -> list[Rate]:
    """A row for each format of moments."""
    with CpuUpdater() as updater:
        is_slow, num_threads = updater.path == "torch", updater.num_threads
        path = "PyTorch" if is_slow else updater.path
    weights = _weights(SLOW_PARAMETERS if is_slow else effort.num_parameters)
    return [
        attempt(
            f"update.{name}",
            f"update, {name} moments",
            NS_PER_PARAMETER,
            partial(_ns_per_parameter, name, weights, effort.seconds),
            f"{path}, {format_number(num_threads, 'thread')}",
        )
        for name in MOMENTS
    ]


def _ns_per_parameter(name: str, weights: tuple[Tensor, Tensor, Tensor], seconds: float) -> float:
    """weights: upper halves (n,) bf16, lower halves (n,) int16, gradients (n,) bf16."""
    num_parameters = weights[0].numel()
    if name == "lossless":
        num_parameters //= LOSSLESS_SHARE
    segment = _segment(name, *(tensor[:num_parameters] for tensor in weights))
    with CpuUpdater() as updater, ThreadPoolExecutor(updater.num_threads) as pool:

        def step() -> None:
            if isinstance(segment, LosslessSegment):
                update_lossless(updater, pool, [segment], False, Marks())
            else:
                updater.run([segment])

        return 1e9 * median_seconds(step, seconds) / num_parameters


def _segment(name: str, upper: Tensor, low: Tensor, grad: Tensor) -> Segment | LosslessSegment:
    rule = rules.ADAMW
    if name != "lossless":
        states = stored_moments(name, grad.numel())
        return Segment(rule=rule, scalars=SCALARS, weights=upper, low=low, grad=grad, states=states, key=(1, 2))
    moments = (LosslessMoment(grad.numel()), LosslessMoment(grad.numel()))
    for moment, stored in zip(moments, stored_moments("fp32", grad.numel()), strict=True):
        moment.copy_(stored.codes)
    return LosslessSegment(rule=rule, scalars=SCALARS, weights=upper, low=low, grad=grad, moments=moments, key=(1, 2))


def _weights(num_parameters: int) -> tuple[Tensor, Tensor, Tensor]:
    upper, low = torch.empty(TILE, dtype=torch.bfloat16), torch.empty(TILE, dtype=torch.int16)
    masters.split_(torch.randn(TILE), upper, low)
    grad = torch.randn(TILE).mul_(1e-3).bfloat16()
    return repeat(upper, num_parameters), repeat(low, num_parameters), repeat(grad, num_parameters)


def stored_moments(name: str, num_parameters: int) -> tuple[Stored, Stored]:
    """First and second moments in a format of `FORMATS` as a run leaves them: ordinary numbers."""
    format_ = FORMATS[name]
    random = rounding.random_bits((3, 4), 0, TILE, torch.device("cpu"))
    first, second = (
        Stored(
            format_,
            torch.empty(format_.num_codes(TILE), dtype=format_.dtype),
            torch.empty(format_.num_scales(TILE)) if format_.is_block else None,
        )
        for _ in range(2)
    )
    codecs.encode_(torch.rand(TILE).mul_(1e-6), second, random, is_signed=False)
    reference = second if format_.is_block else None
    codecs.encode_(torch.randn(TILE).mul_(1e-3), first, random, is_signed=True, reference=reference)

    def whole(tile: Stored) -> Stored:
        scales = None if tile.scales is None else repeat(tile.scales, format_.num_scales(num_parameters))
        return Stored(format_, repeat(tile.codes, format_.num_codes(num_parameters)), scales)

    return whole(first), whole(second)


def repeat(tile: Tensor, numel: int) -> Tensor:
    """A flat tensor that repeats the numbers of the tile."""
    result = torch.empty(numel, dtype=tile.dtype)
    for start in range(0, numel, tile.numel()):
        part = result[start : start + tile.numel()]
        part.copy_(tile[: part.numel()])
    return result
