"""How fast each kernel of PyTorch's scaled_dot_product_attention is at a shape, forward and backward together.

Rule: the call is the one that transformers makes: heads behind one another in memory, fewer heads of keys as they are
where there is no mask and repeated where there is one, a mask of booleans. And none is fast that is wrong: results are
compared with those of the first kernel.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatrain.execute.attention import KERNELS, LABELS, ON_CPU
from megatrain.plan.cost import ATTENTION_BACKWARD
from megatrain.probe.facts import FLOPS_PER_SECOND, Rate, attempt
from megatrain.probe.timing import Effort, median_seconds
from megatrain.spec.model import Attention

MASKED_SAMPLES = 4
"""Samples that share a row behind a mask."""
LARGEST_DIFFERENCE = 0.05
"""Of results, relative. Rounding in bf16 leaves less than a hundredth (measured: flash against math on the CPU, 128 to
2048 tokens, 0.002 to 0.006)."""
NUM_KERNELS = len(KERNELS)
NUM_CALLS = 4
"""Of one timed round on a GPU."""


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """One call of a layer in training."""

    attention: Attention
    rows: int
    """Sequences."""
    length: int
    """Tokens of each."""
    dtype: torch.dtype
    is_masked: bool = False
    """With a mask that keeps samples of a row apart, or padding away; else causal."""

    @property
    def flops(self) -> float:
        """Of forward and backward: pairs of tokens that see each other."""
        num_samples = MASKED_SAMPLES if self.is_masked and self.length >= MASKED_SAMPLES else 1
        num_pairs = self.rows * num_samples * self.attention.num_pairs(self.length // num_samples)
        return (1 + ATTENTION_BACKWARD) * 2 * self.attention.width * num_pairs

    def __str__(self) -> str:
        of = self.attention
        sizes = f"{of.key_dim}" if of.key_dim == of.value_dim else f"{of.key_dim} and {of.value_dim}"
        kind = "masked" if self.is_masked else "causal"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{of.num_heads}/{of.num_kv_heads} heads of {sizes}, {self.rows} x {self.length} tokens, {kind}, {dtype}"


def kernels_of(device: torch.device) -> tuple[str, ...]:
    """Names of those that PyTorch offers there."""
    return tuple(KERNELS) if device.type == "cuda" else ON_CPU


def measure_attention(device: torch.device, shape: AttentionShape, seconds: float) -> list[Rate]:
    """A row for each kernel, with the reason where it cannot take the call. seconds: for each, about."""
    rates: list[Rate] = []
    truth: list[Tensor] = []
    for name in kernels_of(device):
        measure = partial(_flops_per_second, device, shape, name, seconds, truth)
        label = f"attention, {shape.rows} x {shape.length}, {LABELS[name]}"
        rates.append(attempt(f"{key_of(shape)}.{name}", label, FLOPS_PER_SECOND, measure, str(shape)))
        _give_back(device)
    return rates


def measure_common_attention(device: torch.device, effort: Effort) -> list[Rate]:
    """At common shapes: heads of a 7B model, in bf16."""
    common = Attention(num_heads=28, num_kv_heads=4, key_dim=128, value_dim=128, window=None)
    rates = []
    for rows, length in effort.attention_tokens if device.type == "cuda" else effort.cpu_attention_tokens:
        shape = AttentionShape(attention=common, rows=rows, length=length, dtype=torch.bfloat16)
        rates += measure_attention(device, shape, effort.seconds / NUM_KERNELS)
    return rates


def best_by_length(rates: Iterable[Rate]) -> dict[str, float]:
    """Tokens of a sequence -> FLOPs a second of the fastest kernel, as plans use them."""
    best: dict[str, float] = {}
    for rate in rates:
        if rate.key.startswith("attention.causal.") and rate.value:
            length = rate.key.split(".")[2].partition("x")[2]
            best[length] = max(best.get(length, 0.0), rate.value)
    return best


def key_of(shape: AttentionShape) -> str:
    """Of its rates: "attention.causal.1x8192"."""
    return f"attention.{'masked' if shape.is_masked else 'causal'}.{shape.rows}x{shape.length}"


def check_kernel(device: torch.device, shape: AttentionShape, name: str) -> None:
    """One forward and backward. Raises what PyTorch raises where the kernel cannot take the call."""
    _training_call(device, shape, name)()
    _give_back(device)


def _flops_per_second(
    device: torch.device, shape: AttentionShape, name: str, seconds: float, truth: list[Tensor]
) -> float:
    """truth: results of the first kernel, which leaves them there."""
    call = _training_call(device, shape, name)
    results = call()
    if truth:
        _compare(results, truth)
    else:
        truth += results
    del results
    return shape.flops / (_device_seconds(call, seconds) if device.type == "cuda" else median_seconds(call, seconds))


def _compare(results: Sequence[Tensor], truth: Sequence[Tensor]) -> None:
    """Raise RuntimeError where they differ by more than rounding."""
    for result, expected in zip(results, truth, strict=True):
        difference = float((result - expected).float().norm() / expected.float().norm())
        if not difference <= LARGEST_DIFFERENCE:
            raise RuntimeError(f"its results differ from those of another kernel by {difference:.2g} of their size")


def _training_call(device: torch.device, shape: AttentionShape, name: str) -> Callable[[], Sequence[Tensor]]:
    """Returns output and gradients, of the same inputs each time."""
    of, generator = shape.attention, torch.Generator(device).manual_seed(0)

    def make(num_heads: int, dim: int) -> Tensor:
        """(rows, heads, length, dim), with the heads of a token next to each other in memory."""
        size = (shape.rows, shape.length, num_heads, dim)
        flat = torch.randn(size, generator=generator, device=device, dtype=shape.dtype)
        return flat.transpose(1, 2)

    query, gradient = make(of.num_heads, of.key_dim), make(of.num_heads, of.value_dim)
    keys, values = make(of.num_kv_heads, of.key_dim), make(of.num_kv_heads, of.value_dim)
    mask = _mask(device, shape) if shape.is_masked else None
    shares_heads = of.num_heads != of.num_kv_heads
    # As transformers' `use_gqa_in_sdpa` says.
    is_gqa = shares_heads and mask is None and of.key_dim == of.value_dim <= 256
    if shares_heads and not is_gqa:
        keys, values = (one.repeat_interleave(of.num_heads // of.num_kv_heads, dim=1) for one in (keys, values))
    inputs = [tensor.requires_grad_() for tensor in (query, keys, values)]

    def call() -> Sequence[Tensor]:
        with sdpa_kernel(KERNELS[name]):
            output = scaled_dot_product_attention(*inputs, attn_mask=mask, is_causal=mask is None, enable_gqa=is_gqa)
        return output.detach(), *torch.autograd.grad(output, inputs, gradient)

    return call


def _mask(device: torch.device, shape: AttentionShape) -> Tensor:
    """(rows, 1, length, length) of booleans: causal within each of the samples of a row."""
    positions = torch.arange(shape.length, device=device)
    samples = positions // max(1, shape.length // MASKED_SAMPLES)
    one = (positions[:, None] >= positions) & (samples[:, None] == samples)
    return one.expand(shape.rows, 1, -1, -1).contiguous()


def _device_seconds(call: Callable[[], object], seconds: float) -> float:
    """Of one call, by the device's own clock: the median of the later rounds, when an idle one has woken up."""

    def rounds() -> Iterator[float]:
        total, last = 0.0, 0.0
        while not total or total + last < seconds:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(NUM_CALLS):
                call()
            end.record()
            end.synchronize()
            last = begin.elapsed_time(end) * 1e-3
            total += last
            yield last / NUM_CALLS

    call()  # the first one may choose, load or compile
    times = list(rounds())
    return statistics.median(times[len(times) // 2 :])


def _give_back(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
