"""What a checkpoint means for a model on the meta device: which weights it has, what is tied, what makes the rest.

`OpenedCheckpoint` does for transformers' `from_pretrained` what its two steps of reading and finishing do, except for
reading a weight.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from megatrain.base.errors import UserError
from megatrain.base.units import format_number
from megatrain.load.checkpoint import Checkpoint
from megatrain.load.initial import Initialiser
from megatrain.load.units import WeightSource, names_of

logger = logging.getLogger("megatrain")

_SHOWN_NAMES = 5


class OpenedCheckpoint:
    """Safetensors files for `model`, which is on the meta device and has its weights tied afterwards.

    Raises UserError: a file that is damaged or lacking, another shape, a conversion that fails.
    """

    def __init__(self, model: PreTrainedModel, path: Any, files: list[str], load_config: Any) -> None:
        self._model = model
        self._path = path
        self._checkpoint = Checkpoint(model, files, load_config)
        self.info = self._checkpoint.info
        if self.info.mismatched_keys and not load_config.ignore_mismatched_sizes:
            name, found, expected = sorted(self.info.mismatched_keys)[0]
            raise UserError(
                f"{path}: {name} has shape {tuple(found)} in the checkpoint and {tuple(expected)} in the model: "
                "give the config that belongs to it, or ignore_mismatched_sizes=True to initialise it anew"
            )

    def finalize(self) -> None:
        """As in transformers, on the meta device: buffers for real, weights tied, the report cleaned."""
        model, info = self._model, self.info
        self._settle_ties()
        model.mark_tied_weights_as_initialized(info)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type == "meta":
                    module._buffers[name] = torch.zeros_like(buffer, device="cpu")
        model.initialize_weights()
        model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
        model._adjust_missing_and_unexpected_keys(info)

    def weights(self) -> WeightSource:
        """What makes the weights: the files, and initialisation for those that they lack. Warns of the latter."""
        names_by_first = names_of(self._model)
        unit_of = self._checkpoint.unit_of
        missing = {first for first, names in names_by_first.items() if all(unit_of(name) is None for name in names)}
        # transformers leaves out of its report what a model says that it may lack.
        reported = self.info.missing_and_mismatched()
        shown = {first for first in missing if not reported.isdisjoint(names_by_first[first])}
        buffers = self.info.missing_keys - {name for names in names_by_first.values() for name in names}
        self._warn("{are} not in the checkpoint and {were} initialised anew", shown | buffers)
        self._warn("in the checkpoint {are} not in the model and {were} left out", self.info.unexpected_keys)
        if not missing:
            return WeightSource(self._model, [self._checkpoint])
        seed = int(torch.randint(2**62, (), dtype=torch.int64))
        return WeightSource(self._model, [self._checkpoint, Initialiser(self._model, missing, seed)])

    def _settle_ties(self) -> None:
        """Where a checkpoint has both of a tied pair: one is left out if they are equal, else they are not tied."""
        for target, source in list(self._model.all_tied_weights_keys.items()):
            if self._checkpoint.unit_of(target) is None or self._checkpoint.unit_of(source) is None:
                continue
            if self._checkpoint.have_equal_values(target, source):
                self._checkpoint.drop(target)
                self.info.missing_keys.add(target)
                continue
            del self._model.all_tied_weights_keys[target]
            logger.warning(
                "%s: the config ties %s to %s, but the checkpoint has other values for it: they are not tied",
                self._path,
                target,
                source,
            )

    def _warn(self, what: str, names: set[str]) -> None:
        if names:
            shown = sorted(names)
            more = f" and {len(shown) - _SHOWN_NAMES} more" if len(shown) > _SHOWN_NAMES else ""
            listed = ", ".join(shown[:_SHOWN_NAMES])
            are, were = ("is", "was") if len(shown) == 1 else ("are", "were")
            told = f"{format_number(len(shown), 'weight')} {what.format(are=are, were=were)}"
            logger.warning("%s: %s: %s%s", self._path, told, listed, more)
