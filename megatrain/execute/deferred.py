"""DeferredParameter: a weight that is still in its file, until somebody asks for a value.

After `mt.init`, plain `from_pretrained` of transformers leaves them in large models. `mt.stream` takes each value
straight to its home. Whoever asks for one before (a forward, `resize_token_embeddings`, `.to(...)`, `state_dict`) gets
the weights of that layer read: from then on they are plain parameters, the same objects, with the values that plain
loading gives.
Rule: what a parameter can tell without its value (shape, dtype, whether it trains) it tells without reading.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from megatrain.base.cgroup import free_host_bytes
from megatrain.base.errors import UserError
from megatrain.base.units import format_bytes
from megatrain.execute.functions import METADATA

_SILENT = METADATA | {
    torch.Tensor.requires_grad.__get__,
    torch.Tensor.requires_grad.__set__,
    torch.Tensor.requires_grad_,
    torch.Tensor.grad.__get__,
}
"""Functions that are answered without the value."""


class Source(Protocol):
    """Makes values (see `load/units.py`)."""

    def __call__(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor: ...

    def restart(self, names: Iterable[str]) -> None: ...


class DeferredWeights:
    """The weights of one model that have not been read yet.

    Args:
        source: (name, shape, dtype) -> value, once a name, until it is told to begin again with names.
        units: name -> the unit that it is made with; a unit is read as a whole.
    """

    def __init__(self, source: Source, units: Mapping[str, Hashable]) -> None:
        self._source = source
        self._units = units
        self._left: dict[Hashable, list[DeferredParameter]] = {}
        self._lock = threading.RLock()

    def parameter(self, name: str, like: torch.Tensor) -> DeferredParameter:
        """A parameter of `like`'s shape, dtype, flags and attributes. Call it once a name."""
        made = DeferredParameter(self, name, like)
        self._left.setdefault(self._units[name], []).append(made)
        return made

    def read(self, parameter: DeferredParameter) -> None:
        """Make the whole unit of `parameter` plain parameters. Raises UserError when it does not fit in memory."""
        with self._lock:
            # Somebody else may have read it while this thread waited.
            if not isinstance(parameter, DeferredParameter):
                return
            _check_not_traced(parameter)
            unit = self._units[parameter._name]
            self._check_room(self._left[unit])
            for one in list(self._left[unit]):
                self.copy_to(one, functools.partial(self.become, one))

    def copy_to(self, parameter: DeferredParameter, write: Callable[[torch.Tensor], Any]) -> None:
        """Read one value and hand it to `write`."""
        with self._lock, _plain_mode():
            write(self._source(parameter._name, parameter.shape, parameter.dtype))

    def become(self, parameter: DeferredParameter, value: torch.Tensor) -> None:
        """The parameter is a plain one of `value` from now on."""
        with self._lock, _plain_mode():
            unit = self._units[parameter._name]
            _become(parameter, value)
            self._left[unit][:] = [one for one in self._left[unit] if one is not parameter]

    def restart(self) -> None:
        """What was copied is asked for once more."""
        with self._lock:
            self._source.restart(one._name for ones in self._left.values() for one in ones)

    def _check_room(self, parameters: list[DeferredParameter]) -> None:
        needed_bytes = sum(_num_bytes(one) for one in parameters)
        free_bytes = free_host_bytes()
        if needed_bytes <= free_bytes:
            return
        left_bytes = sum(_num_bytes(one) for ones in self._left.values() for one in ones)
        raise UserError(
            f"{parameters[0]._name} was asked for before mt.stream, which reads its layer into memory as plain PyTorch "
            f"does: {format_bytes(needed_bytes)} of {format_bytes(left_bytes)} that are still in files, and "
            f"{format_bytes(free_bytes)} are free. Call mt.stream(model) first, or give the model to mt.Trainer"
        )


class DeferredParameter(nn.Parameter):
    """Made by `DeferredWeights.parameter`."""

    is_deferred = True

    def __new__(cls, weights: DeferredWeights, name: str, like: torch.Tensor) -> DeferredParameter:
        shell = torch.empty(like.shape, dtype=like.dtype, device="meta")
        return torch.Tensor._make_subclass(cls, shell, like.requires_grad)

    def __init__(self, weights: DeferredWeights, name: str, like: torch.Tensor) -> None:
        self.__dict__.update(like.__dict__)
        self._weights, self._name = weights, name

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in _SILENT:
            for value in pytree.tree_leaves((args, kwargs)):
                if isinstance(value, DeferredParameter):
                    value.read()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def read(self) -> None:
        """Become a plain parameter with its value, and with it all of its layer."""
        self._weights.read(self)

    def copy_to(self, write: Callable[[torch.Tensor], Any]) -> None:
        """Hand the value to `write`, and keep none. Once, but after `restart_deferred`."""
        self._weights.copy_to(self, write)

    def leave(self) -> None:
        """Become an empty plain parameter: the value lives elsewhere from now on."""
        self._weights.become(self, torch.empty(0, dtype=self.dtype))

    @property
    def device(self) -> torch.device:
        """Where the value will be."""
        return torch.device("cpu")

    @property
    def is_meta(self) -> bool:
        return False

    @property
    def is_cpu(self) -> bool:
        return True

    @property
    def is_cuda(self) -> bool:
        return False

    def __deepcopy__(self, memo: Any) -> Any:
        self.read()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.read()
        return self.__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:
        return f"DeferredParameter({self._name}, {tuple(self.shape)}, {self.dtype}, not read yet)"


def read_before_compiling() -> None:
    """From now on `torch.compile(model)` reads what is deferred: weights must not change while they are traced."""
    _register_hook()


@functools.cache
def _register_hook() -> None:
    torch_module.register_module_module_registration_hook(_read_for_wrapper)


def _read_for_wrapper(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if child is not None and type(parent).__name__ == "OptimizedModule":
        read_deferred(child)


def _check_not_traced(parameter: DeferredParameter) -> None:
    if torch._guards.TracingContext.try_get() is not None:
        raise UserError(
            f"{parameter._name} is still in its file, and is traced: compile the model itself, torch.compile(model), "
            "which reads its weights first, or say mt.init(defer_loading=False) before from_pretrained"
        )


def read_deferred(model: nn.Module) -> None:
    """Read every weight of `model` that is still in a file. Raises UserError when one does not fit in memory."""
    for parameter in model.parameters():
        if isinstance(parameter, DeferredParameter):
            parameter.read()


def restart_deferred(model: nn.Module) -> None:
    """Whoever copied values of `model` has failed, and is about to ask again."""
    deferred = {one._weights for one in model.parameters() if isinstance(one, DeferredParameter)}
    for weights in deferred:
        weights.restart()


def _become(parameter: DeferredParameter, value: torch.Tensor) -> None:
    """The same object is a plain parameter afterwards, so whoever holds it (an optimizer, a tied module) has it."""
    real = nn.Parameter(value, requires_grad=parameter.requires_grad)
    real.__dict__.update(parameter.__dict__)
    del real.__dict__["_weights"], real.__dict__["_name"]
    torch.utils.swap_tensors(parameter, real)


@contextlib.contextmanager
def _plain_mode() -> Iterator[None]:
    """Values are made as in a plain script, wherever one is first asked for (inside inference_mode, under a device)."""
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        yield


def _num_bytes(parameter: DeferredParameter) -> int:
    return parameter.numel() * parameter.element_size()
