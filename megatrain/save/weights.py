"""Reading saved weights back into a model that is streamed already, and the bits of its masters that they lack.

Rule: a parameter that the folder does not have is an error, never a silent leftover of the old weights; and all is
looked at (`save/fitting.py`) before the first is overwritten.
Host memory grows by one group of tensors, not by the model, except for architectures whose files name their weights
differently from the live model (fused experts): those are read as a plain model beside it, a layer at a time where
`mt.init` was called.
"""

from __future__ import annotations

import copy
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
from megatrain.optim.base import HomeOptimizer
from megatrain.optim.saved import state_dict_of
from megatrain.save.adapters import read_adapters, saves_adapters, trained_bytes
from megatrain.save.checkpoints import FOREIGN_OPTIMIZER_NAME, OPTIMIZER_STEM, SETTINGS_NAME
from megatrain.save.fitting import check_weights, plain_class_of, widest_dtype
from megatrain.save.folder import WEIGHT_NAMES
from megatrain.save.layers import LOW_HALF, WHOLE, lacking_bytes, lacks_bits
from megatrain.save.tensor_files import WEIGHTS_STEM, MappedTensors, tensor_files
from megatrain.spec.layout import Field
from megatrain.store.home import Home
from megatrain.store.masters import join

logger = logging.getLogger("megatrain")

GROUP_BYTES = GIB


def check_saved(model: nn.Module, engine: Engine, folder: Path) -> None:
    """Whether `read_weights` and `read_exact` can take what `folder` has: headers are looked at, nothing is changed.

    Raises UserError that names what lacks, or does not fit. Adapters are looked at when they are read.
    """
    if _has_adapters_alone(model, folder):
        return
    weight_files(folder)
    check_weights(model, folder)
    _check_exact(engine, folder)


def read_weights(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Copy the weights in `folder` (safetensors, one file or sharded) into `model`, in place.

    Raises UserError when the folder has no weights, or other than the model has: then none is changed. Of a model that
    saves its adapters alone, the base keeps what it has.
    """
    folder = Path(folder)
    if _has_adapters_alone(model, folder):
        read_adapters(model, folder)
        return
    weight_files(folder)
    is_named_alike = check_weights(model, folder)
    _copy_groups(model, _tensors(folder) if is_named_alike else _tensors_of_plain(model, folder))


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


def _check_exact(engine: Engine, folder: Path) -> None:
    """Low halves and whole masters: each of the size of its weight; all of them, or none."""
    saved, weights = MappedTensors(folder, OPTIMIZER_STEM), MappedTensors(folder, WEIGHTS_STEM)
    is_fp32, trained = _masters_in(folder)
    for field in _fields(engine):
        for ending, dtype, shape in ((WHOLE, "F32", tuple(field.shape)), (LOW_HALF, "I16", (field.numel,))):
            name = f"{field.name}{ending}"
            if name in saved and saved.header(name) != (dtype, shape):
                raise UserError(
                    f"{folder}: {name} was saved as {saved.header(name)}, and this model's is {(dtype, shape)}: give "
                    "another checkpoint"
                )
        was_rounded = field.name in weights and weights.header(field.name)[0] in ("BF16", "F16")
        has_rest = f"{field.name}{WHOLE}" in saved or f"{field.name}{LOW_HALF}" in saved
        if is_fp32 and was_rounded and field.name in trained and not has_rest:
            raise UserError(
                f"{folder} lacks {field.name}{LOW_HALF}, the bits of its master that its weight lacks: give "
                "another checkpoint, or start a new run from the weights"
            )


def _masters_in(folder: Path) -> tuple[bool, set[str]]:
    """Whether masters were exact, and of which parameters; no where nothing tells."""
    try:
        settings = json.loads((folder / SETTINGS_NAME).read_text(encoding="utf-8"))
        trained = {name for group in settings["groups"] for name in group["parameters"]}
        return settings.get("master") in ("fp32", "split"), trained
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False, set()


def _has_adapters_alone(model: nn.Module, folder: Path) -> bool:
    return saves_adapters(model) and not any((folder / name).is_file() for name in WEIGHT_NAMES)


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


def _tensors_of_plain(model: nn.Module, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    plain_class: Any = plain_class_of(model)
    # By the live model's config, with which all was looked at: what the folder's says beside it is not asked.
    config = copy.deepcopy(model.config)
    state = plain_class.from_pretrained(folder, config=config, dtype=widest_dtype(folder)).state_dict(keep_vars=True)
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


def _copy_groups(model: nn.Module, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Copy tensors into the model, about GROUP_BYTES at a time."""
    group: dict[str, torch.Tensor] = {}
    group_bytes = 0
    for name, tensor in tensors:
        group[name] = tensor
        group_bytes += tensor.nbytes
        if group_bytes >= GROUP_BYTES:
            model.load_state_dict(group, strict=False)
            group, group_bytes = {}, 0
    model.load_state_dict(group, strict=False)
