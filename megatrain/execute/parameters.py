"""HomeParameter: what a streamed model holds in place of each parameter; HomeView: a view of one.

They have the shape, compute dtype and compute device of the weight but none of its bytes. Reading one (any torch
function) brings the weight to the device, differentiable; changing one in place under `no_grad`, or through `.data`,
writes to the home; `.grad` is the gradient at home. So code that knows nothing of streaming does the right thing, if
slowly, and what cannot work is refused by name.

Rule: a tensor that aliases a parameter in plain PyTorch writes to its home here, or raises. Nothing is lost silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from megatrain.base.errors import RefusedError
from megatrain.execute.functions import DETACH, METADATA, VIEWS, refusal, written
from megatrain.spec.layout import Field
from megatrain.store.home import Home

if TYPE_CHECKING:
    from megatrain.execute.engine import Engine

COPY_REMEDY = (
    "its weights live in one place. Save the model with model.save_pretrained, or take the weights with "
    "mt.full_state_dict(model)"
)
"""What to do instead of copying or pickling."""

Step = Callable[[torch.Tensor], torch.Tensor]
"""One view function with its arguments."""


class _AtHome:
    """What HomeParameter and HomeView share. `_engine`, `_home`, `_field` say where the bytes are."""

    __slots__ = ()
    _engine: Engine
    _home: Home
    _field: Field

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _dispatch(func, args, kwargs or {})

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

    def data_ptr(self) -> int:
        """Address at home: it tells tied parameters from others."""
        return self.of(self._home.weights(self._field)).data_ptr()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.unbind(0))


class HomeParameter(_AtHome, nn.Parameter):
    """Made by `mt.stream`; never by a user."""

    # Slots of its own make torch.utils.swap_tensors refuse to swap it for a tensor that is not at home.
    __slots__ = ("_engine", "_field", "_home")

    def __new__(cls, engine: Engine, home: Home, field: Field) -> HomeParameter:
        # The shell itself never takes part in autograd: a backward that asks for its gradient must fail, not find none.
        shell = torch.empty(field.shape, dtype=field.dtype, device="meta")
        parameter = torch.Tensor._make_subclass(cls, shell, False)
        parameter._engine, parameter._home, parameter._field = engine, home, field
        return parameter

    def __init__(self, *_: Any) -> None:
        """Everything is done in `__new__`."""

    def fetch(self) -> torch.Tensor:
        """The weight as a plain tensor on the compute device, in the compute dtype, differentiable."""
        return self._engine.fetcher.fetch(self._home, self._field)

    def master(self) -> torch.Tensor:
        """A copy of the exact master on the CPU: fp32, or the model's dtype where nothing was split."""
        return self._home.read(self._field)

    @property
    def data(self) -> HomeView:
        return HomeView(self, (), _shell(self))

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """What would change dtype, device or shape (Module.half, Module.to) is refused."""
        if value is self:
            return
        is_same = value.dtype == self.dtype and value.device.type == self.device.type and value.shape == self.shape
        if not is_same:
            raise RefusedError(
                f"{self._field.name} is streamed as {_describe(self)} and cannot become {_describe(value)}: convert "
                "the model before mt.stream (mt.init(precision=...) chooses the compute dtype). To write values of any "
                "dtype, use p.copy_(...) under torch.no_grad()"
            )
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
            return
        if not self.requires_grad:
            raise RefusedError(f"{self._field.name} is frozen and has no gradient: unfreeze it with requires_grad_()")
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"the gradient of {self._field.name} must be a tensor or None, not {type(value).__name__}")
        if value.shape != self.shape:
            raise RuntimeError(f"a gradient of shape {tuple(value.shape)} does not fit {self._field.name} {self.shape}")
        # An update that is still running reads the same memory.
        self._home.wait()
        self._home.grads.set(self._home.gradient_layout(), self._field, value)

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """A parameter is the whole of its weight (see `HomeView.of`)."""
        return weight

    def __repr__(self, **_: Any) -> str:
        return f"HomeParameter({self._field.name}, {_describe(self)})"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RefusedError(f"copy.deepcopy of {self._field.name} is refused: {COPY_REMEDY}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RefusedError(f"copying or pickling {self._field.name} is refused: {COPY_REMEDY}")


class HomeView(_AtHome, torch.Tensor):
    """A view of a HomeParameter outside of autograd (`p.data`, `p.detach()`, `p[0]` under no_grad): it reads what is
    at home when it is used, and in-place changes reach the home."""

    _steps: tuple[Step, ...]

    def __new__(cls, base: HomeParameter | HomeView, steps: tuple[Step, ...], shell: torch.Tensor) -> HomeView:
        view = torch.Tensor._make_subclass(cls, shell, False)
        view._engine, view._home, view._field = base._engine, base._home, base._field
        view._steps = steps
        return view

    def fetch(self) -> torch.Tensor:
        """The view as a plain tensor on the compute device, in the compute dtype."""
        return self.of(self._engine.fetcher.weights(self._home, self._field))

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """The same view of `weight`, a plain tensor of the parameter's shape."""
        for step in self._steps:
            weight = step(weight)
        return weight

    @property
    def data(self) -> HomeView:
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> NoReturn:
        raise RefusedError(f"assigning to .data of a view of {self._field.name} is refused: use view.copy_(...)")

    def requires_grad_(self, requires_grad: bool = True) -> torch.Tensor:
        """A plain tensor: a leaf of its own must hold its own bytes."""
        return self.fetch().clone().requires_grad_(requires_grad)


_Tensors = (HomeParameter, HomeView)


def _dispatch(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    if func in METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func is torch._has_compatible_shallow_copy_type:
        # Module._apply asks whether to assign to `.data` (which checks what it gets) or to put another parameter here.
        return True
    remedy = refusal(func)
    if remedy is not None:
        raise RefusedError(f"{_name(func)} on a streamed parameter is refused: {remedy}")
    target = written(func, args, kwargs)
    if isinstance(target, _Tensors) or (isinstance(target, (list, tuple)) and any(map(_is_home, target))):
        return _write(func, target, args, kwargs)
    if func in VIEWS and _is_home(args[0]) and (func in DETACH or not _is_tracked(args[0])):
        view = _view(func, *args, **kwargs)
        if view is not None:
            return view
    return _read(func, args, kwargs)


def _read(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    fetched: dict[int, Any] = {}

    def fetch(tensor: HomeParameter | HomeView) -> torch.Tensor:
        value = tensor.fetch()
        fetched[id(value)] = tensor
        return value

    args, kwargs = pytree.tree_map_only(_Tensors, fetch, (args, kwargs))
    result = func(*args, **kwargs)
    if type(result).__module__ == "numpy" and hasattr(result, "flags"):
        # In plain PyTorch the array is the parameter's memory; a change in it would be lost here.
        result.flags.writeable = False
    origin = fetched.get(id(result))
    # What returns the very tensor (`.to` and `.contiguous` with nothing to do) returns the parameter here too, so that
    # Module._apply leaves it alone. In a graph the fetched tensor serves as well and is not fetched again.
    return result if origin is None or _is_tracked(origin) else origin


def _view(func: Callable[..., Any], base: HomeParameter | HomeView, *args: Any, **kwargs: Any) -> Any:
    """View(s) of `base`, or None where `func` makes a copy."""
    if func is torch.Tensor.__getitem__:
        args = _basic_index(args[0])
        if args is None:
            return None
    args, kwargs = pytree.tree_map_only(_Tensors, _shell, (args, kwargs))
    shell = _shell(base)
    shells = func(shell, *args, **kwargs)
    if isinstance(shells, torch.Tensor):
        return _one_view(base, shell, shells, lambda weight: func(weight, *args, **kwargs))
    return type(shells)(
        _one_view(base, shell, one, lambda weight, index=index: func(weight, *args, **kwargs)[index])
        for index, one in enumerate(shells)
    )


def _one_view(
    base: HomeParameter | HomeView, shell: torch.Tensor, view_shell: torch.Tensor, step: Step
) -> HomeView | None:
    if view_shell.untyped_storage()._cdata != shell.untyped_storage()._cdata:
        return None
    return HomeView(base, (*(base._steps if isinstance(base, HomeView) else ()), step), view_shell)


def _basic_index(index: Any) -> tuple[Any] | None:
    """`index` if it makes a view (numbers, slices, None, Ellipsis), as arguments of __getitem__; None if a copy."""
    parts = [
        int(part) if isinstance(part, torch.Tensor) and part.dim() == 0 and not part.is_floating_point() else part
        for part in (index if isinstance(index, tuple) else (index,))
    ]
    is_basic = all(part is None or part is Ellipsis or isinstance(part, (int, slice)) for part in parts)
    return (tuple(parts),) if is_basic else None


def _write(func: Callable[..., Any], target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run `func` on the masters, which it changes, and write them home. Returns what `func` does: its target."""
    targets = [one for one in (target if isinstance(target, (list, tuple)) else [target]) if _is_home(one)]
    for one in targets:
        one._engine.set_aside.check(f"writing {one._field.name}")
    if getattr(func, "__module__", None) != "torch.nn.init":
        for one in targets:
            _check_untracked(func, one)
    masters = {one._field: one._home.read(one._field) for one in targets}
    aliases = {id(one): _alias(func, one, masters[one._field]) for one in targets}

    def operand(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in aliases:
            return aliases[id(tensor)]
        if _is_home(tensor):
            return tensor.of(tensor._home.read(tensor._field))
        return tensor.detach().cpu()

    args, kwargs = pytree.tree_map_only(torch.Tensor, operand, (args, kwargs))
    if func is torch.Tensor.copy_ and len(args) > 1 and targets[0]._field.is_split:
        args = (args[0], _exact(targets[0], *args[:2]), *args[2:])
    with torch.no_grad():
        func(*args, **kwargs)
    for one in {one._field: one for one in targets}.values():
        one._home.write(one._field, masters[one._field])
    return target


def _exact(target: HomeParameter | HomeView, master: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, to be copied over `master`. Where it is bf16 and says what the weight is in bf16, the master stays as it
    is, so that `load_state_dict(state_dict())` changes nothing."""
    if value.dtype != torch.bfloat16:
        return value
    now = target.of(target._home.weights(target._field)).cpu()
    return torch.where(now.view(torch.int16) == value.view(torch.int16), master, value.float())


def _alias(func: Callable[..., Any], tensor: HomeParameter | HomeView, master: torch.Tensor) -> torch.Tensor:
    alias = tensor.of(master)
    if alias.shape != _shell(tensor).shape:
        raise RefusedError(
            f"{_name(func)} on a view of {tensor._field.name} in another dtype is refused: its master is {master.dtype}"
        )
    return alias


def _check_untracked(func: Callable[..., Any], tensor: HomeParameter | HomeView) -> None:
    if _is_tracked(tensor):
        raise RuntimeError(
            f"{_name(func)}: {tensor._field.name} requires grad: change it in place under torch.no_grad()"
        )


def _is_tracked(tensor: HomeParameter | HomeView) -> bool:
    return isinstance(tensor, HomeParameter) and torch.is_grad_enabled() and tensor.requires_grad


def _is_home(value: Any) -> bool:
    return isinstance(value, _Tensors)


def _shell(tensor: HomeParameter | HomeView) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def _describe(tensor: torch.Tensor) -> str:
    return f"shape={tuple(tensor.shape)}, dtype={tensor.dtype}, device={tensor.device}"


def _name(func: Callable[..., Any]) -> str:
    """`Tensor.add_`, `clamp`: without the module of an internal."""
    owner = "Tensor." if hasattr(torch.Tensor, func.__name__) else ""
    return f"{owner}{func.__name__}"
