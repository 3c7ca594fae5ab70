"""Does this model keep packed samples apart? Measured on the model itself, with one short forward.

Rule: never assume from a name. Recurrent layers (Mamba, linear attention) carry state across samples, and some models
do not hand positions to their mask; both look healthy in the loss.
Gives up: windows longer than the probe are not exercised (their masks are the same code).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatrain.base.errors import UserError
from megatrain.data.collate import Collator, ready_masks

PROBE_TOKENS = 12  # a sample; two make a row
# Shares of a full leak. The least true leak seen is 5e-3 (Falcon-H1); rounding in fp32 is 1e-6.
LARGEST_LEAK = 1e-4
LARGEST_SHIFT = {torch.float32: 1e-4, torch.float64: 1e-4}
LARGEST_SHIFT_16_BIT = 0.1  # other matrix shapes, other rounding; a wrong position table is off by more


def fit_collator(collator: Collator, model: nn.Module) -> Collator:
    """The collator with which `model` keeps packed samples apart: as it is, or with ready-made masks.

    `model` may be streamed or plain. Five rows of 24 tokens run through it once or twice, without gradients.
    Raises UserError where samples would see each other either way.
    """
    if not collator.packed:
        return collator
    config = getattr(model, "config", None)
    dtype = next(model.parameters()).dtype
    with_masks = replace(collator, mask_config=config, mask_dtype=dtype)
    exact, reason = packing_is_exact(model, collator)
    if exact:
        return collator
    if _masks_are_exact(model, with_masks):
        return with_masks
    raise UserError(
        f"data.packing is on, but {type(model).__name__} mixes samples that share a row ({reason}); "
        "set data.packing to false"
    )


def _masks_are_exact(model: nn.Module, with_masks: Collator) -> bool:
    try:
        return packing_is_exact(model, with_masks)[0]
    except (TypeError, ValueError, AttributeError, RuntimeError):
        # The plain probe ran, so what fails is this model's reading of a mask of four dimensions.
        return False


def packing_is_exact(model: nn.Module, collator: Collator) -> tuple[bool, str]:
    """Whether packed samples get the logits they get alone; and the figures, or the reason why not.

    One batch, c is another sample: rows `a b`, `b a`, `c b`, `b c` packed, and `a b` as one sample (a full leak).
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "position_ids" not in inspect.signature(type(base).forward).parameters:
        return False, "its forward takes no position_ids"
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        return False, "it has no transformers config"
    a, b, c = probe_ids(model)
    ids = torch.stack([torch.cat(pair) for pair in ((a, b), (b, a), (c, b), (b, c), (a, b))])
    positions = torch.arange(PROBE_TOKENS).repeat(5, 2)
    positions[-1] = torch.arange(2 * PROBE_TOKENS)
    logits = _logits(model, collator, ids, positions)
    return _judge(logits, LARGEST_SHIFT.get(next(model.parameters()).dtype, LARGEST_SHIFT_16_BIT))


def _judge(logits: torch.Tensor, largest_shift: float) -> tuple[bool, str]:
    """`logits` (5, 2 * PROBE_TOKENS, vocabulary) of the rows above.

    Leak: does b change when what stands before it in the row changes? A change behind it cannot matter to a causal
    model, so that one measures the rounding (zero, but for experts whose batches change). Shift: does b differ from b
    at the start of a row?
    """
    first, second = logits[:, :PROBE_TOKENS], logits[:, PROBE_TOKENS:]
    full_leak = _distance(second[4], first[1])
    if full_leak == 0:
        return True, "no token sees another"
    leak = _distance(second[0], second[2]) / full_leak
    rounding = _distance(first[1], first[3]) / full_leak
    shift = _distance(second[0], first[1]) / full_leak
    exact = leak <= max(LARGEST_LEAK, 10 * rounding) and shift <= largest_shift
    return exact, f"logits move by {max(leak, shift):.1e} of what a full leak moves them"


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    return (left - right).abs().max().item()


def probe_ids(model: nn.Module) -> torch.Tensor:
    """Three samples (3, PROBE_TOKENS) from the middle of the vocabulary: special ids stand at its ends."""
    vocab_size = model.config.get_text_config().vocab_size
    low, high = vocab_size // 4, max(vocab_size // 2, vocab_size // 4 + 1)
    return torch.randint(low, high, (3, PROBE_TOKENS), generator=torch.Generator().manual_seed(0))


def _logits(model: nn.Module, collator: Collator, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    device = next(model.parameters()).device
    batch: dict[str, Any] = {"input_ids": ids.to(device), "position_ids": positions.to(device), "use_cache": False}
    if collator.mask_config is not None:
        batch["attention_mask"] = ready_masks(collator.mask_config, batch["position_ids"], collator.mask_dtype)
    with _evaluating(model), torch.no_grad():
        return model(**batch).logits.float().cpu()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off; each module's own mode comes back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
