"""Adapters (peft) of a streamed model: reading saved ones back, and the exact trained weights beside them.

peft saves what makes inference work, and training may need more: the encoder behind a prompt and not its output, or
weights that train beside the adapters. So a checkpoint also gets the exact master of every trained parameter.

Rule: a trained parameter that neither has is an error, never a silent leftover of the old weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatrain.base.errors import UserError
from megatrain.execute.engine import Engine
from megatrain.execute.model import named_home_parameters
from megatrain.save.folder import ADAPTER_NAMES

TRAINED_NAME = "trained_masters.safetensors"


def saves_adapters(model: nn.Module) -> bool:
    """Whether `save_pretrained` writes the adapters alone, as peft does, and transformers after `add_adapter`."""
    # A peft model shows the attributes of its base, so the class decides.
    return hasattr(model, "peft_config") and (not _is_transformers(model) or model._hf_peft_config_loaded)


def trained_bytes(engine: Engine) -> int:
    """What `save_trained` writes, at most."""
    return sum(4 * field.numel for home in engine.homes for field in home.fields if home.trainable[field])


def save_trained(model: nn.Module, folder: Path) -> None:
    """Write the exact masters of all parameters that train."""
    from safetensors.torch import save_file

    save_file({name: parameter.master() for name, parameter in _trained(model).items()}, folder / TRAINED_NAME)


def read_adapters(model: nn.Module, folder: Path) -> None:
    """Copy the adapters in `folder`, and what `save_trained` wrote there if it did, into `model`, in place.

    Raises UserError when the folder lacks an adapter, or a parameter that trains; nothing has changed then.
    """
    # peft tells what does not fit while it loads.
    before = {name: parameter.master() for name, parameter in _trained(model).items()}
    try:
        _read_all(model, folder)
    except UserError:
        with torch.no_grad():
            for name, parameter in _trained(model).items():
                parameter.copy_(before[name])
        raise


def _read_all(model: nn.Module, folder: Path) -> None:
    is_exact = (folder / TRAINED_NAME).is_file()
    missing = set(_trained(model))
    for name, place in _adapter_folders(model, folder).items():
        # What is saved of a prompt is the output of its encoder, and may not even fit there.
        if not (is_exact and model.peft_config[name].is_prompt_learning):
            missing -= _read_adapter(model, name, place)
    if is_exact:
        missing -= _read_trained(model, folder / TRAINED_NAME)
    if missing:
        raise UserError(
            f"{folder} lacks {len(missing)} weights that train, such as {min(missing)}: peft does not save them, and "
            f"the folder has no {TRAINED_NAME}; give a checkpoint of megatrain.Trainer with the same adapters"
        )


def _adapter_folders(model: nn.Module, folder: Path) -> dict[str, Path]:
    """Where the saved adapters are, by name: peft gives each but `default` a folder, transformers saves the active."""
    if _is_transformers(model):
        return {model.active_adapters()[0]: folder}
    return {name: folder if name == "default" else folder / name for name in model.peft_config}


def _read_adapter(model: nn.Module, name: str, folder: Path) -> set[str]:
    """Returns the names of the parameters that were given, and of buffers."""
    from peft import load_peft_weights, set_peft_model_state_dict

    if not any((folder / file).is_file() for file in ADAPTER_NAMES):
        raise UserError(f"{folder} has no {ADAPTER_NAMES[0]}: give a folder that was saved from a model with {name!r}")
    state = load_peft_weights(str(folder), device="cpu")
    try:
        result = set_peft_model_state_dict(model, state, adapter_name=name)
    except (RuntimeError, KeyError) as error:
        raise UserError(f"{folder} holds another adapter than {name!r} of this model: {error}") from error
    given = model.state_dict().keys() - set(result.missing_keys)
    if model.peft_config[name].is_prompt_learning:
        given.add(f"prompt_encoder.{name}.embedding.weight")
    return given


def _read_trained(model: nn.Module, path: Path) -> set[str]:
    from safetensors import safe_open

    trained = _trained(model)
    with safe_open(path, framework="pt") as file, torch.no_grad():
        given = trained.keys() & set(file.keys())
        for name in given:
            master = file.get_tensor(name)
            if master.shape != trained[name].shape:
                raise UserError(
                    f"{path}: {name} has the shape {tuple(master.shape)}, this model's {tuple(trained[name].shape)}"
                )
            trained[name].copy_(master)
    return given


def _trained(model: nn.Module) -> dict[str, Any]:
    return {name: parameter for name, parameter in named_home_parameters(model) if parameter.requires_grad}


def _is_transformers(model: nn.Module) -> bool:
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)
