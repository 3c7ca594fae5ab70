"""The model of a recipe: one with its weights, or a shape for which random ones are made.

Rule: what can be refused without weights is refused when the model is found; they are made when it is opened.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megatrain import api
from megatrain.base.errors import UserError
from megatrain.commands.console import print_step
from megatrain.commands.trial import check_runs
from megatrain.data.build import check_positions
from megatrain.execute.model import Initialize
from megatrain.loading import open_config, open_pretrained
from megatrain.models import ResolvedModel, resolve_model, resolve_tokenizer
from megatrain.planning import read_config
from megatrain.save.card import BASE_MODEL, BASE_WEIGHTS, Facts, base_model_name
from megatrain.save.folder import WEIGHT_NAMES

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from megatrain.model_choice import ModelConfig
    from megatrain.recipe import Recipe

Opened = tuple["nn.Module", Initialize | None]
"""A model and what makes its weights; None where it has them."""

WHAT = "causal language model"


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """A model without its weights."""

    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    origin: str
    """A sentence for the user."""
    facts: Facts
    """For the card of what is trained from it."""
    open: Callable[[], Opened]


def find_model(model: ModelConfig, console: Console) -> FoundModel:
    """Gets all of a model but its weights. Raises UserError for what the user can mend."""
    return _find_named(model, console) if model.shape is None else _find_shape(model, console)


def check_fits(found: FoundModel, recipe: Recipe, *, bf16: bool) -> None:
    """Refuse rows longer than the model has positions, a shape that its changes have broken, and a model that does not
    fit in memory, before the data is read and its weights are loaded."""
    check_positions(found.config.get_text_config(), recipe.data.sequence_length)
    check_runs(recipe.model, found.config, recipe.data.sequence_length)
    dtype = {} if recipe.model.dtype == "auto" else {"dtype": recipe.model.dtype}
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(found.config, **dtype)
        model.tie_weights()
    except Exception:
        return  # a class that cannot be built without values: the check comes when it has them
    api.check_fits(model, bf16=bf16)


def _find_named(model: ModelConfig, console: Console) -> FoundModel:
    assert model.name is not None
    resolved = resolve_model(
        model.name, revision=model.revision, cache_dir=model.cache_dir, say=lambda line: print_step(console, line)
    )
    of_weights = {BASE_WEIGHTS: resolved.note} if resolved.note else {}
    return FoundModel(
        config=_load(AutoConfig.from_pretrained, resolved, "config"),
        tokenizer=_load(AutoTokenizer.from_pretrained, resolved, "tokenizer"),
        origin=resolved.origin,
        facts={BASE_MODEL: base_model_name(model.name), **of_weights},
        open=lambda: _open_named(resolved, model.dtype, console),
    )


def _open_named(resolved: ResolvedModel, dtype: str, console: Console) -> Opened:
    """The model has its weights already where its files cannot be read a layer at a time."""
    print_step(console, "loading the weights")
    if any((resolved.path / name).is_file() for name in WEIGHT_NAMES):
        opened = _load(open_pretrained, resolved, WHAT, model_class=AutoModelForCausalLM, dtype=dtype)
        return opened.model, opened.source
    print_step(console, "no safetensors in that folder: all weights are in memory once before they go home")
    return _load(AutoModelForCausalLM.from_pretrained, resolved, WHAT, dtype=dtype), None


def _load(load: Callable[..., Any], resolved: ResolvedModel, what: str, key: str = "name", **options: Any) -> Any:
    """What `load` (from_pretrained of a class of transformers) makes of the model's folder."""
    try:
        return load(resolved.path, local_files_only=True, **options)
    except Exception as error:  # broken files come out as errors of JSON, tokenizers, safetensors, torch
        raise UserError(f"model.{key}: {resolved.path} cannot be loaded as a {what}: {error}") from error


def _find_shape(model: ModelConfig, console: Console) -> FoundModel:
    assert model.shape is not None and model.tokenizer is not None
    try:
        config = read_config(model.shape, model.config)
    except UserError as error:
        raise UserError(str(error).replace("MODEL", "model.shape", 1)) from error
    resolved = resolve_tokenizer(model.tokenizer, cache_dir=model.cache_dir, say=lambda line: print_step(console, line))
    tokenizer = _load(AutoTokenizer.from_pretrained, resolved, "tokenizer", "tokenizer")
    config = _with_ids_of(tokenizer, config, model)
    seed = model.seed or 0
    return FoundModel(
        config=config,
        tokenizer=tokenizer,
        origin=f"random weights, seed {seed}; tokenizer: {resolved.origin}",
        facts={"shape": _plain_name(model.shape), "first weights": f"random, seed {seed}"},
        open=lambda: _open_shape(config, model, seed, console),
    )


def _open_shape(config: PreTrainedConfig, model: ModelConfig, seed: int, console: Console) -> Opened:
    print_step(console, f"making random weights, seed {seed}")
    try:
        opened = open_config(config, dtype=model.dtype, seed=seed)
    except UserError as error:
        raise UserError(f"model.shape: {model.shape}: {error}") from error
    return opened.model, opened.source


def _with_ids_of(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, model: ModelConfig) -> PreTrainedConfig:
    """The config with the special ids of the tokenizer. Raises UserError for ids beyond the vocabulary."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= text.vocab_size:
        raise UserError(
            f"model.tokenizer: {model.tokenizer} has ids up to {largest:,}, and the shape {model.shape} a vocabulary "
            f"of {text.vocab_size:,}; choose another tokenizer, or set model.config.vocab_size={largest + 1}"
        )
    text.bos_token_id, text.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    # A padding id would keep the embedding of that token from being trained; padding never enters the loss.
    text.pad_token_id = None
    return config


def _plain_name(shape: str) -> str:
    """No path of the machine is written into a card."""
    return os.path.basename(os.path.normpath(shape)) if Path(shape).exists() else shape
