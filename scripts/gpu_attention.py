"""Attention kernels on a GPU: rates of each at the shape of a 7B model, and that layers run on the one they were told.

For gpu_check.py.
"""

from __future__ import annotations

import copy
import os
import tempfile
from typing import Any

import torch
from gpu_running import run_checks
from torch.nn.attention import sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain as mt
from megatrain.api import stream
from megatrain.execute.attention import KERNELS
from megatrain.execute.engine import engine_of
from megatrain.probe.attention import MASKED_SAMPLES, AttentionShape, measure_attention
from megatrain.probe.facts import first_line
from megatrain.spec.model import Attention

QWEN_7B = Attention(num_heads=28, num_kv_heads=4, key_dim=128, value_dim=128, window=None)
TOKENS = ((16, 1024), (1, 8192), (1, 32768))
"""Rows, and tokens of each."""
SECONDS = 0.5
SAME_KERNEL = 0.02
"""Relative difference of all gradients in bf16 that rounding leaves, kernels being the same."""
OTHER_KERNEL = 0.05


def run_attention() -> bool:
    """Prints rates, then one line a check."""
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}", f"cuDNN {torch.backends.cudnn.version()}")
    for rows, length in TOKENS:
        for is_masked in (False, True):
            _print_rates(rows, length, is_masked)
    checks = {name: lambda name=name: check_kernel(name) for name in KERNELS}
    checks |= {"the fastest, planned": check_planned, "flex, packed rows": check_flex}
    return run_checks({f"attention: {name}": check for name, check in checks.items()})


def _print_rates(rows: int, length: int, is_masked: bool) -> None:
    shape = AttentionShape(attention=QWEN_7B, rows=rows, length=length, dtype=torch.bfloat16, is_masked=is_masked)
    print(f"== forward and backward, {shape}", flush=True)
    for rate in measure_attention(torch.device("cuda"), shape, SECONDS):
        print(f"{rate.key}: {rate.note if rate.value is None else f'{rate.value / 1e12:.0f} TFLOPS'}", flush=True)
    if is_masked:
        try:
            told = f"{_flex_rate(shape) / 1e12:.0f} TFLOPS"
        except Exception as error:  # noqa: BLE001 - a row that says why
            told = first_line(error)
        print(f"attention.masked.{rows}x{length}.flex: {told}", flush=True)
        torch.cuda.empty_cache()


def _flex_rate(shape: AttentionShape) -> float:
    """FLOPs a second of compiled flex attention over the same samples, as transformers runs it."""
    sample = shape.length // MASKED_SAMPLES
    mask = create_block_mask(
        lambda _, __, query, key: (query >= key) & (query // sample == key // sample),
        shape.rows, None, shape.length, shape.length, device="cuda",
    )  # fmt: skip
    heads = (QWEN_7B.num_heads, QWEN_7B.num_kv_heads, QWEN_7B.num_kv_heads)
    inputs = [
        torch.randn(shape.rows, shape.length, n, QWEN_7B.key_dim, device="cuda", dtype=shape.dtype)
        .transpose(1, 2).requires_grad_() for n in heads
    ]  # fmt: skip
    gradient = torch.randn_like(inputs[0])
    compiled = torch.compile(flex_attention, dynamic=False)

    def call() -> None:
        torch.autograd.grad(compiled(*inputs, block_mask=mask, enable_gqa=True), inputs, gradient)

    times = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return shape.flops / sorted(times[2:])[3]


def model_of(implementation: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
                         num_key_value_heads=2, vocab_size=1000, attn_implementation=implementation)  # fmt: skip
    return LlamaForCausalLM(config).bfloat16()


def batch(*, is_packed: bool = False) -> dict[str, Any]:
    ids = torch.randint(0, 1000, (2, 512), generator=torch.Generator().manual_seed(3)).cuda()
    packed = {"position_ids": torch.arange(256, device="cuda").repeat(2, 2)} if is_packed else {}
    return {"input_ids": ids, "labels": ids, "use_cache": False, **packed}


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Of all gradients, relative."""
    squares = [sum(float(value.float().cpu().square().sum()) for value in of) for of in (
        [left[name].float().cpu() - right[name].float().cpu() for name in left], left.values())]  # fmt: skip
    return (squares[0] / squares[1]) ** 0.5


def plain_gradients(model: torch.nn.Module, name: str, **kind: bool) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model).cuda().train()
    with sdpa_kernel(KERNELS[name]):
        model(**batch(**kind)).loss.backward()
    return {key: parameter.grad for key, parameter in model.named_parameters()}


def streamed_gradients(model: torch.nn.Module, attention: str | None, **kind: bool) -> dict[str, torch.Tensor]:
    mt.init(hbm_home_gb=0, attention=attention)
    model = mt.stream(model).train()
    mt.accumulate(model, [batch(**kind)])
    found = {name: gradient.clone() for name, gradient in mt.named_gradients(model)}
    engine_of(model).close()
    return found


def check_kernel(name: str) -> str:
    """Streamed layers compute with it what plain ones do."""
    model = model_of("sdpa")
    if name == "efficient":
        model.config.num_key_value_heads = model.config.num_attention_heads  # it takes no shared heads
        model = LlamaForCausalLM(model.config).bfloat16()
    found = difference(plain_gradients(model, name), streamed_gradients(model, name))
    return "" if found < SAME_KERNEL else f"gradients differ by {found:.3f}"


def check_planned() -> str:
    """A run whose work is known measures once, takes the fastest, and says so."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MEGATRAIN_CACHE"] = folder
        try:
            mt.init()
            orders = []
            for _ in range(2):
                model = stream(model_of("sdpa"), workload=mt.Workload(num_sequences=8, length=1024, rows=4))
                orders.append(engine_of(model).attention.order)
                engine_of(model).close()
            has_kept = os.path.exists(os.path.join(folder, "attention.json"))
        finally:
            del os.environ["MEGATRAIN_CACHE"]
    return "" if orders[0] and orders[0] == orders[1] and has_kept else f"chosen were {orders}, kept: {has_kept}"


def check_flex() -> str:
    """transformers' flex attention streams, and keeps packed samples apart as the masks of sdpa do."""
    with_masks, with_flex = model_of("sdpa"), model_of("flex_attention")
    expected = plain_gradients(with_masks, "math", is_packed=True)
    found = difference(expected, streamed_gradients(with_flex, None, is_packed=True))
    return "" if found < OTHER_KERNEL else f"gradients differ by {found:.3f}"
