"""A model's spec from its name: a built-in shape, a folder, a config.json or a name on the Hub. No weights are read.

The model is built on the meta device, so that 405B parameters take a second and no memory.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatrain.base.errors import UserError, one_line
from megatrain.base.hub import HUB_TIMEOUT_SECONDS, silence
from megatrain.base.paths import looking_at, user_path
from megatrain.spec.builtin import BUILTIN
from megatrain.spec.homes import Formats
from megatrain.spec.model import ModelSpec, model_spec

if TYPE_CHECKING:
    from torch import nn

    from megatrain.base.config import Config

HOW_TO_NAME = "give a folder, a config.json, a name on the Hugging Face Hub, or one of"


class OutlinedModel:
    """A model on the meta device, from which specs in any format are made."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name = name
        self._model = model

    @property
    def config(self) -> Any:
        """Of transformers."""
        return self._model.config

    def spec(self, formats: Formats) -> ModelSpec:
        try:
            return model_spec(self._model, formats, self.name)
        except ZeroDivisionError as error:
            raise UserError(f"MODEL: a size in the config of {self.name} is 0, so there is nothing to train") from error

    def why_unmerged(self, config: Config, precision: str) -> str:
        """Why micro-batches are run as they are; empty where they may be merged."""
        from megatrain.outline import why_unmerged

        return why_unmerged(self._model, config, precision, None)


def outline_model(name: str, changes: Mapping[str, Any] = MappingProxyType({})) -> OutlinedModel:
    """A model of the config that `read_config` gives.

    Raises UserError: no such model, a config that transformers cannot build, no repeated blocks.
    """
    config = read_config(name, changes)
    return OutlinedModel(name, _on_meta(name, config))


def read_config(name: str, changes: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """The config of transformers that `name` means, with `changes` in place of its values.

    Raises UserError: no such model, a config that transformers refuses, a change of what the config does not have.
    """
    _check_changes(name, changes)
    key = name.lower()
    if key in BUILTIN:
        return _built(copy.deepcopy(BUILTIN[key]), name, changes)
    path = user_path(name, "MODEL")
    with looking_at("MODEL"):
        is_file, is_folder = path.is_file(), path.is_dir()
    if is_file:
        return _built(_values(path), str(path), changes)
    if is_folder and not (path / "config.json").is_file():
        raise UserError(f"MODEL: the folder {path} has no config.json; {_choices()}")
    if not is_folder and (path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1):
        is_path = path.is_absolute() or name.startswith((".", "~"))
        asked = "" if is_path else ", and the Hub was not asked, where names are OWNER/NAME"
        instead = _close(name, list(BUILTIN)) or f"; {_choices()}"
        raise UserError(f"MODEL: there is no folder or file {name}, no built-in shape of that name{asked}{instead}")
    return _from_folder(path, changes) if is_folder else _from_hub(name, changes)


def _check_changes(name: str, changes: Mapping[str, Any]) -> None:
    """transformers takes any word, and nobody reads the ones that it does not know."""
    if not changes:
        return
    config = read_config(name)
    known = {*config.to_dict(), *config.attribute_map} - {"model_type"}
    for key in changes:
        if key not in known:
            instead = _close(str(key), sorted(known)) or "; use a key of its config.json"
            raise UserError(f"MODEL: the config of {name} has no {key} to change{instead}")


def _built(values: dict[str, Any], name: str, changes: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(values.pop("model_type"), **{**values, **changes})
    except Exception as error:  # Whatever the checks of the architecture's config raise.
        raise UserError(f"MODEL: transformers refuses {name} ({one_line(error)})") from error


def _from_folder(path: Path, changes: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    values = _values(path / "config.json", may_have_code=True)
    try:
        return AutoConfig.from_pretrained(path, **changes)
    except Exception as error:  # As above, and of code of the folder's own.
        own = "; it has code of its own, which is not run here" if "auto_map" in values else ""
        raise UserError(f"MODEL: transformers refuses the config.json of {path} ({one_line(error)}){own}") from error


def _values(path: Path, *, may_have_code: bool = False) -> dict[str, Any]:
    """What a config.json says. Raises UserError for one that transformers has no architecture for.

    may_have_code: the code of an architecture of its own may lie beside it.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"MODEL: {path} is no config.json ({one_line(error)})") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise UserError(f"MODEL: {path} is no config.json of a model: it names no model_type")
    kind = values["model_type"]
    is_known = isinstance(kind, str) and kind in CONFIG_MAPPING
    if not is_known and not (may_have_code and "auto_map" in values):
        close = _close(str(kind), list(CONFIG_MAPPING))
        raise UserError(f"MODEL: {path}: unknown model_type {kind!r}, transformers has none of that name{close}")
    return values


def _from_hub(name: str, changes: Mapping[str, Any]) -> Any:
    """Asks the Hub once, with a timeout; where it is silent, the copy in its cache stands in."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
    from transformers import AutoConfig

    reason = ""
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_SECONDS)
    except GatedRepoError as error:
        raise UserError(f"MODEL: {name} is gated; accept its terms there, then run `hf auth login`") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        instead = _close(name.partition("/")[2], list(BUILTIN)) or f"; {_choices()}"
        raise UserError(
            f"MODEL: there is no folder or file {name}, and the Hub, which was asked, has no model of that name (or it "
            f"is private){instead}"
        ) from error
    except Exception as error:  # The HTTP library under huggingface_hub differs from version to version.
        reason = silence(error)
    try:
        return AutoConfig.from_pretrained(name, local_files_only=bool(reason), **changes)
    except Exception as error:
        told = f"the Hub: {reason}" if reason else one_line(error)
        raise UserError(f"MODEL: the config of {name} cannot be had ({told}); {_choices()}") from error


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
    raise UserError(f"MODEL: transformers cannot build {name} from its config ({one_line(first)})") from first


def _close(name: str, known: list[str]) -> str:
    """`; did you mean 'llama' or 'llama4'?`, or nothing."""
    found = difflib.get_close_matches(name.lower(), known, n=3)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def _choices() -> str:
    """How to name a model, with the built-in shapes by family."""
    families: dict[str, list[str]] = {}
    for name in BUILTIN:
        family, _, size = name.partition("-")
        families.setdefault(family, []).append(size)
    shapes = (
        f"{of}-{sizes[0]}" if len(sizes) == 1 else f"{of}-{{{','.join(sizes)}}}" for of, sizes in families.items()
    )
    return f"{HOW_TO_NAME} {', '.join(shapes)}"
