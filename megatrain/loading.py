"""`from_pretrained` and `from_config`: weights go straight to their homes, and are never whole in memory beside them.

transformers' own `from_pretrained` runs as ever (it finds the class and the files, reads the generation config), except
for the two steps that read and finish the weights: they make a plan instead, on the meta device. `mt.stream` then asks
for the weights, a layer at a time. Peak host memory: homes, and two of the largest layers.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from megatrain.api import stream
from megatrain.base.errors import UserError
from megatrain.load.checkpoint import Checkpoint, damaged_file
from megatrain.load.initial import Initialiser
from megatrain.load.units import PATCHING, WeightSource, names_of, parameters_on_meta

logger = logging.getLogger("megatrain")

_SHOWN_NAMES = 5
_REFUSED = {
    "device_map": "layers live in host memory; choose the device with mt.init(device=...)",
    "max_memory": "say mt.init(max_vram_gb=..., max_ram_gb=...)",
    "offload_folder": "say mt.init(offload_dir=...)",
    "quantization_config": "full-parameter training needs unquantised weights",
    "load_in_8bit": "full-parameter training needs unquantised weights",
    "load_in_4bit": "full-parameter training needs unquantised weights",
    "gguf_file": "load it with transformers, then mt.stream(model)",
    "state_dict": "load it with transformers, then mt.stream(model)",
    "tp_plan": "one GPU and one process alone",
    "tp_size": "one GPU and one process alone",
    "distributed_config": "one GPU and one process alone",
    "output_loading_info": "what is missing or unexpected is told by a warning",
}
"""Argument of transformers' from_pretrained -> what to do instead."""


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A model on the meta device, and what makes its weights. Nothing of its size is in memory yet."""

    model: PreTrainedModel
    source: WeightSource

    def stream(self, *, bf16: bool | None = None) -> nn.Module:
        """Make the weights and take them home; see `mt.stream`."""
        with transformers_logging.tqdm(total=self.source.num_units, desc="Loading weights", unit="layer") as bar:
            self.source.done = bar.update
            return stream(self.model, self.source, bf16=bf16)


def from_pretrained(
    pretrained_model_name_or_path: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "auto",
    model_class: Any = None,
    **keywords: Any,
) -> nn.Module:
    """What `mt.stream(AutoModelForCausalLM.from_pretrained(...))` gives, without the model in memory beside its homes.

    Reads safetensors, one file or sharded, a layer at a time, with transformers' own key mapping: fused experts, base
    models, tied weights. Weights that the checkpoint lacks are initialised as transformers does; a warning names them.

    Args:
        pretrained_model_name_or_path: a folder, or a name on the Hugging Face Hub.
        dtype: "bfloat16", "float32", a torch.dtype, or "auto": as the config says, else as saved.
        model_class: a class of transformers with `from_pretrained`; None is AutoModelForCausalLM.
        keywords: of transformers' from_pretrained: revision, cache_dir, token, trust_remote_code, attn_implementation,
            config, key_mapping, ignore_mismatched_sizes, and whatever changes the config.

    Raises UserError, before any weight is read: an argument that makes no sense here, no such model, no safetensors,
    a shard that is damaged or lacking, another shape (key and both shapes are named), too little memory.
    """
    keywords = {"dtype": dtype, **keywords}
    return open_pretrained(pretrained_model_name_or_path, model_class or AutoModelForCausalLM, **keywords).stream()


def from_config(
    config: PreTrainedConfig | str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    seed: int = 0,
    model_class: Any = None,
    **keywords: Any,
) -> nn.Module:
    """A streamed model with the initialisation of its architecture, made a layer at a time.

    Each parameter has the distribution that transformers' `from_config` gives it. The values depend on `seed` and the
    config alone, not on threads or on the order of layers; they are not those of a plain model with that seed.

    Args:
        config: a config, a folder with a config.json, or a name on the Hugging Face Hub.
        dtype: "bfloat16", "float32", a torch.dtype, or None: as the config says, else float32.
        seed: of all random numbers; the global generators stay as they are.
        model_class: a class of transformers with `from_config`; None is AutoModelForCausalLM.
        keywords: `attn_implementation`, `trust_remote_code`; with a path, those of AutoConfig.from_pretrained too.

    Raises UserError: no such config, no repeated blocks, too little memory.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UserError(f"seed={seed!r} must be a whole number")
    own = {name: keywords.pop(name) for name in ("attn_implementation", "trust_remote_code") if name in keywords}
    with _told_plainly(config):
        if not isinstance(config, PreTrainedConfig):
            trust = {name: own[name] for name in ("trust_remote_code",) if name in own}
            config, keywords = AutoConfig.from_pretrained(config, return_unused_kwargs=True, **trust, **keywords)
        if dtype is not None:
            own["dtype"] = dtype
        model_class = model_class or AutoModelForCausalLM
        build = getattr(model_class, "from_config", None) or model_class._from_config
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), parameters_on_meta():
            torch.default_generator.manual_seed(seed % 2**63)
            model = build(copy.deepcopy(config), **own, **keywords)
    names = set(names_of(model))
    return _opened(model, None, names, seed).stream()


def open_pretrained(path: str | os.PathLike[str], model_class: Any, **keywords: Any) -> OpenedModel:
    """The model on the meta device and the plan of its weights. Arguments and errors: see `from_pretrained`."""
    for name, remedy in _REFUSED.items():
        if keywords.get(name) is not None and keywords[name] is not False:
            raise UserError(f"{name}={keywords[name]!r} is not for a streamed model: {remedy}")
    interception = _Interception(path)
    with _told_plainly(path), interception.active():
        model = model_class.from_pretrained(path, **keywords)
    checkpoint, info = interception.checkpoint, interception.info
    assert checkpoint is not None, f"{model_class.__name__}.from_pretrained read no weights"
    names_by_first = names_of(model)
    missing = {first for first, names in names_by_first.items() if all(checkpoint.unit_of(n) is None for n in names)}
    # transformers leaves out of its report what a model says that it may lack.
    reported = info.missing_and_mismatched()
    shown = {first for first in missing if not reported.isdisjoint(names_by_first[first])}
    buffers = info.missing_keys - {name for names in names_by_first.values() for name in names}
    _warn("are not in the checkpoint and were initialised anew", path, shown | buffers)
    _warn("in the checkpoint are not in the model and were left out", path, info.unexpected_keys)
    seed = int(torch.randint(2**62, (), dtype=torch.int64)) if missing else 0
    return _opened(model, checkpoint, missing, seed)


def _opened(model: PreTrainedModel, checkpoint: Checkpoint | None, missing: set[str], seed: int) -> OpenedModel:
    makers: list[Any] = [] if checkpoint is None else [checkpoint]
    if missing:
        makers.append(Initialiser(model, missing, seed))
    return OpenedModel(model=model, source=WeightSource(model, makers))


class _Interception:
    """Stands in for the two steps of transformers' from_pretrained that read and finish the weights."""

    def __init__(self, path: Any) -> None:
        self._path = path
        self.checkpoint: Checkpoint | None = None
        self.info: Any = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """In this thread alone: models that others load meanwhile are loaded as ever."""
        thread = threading.get_ident()

        def load(*args: Any, **kwargs: Any) -> Any:
            return (self._load if threading.get_ident() == thread else originals[0])(*args, **kwargs)

        def finalize(*args: Any, **kwargs: Any) -> Any:
            return (self._finalize if threading.get_ident() == thread else originals[1])(*args, **kwargs)

        with PATCHING:
            originals = PreTrainedModel._load_pretrained_model, PreTrainedModel._finalize_model_loading
            PreTrainedModel._load_pretrained_model = staticmethod(load)
            PreTrainedModel._finalize_model_loading = staticmethod(finalize)
            try:
                yield
            finally:
                PreTrainedModel._load_pretrained_model = staticmethod(originals[0])
                PreTrainedModel._finalize_model_loading = staticmethod(originals[1])

    def _load(self, model: Any, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any, **_: Any) -> Any:
        """The plan of the weights; under the names that transformers calls it with."""
        if load_config.hf_quantizer is not None:
            raise UserError(f"{self._path} is quantised: full-parameter training needs the unquantised model")
        if self.checkpoint is not None:
            raise UserError(
                f"{self._path} holds an adapter: load it with transformers and peft, then mt.stream the whole model"
            )
        if not checkpoint_files or not all(str(file).endswith(".safetensors") for file in checkpoint_files):
            raise UserError(
                f"{self._path} has no safetensors, which are read a layer at a time: convert it once, with "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder), or load it whole, with "
                "mt.stream(AutoModelForCausalLM.from_pretrained(...))"
            )
        self.checkpoint = Checkpoint(model, [str(file) for file in checkpoint_files], load_config)
        self.info = self.checkpoint.info
        if self.info.mismatched_keys and not load_config.ignore_mismatched_sizes:
            name, found, expected = sorted(self.info.mismatched_keys)[0]
            raise UserError(
                f"{self._path}: {name} has shape {tuple(found)} in the checkpoint and {tuple(expected)} in the model: "
                "give the config that belongs to it, or ignore_mismatched_sizes=True to initialise it anew"
            )
        return self.info, None

    def _finalize(self, model: Any, _: Any, info: Any) -> Any:
        """As in transformers, on the meta device: buffers for real, weights tied, the report cleaned."""
        self._settle_ties(model, info)
        model.mark_tied_weights_as_initialized(info)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type == "meta":
                    module._buffers[name] = torch.zeros_like(buffer, device="cpu")
        model.initialize_weights()
        model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
        model._adjust_missing_and_unexpected_keys(info)
        return info

    def _settle_ties(self, model: Any, info: Any) -> None:
        """Where a checkpoint has both of a tied pair: one is left out if they are equal, else they are not tied."""
        for target, source in list(model.all_tied_weights_keys.items()):
            if self.checkpoint.unit_of(target) is None or self.checkpoint.unit_of(source) is None:
                continue
            if self.checkpoint.have_equal_values(target, source):
                self.checkpoint.drop(target)
                info.missing_keys.add(target)
                continue
            del model.all_tied_weights_keys[target]
            logger.warning(
                "%s: the config ties %s to %s, but the checkpoint has other values for it: they are not tied",
                self._path,
                target,
                source,
            )


@contextlib.contextmanager
def _told_plainly(path: Any) -> Iterator[None]:
    """Errors of transformers, safetensors and the Hub, as UserError."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        damaged = damaged_file(path) if isinstance(path, str | os.PathLike) else None
        if damaged is not None:
            raise damaged from error
        what = f"the config of a {type(path).__name__}" if isinstance(path, PreTrainedConfig) else path
        raise UserError(f"{what} cannot be loaded: {error}") from error


def _warn(what: str, path: Any, names: set[str]) -> None:
    if names:
        shown = sorted(names)
        more = f" and {len(shown) - _SHOWN_NAMES} more" if len(shown) > _SHOWN_NAMES else ""
        logger.warning("%s: %d weights %s: %s%s", path, len(shown), what, ", ".join(shown[:_SHOWN_NAMES]), more)
