"""After `mt.init`, plain `from_pretrained` of transformers leaves the weights of large models in their files.

The model it returns has `DeferredParameter`s: `mt.stream` takes their values straight to their homes, and whoever asks
for one before has that layer read, as transformers would have. What is not for streaming goes on as in plain
transformers from the start: models of up to a gibibyte (which that much room beside the homes allows for), without
repeated blocks, quantised, with a device_map, a state_dict or a mesh of devices, and files other than safetensors.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Hashable
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging as transformers_logging

from megatrain.base.errors import UserError
from megatrain.base.units import GIB
from megatrain.execute.deferred import DeferredWeights, read_before_compiling, read_deferred
from megatrain.load.checkpoint import WholeModelError
from megatrain.load.interception import set_process_loader
from megatrain.load.opening import OpenedCheckpoint
from megatrain.load.units import WeightSource, names_of
from megatrain.spec.discover import find_layers

PLAIN_BYTES = GIB
"""Models of up to this size, in the dtype in which they are loaded, are loaded plainly."""


def defer_loading(is_on: bool) -> None:
    """From now on in this process; off: transformers loads as it does without this library."""
    if is_on:
        read_before_compiling()
    set_process_loader(_Deferring() if is_on else None)


class _Deferring:
    """The process's loader (see `load/interception.py`)."""

    def __init__(self) -> None:
        self._opened: weakref.WeakKeyDictionary[Any, tuple[PreTrainedModel, OpenedCheckpoint]]
        self._opened = weakref.WeakKeyDictionary()

    def load(self, model: Any, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any) -> Any | None:
        # Loaded into a second time, by an adapter: that is for transformers, which finds a plain model.
        read_deferred(model)
        if state_dict is not None or not _is_deferrable(model, checkpoint_files, load_config):
            return None
        path = load_config.pretrained_model_name_or_path
        # The weights are made with a copy: what somebody does to the model before they are read is nothing to it.
        twin = copy.deepcopy(model)
        try:
            opened = OpenedCheckpoint(twin, path, [str(file) for file in checkpoint_files or ()], load_config)
        except WholeModelError:
            return None
        self._opened[model] = twin, opened
        return opened.info

    def finalize(self, model: Any, load_config: Any, loading_info: Any) -> Any | None:
        if model not in self._opened:
            return None
        twin, opened = self._opened.pop(model)
        opened.finalize()
        _defer(model, twin, opened.weights())
        return opened.info


def _is_deferrable(model: nn.Module, files: list[str] | None, load_config: Any) -> bool:
    parameters = list(model.parameters())
    is_plain = load_config.hf_quantizer is None and load_config.device_map is None and load_config.device_mesh is None
    if not is_plain or is_deepspeed_zero3_enabled() or any(p.device.type != "meta" for p in parameters):
        return False
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        return False
    if sum(p.numel() * p.element_size() for p in parameters) <= PLAIN_BYTES:
        return False
    try:
        return bool(find_layers(model))
    except UserError:
        return False


def _defer(model: PreTrainedModel, twin: PreTrainedModel, source: WeightSource) -> None:
    """Give `model` what its finished `twin` has, with deferred parameters in place of those on the meta device."""
    units: dict[str, Hashable] = {name: source.unit_of(name) for name in names_of(twin)}
    source.done = _Progress(source.num_units)
    weights = DeferredWeights(source, units)
    firsts = {id(parameter): name for name, parameter in twin.named_parameters()}
    made = {key: weights.parameter(name, twin.get_parameter(name)) for key, name in firsts.items()}
    for (_, module), (_, finished) in zip(model.named_modules(), twin.named_modules(), strict=True):
        for name, parameter in finished._parameters.items():
            module._parameters[name] = None if parameter is None else made[id(parameter)]
        module._buffers.update(finished._buffers)
        if "_is_hf_initialized" in vars(finished):
            module._is_hf_initialized = finished._is_hf_initialized
    model.all_tied_weights_keys = dict(twin.all_tied_weights_keys)


class _Progress:
    """A bar like that of transformers, from the first layer that is read to the last."""

    def __init__(self, num_units: int) -> None:
        self._num_units = self._num_left = num_units
        self._bar: Any = None

    def __call__(self) -> None:
        if self._bar is None:
            self._bar = transformers_logging.tqdm(total=self._num_units, desc="Loading weights", unit="layer")
        self._bar.update()
        self._num_left -= 1
        if self._num_left == 0:
            self._bar.close()
