"""Compiled head and loss in pieces on a GPU: near whole logits, in the memory that is planned, its sum in fp32.

For gpu_check.py.
"""

from __future__ import annotations

import torch
from gpu_models import llama
from torch.nn import functional

import megatrain as mt
from megatrain.execute.engine import engine_of
from megatrain.execute.loss_code import LossCode
from megatrain.execute.loss_in_pieces import LossRule
from megatrain.execute.products import add_product_
from megatrain.execute.steps import Step
from megatrain.plan import cost

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}
"""Of a gradient, as a share of its norm: other orders of sums, and one rounding to bf16 more or less in each layer."""
CAPPED = (Step(torch.Tensor.float, (), {}), Step(torch.Tensor.div, (30.0,), {}), Step(torch.tanh, (), {}),
          Step(torch.Tensor.mul, (30.0,), {}))  # fmt: skip


def check_sums() -> str:
    """A product of bf16 is added to a sum in fp32 without a rounding to bf16, and without memory of its own."""
    tokens, vocabulary, width = 256, 40_000, 1024
    a, b = (torch.randn(tokens, size, device="cuda").bfloat16() for size in (vocabulary, width))
    total = torch.randn(vocabulary, width, device="cuda")
    size = (total.abs() + a.T.float().abs() @ b.float().abs()).double()
    expected = total.double() + a.T.double() @ b.double()
    add_product_(torch.zeros_like(total), a.T, b)  # cuBLAS allocates its workspace
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    add_product_(total, a.T, b)
    on_top = torch.cuda.max_memory_allocated() - before
    # Products of bf16 are exact in fp32, so each of their sums rounds once a term: two units, where a core truncates.
    worst = float(((total.double() - expected).abs() / size).max()) / (tokens * 2.0**-22)
    if worst > 1 or on_top > 0:
        return f"{worst:.2f} of the error that sums in fp32 may have, {on_top >> 20} MiB on top"
    return ""


def check_loss_code() -> str:
    """Loss and gradient of bf16 logits beside eager's, and no memory of the size of the logits."""
    tokens, vocabulary = 4096, 50_304
    for steps, smoothing in (((), 0.0), (CAPPED, 0.0), ((), 0.1)):
        rule = LossRule(steps=steps, reduction="sum", ignored=-100, smoothing=smoothing, dtype=torch.float32)
        code = LossCode(rule, f"checked{len(steps)}_{smoothing}")
        logits = (3 * torch.randn(tokens, vocabulary, device="cuda")).bfloat16().requires_grad_()
        targets = torch.randint(0, vocabulary, (tokens,), device="cuda")
        targets[::7] = -100
        scale = torch.rand(tokens, device="cuda")
        after = logits
        for step in steps:
            after = step(after)
        expected = functional.cross_entropy(after.float(), targets, reduction="none", label_smoothing=smoothing)
        (right,) = torch.autograd.grad(expected, logits, scale)
        del after
        given = [logits.detach().clone() for _ in range(2)]
        with torch.no_grad():
            code.with_gradient_(given[0], targets, scale)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            losses = code.with_gradient_(given[1], targets, scale)
        on_top = torch.cuda.max_memory_allocated() - before
        if on_top > given[1].nbytes / 20:
            logit_mib = given[1].nbytes >> 20
            return f"{len(steps)} steps, smoothing {smoothing}: {on_top >> 20} MiB for {logit_mib} of logits"
        torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-4)
        # Both round once to 8 bits, beside a tie to different sides; before that both are off by some units of fp32.
        torch.testing.assert_close(given[1], right, rtol=2.0**-7, atol=1e-7)
    return ""


def check_compiled_pieces(precision: str, *, is_tied: bool) -> str:
    """Losses and gradients near those of whole logits, in several pieces and one; code for losses and for gradients
    alone, whatever the lengths. The blocks are compiled in both."""
    found, sizes = [], (cost.PIECE_TOKENS, cost.PIECE_LOGITS, cost.COMPILED_PIECE)
    generator = torch.Generator().manual_seed(3)
    made = [torch.randint(0, 1000, (2, length), generator=generator).cuda() for length in (70, 120, 33, 96)]
    data = [{"input_ids": ids, "labels": ids, "use_cache": False} for ids in made]
    cost.PIECE_TOKENS, cost.PIECE_LOGITS, cost.COMPILED_PIECE = 32, 0, 2
    try:
        for in_pieces in (False, True):
            torch.manual_seed(0)
            built = llama()
            if is_tied:
                built.lm_head.weight = built.model.embed_tokens.weight
                built.config.tie_word_embeddings = True
            mt.init(precision=precision, compile=True, grad_dtype="fp32", logits_in_pieces=in_pieces)
            model = mt.stream(built).train()
            losses = mt.accumulate(model, data)
            gradients = {name: gradient.float() for name, gradient in mt.named_gradients(model)}
            found.append({**gradients, "losses": torch.stack(losses).float().cpu()})
            engine_of(model).close()
    finally:
        cost.PIECE_TOKENS, cost.PIECE_LOGITS, cost.COMPILED_PIECE = sizes
    truth, pieces = found
    if truth.keys() != pieces.keys():
        return f"gradients of {sorted(truth.keys() ^ pieces.keys())}"
    worst = {n: float((truth[n] - pieces[n]).norm() / truth[n].norm().clamp(min=1e-6)) for n in truth}
    name = max(worst, key=worst.__getitem__)
    return "" if worst[name] < TOLERANCE[precision] else f"relative difference {worst[name]:.1e} of {name}"
