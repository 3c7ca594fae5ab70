"""Turns a model into a streamed one, in place: homes built, parameters replaced, calls that would do harm refused.

Rule: what a user may call on the model afterwards does the right thing or raises an error that names it. The table
`REFUSED` and the overrides of `StreamedModel` say which; a test goes through both.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from megatrain.base.errors import RefusedError, UserError
from megatrain.execute.dropped import note_streamed
from megatrain.execute.engine import Engine, engine_of
from megatrain.execute.guard import protect
from megatrain.execute.layer import StreamedLayer, stream_module
from megatrain.execute.moving import Initialize, check_not_moved
from megatrain.execute.parameters import COPY_REMEDY, HomeParameter, HomeView
from megatrain.execute.tiles import tile_layers
from megatrain.spec.discover import FoundLayer, parameter_uses
from megatrain.spec.homes import HomePlan
from megatrain.store.home import Home

REFUSED = {
    "resize_token_embeddings": "resize the model before mt.stream, then stream it",
    "half": "float16 is not a compute precision here: load the model in bfloat16, or use mt.init(precision='bf16')",
    "to_empty": "its weights live at home and stay there",
    "share_memory": "its weights live at home: start worker processes before mt.stream",
    "tie_weights": "tie weights before mt.stream; what was tied then stays tied",
    "dequantize": "load the model unquantised",
    "add_adapter": "add adapters (peft) before mt.stream, then stream the whole model",
    "load_adapter": "load adapters (peft) before mt.stream, then stream the whole model",
    "compile": "it would trace through the streaming of layers; say mt.init(compile=True) before mt.stream",
}
"""Method of a streamed model -> what to do instead."""


class StreamedModel(nn.Module):
    """Mixed in before the model's own class."""

    def to(self, *args: Any, **kwargs: Any) -> StreamedModel:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        engine = _engine(self)
        if memory_format is not None:
            raise RefusedError(f".to(memory_format={memory_format}) on a streamed model: say it before mt.stream")
        if device is not None and not _is_same_device(device, engine.device):
            raise RefusedError(
                f".to({str(device)!r}) on a streamed model: its layers run on {engine.device} and live in host memory. "
                "Choose the device with mt.init(device=...) before mt.stream"
            )
        if dtype is not None:
            self._keep_dtype(f".to({dtype})", dtype)
        return self

    def cuda(self, device: Any = None) -> StreamedModel:
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def cpu(self) -> StreamedModel:
        return self.to("cpu")

    def float(self) -> StreamedModel:
        return self._keep_dtype(".float()", torch.float32)

    def bfloat16(self) -> StreamedModel:
        return self._keep_dtype(".bfloat16()", torch.bfloat16)

    def double(self) -> StreamedModel:
        return self._keep_dtype(".double()", torch.float64)

    def type(self, dst_type: Any) -> StreamedModel:
        return self._keep_dtype(f".type({dst_type})", dst_type)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in torch (see `_bring_home`); tied parameters share one tensor."""
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        first: dict[int, torch.Tensor] = {}
        for name, parameter in named_home_parameters(self, remove_duplicate=False):
            if prefix + name in state:
                state[prefix + name] = first.setdefault(id(parameter), state[prefix + name])
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Writes to the homes; see torch."""
        if assign:
            raise RefusedError(
                "load_state_dict(assign=True) on a streamed model is refused: it would replace the parameters that are "
                "at home; leave assign out"
            )
        _engine(self).set_aside.check("load_state_dict")
        return super().load_state_dict(state_dict, strict=strict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if set_to_none:
            _engine(self).zero_grad()
        else:
            super().zero_grad(set_to_none=False)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RefusedError(f"copy.deepcopy of a streamed {type(self).__name__} is refused: {COPY_REMEDY}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RefusedError(f"copying or pickling a streamed {type(self).__name__} is refused: {COPY_REMEDY}")

    def _keep_dtype(self, what: str, dtype: torch.dtype) -> StreamedModel:
        engine = _engine(self)
        now = torch.bfloat16 if engine.precision == "bf16" else torch.float32
        if dtype != now:
            raise RefusedError(
                f"{what} on a streamed model: it computes in {now}. Say mt.init(precision=...) before mt.stream"
            )
        return self


class StreamedPretrained(StreamedModel):
    """Mixed in before a class of transformers."""

    _is_being_saved = False
    write_card: Callable[[nn.Module, Path], None] | None = None
    """See `install`."""

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in; while it is being saved, what its files hold (transformers writes it to the config)."""
        if self._is_being_saved:
            return next(parameter._field.saved_dtype for _, parameter in named_home_parameters(self))
        return super().dtype

    def gradient_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        """Nothing to do: the engine keeps the inputs of layers and recomputes the rest."""

    def gradient_checkpointing_disable(self) -> None:
        """Nothing to do; see `gradient_checkpointing_enable`."""

    # Their names in newer releases.
    activation_checkpointing_enable = gradient_checkpointing_enable
    activation_checkpointing_disable = gradient_checkpointing_disable

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers: config and sharded safetensors that plain `from_pretrained` loads; and a card (README.md)
        that says what was trained, unless there is one that is not this library's."""
        self._is_being_saved = True
        try:
            result = super().save_pretrained(*args, **kwargs)
        finally:
            self._is_being_saved = False
        folder = args[0] if args else kwargs["save_directory"]
        if self.write_card is not None and kwargs.get("is_main_process", True):
            self.write_card(self, Path(folder))
        return result


@contextlib.contextmanager
def without_card(model: nn.Module) -> Iterator[None]:
    """In the block, saving `model` writes no card."""
    held = vars(model).pop("write_card", None)
    try:
        yield
    finally:
        if held is not None:
            vars(model)["write_card"] = held


def _refusal(name: str, remedy: str) -> Callable[..., NoReturn]:
    def refuse(self: nn.Module, *_: Any, **__: Any) -> NoReturn:
        raise RefusedError(f"{name} on a streamed {type(self).__name__} is refused: {remedy}")

    return refuse


@functools.cache
def streamed_model_class(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `cls` under the same name, with `StreamedModel` and the refusals before it."""
    members: dict[str, Any] = {name: _refusal(name, remedy) for name, remedy in REFUSED.items() if hasattr(cls, name)}
    members |= {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        # Called by a user (or by from_pretrained), the class makes a plain model.
        "__new__": lambda _, *args, **kwargs: cls(*args, **kwargs),
    }
    is_pretrained = hasattr(cls, "save_pretrained") and hasattr(cls, "gradient_checkpointing_enable")
    return type(cls.__name__, (StreamedPretrained if is_pretrained else StreamedModel, cls), members)


def check_model(model: nn.Module, initialize: Initialize | None) -> None:
    """Refuse what is no model, what is streamed in part, and an `initialize` without use. Raises UserError."""
    if not isinstance(model, nn.Module):
        raise UserError(f"mt.stream takes a torch.nn.Module, got a {type(model).__name__}: load the model first")
    if initialize is not None and all(parameter.device.type != "meta" for parameter in model.parameters()):
        raise UserError(
            "initialize was given, but every weight has its values: leave it out, or build on torch's meta device"
        )
    for name, module in model.named_modules():
        if type(module).__name__ == "ParamWrapper" and type(module).__module__.startswith("peft."):
            raise UserError(
                f"{name}: peft adapts a parameter here and not a module (target_parameters=..., or all-linear with "
                "fused experts), by putting another in its place inside the forward, which a streamed layer cannot "
                "follow: name modules instead, LoraConfig(target_modules=['q_proj', 'v_proj'])"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, HomeParameter):
            raise UserError(
                f"{name} is streamed already: call mt.stream once, on the whole model (wrap it, or apply peft, before)"
            )
    check_not_moved(model)


def replace_parameters(model: nn.Module, engine: Engine, plans: list[HomePlan], homes: list[Home]) -> None:
    """Put a HomeParameter in every place that holds a parameter; tied places share one."""
    made: dict[int, HomeParameter] = {}
    for plan, home in zip(plans, homes, strict=True):
        for key, field in plan.parameters.items():
            made[key] = HomeParameter(engine, home, field)
    for use in list(parameter_uses(model)):
        use.owner._parameters[use.attribute] = made[id(use.parameter)]


def make_layers(found: list[FoundLayer], plans: list[HomePlan], homes: list[Home]) -> list[StreamedLayer]:
    """Call before `replace_parameters`: fields are found by the identity of the original parameters."""
    home_of = {layer: (plan, home) for plan, home in zip(plans, homes, strict=True) for layer in plan.layers}
    layers = []
    for index, layer in enumerate(found):
        plan, home = home_of[layer]
        uses = [(use, plan.parameters[id(use.parameter)]) for use in parameter_uses(layer.module)]
        layers.append(StreamedLayer(layer, home, uses, index))
    return layers


def install(model: nn.Module, engine: Engine, write_card: Callable[[nn.Module, Path], None]) -> None:
    """Route the layers' forwards through the engine and put the model's class under the rules above.

    Args:
        write_card: called with the model and the folder when one of transformers was saved.
    """
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False
    for layer in engine.layers:
        stream_module(layer, engine.call)
    tile_layers(engine.layers, engine.config, engine.device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(engine.device)
        module.register_state_dict_post_hook(_bring_home)
    engine.register(model)
    note_streamed(model, engine)
    model.__class__ = streamed_model_class(type(model))
    if isinstance(model, StreamedPretrained):
        model.write_card = write_card
    protect(model)


def named_home_parameters(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, HomeParameter]]:
    """(original name, HomeParameter); every tied name too when `remove_duplicate` is off."""
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        if not isinstance(parameter, HomeParameter):
            raise UserError(f"{name} was put into the model after mt.stream: change the model first, then stream it")
        yield name, parameter


def _bring_home(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """State-dict hook: CPU tensors in the dtype the model was loaded in. They view homes where nothing is converted."""
    for name, parameter in module._parameters.items():
        if isinstance(state.get(prefix + name), HomeView):
            state[prefix + name] = parameter._home.saved(parameter._field)
    for name, buffer in module._buffers.items():
        value = state.get(prefix + name)
        # With keep_vars it is the buffer itself.
        if value is not None and value is not buffer:
            state[prefix + name] = value.cpu()


def _engine(model: nn.Module) -> Engine:
    engine = engine_of(model)
    assert engine is not None
    return engine


def _is_same_device(wanted: torch.device, now: torch.device) -> bool:
    return wanted.type == now.type and (wanted.index is None or now.index is None or wanted.index == now.index)
