"""Compiled layers on a GPU: trained beside eager ones, whatever they keep; and what that costs and saves in a 7B layer.

For gpu_check.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from gpu_models import llama
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from megatrain.base.config import KEEPS, StreamOptions
from megatrain.execute.context import CallContext
from megatrain.execute.templates import Compiler

ROWS, LENGTH = 16, 1024
BUDGETS = (1.0, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.0)
TURNS = 15
Layer = Callable[..., torch.Tensor]
State = dict[str, torch.Tensor]


def check_compiled(trained: Callable[..., State]) -> str:
    """No fall-back to eager, and weights near those of eager bf16 training.

    trained: (make a model, precision, stream options, settings of mt.init) -> weights and moments after four steps.
    """
    truth = trained(llama, "bf16", StreamOptions())
    # Without gradients and with all kept, and one more each when the second length makes the shape dynamic.
    return _differs(trained, truth, {}, 4)


def check_kept_in_part(trained: Callable[..., State]) -> str:
    """The same of compiled layers that keep their input alone, their products, or all, in slots that are poisoned."""
    truth = trained(llama, "bf16", StreamOptions())
    kept = {f"model.layers.{number}": name for number, name in enumerate(tuple(KEEPS) * 2)}
    drawn, has_drawn = [], CallContext.has_drawn

    def noted(self: CallContext) -> bool:
        drawn.append(has_drawn(self))
        return drawn[-1]

    CallContext.has_drawn = noted
    try:
        problem = _differs(trained, truth, kept, 8)
    finally:
        CallContext.has_drawn = has_drawn
    # Four layers, four steps of four micro-batches, but for the very first call of a layer.
    is_kept = len(drawn) == 4 * (4 * 4 - 1) and not any(drawn)
    return problem or ("" if is_kept else f"{len(drawn)} calls kept a part, {sum(drawn)} of which drew random numbers")


def _differs(trained: Callable[..., State], truth: State, kept: dict[str, str], most_graphs: int) -> str:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = StreamOptions(kept_layers=kept, num_slots=1, poison=True)
    state = trained(llama, "bf16", options, compile=True)
    weights = [name for name in truth if name.startswith(("model.", "lm_head."))]
    worst = max(float((truth[n] - state[n]).norm() / truth[n].norm().clamp(min=1e-6)) for n in weights)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    is_right = worst < 0.05 and graphs <= most_graphs
    return "" if is_right else f"relative difference {worst:.3f}, {graphs} graphs"


def run_layer() -> bool:
    """Prints KB a token that one Qwen2-7B layer keeps, and TFLOPS of its forward and backward, by budget, and with a
    second forward in place of it. These are what `plan/cost.py` was fitted to."""
    config = Qwen2Config(hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4,
                         attn_implementation="sdpa")  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        layer = Qwen2DecoderLayer(config, 0).to(torch.bfloat16)
        x = torch.randn(ROWS, LENGTH, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        positions = Qwen2RotaryEmbedding(config)(x, torch.arange(LENGTH)[None])
    matrices = sum(parameter.numel() for parameter in layer.parameters() if parameter.dim() == 2)
    attention = 2 * config.hidden_size * ROWS * LENGTH * (LENGTH + 1) // 2
    flops = 6 * (matrices * ROWS * LENGTH + attention)
    grad = torch.randn_like(x)

    def compiled(budget: float) -> Layer:
        def run(x: torch.Tensor) -> torch.Tensor:
            result = layer(x, position_embeddings=positions)
            return result[0] if isinstance(result, tuple) else result

        torch._dynamo.reset()
        return torch.compile(run, backend=Compiler(budget), dynamic=False)

    print(torch.cuda.get_device_name(), f"torch {torch.__version__}", f"{ROWS} x {LENGTH} tokens", flush=True)
    for budget in BUDGETS:
        run = compiled(budget)
        seconds, kept_bytes = _timed(lambda run=run: run(x), layer, x, grad)
        kept_kb = kept_bytes / (ROWS * LENGTH) / 1e3
        print(f"budget {budget}: {kept_kb:.1f} KB a token, {flops / seconds / 1e12:.0f} TFLOPS", flush=True)
    run = compiled(1.0)

    def twice() -> torch.Tensor:
        with torch.no_grad():
            run(x)
        return run(x)

    seconds, _ = _timed(twice, layer, x, grad)
    print(f"a second forward: {flops / seconds / 1e12:.0f} TFLOPS", flush=True)
    return True


def _timed(forward: Callable[[], torch.Tensor], layer: Any, x: torch.Tensor, grad: torch.Tensor) -> tuple[float, int]:
    """Seconds of forward and backward, and bytes between them, but for the weights and the result."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    result.backward(grad)
    del result
    seconds = []
    for _ in range(TURNS):
        layer.zero_grad(set_to_none=True)
        x.grad = None
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        forward().backward(grad)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds[TURNS // 3 :]), sum(kept.values())
