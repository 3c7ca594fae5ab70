"""HomeParameter: what a streamed model holds in place of each parameter.

It has the shape, compute dtype and compute device of the weight but none of its bytes. Reading it (any torch function)
brings the weight to the device, differentiable; changing it in place under `no_grad` writes to the home; `.grad` is the
gradient at home. So code that knows nothing of streaming does the right thing, if slowly, and what cannot work is
refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from megatrain.base.errors import RefusedError
from megatrain.spec.layout import Field
from megatrain.store.home import Home

if TYPE_CHECKING:
    from megatrain.execute.engine import Engine

_METADATA = {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.element_size,
    torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.is_contiguous, torch.Tensor.stride,
    torch.Tensor.ndimension, torch.Tensor.__hash__, torch.is_floating_point, torch.is_complex, torch.numel,
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "layout", "is_leaf", "grad_fn", "names", "retains_grad", "itemsize",
                     "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xla", "is_mps", "output_nr", "nbytes")
        if hasattr(torch.Tensor, name)  # not every release has all of them
    ),
}  # fmt: skip

_HOOKS = {
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
}


class HomeParameter(nn.Parameter):
    """Made by `mt.stream`; never by a user."""

    _engine: Engine
    _home: Home
    _field: Field

    def __new__(cls, engine: Engine, home: Home, field: Field) -> HomeParameter:
        shell = torch.empty(field.shape, dtype=field.dtype, device="meta")
        parameter = torch.Tensor._make_subclass(cls, shell, True)
        parameter._engine, parameter._home, parameter._field = engine, home, field
        return parameter

    def __init__(self, *_: Any) -> None:
        """Everything is done in `__new__`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _HOOKS:
            raise RefusedError(
                f"{func.__name__} on a streamed parameter: its gradient never passes through autograd as one tensor. "
                "Read it after backward with mt.named_gradients(model) or p.grad"
            )
        if _is_in_place(func) and isinstance(args[0], HomeParameter):
            return args[0]._write_through(func, args[1:], kwargs)
        args, kwargs = pytree.tree_map_only(HomeParameter, HomeParameter.fetch, (args, kwargs))
        return func(*args, **kwargs)

    def fetch(self) -> torch.Tensor:
        """The weight as a plain tensor on the compute device, in the compute dtype, differentiable."""
        return self._engine.fetcher.fetch(self._home, self._field)

    def master(self) -> torch.Tensor:
        """A copy of the exact master on the CPU: fp32, or the model's dtype where nothing was split."""
        return self._home.read(self._field)

    @property
    def device(self) -> torch.device:
        return self._engine.device

    @property
    def is_meta(self) -> bool:
        return False

    @property
    def is_cuda(self) -> bool:
        return self._engine.device.type == "cuda"

    @property
    def is_cpu(self) -> bool:
        return self._engine.device.type == "cpu"

    @property
    def data(self) -> HomeParameter:
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.copy_(value)

    @property
    def requires_grad(self) -> bool:
        return self._home.trainable[self._field]

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        self._home.trainable[self._field] = bool(flag)

    def requires_grad_(self, requires_grad: bool = True) -> HomeParameter:
        self.requires_grad = requires_grad
        return self

    @property
    def grad(self) -> torch.Tensor | None:
        return self._engine.gradient(self._home, self._field)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            self._home.grads.drop(self._field)
        else:
            self._home.grads.set(self._home.gradient_layout(), self._field, value)

    def data_ptr(self) -> int:
        """Address of the weight at home: it tells tied parameters from others."""
        return self._home.weights(self._field).data_ptr()

    def __repr__(self, **_: Any) -> str:
        field = self._field
        return f"HomeParameter({field.name}, shape={field.shape}, dtype={field.dtype}, device={self.device})"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RefusedError(_no_copy("copy.deepcopy"))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RefusedError(_no_copy("pickling"))

    def _write_through(self, func: Any, args: tuple, kwargs: dict) -> HomeParameter:
        if torch.is_grad_enabled() and self.requires_grad:
            raise RuntimeError(f"{self._field.name} requires grad: change it in place under torch.no_grad()")
        args, kwargs = pytree.tree_map_only(HomeParameter, lambda p: p.master(), (args, kwargs))
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), (args, kwargs))
        value = self.master()
        func(value, *args, **kwargs)
        self._home.write(self._field, value)
        return self


def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__", "__imul__")


def _no_copy(what: str) -> str:
    return (
        f"{what} of a streamed model is refused: its weights live in one place. Save it with model.save_pretrained, or "
        "take the weights with mt.full_state_dict(model)"
    )
