"""A model's spec from its name: a built-in shape, a folder, a config.json or a name on the Hub. No weights are read.

The model is built on the meta device, so that 405B parameters take a second and no memory.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.base.errors import UserError
from megatrain.base.hub import silence
from megatrain.base.paths import looking_at, user_path
from megatrain.spec.builtin import BUILTIN
from megatrain.spec.homes import Formats
from megatrain.spec.model import ModelSpec, model_spec

if TYPE_CHECKING:
    from torch import nn

GATED_OR_LOCAL = "give a folder, a config.json, a name on the Hugging Face Hub, or one of"


class OutlinedModel:
    """A model on the meta device, from which specs in any format are made."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name = name
        self._model = model

    def spec(self, formats: Formats) -> ModelSpec:
        return model_spec(self._model, formats, self.name)


def outline_model(name: str) -> OutlinedModel:
    """Raises UserError: no such model, a config that transformers cannot build, no repeated blocks."""
    config = _config(name)
    return OutlinedModel(name, _on_meta(name, config))


def _config(name: str) -> Any:
    from transformers import AutoConfig

    key = name.lower()
    if key in BUILTIN:
        values = copy.deepcopy(BUILTIN[key])
        return AutoConfig.for_model(values.pop("model_type"), **values)
    path = user_path(name, "MODEL")
    with looking_at("MODEL"):
        is_file, is_folder = path.is_file(), path.is_dir()
    if is_file:
        return _config_file(path)
    if is_folder and not (path / "config.json").is_file():
        raise UserError(f"MODEL: the folder {path} has no config.json; {_choices()}")
    if not is_folder and (path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1):
        raise UserError(f"MODEL: {name} is not there and no built-in shape; {_choices()}")
    return _from_transformers(name, str(path) if is_folder else name)


def _config_file(path: Path) -> Any:
    from transformers import AutoConfig

    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return AutoConfig.for_model(values.pop("model_type"), **values)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"MODEL: {path} is no config.json that transformers knows ({type(error).__name__}: {_first_line(error)})"
        ) from error


def _from_transformers(name: str, source: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source)
    except Exception as error:  # The HTTP library under huggingface_hub differs from version to version.
        raise UserError(f"MODEL: the config of {name} cannot be had ({silence(error)}); {_choices()}") from error


def _on_meta(name: str, config: Any) -> nn.Module:
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    first: Exception | None = None
    for auto in (AutoModelForCausalLM, AutoModel):
        try:
            with torch.device("meta"):
                return auto.from_config(config, dtype=torch.bfloat16)
        except Exception as error:  # Whatever the architecture's own constructor raises.
            first = first or error
    raise UserError(f"MODEL: transformers cannot build {name} from its config ({_first_line(first)})") from first


def _first_line(error: BaseException | None) -> str:
    return next(iter(str(error).splitlines()), "")


def _choices() -> str:
    return f"{GATED_OR_LOCAL} {', '.join(BUILTIN)}"
