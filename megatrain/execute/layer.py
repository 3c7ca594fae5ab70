"""Streamed layer: a module whose weights are views into a slot, bound for one forward.

The module object stays in its place with its own class, attributes and hooks; only its parameters are swapped. Its
class is replaced by a subclass whose `forward` goes through the engine.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import nn

from megatrain.base.errors import RefusedError, UserError
from megatrain.execute.parameters import COPY_REMEDY, HomeParameter
from megatrain.spec.discover import FoundLayer, ParameterUse
from megatrain.spec.layout import Field, view_field
from megatrain.store.home import Home

if TYPE_CHECKING:
    from megatrain.execute.loss_code import LossCodes
    from megatrain.execute.tiles import LayerTiles


class Views(dict[Field, torch.Tensor]):
    """A layer's parameters in a slot, for one visit.

    Args:
        weights: the slot.
    """

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__()
        self.is_guarded = False
        """`call.py` has made sure that no backward but its own reaches them."""

        self.weights = weights
        self._storage = _storage(weights)

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` views the slot, be it by way of `.data`."""
        return _storage(tensor) == self._storage


class Compiled(NamedTuple):
    """Forwards of one kind of block: (module, *args, **kwargs) -> result."""

    plain: Callable[..., Any]
    """Without gradients."""
    keeping: Mapping[str, Callable[..., Any]]
    """By what is kept for the backward (`base/config.py:KEEPS`)."""


class StreamedLayer:
    """One layer of the model and the home its weights come from.

    Args:
        uses: every place in the module that holds a parameter, with its field.
        index: position in the model, in order of definition.
    """

    def __init__(self, found: FoundLayer, home: Home, uses: list[tuple[ParameterUse, Field]], index: int) -> None:
        self.name = found.name
        self.kind = found.kind
        self.index = index
        self.home = home
        self.module = found.module
        self.modules = list(found.module.modules())
        self.forward = _forward_of(found.module)
        self.compiled: Compiled | None = None
        self.loss_codes: LossCodes | None = None
        """Of a head, where the engine compiles."""

        self.tiles: LayerTiles | None = None
        self._places = [(use.owner, use.attribute, field) for use, field in uses]
        self.own_modules = [module for module in self.modules if not _is_torchs_own(module)]
        """Those whose forward may set attributes."""

        self.num_uses: dict[int, list[int]] = {}
        """Number of tensor arguments -> how often the layer's graph uses each. Filled by the first forward."""

        self.fields = list(dict.fromkeys(field for _, _, field in self._places))
        self._watched: set[bool] = set()
        self._own: list[Any] | None = None

    def trainable_fields(self) -> list[Field]:
        return [field for field in self.fields if self.home.trainable[field]]

    def field_of(self, attribute: str) -> Field | None:
        """Of the parameter that the layer's own module holds under this name."""
        return next((field for owner, name, field in self._places if (owner, name) == (self.module, attribute)), None)

    def check_inputs(self, tensors: list[torch.Tensor], device: torch.device) -> None:
        """Raises UserError where a tensor is not on the device that layers run on."""
        for tensor in tensors:
            if tensor.device.type != device.type and tensor.dim() > 0:
                raise UserError(
                    f"{self.name} got a tensor on {tensor.device}, and layers run on {device}: "
                    "move the batch with .to(model.device)"
                )

    def run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The forward that the module's authors wrote. Enter with weights bound."""
        with contextlib.nullcontext() if self.tiles is None else self.tiles.in_place(args, kwargs):
            return self.forward(self.module, *args, **kwargs)

    def run_training(self, args: tuple, kwargs: dict[str, Any], keeps: str = "all") -> Any:
        """`run`, compiled if the engine compiles. keeps: what of it is kept for its backward, in grad mode."""
        if self.compiled is None:
            return self.run(args, kwargs)
        run = self.compiled.keeping[keeps] if torch.is_grad_enabled() else self.compiled.plain
        return run(self.module, *args, **kwargs)

    def views(self, weights: torch.Tensor) -> Views:
        """The layer's parameters in `weights` (flat uint8 on the device).

        Trainable ones require grad, for calls without grad mode too: PyTorch picks some kernels by that alone.
        """
        self._check_unchanged()
        views = Views(weights)
        for field in self.fields:
            view = view_field(weights, field)
            views[field] = view.detach().requires_grad_() if self.home.trainable[field] else view
        return views

    @contextlib.contextmanager
    def bound(self, views: Views) -> Iterator[None]:
        """The module holds `views` as its parameters for the length of the block."""
        held = [owner._parameters[attribute] for owner, attribute, _ in self._places]
        is_first = self.module.training not in self._watched
        marks = _marks(views, is_first)
        try:
            self._put([views[field] for _, _, field in self._places])
            yield
        finally:
            try:
                self._put(held)
            except KeyboardInterrupt:
                self._put(held)
                raise
        if _marks(views, is_first) != marks:
            # What the slot holds now is not what is at home.
            self.home.version += 1
            raise UserError(
                f"the forward of {self.name} changes its own weights in place (a clamp?), which its home "
                "cannot see: compute a changed copy in the forward, or change weights between steps"
            )
        self._watched.add(self.module.training)
        for module in self.modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and views.hold(buffer):
                    module._buffers[name] = buffer.detach().clone()

    def recover(self) -> None:
        """After an interrupt at any place: the module holds its own parameters."""
        if self._own is not None:
            self._put(self._own)

    def _put(self, parameters: list[Any]) -> None:
        for (owner, attribute, _), parameter in zip(self._places, parameters, strict=True):
            owner._parameters[attribute] = parameter

    def _check_unchanged(self) -> None:
        for owner, attribute, field in self._places:
            if not isinstance(owner._parameters.get(attribute), HomeParameter):
                raise UserError(
                    f"{field.name} was replaced after mt.stream (torch.func.functional_call?), which its home does not "
                    "see: write values with p.copy_(...) under torch.no_grad()"
                )
        if list(self.module.modules()) != self.modules:
            raise UserError(
                f"{self.name} was changed after mt.stream (a submodule inserted?): change the model first, then call "
                "mt.stream"
            )
        if self._own is None:
            self._own = [owner._parameters[attribute] for owner, attribute, _ in self._places]


_MARKED_AT_ONCE = 1 << 24


def _storage(tensor: torch.Tensor) -> int | None:
    """What tensors over the same memory have in common. None for those without memory of one piece."""
    if tensor.layout is not torch.strided:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()._cdata


def _marks(views: Views, is_first: bool) -> list[int]:
    """What differs after a change: version counters, and at a first call the bits (`.data` goes past the counters)."""
    # A tensor made in inference mode counts no versions.
    versions = [view._version for view in views.values() if not view.is_inference()]
    if not is_first:
        return versions
    bits = [view.detach().view(torch.int16 if view.element_size() == 2 else torch.int32) for view in views.values()]
    # In pieces: a sum in int64 makes a copy of all its numbers, four times as large as a vocabulary in bf16.
    pieces = [piece.sum(dtype=torch.int64) for view in bits for piece in view.reshape(-1).split(_MARKED_AT_ONCE)]
    return versions + (torch.stack(pieces).tolist() if pieces else [])


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """(module, *args, **kwargs) -> result, as the module's authors wrote it or somebody else patched it."""
    patched = vars(module).get("forward")
    return type(module).forward if patched is None else lambda _, *args, **kwargs: patched(*args, **kwargs)


def _is_torchs_own(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and "forward" not in vars(module)


def stream_module(layer: StreamedLayer, call: Callable[[StreamedLayer, tuple, dict], Any]) -> None:
    """Route the module's forward through `call(layer, args, kwargs)`, in place."""
    patched = vars(layer.module).get("forward")
    if patched is not None:
        # The class keeps its own forward, which the patch may call.
        vars(layer.module)["forward"] = functools.wraps(patched)(lambda *args, **kwargs: call(layer, args, kwargs))
    layer.module.__class__ = _streamed_class(type(layer.module), patched is not None)
    layer.module._streamed_layer = layer
    layer.module._streamed_call = call


@functools.cache
def _streamed_class(cls: type[nn.Module], keeps_forward: bool) -> type[nn.Module]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._streamed_call(self._streamed_layer, args, kwargs)

    def reduce(self: nn.Module, protocol: Any) -> NoReturn:
        raise RefusedError(f"copying or pickling {self._streamed_layer.name} is refused: {COPY_REMEDY}")

    members = {
        "forward": forward,
        "__reduce_ex__": reduce,
        # Called by a user, the class makes a plain module.
        "__new__": lambda _, *args, **kwargs: cls(*args, **kwargs),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        # The engine recomputes anyway; a second recomputation around it would run after the weights are gone.
        "gradient_checkpointing": property(lambda self: False, lambda self, value: None),
    }
    if keeps_forward:
        del members["forward"]
    return type(cls.__name__, (cls,), members)
