"""The update of a segment by its definition: masters joined, moments decoded, the rule's formula, all stored again.

It runs in plain PyTorch on any device. It is what the kernels are tested against, and what runs where there is none.

Rule: no result depends on how a segment is cut into pieces.
"""

from __future__ import annotations

import torch

from megatrain.optim.formula import ema_
from megatrain.optim.segment import Segment
from megatrain.store import codecs, masters, rounding


def update_(segment: Segment, measure: bool = False) -> tuple[float, float] | None:
    """One step in place, with temporaries of several fp32 numbers a parameter: give it a piece at a time.

    Returns, with `measure`, (sum of squared weight changes, sum of squared weights before the step), in fp32 masters.
    """
    rule, n, states = segment.rule, segment.numel, segment.states
    reference = None if rule.reference is None else states[rule.reference]
    references = [reference if state.is_signed else None for state in rule.states]
    moments = [
        codecs.decode(stored, n, is_signed=state.is_signed, reference=other)
        for state, stored, other in zip(rule.states, states, references, strict=True)
    ]
    w = segment.weights if segment.low is None else masters.join(segment.weights, segment.low)
    w = w.float()
    old = w.clone() if measure else None
    rule.step(w, segment.grad.float(), *moments, segment.scalars)
    if segment.ema is not None:
        ema_(segment.ema.average, w, segment.ema.decay)
    random = None
    if segment.is_rounded:
        random = rounding.random_bits(segment.key, segment.first, n, w.device)
    for i in rule.order():
        codecs.encode_(moments[i], states[i], random, is_signed=rule.states[i].is_signed, reference=references[i])
    _store_weights(segment, w, random)
    if old is None:
        return None
    return (w - old).double().square_().sum().item(), old.double().square_().sum().item()


def _store_weights(segment: Segment, w: torch.Tensor, random: torch.Tensor | None) -> None:
    if segment.low is not None:
        masters.split_(w, segment.weights, segment.low)
    elif segment.weights.dtype == torch.bfloat16:
        assert random is not None
        stream = rounding.stream(random, rounding.MASTER_STREAM)
        segment.weights.copy_(rounding.round_to_bf16(w, stream))
