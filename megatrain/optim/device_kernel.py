"""The update as one Triton kernel: what `optim/definition.py` says, in one pass over the device's memory.

A program updates a few whole blocks. Masters, formats, rule, EMA and measure are chosen when the kernel is compiled: by
the dtypes of the pointers, by which of them are None, by the format's bits and by the rule's function. So each stage is
written once for all of them.

Rule: the same bits as the definition. See `optim/device_codes.py` for what that takes.

What it gives up: NaNs stay NaNs, with any sign and payload (a bf16 or split master has one NaN only).
"""

from __future__ import annotations

from dataclasses import astuple

import torch
from torch import Tensor

from megatrain.optim import rules
from megatrain.optim.device_codes import (
    MASTER_STREAM,
    UNSIGNED_STREAM,
    bits_of,
    float_of,
    jit,
    load,
    load_first,
    load_float,
    load_second,
    places,
    random_bits,
    store,
    store_first,
    store_float,
    store_second,
    tl,
    triton,
)
from megatrain.optim.segment import Segment
from megatrain.store.codecs import BLOCK, Format, Stored

TILE_BLOCKS = 8  # blocks of one program
MAX_NUMEL = 1 << 30  # of one launch, so that indices fit in 32 bits


def is_interpreted() -> bool:
    """Whether Triton is told to run kernels in NumPy, on tensors of the CPU: for tests."""
    return triton is not None and triton.knobs.runtime.interpret


def knows(segment: Segment) -> bool:
    """Whether the kernel has the segment's rule. It has every format."""
    return segment.rule in _STEPS


def update_(segment: Segment, measure: bool) -> Tensor | None:
    """Enqueue one step in place on the current stream, of a segment with at most MAX_NUMEL parameters, but at least 1.

    Returns, with `measure`, (2,) fp64 on the device: the sum of squared weight changes, that of squared old weights.
    """
    assert 0 < segment.numel <= MAX_NUMEL
    num_programs = -(-segment.numel // (TILE_BLOCKS * BLOCK))
    sums = None
    if measure:
        sums = torch.empty(num_programs, 2, dtype=torch.float64, device=segment.grad.device)
    m, v = (*segment.states, None, None)[:2]
    decay = 0.0 if segment.ema is None else segment.ema.decay
    _update[(num_programs,)](
        _pointer(segment.weights),
        segment.low,
        _pointer(segment.grad),
        *_pointers(m),
        *_pointers(v),
        None if segment.ema is None else segment.ema.average,
        sums,
        segment.numel,
        _signed32(segment.first),
        _signed32(segment.key[0]),
        _signed32(segment.key[1]),
        astuple(segment.scalars),
        decay,
        1.0 - decay,
        STEP=_STEPS[segment.rule],
        **_format_constants(None if m is None else m.format),
        BLOCKS=TILE_BLOCKS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return None if sums is None else _total(sums)


def _total(sums: Tensor) -> Tensor:
    """The step is made by now: nothing may raise."""
    try:
        return sums.sum(dim=0)
    except torch.OutOfMemoryError:
        return sums.cpu().sum(dim=0)


def _pointer(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _pointers(stored: Stored | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if stored is None else (_pointer(stored.codes), stored.scales)


def _signed32(x: int) -> int:
    """The lower 32 bits as a signed number: one type whatever the value, so the kernel is compiled once."""
    return (x + 0x80000000 & 0xFFFFFFFF) - 0x80000000


def _format_constants(format_: Format | None) -> dict[str, object]:
    """What the kernel must know of the format of the moments when it is compiled."""
    if format_ is None or not format_.is_block:
        return {"BITS": 32, "SIGNED": 0, "UNSIGNED": 0, "SPAN": 0.0, "SHARE": 0.0}
    exponent, mantissa = divmod((1 << (format_.bits - 1)) - 1, 1 << format_.signed_mantissa)
    span = 2.0**exponent * (1.0 + mantissa / (1 << format_.signed_mantissa)) - 1.0
    return {
        "BITS": format_.bits,
        "SIGNED": format_.signed_mantissa,
        "UNSIGNED": format_.unsigned_mantissa,
        "SPAN": span,
        "SHARE": 1.0 / span,
    }


# Masters: fp32, bf16, or with `low` the upper halves of split ones (`store/masters.py`).


@jit
def _load_weights(weights: tl.tensor, low: tl.tensor, rows: tl.tensor, n: tl.tensor) -> tl.tensor:
    w = load_float(weights, rows, n)
    if low is not None:
        w = float_of(bits_of(w) + load(low, rows, n).to(tl.int32))
    return w


@jit
def _store_weights(
    weights: tl.tensor, low: tl.tensor, w: tl.tensor, random: tl.tensor, rows: tl.tensor, n: tl.tensor
) -> None:
    if low is not None:
        bits = tl.where(w == w, bits_of(w), 0x7FC00000)
        store(weights, ((bits + 0x8000) >> 16).to(tl.int16), rows, n)
        store(low, bits.to(tl.int16), rows, n)
    else:
        store_float(weights, w, random * MASTER_STREAM, rows, n)


# Rules: `optim/formula.py`, which says what the scalars are. m, v: first and second moment, or 0.0 where there is none.


@jit
def _adamw(w: tl.tensor, g: tl.tensor, m: tl.tensor, v: tl.tensor, scalars: tl.tuple) -> tl.tuple:
    clip, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, bias2_sqrt, step_size = scalars
    clipped = g * clip
    m = m * beta1 + clipped * one_minus_beta1
    v = v * beta2 + clipped * clipped * one_minus_beta2
    return w * decay - tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), bias2_sqrt) + eps) * step_size, m, v


@jit
def _adam(w: tl.tensor, g: tl.tensor, m: tl.tensor, v: tl.tensor, scalars: tl.tuple) -> tl.tuple:
    clip, weight_decay, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, bias2_sqrt, step_size = scalars
    clipped = g * clip + w * weight_decay
    m = m * beta1 + clipped * one_minus_beta1
    v = v * beta2 + clipped * clipped * one_minus_beta2
    return w - tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), bias2_sqrt) + eps) * step_size, m, v


@jit
def _momentum(w: tl.tensor, g: tl.tensor, m: tl.tensor, v: float, scalars: tl.tuple) -> tl.tuple:
    clip, weight_decay, momentum, gradient_share, nesterov, look_ahead, lr = scalars
    clipped = g * clip + w * weight_decay
    m = m * momentum + clipped * gradient_share
    return w - (clipped * nesterov + m * look_ahead) * lr, m, v


@jit
def _sgd(w: tl.tensor, g: tl.tensor, m: float, v: float, scalars: tl.tuple) -> tl.tuple:
    clip, weight_decay, lr = scalars
    return w - (g * clip + w * weight_decay) * lr, m, v


@jit
def _lion(w: tl.tensor, g: tl.tensor, m: tl.tensor, v: float, scalars: tl.tuple) -> tl.tuple:
    clip, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr = scalars
    clipped = g * clip
    direction = m * beta1 + clipped * one_minus_beta1
    sign = tl.where(direction > 0.0, 1.0, tl.where(direction < 0.0, -1.0, direction * 0.0))
    return w * decay - sign * lr, m * beta2 + clipped * one_minus_beta2, v


_STEPS = {rules.ADAMW: _adamw, rules.ADAM: _adam, rules.MOMENTUM: _momentum, rules.SGD: _sgd, rules.LION: _lion}


@jit
def _store_sums(
    sums: tl.tensor, w: tl.tensor, old: tl.tensor, program: tl.tensor, rows: tl.tensor, n: tl.tensor
) -> None:
    change = tl.where(places(rows) < n, w - old, 0.0).to(tl.float64)
    old = old.to(tl.float64)
    tl.store(sums + 2 * program, tl.sum(change * change))
    tl.store(sums + 2 * program + 1, tl.sum(old * old))


@jit(do_not_specialize=["first", "key0", "key1"])  # they differ from call to call
def _update(
    weights: tl.tensor,
    low: tl.tensor,
    grad: tl.tensor,
    m_codes: tl.tensor,
    m_scales: tl.tensor,
    v_codes: tl.tensor,
    v_scales: tl.tensor,
    ema: tl.tensor,
    sums: tl.tensor,
    n: tl.tensor,
    first: tl.tensor,
    key0: tl.tensor,
    key1: tl.tensor,
    scalars: tl.tuple,
    ema_decay: tl.tensor,
    ema_share: tl.tensor,
    STEP: tl.constexpr,
    BITS: tl.constexpr,
    SIGNED: tl.constexpr,
    UNSIGNED: tl.constexpr,
    SPAN: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """SIGNED, UNSIGNED: mantissa bits of the codes."""
    program = tl.program_id(0)
    rows = program * BLOCKS + tl.arange(0, BLOCKS)
    half = None
    m = 0.0
    v = 0.0
    if v_scales is not None:
        v, half = load_second(v_codes, v_scales, rows, n, BITS, UNSIGNED)
    elif v_codes is not None:
        v = load_float(v_codes, rows, n)
    if m_scales is not None:
        m = load_first(m_codes, m_scales, half, rows, n, BITS, SIGNED, SHARE)
    elif m_codes is not None:
        m = load_float(m_codes, rows, n)
    old = _load_weights(weights, low, rows, n)
    w, m, v = STEP(old, load_float(grad, rows, n), m, v, scalars)
    if sums is not None:
        _store_sums(sums, w, old, program, rows, n)
    if ema is not None:
        store(ema, load(ema, rows, n) * ema_decay + w * ema_share, rows, n)
    random = random_bits(rows, first, key0, key1)
    if v_scales is not None:
        half = store_second(v_codes, v_scales, v, random * UNSIGNED_STREAM, rows, n, BITS, UNSIGNED)
    elif v_codes is not None:
        store_float(v_codes, v, random * UNSIGNED_STREAM, rows, n)
    if m_scales is not None:
        store_first(m_codes, m_scales, m, half, random, rows, n, BITS, SIGNED, SPAN)
    elif m_codes is not None:
        store_float(m_codes, m, random, rows, n)
    _store_weights(weights, low, w, random, rows, n)
