"""Reading saved weights back into a model that is streamed already, and the bits of its masters that they lack.

Rule: a parameter that the folder does not have is an error, never a silent leftover of the old weights.
Host memory grows by one group of tensors, not by the model, except for architectures whose files name their weights
differently from the live model (fused experts): those are read as a plain model beside it, a layer at a time where
`mt.init` was called.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatrain.base.errors import UserError
from megatrain.base.units import GIB
from megatrain.execute.engine import Engine
from megatrain.execute.model import StreamedModel
from megatrain.optim.base import HomeOptimizer
from megatrain.optim.saved import state_dict_of
from megatrain.save.adapters import read_adapters, saves_adapters, trained_bytes
from megatrain.save.checkpoints import FOREIGN_OPTIMIZER_NAME, OPTIMIZER_STEM, SETTINGS_NAME
from megatrain.save.folder import WEIGHT_NAMES
from megatrain.save.layers import LOW_HALF, WHOLE, lacking_bytes, lacks_bits
from megatrain.save.tensor_files import WEIGHTS_STEM, MappedTensors, tensor_files
from megatrain.spec.layout import Field
from megatrain.store.home import Home
from megatrain.store.masters import join

logger = logging.getLogger("megatrain")

GROUP_BYTES = GIB


def read_weights(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Copy the weights in `folder` (safetensors, one file or sharded) into `model`, in place.

    Raises UserError when the folder has no weights, or lacks one that the model has. Of a model that saves its adapters
    alone, the base keeps what it has.
    """
    if saves_adapters(model) and not _has_weights(Path(folder)):
        read_adapters(model, Path(folder))
        return
    missing = _missing(model, _copy_groups(model, _tensors(Path(folder))))
    if missing and hasattr(type(model), "from_pretrained"):
        missing = _missing(model, _copy_groups(model, _tensors_of_plain(model, folder)))
    if missing:
        raise UserError(
            f"{os.fspath(folder)} lacks {len(missing)} weights of this model, such as {missing[0]}: "
            "give a folder that was saved from the same architecture"
        )


def checkpoint_bytes(model: nn.Module, engine: Engine, optimizer: HomeOptimizer | None = None) -> int:
    """Bytes of the weights as they are saved and, with `optimizer`, of what training needs to go on from them."""
    fields = [field for home in engine.homes for field in home.fields]
    trained = [field for home in engine.homes for field in home.fields if home.trainable[field]]
    saved = trained if saves_adapters(model) else fields
    num_bytes = sum(field.numel * field.saved_dtype.itemsize for field in saved)
    if optimizer is not None:
        num_bytes += optimizer.num_state_bytes()
        num_bytes += _exact_bytes(model, engine)
    return num_bytes


def _exact_bytes(model: nn.Module, engine: Engine) -> int:
    """Bytes of what the saved weights lack of the exact masters."""
    if saves_adapters(model):
        return trained_bytes(engine)
    return sum(lacking_bytes(field) for field in _fields(engine) if lacks_bits(field))


def read_exact(model: nn.Module, engine: Engine, folder: Path) -> None:
    """Complete the masters after `read_weights`: bf16 weights are masters rounded to nearest, and with their low halves
    (2 bytes a parameter, beside the optimizer's states) they are exact. Where masters are of another form now, they
    are converted, and it says so. A folder without low halves has whole masters, or weights alone.
    """
    if saves_adapters(model):
        return
    engine.wait()
    saved = MappedTensors(folder, OPTIMIZER_STEM)
    was_rounded = False
    for home in engine.homes:
        for field in home.fields:
            master = _saved_master(home, field, saved)
            if master is None:
                continue
            if field.is_split or field.dtype == torch.float32:
                home.write(field, master)
            else:
                was_rounded = True  # as the saved weights are, which have been read
    if was_rounded:
        logger.warning("the saved masters are fp32 and were rounded to bf16, which is what masters are now")
    elif saved_master(folder) == "bf16" != engine.formats.master:
        logger.warning("the saved masters are bf16: the fp32 masters that there are now start as they")
    elif (folder / FOREIGN_OPTIMIZER_NAME).is_file() and any(map(lacks_bits, _fields(engine))):
        logger.warning(
            "%s was saved by plain transformers: its bf16 weights are whole, and masters start as they", folder
        )


def _saved_master(home: Home, field: Field, saved: MappedTensors) -> torch.Tensor | None:
    """The exact master of weights that were saved in fewer bits and have been read. None where they were not."""
    if f"{field.name}{WHOLE}" in saved:
        return saved[f"{field.name}{WHOLE}"]
    if f"{field.name}{LOW_HALF}" not in saved:
        return None
    rounded = home.read(field).to(torch.bfloat16)
    return join(rounded.view(-1), saved[f"{field.name}{LOW_HALF}"]).view(field.shape)


def _fields(engine: Engine) -> list[Field]:
    return [field for home in engine.homes for field in home.fields]


def read_optimizer(folder: Path, optimizer: HomeOptimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the optimizer of a checkpoint, and what its `load_state_dict` takes: mapped, not read.

    Raises UserError for settings that are not what was written, or of another optimizer.
    """
    try:
        settings = json.loads((folder / SETTINGS_NAME).read_text(encoding="utf-8"))
        return settings, state_dict_of(settings, MappedTensors(folder, OPTIMIZER_STEM), optimizer)
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder / SETTINGS_NAME} is not what was written ({type(error).__name__}: {error}): choose another "
            "checkpoint"
        ) from error


def saved_master(folder: Path) -> str | None:
    """Form of the masters of a checkpoint, as `mt.init(master=...)` names them. None where nothing tells."""
    try:
        return json.loads((folder / SETTINGS_NAME).read_text(encoding="utf-8")).get("master")
    except (OSError, ValueError, AttributeError):
        return None


def _has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in WEIGHT_NAMES)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a saved model, in order. Raises UserError when there are none."""
    files = tensor_files(folder, WEIGHTS_STEM)
    if not files:
        raise UserError(f"{folder} has neither model.safetensors nor its index: give the folder of a saved model")
    return files


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)


def _tensors_of_plain(model: nn.Module, folder: str | os.PathLike[str]) -> Iterator[tuple[str, torch.Tensor]]:
    plain_class = next(cls for cls in type(model).__mro__ if not issubclass(cls, StreamedModel))
    state = plain_class.from_pretrained(folder, dtype="auto").state_dict(keep_vars=True)
    seen: set[int] = set()
    while state:
        name, value = state.popitem(last=False)
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield name, value.detach()
        if isinstance(value, nn.Parameter):
            # Given up as it is copied: where the weights are still in their files, a layer is in memory at a time.
            value.data = torch.empty(0, dtype=value.dtype)


def _missing(model: nn.Module, seen: set[str]) -> list[str]:
    """Parameters of which no name is in `seen`; a tied one has several names and is saved under one of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [aliases[0] for aliases in names.values() if seen.isdisjoint(aliases)]


def _copy_groups(model: nn.Module, tensors: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
    """Copy tensors into the model, about GROUP_BYTES at a time. Returns the names that were given."""
    seen: set[str] = set()
    group: dict[str, torch.Tensor] = {}
    group_bytes = 0
    for name, tensor in tensors:
        seen.add(name)
        group[name] = tensor
        group_bytes += tensor.nbytes
        if group_bytes >= GROUP_BYTES:
            model.load_state_dict(group, strict=False)
            group, group_bytes = {}, 0
    model.load_state_dict(group, strict=False)
    return seen
