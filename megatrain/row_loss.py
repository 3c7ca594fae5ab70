"""May the rows of a micro-batch be run apart, and those of several together, and how do their losses add up? Measured
on the model itself, as in data/exactness.py, with two short forwards of two rows, without gradients and in the mode
that the model is in.

Rule: what is not known couples rows. A loss must be the cross entropy of the logits that the model returns, to 1e-6, so
that nothing else is in it (auxiliary losses of routers, contrastive losses), and the logits of a row must not change
with another row (experts of limited capacity). Batch norms are refused as they stand, and so is a model that one of the
forwards changes (`untouched.py`, which undoes that).
Gives up: losses of other kinds, and models that return no logits. A coupling that only longer rows bring about is not
seen, so limited capacities, and RoPE whose frequencies are those of a batch's longest sample, are refused by their
settings too.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from megatrain.base.errors import UserError, one_line
from megatrain.data.exactness import PROBE_TOKENS, probe_ids
from megatrain.data.rows import IGNORED_LABEL
from megatrain.losses import is_language_modelling, own_loss
from megatrain.untouched import Randomness, untouched

NUM_ITEMS = 7
"""Not the number of targets in either row, nor in both."""
LARGEST_DIFFERENCE = 1e-6
LARGEST_LEAK = 1e-4
LARGEST_LEAK_16_BIT = 0.0
"""Products are of the same shapes, whatever is in the other row, and so a row's bits are the same."""
LARGEST_LEAK_16_BIT_EXPERTS = 2e-2
"""An expert's batch has as many rows as tokens chose it, and products of other shapes round otherwise."""
CAPACITIES = ("expert_capacity", "capacity_factor", "moe_capacity")
"""Settings by which experts take so many tokens of a batch and no more."""
ROPES_OF_THE_BATCH = ("dynamic", "longrope", "su")
"""Kinds of RoPE whose frequencies depend on the largest position in a batch, and on those before it."""


@dataclass(frozen=True)
class RowLoss:
    """Cross entropy over target tokens, divided by the number that the forward is given, or by their own."""

    is_shifted: bool
    """Targets are the labels but for the first of each row."""
    is_mean: bool
    """Over the target tokens of the micro-batch."""
    draws_random: bool = False
    """The forward does (dropout)."""

    def num_targets(self, labels: torch.Tensor) -> torch.Tensor:
        """A whole number, where `labels` are."""
        return (_targets(labels) if self.is_shifted else labels).ne(IGNORED_LABEL).sum()


_measured: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, RowLoss | str]] = weakref.WeakKeyDictionary()


def row_loss_of(model: nn.Module, *, takes_num_items: bool) -> RowLoss:
    """As `measure_row_loss`, which is asked once for a model in one mode and with one config."""
    known = _measured.setdefault(model, {})
    config = getattr(model, "config", None)
    key = takes_num_items, tuple(module.training for module in model.modules()), str(vars(config) if config else None)
    if key not in known:
        try:
            known[key] = measure_row_loss(model, takes_num_items=takes_num_items)
        except UserError as error:
            known[key] = str(error)
    found = known[key]
    if isinstance(found, str):
        raise UserError(found)
    return found


def why_coupled(model: nn.Module) -> str:
    """What couples the rows of a batch, or hides whether they are coupled, as far as the model's build tells. Its
    weights may be on the meta device."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            return f"{name} is a batch norm, which takes the mean over all rows"
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        return "what couples the rows of a model that is not of transformers is not known"
    config = model.config.get_text_config()
    for name in CAPACITIES:
        if getattr(config, name, None):
            return f"experts take a limited number of tokens of all rows ({name})"
    if rope_type := _rope_of_the_batch(model.config):
        return f"the frequencies of {rope_type} RoPE are those of the longest sample of all rows"
    return _why_no_language_model(model)


def _rope_of_the_batch(settings: Any, is_rope: bool = False) -> str:
    """The kind of RoPE that looks at the positions of a whole batch, or nothing.

    Args:
        settings: a config, or a part of one, with those of other layer types and models in it.
        is_rope: they are those of RoPE.
    """
    if not isinstance(settings, dict):
        settings = vars(settings)
    for name, value in settings.items():
        if is_rope and name in ("rope_type", "type") and value in ROPES_OF_THE_BATCH:
            return str(value)
        if isinstance(value, dict) or hasattr(value, "get_text_config"):
            found = _rope_of_the_batch(value, is_rope or str(name).startswith("rope_"))
            if found:
                return found
    return ""


def _why_no_language_model(model: nn.Module) -> str:
    """Why tokens of the vocabulary cannot be its labels. A head of three classes has no memory for them, and on a GPU
    such a label breaks the whole process."""
    if not is_language_modelling(model):
        return "its loss is not that of causal or masked language modelling"
    head = model.get_output_embeddings()
    width = getattr(head, "out_features", None) or getattr(head, "num_embeddings", None)
    has_words = isinstance(getattr(model.config.get_text_config(), "vocab_size", None), int)
    if width is None or not has_words or width <= int(probe_ids(model).max()):
        return "it is not known to have a head as wide as its vocabulary"
    return ""


def why_not_merged(model: nn.Module) -> str:
    """Why micro-batches cannot be merged, as far as the model's build tells, before there are weights to measure with.
    Empty where it does not tell."""
    if reason := why_coupled(model):
        return reason
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        return "the loss has an auxiliary loss of a router (output_router_logits)"
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.p > 0:
            return f"{name} draws random numbers (dropout), and merged micro-batches would draw others"
        for key, value in vars(module).items():
            if "drop" in key and isinstance(value, float) and value > 0:
                return f"{name}.{key} is {value:g}, and merged micro-batches would draw other random numbers for it"
    return ""


def measure_row_loss(model: nn.Module, *, takes_num_items: bool) -> RowLoss:
    """How the losses of rows make that of a micro-batch. `model` may be streamed or plain; it draws no random numbers.

    Args:
        takes_num_items: its forward is given the number of target tokens of the step.

    Raises UserError with the reason where that is not known, or where rows are coupled.
    """
    if reason := why_coupled(model):
        raise UserError(reason)
    try:
        with untouched(model) as changed:
            found = _measure(model, takes_num_items)
    except UserError:
        raise
    except Exception as error:  # whatever a forward may raise that is asked for something it does not do
        raise UserError(f"a short forward that was to show it failed ({one_line(error)})") from error
    if changed:
        raise UserError(f"a forward changes {changed[0]}")
    return found


def _measure(model: nn.Module, takes_num_items: bool) -> RowLoss:
    a, b, c = probe_ids(model)
    loss, logits, draws_random = _forward(model, a, b, takes_num_items)
    _, other, _ = _forward(model, a, c, takes_num_items)
    if logits.dim() != 3 or logits.shape[:2] != (2, PROBE_TOKENS):
        raise UserError("the model returns no logits for each token")
    full = (logits[1] - other[1]).abs().max().item()
    leak = (logits[0] - other[0]).abs().max().item()
    if not leak <= full * _largest_leak(model):
        raise UserError(f"the logits of a row move by {leak / full:.1e} when another row changes")
    found = _find(loss, logits, _labels(a, b), takes_num_items)
    if found is None:
        raise UserError(
            "the model's loss is not the cross entropy of its target tokens alone (an auxiliary loss of a router?)"
        )
    return replace(found, draws_random=draws_random)


def _largest_leak(model: nn.Module) -> float:
    """Of a row's logits into those of another, as a share of what moves them in its own."""
    if next(model.parameters()).dtype in (torch.float32, torch.float64):
        return LARGEST_LEAK
    has_experts = any("expert" in f"{name} {type(module).__name__}".lower() for name, module in model.named_modules())
    return LARGEST_LEAK_16_BIT_EXPERTS if has_experts else LARGEST_LEAK_16_BIT


def _find(loss: float, logits: torch.Tensor, labels: torch.Tensor, takes_num_items: bool) -> RowLoss | None:
    """Which of the known losses of `logits` (2, PROBE_TOKENS, vocabulary) is `loss`."""
    for is_shifted in (True, False):
        scores, targets = (logits[:, :-1], _targets(labels)) if is_shifted else (logits, labels)
        total = nn.functional.cross_entropy(
            scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        ).item()
        for is_mean in (True, False) if takes_num_items else (True,):
            known = RowLoss(is_shifted=is_shifted, is_mean=is_mean)
            expected = total / (known.num_targets(labels).item() if is_mean else NUM_ITEMS)
            if abs(loss - expected) <= LARGEST_DIFFERENCE * abs(expected):
                return known
    return None


def _forward(
    model: nn.Module, first: torch.Tensor, second: torch.Tensor, takes_num_items: bool
) -> tuple[float, torch.Tensor, bool]:
    """Loss, logits (fp32, on the CPU), and whether random numbers were drawn. The same ones each time."""
    device = next(model.parameters()).device
    batch: dict[str, Any] = {
        "input_ids": torch.stack([first, second]).to(device),
        "labels": _labels(first, second).to(device),
    }
    if takes_num_items:
        batch["num_items_in_batch"] = torch.tensor(NUM_ITEMS, device=device)
    before = Randomness.get(device)
    with torch.no_grad():
        outputs = model(**batch)
    draws_random = not Randomness.get(device).equals(before)
    before.set(device)
    return own_loss(outputs).item(), outputs.logits.float().cpu(), draws_random


def _labels(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Rows of unlike numbers of targets: a mean over rows is not one over targets."""
    labels = torch.stack([first, second])
    labels[0, :5] = IGNORED_LABEL
    return labels


def _targets(labels: torch.Tensor) -> torch.Tensor:
    return labels[..., 1:]
