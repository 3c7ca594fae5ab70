"""What may be done to logits without having them: which functions work on each number alone, and which leave rows of
the vocabulary whole. Every function that is not known here needs the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_BOTH = (torch.Tensor, torch)

_ELEMENT_WISE = {
    *(
        getattr(space, name)
        for space in _BOTH
        for name in (
            "mul", "multiply", "div", "divide", "true_divide", "add", "sub", "subtract", "neg", "negative", "tanh",
            "clamp", "clip", "float", "double", "half", "bfloat16",
        )
        if callable(getattr(space, name, None))
    ),
    *(
        getattr(torch.Tensor, f"__{name}__")
        for name in ("mul", "rmul", "truediv", "rtruediv", "add", "radd", "sub", "rsub", "neg")
    ),
}  # fmt: skip

_ROWS = {
    getattr(space, name)
    for space in _BOTH
    for name in ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze")
    if hasattr(space, name)
}
"""They keep the order of the numbers: where the last dimension is the vocabulary still, rows are what they were."""


@dataclass(frozen=True, eq=False)
class Step:
    """An element-wise function with its other arguments."""

    func: Callable[..., torch.Tensor]
    args: tuple
    kwargs: dict[str, Any]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.func(tensor, *self.args, **self.kwargs)


def is_element_wise(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether func(logits, *args, **kwargs) works on each number alone. Other tensors are not known here."""
    return func in _ELEMENT_WISE and all(isinstance(value, (int, float)) for value in (*args, *kwargs.values()))


def keeps_rows(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether func(logits, *args, **kwargs) is the same numbers in the same order in another shape."""
    return func in _ROWS and not any(
        isinstance(value, (torch.Tensor, torch.dtype)) for value in (*args, *kwargs.values())
    )


def casts(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any], device: torch.device) -> Step | None:
    """`logits.to(...)` as a cast to a dtype; None for all else (another device, another tensor's dtype)."""
    if func is not torch.Tensor.to or not set(kwargs) <= {"dtype", "device"}:
        return None
    dtypes = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.dtype):
            dtypes.append(value)
        elif not (isinstance(value, (str, torch.device)) and _is_same(torch.device(value), device)):
            return None
    return Step(func, tuple(dtypes), {}) if len(dtypes) == 1 else None


def _is_same(asked: torch.device, device: torch.device) -> bool:
    return asked.type == device.type and asked.index in (None, device.index)


def keeps_vocabulary(index: Any, num_dims: int) -> bool:
    """Whether logits[index] are whole rows of the vocabulary, the last of `num_dims` dimensions."""
    items = index if isinstance(index, tuple) else (index,)
    dots = [at for at, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1 or not all(_is_known(item) for item in items):
        return False
    if dots and dots[0] < len(items) - 1:
        # What stands behind the dots ends with the last dimension.
        return isinstance(items[-1], slice) and items[-1] == slice(None)
    used = [_num_used(item) for item in items if item is not Ellipsis]
    if sum(used) < num_dims:
        return True
    return sum(used) == num_dims and isinstance(items[-1], slice) and items[-1] == slice(None)


def _is_known(item: Any) -> bool:
    if isinstance(item, torch.Tensor):
        return type(item) is torch.Tensor and item.dtype in (torch.bool, torch.int64)
    if isinstance(item, bool):
        return False
    return item is None or item is Ellipsis or isinstance(item, (int, slice))


def _num_used(item: Any) -> int:
    """Dimensions that an item of an index stands for."""
    if isinstance(item, torch.Tensor):
        return item.dim() if item.dtype == torch.bool else 1
    return 0 if item is None else 1
