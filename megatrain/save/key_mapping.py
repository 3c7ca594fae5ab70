"""transformers' own mapping of the keys of files to the weights of a model, run on shapes alone.

Its loader (`convert_and_load_state_dict_in_model`) renames keys, adds or strips the prefix of the base model, fuses and
splits experts. On the meta device it says what is missing, unexpected or of another shape, and reads nothing.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging


class Outline:
    """A tensor of a file as far as its header tells. Reading it gives a tensor on the meta device."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = list(shape)

    def __getitem__(self, _: Any) -> torch.Tensor:
        return torch.empty(self.shape, device="meta")


def on_meta(mapping: list[Any] | None) -> list[Any] | None:
    """The conversions, none of which insists on the CPU: a tensor on meta cannot be moved there."""
    mapping = copy.deepcopy(mapping)
    for entry in mapping or ():
        if getattr(entry, "force_cpu", False):
            entry.force_cpu = False
    return mapping


@contextlib.contextmanager
def without_bar() -> Iterator[None]:
    """Without transformers' progress bar over weights."""
    previous = logging.set_tqdm_hook(lambda factory, args, keywords: logging.EmptyTqdm(*args, **keywords))
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)


def converts(model: PreTrainedModel, keys: Sequence[str], own: Mapping[str, Any]) -> bool:
    """Whether any of the keys of files is more than renamed on its way into the model: fused, split, turned.

    own: the names of the model's weights.
    """
    mapping = get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    prefix = model.base_model_prefix
    return bool(converters) and any(
        rename_source_key(key, renamings, converters, prefix, dict(own))[1] is not None for key in keys
    )


def mapped(
    plain_class: type[PreTrainedModel], config: Any, shapes: Mapping[str, Sequence[int]]
) -> tuple[set[str], Any]:
    """What files of these shapes, by key, are to a model of that class: the names of its weights that they have, and
    transformers' report (`unexpected_keys`, `mismatched_keys`, `conversion_errors`)."""
    with torch.device("meta"):
        twin: nn.Module = plain_class(copy.deepcopy(config))
    settings = LoadStateDictConfig(
        device_map={"": "meta"}, weight_mapping=on_meta(get_model_conversion_mapping(twin)), dtype=torch.float32
    )
    with without_bar():
        report, _ = convert_and_load_state_dict_in_model(
            twin, {key: Outline(shape) for key, shape in shapes.items()}, settings
        )
    given = set(twin.state_dict()) - report.missing_keys
    twin._adjust_missing_and_unexpected_keys(report)
    return given, report
