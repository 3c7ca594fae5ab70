"""Rows to a batch, and what a batch holds.

Rule: nothing in a batch lets one sample see another. Packed rows carry no attention mask: from positions that restart,
transformers derives a mask that is block-diagonal (masking_utils.py, find_packed_sequence_indices; sdpa, eager and
flex attention, any batch size), but only where attention_mask is None and there is no KV cache. Hence `use_cache`.
Models that do not pass positions to their mask get the masks ready made (`mask_config`). exactness.py chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatrain.data.rows import IGNORED_LABEL

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Batch = dict[str, Any]
# Shapes: B rows, T tokens of the longest row (rounded up to pad_to_multiple_of).


@dataclass(frozen=True, kw_only=True)
class Collator:
    """Pads rows on the right to the longest. Gives `input_ids`, `labels` (B, T) int64, and `attention_mask` (B, T) for
    plain rows, or `position_ids` (B, T) and `use_cache=False` for packed ones."""

    pad_token_id: int
    packed: bool
    pad_to_multiple_of: int = 1
    mask_config: PreTrainedConfig | None = None
    """Config of a model whose masks must be ready made; None where the model derives them."""
    mask_dtype: torch.dtype = torch.float32
    """What the model computes in: eager attention adds its mask."""

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> Batch:
        length = max(len(row["input_ids"]) for row in rows)
        length += -length % self.pad_to_multiple_of
        batch: Batch = {
            "input_ids": _stack(rows, "input_ids", length, self.pad_token_id),
            "labels": _stack(rows, "labels", length, IGNORED_LABEL),
        }
        if not self.packed:
            lengths = torch.tensor([len(row["input_ids"]) for row in rows])
            batch["attention_mask"] = (torch.arange(length) < lengths[:, None]).long()
            return batch
        # Each padding token is a sample of its own: it sees itself, and no token sees it.
        batch["position_ids"] = _stack(rows, "position_ids", length, 0)
        batch["use_cache"] = False
        if self.mask_config is not None:
            batch["attention_mask"] = ready_masks(self.mask_config, batch["position_ids"], self.mask_dtype)
        return batch


def _stack(rows: list[dict[str, torch.Tensor]], name: str, length: int, fill: int) -> torch.Tensor:
    out = torch.full((len(rows), length), fill, dtype=torch.int64)
    for index, row in enumerate(rows):
        out[index, : len(row[name])] = row[name]
    return out


def ready_masks(config: PreTrainedConfig, position_ids: torch.Tensor, dtype: torch.dtype) -> Any:
    """The masks that transformers makes for these positions (B, T): one (B, 1, T, T), or a dict by layer type."""
    from transformers.masking_utils import create_masks_for_generate

    shape_only = torch.empty(*position_ids.shape, 0, dtype=dtype, device=position_ids.device)
    return create_masks_for_generate(config.get_text_config(), shape_only, None, None, position_ids=position_ids)


def sample_lengths(batch: Batch) -> list[int]:
    """Tokens of each sample in a batch of the collator, padding apart."""
    if "position_ids" not in batch:
        return batch["attention_mask"].sum(1).tolist()
    positions = batch["position_ids"]
    # A sample ends where the next position does not follow. Padding is a run of samples of one token, and no real
    # sample is that short.
    following = torch.nn.functional.pad(positions[:, 1:], (0, 1))
    lengths = positions[following != positions + 1] + 1
    return lengths[lengths > 1].tolist()


@dataclass(frozen=True)
class BatchCounts:
    """What a batch holds, padding apart. Counts of TFLOPS and tokens/s take these."""

    num_tokens: int
    num_targets: int
    num_padding: int
    num_attended: int
    """Pairs (token, token it may attend to) under causal attention within samples; a sliding window is not counted."""


def count_batch(batch: Batch) -> BatchCounts:
    """Counts for a batch made by Collator."""
    positions, real = _positions(batch)
    return BatchCounts(
        num_tokens=int(real.sum()),
        num_targets=int((batch["labels"][:, 1:] != IGNORED_LABEL).sum()),
        num_padding=int((~real).sum()),
        num_attended=int((positions + 1)[real].sum()),
    )


def _positions(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Position of each token in its sample (B, T), and which tokens are no padding (B, T) bool."""
    if "position_ids" not in batch:
        real = batch["attention_mask"].bool()
        return torch.arange(real.shape[1], device=real.device).expand_as(real), real
    positions = batch["position_ids"]
    # A sample has two tokens at least: a position 0 that no 1 follows is padding.
    following = torch.nn.functional.pad(positions[:, 1:], (0, 1))
    return positions, (positions > 0) | (following == 1)
