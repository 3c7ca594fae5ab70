"""May the rows of a micro-batch be run apart, and how do their losses add up? Measured on the model itself, as in
data/exactness.py, with two short forwards of two rows, without gradients and in the mode that the model is in.

Rule: what is not known couples rows. A loss must be the cross entropy of the logits that the model returns, to 1e-6, so
that nothing else is in it (auxiliary losses of routers, contrastive losses), and the logits of a row must not change
with another row (experts of limited capacity). Batch norms are refused as they stand.
Gives up: losses of other kinds, and models that return no logits. A coupling that only longer rows bring about is not
seen, so limited capacities are refused by their settings too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from megatrain.base.errors import UserError, one_line
from megatrain.data.exactness import PROBE_TOKENS, probe_ids
from megatrain.data.rows import IGNORED_LABEL
from megatrain.losses import own_loss

NUM_ITEMS = 7
"""Not the number of targets in either row, nor in both."""
LARGEST_DIFFERENCE = 1e-6
LARGEST_LEAK = {torch.float32: 1e-4, torch.float64: 1e-4}
LARGEST_LEAK_16_BIT = 2e-2
"""Of experts, whose batches are of another shape then. Without experts the bits are the same."""
CAPACITIES = ("expert_capacity", "capacity_factor", "moe_capacity")
"""Settings by which experts take so many tokens of a batch and no more."""


@dataclass(frozen=True)
class RowLoss:
    """Cross entropy over target tokens, divided by the number that the forward is given, or by their own."""

    is_shifted: bool
    """Targets are the labels but for the first of each row."""
    is_mean: bool
    """Over the target tokens of the micro-batch."""

    def num_targets(self, labels: torch.Tensor) -> int:
        return int((_targets(labels) if self.is_shifted else labels).ne(IGNORED_LABEL).sum())


def measure_row_loss(model: nn.Module, *, takes_num_items: bool) -> RowLoss:
    """How the losses of rows make that of a micro-batch. `model` may be streamed or plain; it draws no random numbers.

    Args:
        takes_num_items: its forward is given the number of target tokens of the step.

    Raises UserError with the reason where that is not known, or where rows are coupled.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise UserError(f"{name} is a batch norm, which takes the mean over all rows")
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise UserError("what couples the rows of a model that is not of transformers is not known")
    config = model.config.get_text_config()
    for name in CAPACITIES:
        if getattr(config, name, None):
            raise UserError(f"experts take a limited number of tokens of all rows ({name})")
    try:
        with _undone(model):
            return _measure(model, takes_num_items)
    except UserError:
        raise
    except Exception as error:  # whatever a forward may raise that is asked for something it does not do
        raise UserError(f"a short forward that was to show it failed ({one_line(error)})") from error


def _measure(model: nn.Module, takes_num_items: bool) -> RowLoss:
    a, b, c = probe_ids(model)
    loss, logits = _forward(model, a, b, takes_num_items)
    _, other = _forward(model, a, c, takes_num_items)
    if logits.dim() != 3 or logits.shape[:2] != (2, PROBE_TOKENS):
        raise UserError("the model returns no logits for each token")
    full = (logits[1] - other[1]).abs().max().item()
    leak = (logits[0] - other[0]).abs().max().item()
    dtype = next(model.parameters()).dtype
    if not leak <= full * LARGEST_LEAK.get(dtype, LARGEST_LEAK_16_BIT):
        raise UserError(f"the logits of a row move by {leak / full:.1e} when another row changes")
    found = _find(loss, logits, _labels(a, b), takes_num_items)
    if found is None:
        raise UserError(
            "the model's loss is not the cross entropy of its target tokens alone (an auxiliary loss of a router?)"
        )
    return found


def _find(loss: float, logits: torch.Tensor, labels: torch.Tensor, takes_num_items: bool) -> RowLoss | None:
    """Which of the known losses of `logits` (2, PROBE_TOKENS, vocabulary) is `loss`."""
    for is_shifted in (True, False):
        scores, targets = (logits[:, :-1], _targets(labels)) if is_shifted else (logits, labels)
        total = nn.functional.cross_entropy(
            scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        ).item()
        for is_mean in (True, False) if takes_num_items else (True,):
            known = RowLoss(is_shifted=is_shifted, is_mean=is_mean)
            expected = total / (known.num_targets(labels) if is_mean else NUM_ITEMS)
            if abs(loss - expected) <= LARGEST_DIFFERENCE * abs(expected):
                return known
    return None


def _forward(
    model: nn.Module, first: torch.Tensor, second: torch.Tensor, takes_num_items: bool
) -> tuple[float, torch.Tensor]:
    """Loss and logits (fp32, on the CPU). The same random numbers each time."""
    device = next(model.parameters()).device
    batch: dict[str, Any] = {
        "input_ids": torch.stack([first, second]).to(device),
        "labels": _labels(first, second).to(device),
    }
    if takes_num_items:
        batch["num_items_in_batch"] = torch.tensor(NUM_ITEMS, device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        outputs = model(**batch)
    return own_loss(outputs).item(), outputs.logits.float().cpu()


def _labels(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Rows of unlike numbers of targets: a mean over rows is not one over targets."""
    labels = torch.stack([first, second])
    labels[0, :5] = IGNORED_LABEL
    return labels


def _targets(labels: torch.Tensor) -> torch.Tensor:
    return labels[..., 1:]


@contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    """Random numbers and buffers of the model are as before. Raises UserError if a buffer was changed."""
    buffers = {name: (buffer, buffer._version, buffer.cpu().clone()) for name, buffer in model.named_buffers()}
    device = next(model.parameters()).device
    changed = []
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        changed += [name for name, (buffer, version, _) in buffers.items() if buffer._version != version]
        for name in changed:
            with torch.no_grad():
                buffers[name][0].copy_(buffers[name][2])
    if changed:
        raise UserError(f"a forward changes {changed[0]}")
