"""Whether the weights in a folder are those of a model, as the headers of their files tell.

Names are compared as the files have them and, where those differ, by transformers' own mapping of keys.
Rule: nothing of the model is changed here, and no weights are read but tied ones that were saved twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatrain.base.errors import UserError, one_line
from megatrain.execute.model import StreamedModel
from megatrain.execute.parameters import HomeParameter
from megatrain.save.tensor_files import WEIGHTS_STEM, MappedTensors

_FLOATS = {"F64", "F32", "F16", "BF16"}
_WHOLE_NUMBERS = {"I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"}
_SHOWN_NAMES = 3

Mismatch = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name of a weight, its shape in the files, its shape in the model."""


@dataclass(frozen=True, kw_only=True)
class _Own:
    """A tensor of the model's state dict."""

    key: int
    """The same for all names of a tied one."""
    shape: tuple[int, ...]
    is_float: bool
    is_parameter: bool


@dataclass(kw_only=True)
class _Fit:
    given: set[str]
    """Names of the model's state dict that the files have."""
    unexpected: list[str]
    mismatched: list[Mismatch] = field(default_factory=list)


def plain_class_of(model: nn.Module) -> type[nn.Module]:
    """The class that a streamed model had before."""
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, StreamedModel))


def check_weights(model: nn.Module, folder: Path) -> bool:
    """Whether the files name each weight as the model does; else they are for transformers' mapping of keys.

    Raises UserError: a folder without weights, files that cannot be read, another architecture, weights that lack or
    that the model does not have, other shapes, dtypes that are none of weights, tied weights of different values.
    """
    _check_architecture(model, folder)
    files = MappedTensors(folder, WEIGHTS_STEM)
    own = _own_tensors(model)
    _check_dtypes(folder, files, own)
    fit = _direct(files, own)
    is_named_alike, lacking = True, _lacking(model, own, fit.given)
    if _is_transformers(model):
        from megatrain.save.key_mapping import converts

        is_named_alike = not lacking and not converts(model, list(files), own)
        if not is_named_alike or fit.unexpected:
            fit = _mapped(model, folder, files)
            lacking = _lacking(model, own, fit.given)
    _check_names(folder, lacking, fit.unexpected)
    _check_shapes(folder, fit.mismatched)
    _check_ties(folder, files, own)
    return is_named_alike


def widest_dtype(folder: Path) -> torch.dtype:
    """Of the floating-point weights in `folder`: read in it, none of them loses a bit."""
    files = MappedTensors(folder, WEIGHTS_STEM)
    names = {files.header(name)[0] for name in files}
    if names & {"F64", "F32"} or {"F16", "BF16"} <= names:
        return torch.float64 if "F64" in names else torch.float32
    return torch.float16 if "F16" in names else torch.bfloat16


def listed(names: Collection[str]) -> str:
    """Some of them, and how many more there are."""
    shown = sorted(names)
    more = f" and {len(shown) - _SHOWN_NAMES} more" if len(shown) > _SHOWN_NAMES else ""
    return ", ".join(shown[:_SHOWN_NAMES]) + more


def _check_architecture(model: nn.Module, folder: Path) -> None:
    path, config = folder / "config.json", getattr(model, "config", None)
    if not path.is_file():
        return
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        theirs, classes = saved.get("model_type"), saved.get("architectures") or ["?"]
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path} cannot be read ({error}): give another checkpoint") from error
    ours = getattr(config, "model_type", None)
    if theirs and ours and theirs != ours:
        raise UserError(
            f"{folder} is of a {theirs} model ({classes[0]}), and this one is a {ours} ({type(model).__name__}): give "
            "a folder that was saved from the same architecture"
        )


def _own_tensors(model: nn.Module) -> dict[str, _Own]:
    own = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, HomeParameter):
            own[name] = _Own(key=id(value), shape=tuple(value._field.shape), is_float=True, is_parameter=True)
        elif isinstance(value, torch.Tensor):
            own[name] = _Own(
                key=id(value), shape=tuple(value.shape), is_float=value.is_floating_point(), is_parameter=False
            )
    return own


def _check_dtypes(folder: Path, files: MappedTensors, own: Mapping[str, _Own]) -> None:
    for name in files:
        dtype = files.header(name)[0]
        is_known = dtype in _FLOATS | _WHOLE_NUMBERS
        if not is_known or (name in own and (dtype in _FLOATS) != own[name].is_float):
            raise UserError(
                f"{folder}: {name} was saved as {dtype}, which is no dtype of weights here (quantised?): give a folder "
                "with weights in fp32, bf16 or fp16"
            )


def _direct(files: MappedTensors, own: Mapping[str, _Own]) -> _Fit:
    shapes = ((name, files.header(name)[1], own[name].shape) for name in files if name in own)
    return _Fit(
        given=own.keys() & set(files),
        unexpected=[name for name in files if name not in own],
        mismatched=[shape for shape in shapes if shape[1] != shape[2]],
    )


def _mapped(model: nn.Module, folder: Path, files: MappedTensors) -> _Fit:
    from megatrain.save.key_mapping import mapped

    given, report = mapped(plain_class_of(model), model.config, {name: files.header(name)[1] for name in files})
    if report.conversion_errors:
        name, error = next(iter(report.conversion_errors.items()))
        raise UserError(
            f"{folder}: {name} cannot be made from what was saved ({one_line(error)}): give a folder that was saved "
            "from the same architecture with the same sizes"
        )
    mismatched = [(name, tuple(found), tuple(expected)) for name, found, expected in sorted(report.mismatched_keys)]
    return _Fit(given=given, unexpected=sorted(report.unexpected_keys), mismatched=mismatched)


def _lacking(model: nn.Module, own: Mapping[str, _Own], given: Collection[str]) -> list[str]:
    """First names of what the files have under none of its names; buffers that a model says it may lack apart."""
    names: dict[int, list[str]] = {}
    for name, one in own.items():
        names.setdefault(one.key, []).append(name)
    patterns = [*(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())]
    patterns += [re.escape(name) for name in getattr(model, "_keys_to_ignore_on_save", None) or ()]
    return [
        aliases[0]
        for aliases in names.values()
        if not any(name in given for name in aliases)
        and (own[aliases[0]].is_parameter or not _is_any(patterns, aliases[0]))
    ]


def _is_any(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _check_names(folder: Path, lacking: list[str], unexpected: list[str]) -> None:
    if lacking:
        others = f", and has {len(unexpected)} of another, such as {min(unexpected)}" if unexpected else ""
        raise UserError(
            f"{folder} lacks {len(lacking)} weights of this model, such as {listed(lacking)}{others}: give a folder "
            "that was saved from the same architecture, whole"
        )
    if unexpected:
        raise UserError(
            f"{folder} has {len(unexpected)} weights that this model does not have, such as {listed(unexpected)}: give "
            "a folder that was saved from the same architecture, or make the model as its config.json says"
        )


def _check_shapes(folder: Path, mismatched: list[Mismatch]) -> None:
    if not mismatched:
        return
    name, found, expected = mismatched[0]
    others = f", and {len(mismatched) - 1} more differ" if len(mismatched) > 1 else ""
    raise UserError(
        f"{folder}: {name} was saved with the shape {found}, and this model's is {expected}{others}: make the model as "
        "it was saved (its config.json says how; the vocabulary may have been resized), or give another checkpoint"
    )


def _check_ties(folder: Path, files: MappedTensors, own: Mapping[str, _Own]) -> None:
    first: dict[int, str] = {}
    for name in files:
        if name not in own:
            continue
        other = first.setdefault(own[name].key, name)
        if other != name and not torch.equal(files[name], files[other]):
            raise UserError(
                f"{folder} has other values for {name} than for {other}, which are one weight of this model: load the "
                "model with tie_word_embeddings=False, or give another checkpoint"
            )


def _is_transformers(model: Any) -> bool:
    if not hasattr(type(model), "from_pretrained"):
        return False
    from transformers import PreTrainedModel

    return issubclass(plain_class_of(model), PreTrainedModel)
