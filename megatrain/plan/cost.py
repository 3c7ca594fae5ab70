"""Seconds and device bytes of a layer's work. Pure.

A layer's time is a sum: matrix products at the machine's rate, attention at its own or at a share of that, numbers that
pass through device memory at its bandwidth, and a constant for launching its kernels. The bytes that pass are a
multiple of the activations that a layer makes; the multiples were fitted to one decoder layer of Qwen2-7B, 16 x 1024
tokens on an H200 (forward 581, forward and backward 538 TFLOPS eager; 715 and 626 compiled; 233 KB of activations a
token eager, 159 compiled), the constant to whole steps of 3B and 7B (docs/performance.md). How many they are eager is
counted (`spec/kept.py`), and compiled is worked out from widths.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatrain.plan.machine import Machine
from megatrain.plan.workload import Workload
from megatrain.spec.homes import HomePlan
from megatrain.spec.layout import wire_bytes
from megatrain.spec.model import LayerSpec, ModelSpec

ATTENTION_SHARE = 0.5
"""Of the rate of matrix products, for causal attention, where the machine has no rate for it (estimated)."""
ATTENTION_BACKWARD = 2.5
"""Its backward in forwards: fused kernels compute the scores again."""

KEPT_PER_OUTPUT = 2.0
KEPT_PER_HIDDEN = 5.5
"""Numbers (of the compute dtype) that the backward of a layer keeps, a token, where they could not be counted: so many
for each output of its matrix products, and for each element of the hidden state. Qwen2-7B: 238 KB in bf16, against 225
counted and 233 measured."""
COMPILED_ACTIVATIONS = 0.68
"""Of these numbers, of a compiled layer, which keeps none of the casts that others count."""
PRODUCTS_PASSES = 0.55
"""Activations that pass through device memory in a backward that finds products alone and computes the rest again."""
LAST_PRODUCT = 0.28
"""Of a forward's products, that of its last one, of which no backward needs the result. Both as measured: 629 TFLOPS
of forward and backward with the products kept, 514 with the input alone, against 634 with all and 484 with a second
forward (16 x 1024 tokens; 107, 7 and 159 KB kept a token)."""

WHOLE_PER_HIDDEN = 4.0
"""Numbers that a block keeps for all tokens where its other insides are those of a tile, for each element of the
hidden state: its input, what comes in between its halves, and both behind their norms. Beside them queries, keys,
values and what attention makes of them. Qwen2-7B: 45.3 KB in bf16; counted on a CPU 45.7."""
PASSING_PER_HIDDEN = 2.0
"""The same on top while the block is at work: a gradient (counted on a CPU: 1 for each), and what a kernel of
attention's backward sums in fp32 (estimated)."""
TRIED_TILES = 2
"""Run whole once, to see that tiles are right (`execute/token_wise.py`)."""
TILE_TRAFFIC_BYTES = 12
"""A parameter and tile: its gradient written, read, and added to the sum in fp32."""

FORWARD_PASSES = {False: 3.4, True: 0.4}
BACKWARD_PASSES = {False: 10.2, True: 5.7}
"""Activations that pass through device memory beside matrix products, in layers' activations; by `compile`."""

FORWARD_LAUNCH_SECONDS = 0.3e-3
BACKWARD_LAUNCH_SECONDS = 0.9e-3
"""A layer and micro-batch, on top of everything; the backward with its recomputation."""
HOST_FORWARD_SECONDS = 2.6e-3
HOST_BACKWARD_SECONDS = 2.0e-3
"""A block and micro-batch at least: what the host takes to launch its work. Measured on a 3B model, compiled, keeping
all it computes, in 8 micro-batches of 1 x 1024: 1.32 s a step for 36 blocks. With more tokens the device binds."""

STEP_SECONDS = 0.05
"""Of the compute lane, a step: norms, the call of the optimizer, the next batches; fitted as the launches were."""

LOGIT_TRAFFIC_BYTES = 36
"""That pass through device memory for each logit: cast, softmax, loss, and the way back."""
LOGIT_BYTES = 18
"""Held at once for each logit: bf16, fp32, its log-softmax, two gradients in fp32."""
EARLIER_LOGIT_BYTES = 6
"""The micro-batch before, whose outputs live until the next ones take their place."""

PIECE_TOKENS = 2048
"""Of logits in pieces, at least. Each piece's gradient of the weights is added to their sum: 12 bytes a parameter that
pass through memory (bf16 written and read, fp32 read and written), for 6 FLOPs a token of the piece. On an H200 (760
TFLOPS; 4.8 TB/s by its data sheet) that takes a sixth of the time of the products at 2048 tokens, and as long as these
at 316 (estimated). Fewer save little: the sum and a piece's gradient are 6 bytes a parameter, those of a vocabulary of
152k and a width of 3584 as much as the logits of 1200 tokens at `LOGIT_BYTES`."""
PIECE_LOGITS = 1 << 26
"""Where the vocabulary is so small that these are more tokens than that: 1.2 GB at `LOGIT_BYTES`."""
COMPILED_PIECE = 4
"""Times as many tokens has a piece whose loss is compiled. It holds a logit once, in the compute dtype, and then its
gradient in that place: 2.5 GB of a vocabulary of 152k in bf16, against 5.6 GB of a piece that is not compiled. The sum
of the gradients then takes a fortieth of the time of the products (estimated, as above)."""
COMPILED_LOGIT_PASSES = 4
"""In which these numbers pass through device memory, beside the products: read for maximum, sum and gradient, and
written as that."""
COMPILED_SUM_BYTES = 8
"""Of the gradients' sum, read and written, a parameter and piece."""

MERGED_TOKENS = 16384
"""Of a micro-batch that several are merged into, at most, where nothing was planned: 16 x 1024, with which the layer
above was measured."""

LONG_ROW_TOKENS = 1 << 15
"""Blocks of longer rows run in tiles by themselves: 7.8 GB of activations in one layer of Qwen2-7B."""
TILE_TOKENS = 4096
"""Of a tile, in all rows of a micro-batch. A tile's gradients of the weights are added to their sums as those of a
piece of logits are; at 4096 tokens that takes a twelfth of the time of the products (estimated)."""

ALLOCATOR_GAPS = 1.03
"""Reserved for a byte of the layer at work: what the allocator cannot use again (measured 0-3 %)."""

SUM_TRAFFIC_BYTES = 10
"""A parameter and micro-batch: a bf16 gradient added to its fp32 sum."""


@dataclass(frozen=True, kw_only=True)
class VisitCost:
    """Seconds of the compute lane for all micro-batches of a step."""

    forward: float
    backward: float
    """With recomputation; 0 for a head, whose backward is in the same visit."""
    kept: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """The same of a layer that keeps something of what it computes inside, by what (`base/config.py:KEEPS`)."""

    def seconds(self, keeps: str | None) -> tuple[float, float]:
        """Forward and backward. keeps: None for nothing."""
        return (self.forward, self.backward) if keeps is None else self.kept[keeps]


def visit_cost(
    machine: Machine, spec: ModelSpec, layer: LayerSpec, workload: Workload, rows: int, *, compiled: bool
) -> VisitCost:
    """rows: sequences of a micro-batch."""
    home, tokens = spec.homes[layer.home], workload.num_tokens
    num_micro = -(-workload.num_sequences // rows)
    sums = num_micro * SUM_TRAFFIC_BYTES * home.numel / machine.hbm_bytes_per_second
    if layer.kind == "embedding":
        looked_up = 4 * compute_bytes(spec) * spec.hidden_size * tokens / machine.hbm_bytes_per_second
        return VisitCost(forward=looked_up, backward=looked_up + sums)
    rate = machine.matmul_flops_per_second if spec.formats.precision == "bf16" else machine.fp32_flops_per_second
    products = 2 * layer.matrix_parameters * tokens / rate
    weights = wire_bytes(home.fields) / machine.hbm_bytes_per_second
    if layer.kind == "head":
        around = _around_products(spec, layer, workload, rows, compiled=compiled) / machine.hbm_bytes_per_second
        launches = num_micro * _num_pieces(spec, layer, rows * workload.length, compiled=compiled)
        launches *= (FORWARD_LAUNCH_SECONDS + BACKWARD_LAUNCH_SECONDS) / 2
        return VisitCost(forward=3 * products + launches + around, backward=0.0)
    weights *= num_micro
    attention = 0.0
    if layer.attention is not None:
        pairs = workload.num_sequences * layer.attention.num_pairs(workload.length)
        attention = 2 * layer.attention.width * pairs / attention_rate(machine, spec, workload.length, rate)
    made = _bytes_by_width(spec, layer) if compiled else activation_bytes(spec, layer, workload.length, compiled=False)
    passing = made * tokens / machine.hbm_bytes_per_second
    forward = products + attention + weights + FORWARD_PASSES[compiled] * passing
    backward = 2 * products + ATTENTION_BACKWARD * attention + 2 * weights + BACKWARD_PASSES[compiled] * passing
    if tile := tile_of(spec, layer, rows, workload.length):
        # Computed once more, a tile at a time, and each tile's gradients added up.
        parameters, num_tiles = tiled_parameters(spec, layer), num_micro * -(-workload.length // tile)
        backward += 2 * parameters * tokens / rate + FORWARD_PASSES[False] * passing
        sums += num_tiles * TILE_TRAFFIC_BYTES * parameters / machine.hbm_bytes_per_second
    again = forward + backward + sums + num_micro * BACKWARD_LAUNCH_SECONDS
    once = backward + sums + num_micro * (BACKWARD_LAUNCH_SECONDS - FORWARD_LAUNCH_SECONDS)
    forward += num_micro * FORWARD_LAUNCH_SECONDS
    host_forward, host_backward = num_micro * HOST_FORWARD_SECONDS, num_micro * HOST_BACKWARD_SECONDS
    again, once = max(again, host_forward + host_backward), max(once, host_backward)
    forward = max(forward, host_forward)
    num_bytes = kept_bytes(spec, layer, workload.length, compiled=compiled)
    # Compiled code that keeps nothing writes nothing.
    written = {
        name: num * tokens / machine.hbm_bytes_per_second if compiled else 0.0 for name, num in num_bytes.items()
    }
    kept = {"all": (forward + written["all"], once)}
    if len(written) > 1:
        kept["products"] = (forward + written["products"], once + PRODUCTS_PASSES * passing)
        kept["input"] = (forward, again - LAST_PRODUCT * products)
    return VisitCost(forward=forward, backward=again, kept=kept)


def _around_products(spec: ModelSpec, layer: LayerSpec, workload: Workload, rows: int, *, compiled: bool) -> float:
    """Bytes that pass through device memory around a head's matrix products, in all micro-batches."""
    home, num_micro = spec.homes[layer.home], -(-workload.num_sequences // rows)
    micro_tokens = rows * workload.length
    num_logits = spec.vocabulary_size * workload.num_tokens
    num_pieces = _num_pieces(spec, layer, micro_tokens, compiled=compiled)
    if not is_in_pieces(spec, layer, micro_tokens):
        sums, weights, of_logit = SUM_TRAFFIC_BYTES, 3, LOGIT_TRAFFIC_BYTES
    elif compiled:
        # No gradient of a piece exists: the sum is filled with zeros first.
        sums = num_pieces * COMPILED_SUM_BYTES + 4 + 2 * SUM_TRAFFIC_BYTES
        weights, of_logit = 2 * num_pieces, COMPILED_LOGIT_PASSES * compute_bytes(spec)
    else:
        # Each piece adds to a sum of the micro-batch; that is scaled, and added to the sum of the pass.
        sums, weights, of_logit = (num_pieces + 2) * SUM_TRAFFIC_BYTES, 3 * num_pieces, LOGIT_TRAFFIC_BYTES
    return num_micro * (sums * home.numel + weights * wire_bytes(home.fields)) + of_logit * num_logits


def attention_rate(machine: Machine, spec: ModelSpec, length: int, rate: float) -> float:
    """FLOPs a second of attention over sequences of that length: as it was measured at the nearest one. rate: of
    matrix products."""
    known = machine.attention_flops_per_second if spec.formats.precision == "bf16" else {}
    nearest = min(known, key=lambda tokens: abs(math.log(int(tokens) / length)), default=None)
    return ATTENTION_SHARE * rate if nearest is None else known[nearest]


def tokens_at_once(vocabulary: int, *, compiled: bool) -> int:
    """Of a micro-batch, whose logits are made in one piece. A micro-batch of no more than these (not compiled) has its
    logits whole, compiled or not."""
    tokens = max(PIECE_TOKENS, PIECE_LOGITS // vocabulary)
    return COMPILED_PIECE * tokens if compiled else tokens


def tokens_of_tile(setting: int | bool | None, rows: int, length: int) -> int | None:
    """Of a row, in one tile of a micro-batch of `rows` x `length` tokens; None: its blocks run whole.

    setting: `Config.tile_tokens`.
    """
    if setting is False:
        return None
    is_on = length > LONG_ROW_TOKENS if setting is None else rows * length > setting
    tile = max(1, (TILE_TOKENS if setting is None else setting) // rows)
    return tile if is_on and length > tile else None


def is_in_pieces(spec: ModelSpec, layer: LayerSpec, tokens: int) -> bool:
    """Whether a head makes the logits of a micro-batch in pieces (be it one); else whole, with a graph of their own."""
    is_plain = layer.has_plain_logits and spec.vocabulary_size > 0
    return is_plain and tokens > tokens_at_once(spec.vocabulary_size, compiled=False)


def _num_pieces(spec: ModelSpec, layer: LayerSpec, tokens: int, *, compiled: bool) -> int:
    """Of the logits of a micro-batch; 1 where they are whole."""
    if not is_in_pieces(spec, layer, tokens):
        return 1
    return -(-tokens // tokens_at_once(spec.vocabulary_size, compiled=compiled))


def compute_bytes(spec: ModelSpec) -> int:
    """Of a number that the device computes with."""
    return 2 if spec.formats.precision == "bf16" else 4


def activation_bytes(spec: ModelSpec, layer: LayerSpec, length: int, *, compiled: bool) -> float:
    """Kept inside a layer for its backward, a token of rows of `length`."""
    if compiled:
        return COMPILED_ACTIVATIONS * _bytes_by_width(spec, layer)
    return _bytes_by_width(spec, layer) if layer.kept is None else layer.kept.per_token(length)


def _bytes_by_width(spec: ModelSpec, layer: LayerSpec) -> float:
    """Of a layer's activations, a token."""
    return compute_bytes(spec) * (KEPT_PER_OUTPUT * layer.output_width + KEPT_PER_HIDDEN * spec.hidden_size)


def kept_bytes(
    spec: ModelSpec, layer: LayerSpec, length: int, *, compiled: bool, is_tiled: bool = False
) -> dict[str, float]:
    """Of a block that keeps something of what it computes inside, a token of rows of `length`; by what it can keep. Not
    compiled, or where it draws random numbers, which a backward that computes again would not draw once more: all. In
    tiles, what is there for all tokens."""
    whole = activation_bytes(spec, layer, length, compiled=compiled)
    kept = {"all": whole_bytes(spec, layer, length) if is_tiled else whole}
    if compiled and not layer.has_dropout:
        # Nobody needs what the last product gives, but the layer's input.
        attention = layer.attention
        mixed = spec.hidden_size if attention is None else attention.num_heads * attention.value_dim
        kept["products"] = compute_bytes(spec) * (layer.output_width + mixed)
        kept["input"] = compute_bytes(spec) * spec.hidden_size
    return kept


def whole_bytes(spec: ModelSpec, layer: LayerSpec, length: int) -> float:
    """Kept for its backward around the tiles of a layer that runs in them, a token of rows of `length`."""
    assert layer.attention is not None, "a layer that may run in tiles"
    of_pairs = [activation_bytes(spec, layer, tokens, compiled=False) for tokens in (0, length)]
    whole = compute_bytes(spec) * (WHOLE_PER_HIDDEN * spec.hidden_size + layer.attention.whole_width)
    return whole + of_pairs[1] - of_pairs[0]


def tiled_parameters(spec: ModelSpec, layer: LayerSpec) -> int:
    """Of the matrix products in tiles: all but those from and to what attention works with."""
    assert layer.attention is not None, "a layer that may run in tiles"
    return max(0, layer.matrix_parameters - spec.hidden_size * layer.attention.whole_width)


def tile_of(spec: ModelSpec, layer: LayerSpec, rows: int, length: int) -> int | None:
    """Tokens of a row in one tile of this layer; None: it runs whole."""
    return tokens_of_tile(spec.tile_tokens, rows, length) if layer.may_tile else None


def inside_bytes(
    spec: ModelSpec,
    layer: LayerSpec,
    keeps: str,
    num_tokens: int,
    length: int,
    *,
    compiled: bool,
    is_tiled: bool = False,
) -> int:
    """Device memory of what a block keeps of so many tokens in rows of `length`, its input among it."""
    gaps = 1.0 if keeps == "input" else ALLOCATOR_GAPS
    return int(gaps * num_tokens * kept_bytes(spec, layer, length, compiled=compiled, is_tiled=is_tiled)[keeps])


def working_bytes(spec: ModelSpec, layer: LayerSpec, workload: Workload, rows: int, *, compiled: bool) -> int:
    """Device memory of a layer at work on one micro-batch: its activations, those of some tiles and what is there for
    all tokens, or its logits and what is summed over their pieces."""
    tokens = rows * workload.length
    if layer.kind == "head" and is_in_pieces(spec, layer, tokens):
        # The longest piece that there is, so that more tokens never take less.
        piece_tokens = min(tokens, tokens_at_once(spec.vocabulary_size, compiled=compiled))
        of_logit = compute_bytes(spec) if compiled else LOGIT_BYTES
        logit_bytes = of_logit * piece_tokens * spec.vocabulary_size
        # Gradients: of the weights, the fp32 sum and, not compiled, a piece's; of the hidden states.
        gradient_bytes = (4 + (0 if compiled else compute_bytes(spec))) * layer.matrix_parameters
        gradient_bytes += compute_bytes(spec) * tokens * spec.hidden_size
        return int(ALLOCATOR_GAPS * (logit_bytes + gradient_bytes))
    if layer.kind == "head":
        is_one = rows >= workload.num_sequences
        logit_bytes = LOGIT_BYTES + (0 if is_one else EARLIER_LOGIT_BYTES)
        return int(ALLOCATOR_GAPS * tokens * spec.vocabulary_size * logit_bytes)
    numbers = activation_bytes(spec, layer, workload.length, compiled=compiled) if layer.kind == "block" else 0
    if tile := tile_of(spec, layer, rows, workload.length):
        passing = compute_bytes(spec) * PASSING_PER_HIDDEN * spec.hidden_size
        numbers = activation_bytes(spec, layer, 0, compiled=compiled)
        of_tiles = min(tokens, TRIED_TILES * rows * tile) * numbers + 4 * tiled_parameters(spec, layer)
        return int(ALLOCATOR_GAPS * (tokens * (whole_bytes(spec, layer, workload.length) + passing) + of_tiles))
    return int(ALLOCATOR_GAPS * tokens * numbers)


def mergeable_tokens(spec: ModelSpec, num_bytes: int, *, compiled: bool) -> int:
    """Of a micro-batch that several are merged into: `MERGED_TOKENS`, or the half of it and so on, so that the layer
    that takes most at work on them takes no more than `num_bytes`. 0: not even one token has room."""
    tokens = MERGED_TOKENS
    while tokens:
        work = Workload(num_sequences=2, length=tokens, rows=1)
        if max(working_bytes(spec, layer, work, 1, compiled=compiled) for layer in spec.layers) <= num_bytes:
            break
        tokens //= 2
    return tokens


def device_update_seconds(machine: Machine, sizes: dict[str, int]) -> float:
    """Of a home whose state lies in device memory: all read and written, the gradients read.

    sizes: bytes by part.
    """
    return (
        2 * (sizes["weights"] + sizes["low"] + sizes["moments"]) + sizes["gradients"]
    ) / machine.hbm_bytes_per_second


def cpu_update_seconds(machine: Machine, home: HomePlan, moments: str) -> float:
    """With all cores."""
    return machine.update_ns_per_parameter[moments] * 1e-9 * home.numel
