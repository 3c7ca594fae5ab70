"""A checkpoint as a model to give away: weights in one dtype, config, tokenizer, a card, and nothing of training alone.

Rule: a file of weights is in memory at a time. What is rounded is said; an exact fp32 master needs what the checkpoint
holds of it.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatrain.base.errors import UserError
from megatrain.optim.saved import SEPARATOR
from megatrain.save.card import WEIGHTS, Facts, card_text, listed_dtypes, read_facts, state_facts
from megatrain.save.checkpoints import (
    CARD_NAME,
    FOREIGN_OPTIMIZER_NAME,
    OPTIMIZER_STEM,
    SETTINGS_NAME,
    STATE_NAME,
    check_sound,
)
from megatrain.save.folder import WEIGHT_NAMES, whole_folder
from megatrain.save.layers import LOW_HALF, WHOLE
from megatrain.save.tensor_files import MappedTensors
from megatrain.save.weights import weight_files
from megatrain.store.masters import join

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
INDEX_NAME = WEIGHT_NAMES[1]
_OF_TRAINING = {
    *(SETTINGS_NAME, FOREIGN_OPTIMIZER_NAME, STATE_NAME),
    *("scheduler.pt", "training_args.bin"),
}


@dataclass(frozen=True, kw_only=True)
class Exported:
    num_tensors: int
    num_bytes: int
    words: str
    """What the weights are: their dtype, and whether they are as they were, rounded, or exact masters."""


@dataclass(frozen=True, kw_only=True)
class _Dtypes:
    """Of the floating-point weights."""

    saved: set[torch.dtype] = field(default_factory=set)
    """In the checkpoint."""
    written: set[torch.dtype] = field(default_factory=set)


def export(checkpoint: Path, target: Path, dtype: str | None = None) -> Exported:
    """Write the model in `checkpoint` to the new folder `target`, complete or not at all.

    Args:
        dtype: "bf16" (nearest, ties to even), "fp32" (the exact masters), or None: as they are.

    Raises UserError: no weights, damage, a dtype that cannot be had, a target that is no new folder.
    """
    check_sound(checkpoint, "CHECKPOINT")
    files = weight_files(checkpoint)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"DIR: {target} is there already and not empty; give a new folder")
    halves = _Halves(checkpoint) if dtype == "fp32" else None
    wanted = None if dtype is None else DTYPES[dtype]
    places: dict[str, str] = {}
    num_bytes, dtypes = 0, _Dtypes()
    with whole_folder(target, needed_bytes=_needed_bytes(files, wanted)) as folder:
        for path in files:
            tensors = _read(path, wanted, halves, dtypes)
            _write(tensors, folder / path.name)
            places |= dict.fromkeys(tensors, path.name)
            num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        if halves is not None and halves.unused():
            raise UserError(
                f"CHECKPOINT: {checkpoint} holds low halves of {halves.unused()[0]} and others that its files of "
                "weights name differently: resume from it and call trainer.save_model() of a model loaded in float32"
            )
        if len(files) > 1:
            total = {"total_size": num_bytes}
            _dump({"metadata": total, "weight_map": dict(sorted(places.items()))}, folder / INDEX_NAME)
        _copy_others(checkpoint, folder, listed_dtypes(dtypes.written) if len(dtypes.written) == 1 else None)
        words = _words(dtypes, halves)
        (folder / CARD_NAME).write_text(card_text(_facts(checkpoint, words)), encoding="utf-8")
    return Exported(num_tensors=len(places), num_bytes=num_bytes, words=words)


class _Halves:
    """Low halves of masters by the names of their weights; none where weights are whole."""

    def __init__(self, checkpoint: Path) -> None:
        self._tensors = MappedTensors(checkpoint, OPTIMIZER_STEM)
        endings = (LOW_HALF, WHOLE)
        self._left = {name.rpartition(SEPARATOR)[0] for name in self._tensors if name.endswith(endings)}
        self.is_any = bool(self._left)

    def master(self, name: str, weights: torch.Tensor) -> torch.Tensor:
        if name not in self._left:
            return weights.float()
        self._left.remove(name)
        if f"{name}{WHOLE}" in self._tensors:
            return self._tensors[f"{name}{WHOLE}"]
        return join(weights.view(-1), self._tensors[f"{name}{LOW_HALF}"]).view(weights.shape)

    def unused(self) -> list[str]:
        return sorted(self._left)


def _read(path: Path, wanted: torch.dtype | None, halves: _Halves | None, dtypes: _Dtypes) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    tensors = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():
            tensor = file.get_tensor(name)
            if tensor.is_floating_point():
                dtypes.saved.add(tensor.dtype)
                tensor = tensor.to(wanted or tensor.dtype) if halves is None else halves.master(name, tensor)
                dtypes.written.add(tensor.dtype)
            tensors[name] = tensor
    return tensors


def _write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})


def _needed_bytes(files: list[Path], wanted: torch.dtype | None) -> int:
    num_bytes = sum(path.stat().st_size for path in files)
    # At most: from two bytes to four.
    return 2 * num_bytes if wanted == torch.float32 else num_bytes


def _copy_others(checkpoint: Path, folder: Path, dtype: str | None) -> None:
    """Config, tokenizer, chat template, code: whatever is not of training."""
    for path in sorted(checkpoint.iterdir()):
        is_of_training = path.name in _OF_TRAINING or path.name.startswith(("rng_state", "megatrain_"))
        if not path.is_file() or is_of_training or path.suffix == ".safetensors" or path.name.endswith(".index.json"):
            continue
        shutil.copyfile(path, folder / path.name)
    config = folder / "config.json"
    if config.is_file() and dtype is not None:
        values = json.loads(config.read_text(encoding="utf-8"))
        for key in ("dtype", "torch_dtype"):
            if key in values:
                values[key] = dtype
        _dump(values, config)


def _words(dtypes: _Dtypes, halves: _Halves | None) -> str:
    now = listed_dtypes(dtypes.written)
    if halves is not None and halves.is_any:
        return f"{now}, the exact masters"
    others = listed_dtypes(dtypes.saved - dtypes.written)
    if not others:
        return f"{now}, as saved"
    return f"{now}, widened from {others}" if halves is not None else f"{now}, rounded to nearest from {others}"


def _facts(checkpoint: Path, words: str) -> Facts:
    """What was trained, as far as the checkpoint tells."""
    state_file = checkpoint / STATE_NAME
    state = json.loads(state_file.read_text(encoding="utf-8")) if state_file.is_file() else None
    of_run = {} if state is None else state_facts(state)
    return {**read_facts(checkpoint), **of_run, WEIGHTS: words}


def _dump(values: dict, path: Path) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
