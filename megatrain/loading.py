"""`from_pretrained` and `from_config`: weights go straight to their homes, and are never whole in memory beside them.

transformers' own `from_pretrained` runs as ever (it finds the class and the files, reads the generation config), except
for the two steps that read and finish the weights: they make a plan instead, on the meta device. `mt.stream` then asks
for the weights, a layer at a time. Peak host memory: homes, and two of the largest layers.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from megatrain.api import init, stream
from megatrain.base.errors import UserError, one_line
from megatrain.base.hub import check_cached, must_be_cached
from megatrain.load.checkpoint import damaged_file
from megatrain.load.initial import Initialiser
from megatrain.load.interception import loading_by
from megatrain.load.opening import OpenedCheckpoint
from megatrain.load.units import WeightSource, names_of, parameters_on_meta

logger = logging.getLogger("megatrain")

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
    return open_config(config, dtype=dtype, seed=seed, model_class=model_class, **keywords).stream()


def open_config(
    config: PreTrainedConfig | str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    seed: int = 0,
    model_class: Any = None,
    **keywords: Any,
) -> OpenedModel:
    """The model on the meta device and what initialises it. Arguments and errors: see `from_config`."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UserError(f"seed={seed!r} must be a whole number")
    dtype = None if dtype == "auto" else dtype
    _check_arguments(config, dtype, model_class, keywords)
    own = {name: keywords.pop(name) for name in ("attn_implementation", "trust_remote_code") if name in keywords}
    with _told_plainly(config, RuntimeError):
        if not isinstance(config, PreTrainedConfig):
            trust = {name: own[name] for name in ("trust_remote_code",) if name in own}
            keywords |= _reach_hub(config, keywords)
            config, keywords = AutoConfig.from_pretrained(config, return_unused_kwargs=True, **trust, **keywords)
        config = _without_quantisation(config)
        if dtype is not None:
            own["dtype"] = dtype
        model_class = model_class or AutoModelForCausalLM
        build = getattr(model_class, "from_config", None) or model_class._from_config
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), parameters_on_meta():
            torch.default_generator.manual_seed(seed % 2**63)
            model = build(copy.deepcopy(config), **own, **keywords)
    source = WeightSource(model, [Initialiser(model, set(names_of(model)), seed)])
    return OpenedModel(model=model, source=source)


def open_pretrained(path: str | os.PathLike[str], model_class: Any, **keywords: Any) -> OpenedModel:
    """The model on the meta device and the plan of its weights. Arguments and errors: see `from_pretrained`."""
    for name, remedy in _REFUSED.items():
        if keywords.get(name) is not None and keywords[name] is not False:
            raise UserError(f"{name}={keywords[name]!r} is not for a streamed model: {remedy}")
    _check_arguments(path, keywords.get("dtype"), model_class, keywords)
    loader = _Opening(path)
    keywords |= _reach_hub(path, keywords)
    if keywords.get("local_files_only"):
        # transformers' auto classes look for an adapter on the Hub all the same.
        own = {"local_files_only": True, "cache_dir": keywords.get("cache_dir")}
        keywords["adapter_kwargs"] = own | (keywords.get("adapter_kwargs") or {})
    with _told_plainly(path), loading_by(loader):
        model = model_class.from_pretrained(path, **keywords)
    assert loader.opened is not None, f"{model_class.__name__}.from_pretrained read no weights"
    return OpenedModel(model=model, source=loader.opened.weights())


class _Opening:
    """The loader of one call (see `load/interception.py`)."""

    def __init__(self, path: Any) -> None:
        self._path = path
        self.opened: OpenedCheckpoint | None = None

    def load(self, model: Any, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any) -> Any:
        del state_dict  # refused as an argument, and there is no other source of one
        if load_config.hf_quantizer is not None:
            raise UserError(f"{self._path} is quantised: full-parameter training needs the unquantised model")
        if self.opened is not None:
            raise UserError(
                f"{self._path} holds an adapter: load it with transformers and peft, then mt.stream the whole model"
            )
        if not checkpoint_files or not all(str(file).endswith(".safetensors") for file in checkpoint_files):
            raise UserError(
                f"{self._path} has no safetensors, which are read a layer at a time: convert it once, with "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder), or load it whole, with "
                "mt.stream(AutoModelForCausalLM.from_pretrained(...))"
            )
        self.opened = OpenedCheckpoint(model, self._path, [str(file) for file in checkpoint_files], load_config)
        return self.opened.info

    def finalize(self, model: Any, load_config: Any, loading_info: Any) -> Any:
        assert self.opened is not None
        self.opened.finalize()
        return loading_info


def _check_arguments(path: Any, dtype: Any, model_class: Any, keywords: dict[str, Any]) -> None:
    """Raises UserError for what transformers would meet with an error of its own, far from the cause."""
    if not isinstance(path, str | os.PathLike | PreTrainedConfig):
        raise UserError(f"{path!r} is no model: give a folder, a name on the Hub, or (mt.from_config) a config")
    is_path = isinstance(path, str | os.PathLike) and (os.path.isabs(path) or os.fspath(path).startswith((".", "~")))
    if is_path and not os.path.exists(os.path.expanduser(path)):
        raise UserError(f"{os.fspath(path)}: there is no such folder")
    name = dtype if isinstance(dtype, str) else None
    if name not in (None, "auto") and not isinstance(getattr(torch, name, None), torch.dtype):
        raise UserError(f"dtype={dtype!r} is not known: use 'bfloat16', 'float32', a torch.dtype, or 'auto'")
    if not isinstance(dtype, str | torch.dtype | None):
        raise UserError(f"dtype={dtype!r} must be one dtype: 'bfloat16', 'float32', a torch.dtype, or 'auto'")
    is_class = isinstance(model_class, type) and (hasattr(model_class, "from_pretrained") or model_class is None)
    if model_class is not None and not (is_class and not issubclass(model_class, PreTrainedConfig | AutoConfig)):
        raise UserError(f"model_class={model_class!r} must be a class of models of transformers, AutoModel for example")
    for setting in keywords.keys() & inspect.signature(init).parameters.keys():
        given = f"{setting}={keywords[setting]!r}"
        raise UserError(f"{given} is a setting of the stream: say it with mt.init({setting}=...)")


def _reach_hub(path: str | os.PathLike[str], keywords: dict[str, Any]) -> dict[str, Any]:
    """Keywords that keep transformers from retrying for half a minute where the Hub does not answer.

    Raises UserError when the model is nowhere.
    """
    if os.path.exists(path):
        return {}
    name, revision = os.fspath(path), keywords.get("revision")
    where = {"revision": revision, "cache_dir": keywords.get("cache_dir")}
    if keywords.get("local_files_only"):
        check_cached(name, "local_files_only=True", **where)
        return {}
    return {"local_files_only": True} if must_be_cached(name, token=keywords.get("token"), **where) else {}


def _without_quantisation(config: PreTrainedConfig) -> PreTrainedConfig:
    """A new model has no quantised weights, whatever the config of a published one says of its files."""
    if getattr(config, "quantization_config", None) is None:
        return config
    logger.warning("the config names a quantisation, which is left out: the weights of a new model are not quantised")
    config = copy.deepcopy(config)
    del config.quantization_config
    return config


@contextlib.contextmanager
def _told_plainly(path: Any, *more: type[Exception]) -> Iterator[None]:
    """Errors of transformers, safetensors and the Hub, as UserError. more: classes that can only be of that kind."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise UserError(
            f"{path} needs a package that is not here ({error}). If that is for its quantisation: full-parameter "
            "training needs the unquantised model"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        damaged = damaged_file(path) if isinstance(path, str | os.PathLike) else None
        if damaged is not None:
            raise damaged from error
        what = f"the config of a {type(path).__name__}" if isinstance(path, PreTrainedConfig) else path
        raise UserError(f"{what} cannot be loaded: {error}") from error
    except (StrictDataclassError, ArithmeticError, *more) as error:
        of = f"a {type(path).__name__}" if isinstance(path, PreTrainedConfig) else path
        raise UserError(f"the config of {of} is none that a model can be built from: {one_line(error)}") from error
