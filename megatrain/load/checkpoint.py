"""Shards of safetensors as the values of a model, a streamed layer at a time, by transformers' own key mapping.

transformers' loader (`convert_and_load_state_dict_in_model`) does the work: it renames keys, adds or strips the prefix
of the base model, fuses and splits experts, casts. Here it runs once a layer with that layer's keys alone: first on the
meta device, which says what is missing, unexpected or of another shape before a byte of weights is read, and then
for real when the layer is asked for.
The files of the next layer are read while one is converted (`load/shards.py`).
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)

from megatrain.base.errors import UserError
from megatrain.load.shards import Once, ReadAhead, Stored, open_shard, read_headers
from megatrain.load.units import RESIDENT, Units, lent_parameters
from megatrain.save.key_mapping import Outline, on_meta, without_bar

_BUFFERS = "buffers"


class WholeModelError(UserError):
    """The checkpoint cannot be read a layer at a time."""


class Checkpoint:
    """What the files hold for `model`. Making one reads headers and persistent buffers.

    Args:
        model: on the meta device, weights not tied yet. Its parameters get the dtypes they are to be loaded in.
        files: safetensors files.
        settings: transformers' LoadStateDictConfig: dtypes, and the conversions of this architecture.

    Raises UserError: a file that is damaged or lacking, another shape, a conversion that fails.
    """

    def __init__(self, model: PreTrainedModel, files: list[str], settings: Any) -> None:
        self._model = model
        self._settings = dataclasses.replace(settings, device_map=None)
        self._dry_settings = dataclasses.replace(
            settings, device_map={"": "meta"}, weight_mapping=on_meta(settings.weight_mapping)
        )
        self._expected = set(model.state_dict())
        self._parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._units = self._group(read_headers(files))
        self._files = ReadAhead(self._units)
        self._unit_of: dict[str, str] = {}
        self._targets: dict[str, list[str]] = {}
        self.info = self._plan()

    def unit_of(self, name: str) -> str | None:
        return self._unit_of.get(name)

    def drop(self, name: str) -> None:
        """Take the parameter from elsewhere: another place has the same values and is tied to it."""
        del self._unit_of[name]

    def make(self, unit: str, following: str | None = None) -> dict[str, torch.Tensor]:
        """Raises UserError when a shard cannot be read."""
        names = [name for name, its_unit in self._unit_of.items() if its_unit == unit]
        tensors = self._files.take(unit)
        if following is not None:
            self._files.announce(following)
        with lent_parameters(self._model, self._targets[unit]) as places:
            # Each is free as soon as it is converted.
            info = self._convert({key: Once(tensors.pop(key)) for key in list(tensors)}, self._settings)
            if info.conversion_errors:
                raise _conversion_error(info)
            return {name: places[name][name.rpartition(".")[2]].data for name in names}

    def have_equal_values(self, *names: str) -> bool:
        first, second = (self.make(self._unit_of[name])[name] for name in names)
        return torch.equal(first, second)

    def _group(self, headers: dict[str, Stored]) -> dict[str, dict[str, Stored]]:
        """Keys by the layer of what they become."""
        mapping = self._settings.weight_mapping or []
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        prefix, state = self._model.base_model_prefix, self._model.state_dict()
        buffers, units = {name for name, _ in self._model.named_buffers()}, Units(self._model)
        groups: dict[str, dict[str, Stored]] = {}
        for key, header in headers.items():
            target, _ = rename_source_key(key, renamings, converters, prefix, state)
            if target not in state and key in state:
                target = key
            unit = _BUFFERS if target in buffers else units.of(target) if target in state else RESIDENT
            groups.setdefault(unit, {})[key] = header
        return groups

    def _plan(self) -> Any:
        """transformers' own report for the whole checkpoint; on the way every loaded name finds its unit."""
        reports = []
        for unit, keys in self._units.items():
            if unit == _BUFFERS:
                continue
            info = self._convert({key: Outline(one.shape) for key, one in keys.items()}, self._dry_settings)
            wrong = {name for name, *_ in info.mismatched_keys}
            made = self._expected - info.missing_keys - wrong
            if others := made - self._parameters:
                raise WholeModelError(
                    f"{min(others)} is no parameter, but made by a conversion of the checkpoint: that cannot be done a "
                    "layer at a time; load the model whole, mt.stream(AutoModelForCausalLM.from_pretrained(...))"
                )
            self._targets[unit] = sorted(made)
            self._unit_of |= dict.fromkeys(self._targets[unit], unit)
            reports.append(info)
        if _BUFFERS in self._units:
            # Small, and not in homes: they are loaded now.
            reports.append(self._convert(self._files.take(_BUFFERS), self._settings))
        whole = self._convert({}, self._dry_settings)
        for info in reports:
            whole.missing_keys &= info.missing_keys
            whole.unexpected_keys |= info.unexpected_keys
            whole.mismatched_keys |= info.mismatched_keys
            whole.conversion_errors |= info.conversion_errors
        if whole.conversion_errors:
            raise _conversion_error(whole)
        return whole

    def _convert(self, tensors: dict[str, Any], settings: Any) -> Any:
        with without_bar():
            info, _ = convert_and_load_state_dict_in_model(self._model, tensors, settings)
        return info


def damaged_file(folder: str | os.PathLike[str]) -> UserError | None:
    """The error for the first safetensors file in `folder` whose header does not fit it."""
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if not name.endswith(".safetensors"):
            continue
        try:
            with open_shard(os.path.join(folder, name)):
                pass
        except UserError as error:
            return error
    return None


def _conversion_error(info: Any) -> UserError:
    name, error = next(iter(info.conversion_errors.items()))
    return UserError(f"{name} cannot be made from the checkpoint's keys: {error}; its files belong to another model")
