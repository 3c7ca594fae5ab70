"""The update as one Triton kernel: what `optim/definition.py` says, in one pass over the device's memory.

A program updates a few whole blocks of a segment of a batch (`optim/device_batch.py`). Masters, formats, rule, EMA and
measure are chosen when the kernel is compiled: by the dtypes of the pointers, by which of them are None, by the bits
of the format and by the rule's function. So each stage is written once for all of them.

Rule: the same bits as the definition. See `optim/device_codes.py` for what that takes.

What it gives up: NaNs stay NaNs, with any sign and payload (a bf16 or split master has one NaN only).
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from megatrain.optim import device_batch, rules
from megatrain.optim.device_batch import Batch
from megatrain.optim.device_codes import (
    MASTER_STREAM,
    UNSIGNED_STREAM,
    bits_of,
    constexpr,
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
from megatrain.store.codecs import BLOCK, Format

TILE_BLOCKS = 8  # blocks of one program
MAX_NUMEL = 1 << 30  # of one segment, so that indices in it fit in 32 bits

# Fields of the table (`optim/device_batch.py`).
OFFSET_DIVISOR = constexpr(device_batch.OFFSET_DIVISOR)
NUMEL, FIRST = constexpr(device_batch.NUMEL), constexpr(device_batch.FIRST)
KEY0, KEY1 = constexpr(device_batch.KEY0), constexpr(device_batch.KEY1)
FIRST_PROGRAM = constexpr(device_batch.FIRST_PROGRAM)
EMA_DECAY, EMA_SHARE = constexpr(device_batch.EMA_DECAY), constexpr(device_batch.EMA_SHARE)
SCALARS = constexpr(device_batch.SCALARS)


def is_interpreted() -> bool:
    """Whether Triton is told to run kernels in NumPy, on tensors of the CPU: for tests."""
    return triton is not None and triton.knobs.runtime.interpret


def knows(segment: Segment) -> bool:
    """Whether the kernel has the segment's rule. It has every format."""
    return segment.rule in _STEPS


def update_(batch: Batch, measure: bool) -> list[Tensor]:
    """Enqueue one step in place on the current stream, of segments with at most MAX_NUMEL parameters, but at least 1.

    Returns, with `measure`, for each segment (2,) fp64 on the device: the sum of squared weight changes, that of
    squared old weights. One that raises has changed nothing.
    """
    segment = batch.segments[0]
    assert all(0 < one.numel <= MAX_NUMEL for one in batch.segments)
    counts = [-(-one.numel // (TILE_BLOCKS * BLOCK)) for one in batch.segments]
    device = segment.grad.device
    sums = torch.empty(sum(counts), 2, dtype=torch.float64, device=device) if measure else None
    _update[(sum(counts),)](
        *batch.tensors,
        sums,
        batch.table(counts, device),
        ROWS=batch.num_rows,
        DIVISOR=batch.divisor,
        STEP=_STEPS[segment.rule],
        NUM_SCALARS=len(fields(segment.rule.scalars)),
        **_format_constants(segment.states[0].format if segment.states else None),
        BLOCKS=TILE_BLOCKS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return [] if sums is None else _totals(sums, counts)


def _totals(sums: Tensor, counts: list[int]) -> list[Tensor]:
    """Of each segment, from `counts` programs of it. The step is made by now: nothing may raise."""
    try:
        return [part.sum(dim=0) for part in sums.split(counts)]
    except torch.OutOfMemoryError:
        return [part.sum(dim=0) for part in sums.cpu().split(counts)]


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
def _store_sums(sums: tl.tensor, w: tl.tensor, old: tl.tensor, rows: tl.tensor, n: tl.tensor) -> None:
    change = tl.where(places(rows) < n, w - old, 0.0).to(tl.float64)
    old = old.to(tl.float64)
    tl.store(sums, tl.sum(change * change))
    tl.store(sums + 1, tl.sum(old * old))


# The table. row: pointer to the segment's first field; its next one is ROWS further.


@jit
def _whole(row: tl.tensor, FIELD: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    """The lower 32 bits."""
    return tl.load((row + FIELD * ROWS).to(tl.pointer_type(tl.int32), bitcast=True))


@jit
def _number(row: tl.tensor, FIELD: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    return float_of(_whole(row, FIELD, ROWS))


@jit
def _scalars(row: tl.tensor, NUM_SCALARS: tl.constexpr, ROWS: tl.constexpr) -> tl.tuple:
    scalars = ()
    for i in tl.static_range(NUM_SCALARS):
        scalars = scalars + (_number(row, SCALARS + i, ROWS),)
    return scalars


@jit
def _start(pointer: tl.tensor, row: tl.tensor, FIELD: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    """Where a tensor of the segment begins. bf16 comes as int16 from here on."""
    if pointer.dtype.element_ty == tl.bfloat16:
        pointer = pointer.to(tl.pointer_type(tl.int16), bitcast=True)
    return pointer + tl.multiple_of(tl.load(row + FIELD * ROWS), OFFSET_DIVISOR)


@jit
def _step(
    weights: tl.tensor,
    low: tl.tensor,
    grad: tl.tensor,
    m_codes: tl.tensor,
    m_scales: tl.tensor,
    v_codes: tl.tensor,
    v_scales: tl.tensor,
    ema: tl.tensor,
    sums: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    n: tl.tensor,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    NUM_SCALARS: tl.constexpr,
    BITS: tl.constexpr,
    SIGNED: tl.constexpr,
    UNSIGNED: tl.constexpr,
    SPAN: tl.constexpr,
    SHARE: tl.constexpr,
) -> None:
    """Of one tile: blocks `rows` of a segment. Tensors: the segment's. SIGNED, UNSIGNED: mantissa bits of the codes."""
    scalars = _scalars(row, NUM_SCALARS, ROWS)
    random = random_bits(rows, _whole(row, FIRST, ROWS), _whole(row, KEY0, ROWS), _whole(row, KEY1, ROWS))
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
        _store_sums(sums, w, old, rows, n)
    if ema is not None:
        average = load(ema, rows, n) * _number(row, EMA_DECAY, ROWS) + w * _number(row, EMA_SHARE, ROWS)
        store(ema, average, rows, n)
    if v_scales is not None:
        half = store_second(v_codes, v_scales, v, random * UNSIGNED_STREAM, rows, n, BITS, UNSIGNED)
    elif v_codes is not None:
        store_float(v_codes, v, random * UNSIGNED_STREAM, rows, n)
    if m_scales is not None:
        store_first(m_codes, m_scales, m, half, random, rows, n, BITS, SIGNED, SPAN)
    elif m_codes is not None:
        store_float(m_codes, m, random, rows, n)
    _store_weights(weights, low, w, random, rows, n)


@jit
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
    table: tl.tensor,
    ROWS: tl.constexpr,
    DIVISOR: tl.constexpr,
    STEP: tl.constexpr,
    NUM_SCALARS: tl.constexpr,
    BITS: tl.constexpr,
    SIGNED: tl.constexpr,
    UNSIGNED: tl.constexpr,
    SPAN: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Tensors: of the batch's first segment. sums: (programs, 2). table, ROWS, DIVISOR: of the batch."""
    program = tl.program_id(0)
    first_programs = tl.load(table + FIRST_PROGRAM * ROWS + tl.arange(0, ROWS))
    row = table + (tl.sum((first_programs <= program).to(tl.int32)) - 1)
    rows = (program - _whole(row, FIRST_PROGRAM, ROWS)) * BLOCKS + tl.arange(0, BLOCKS)
    n = tl.multiple_of(tl.load(row + NUMEL * ROWS).to(tl.int32), DIVISOR)
    weights = _start(weights, row, 0, ROWS)
    grad = _start(grad, row, 2, ROWS)
    if low is not None:
        low = _start(low, row, 1, ROWS)
    if m_codes is not None:
        m_codes = _start(m_codes, row, 3, ROWS)
    if m_scales is not None:
        m_scales = _start(m_scales, row, 4, ROWS)
    if v_codes is not None:
        v_codes = _start(v_codes, row, 5, ROWS)
    if v_scales is not None:
        v_scales = _start(v_scales, row, 6, ROWS)
    if ema is not None:
        ema = _start(ema, row, 7, ROWS)
    if sums is not None:
        sums = sums + 2 * program
    _step(
        weights, low, grad, m_codes, m_scales, v_codes, v_scales, ema, sums, row, rows, n, ROWS, STEP, NUM_SCALARS,
        BITS, SIGNED, UNSIGNED, SPAN, SHARE,
    )  # fmt: skip
