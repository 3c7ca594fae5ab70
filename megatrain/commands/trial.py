"""A recipe's `model.config`, tried before any work: transformers takes values with which the model's forward fails.

The model's forward runs without numbers, on PyTorch's meta device. What fails there without the changes too (routing by
a loop over experts, kernels of others), or for want of numbers, says nothing about them.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM

from megatrain.base.errors import UserError, one_line
from megatrain.planning import read_config
from megatrain.spec.discover import find_layers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from megatrain.model_choice import ModelConfig

ROWS = 2
LONGEST = 64
"""Tokens of a row."""


def check_runs(model: ModelConfig, config: PreTrainedConfig, length: int) -> None:
    """Refuse changes of a shape with which it cannot be built, has no blocks or fails in its forward.

    Args:
        config: of the shape, with the changes.
        length: tokens of the recipe's rows.

    Raises UserError.
    """
    if model.shape is None or not model.config:
        return
    length = min(length, LONGEST)
    reason = _why_failing(config, length)
    if reason and not _why_failing(read_config(model.shape), length):
        raise UserError(
            f"model.config: the shape {model.shape} cannot be trained with these values ({reason}); without them it can"
        )


def _why_failing(config: PreTrainedConfig, length: int) -> str:
    """Nothing where the forward works, or only lacks numbers."""
    ids = torch.zeros(ROWS, length, dtype=torch.long, device="meta")
    try:
        with torch.random.fork_rng(devices=[]):
            with torch.device("meta"):
                # Experts' grouped products run on the meta device in bf16 alone.
                model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.bfloat16)
            find_layers(model)
            model.train()(ids, labels=ids)
    except UserError:
        return "no repeated blocks are left: the number of layers must be at least 1"
    except Exception as error:  # whatever the architecture's own code raises
        lacks_numbers = isinstance(error, NotImplementedError) or "meta" in str(error).lower()
        return "" if lacks_numbers else one_line(error)
    return ""
