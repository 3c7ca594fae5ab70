"""Which torch functions do what to a parameter that is not there: ask its shape, view it, change it, or more.

The tables of `HomeParameter` and `HomeView`. Every function that is in none of them reads the value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_ATTRIBUTES = (
    "shape", "ndim", "dtype", "layout", "is_leaf", "grad_fn", "grad_dtype", "names", "retains_grad", "itemsize",
    "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xla", "is_mps", "output_nr", "nbytes",
)  # fmt: skip
_METHODS = (
    "size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_contiguous", "stride",
    "ndimension", "storage_offset", "__hash__", "__len__",
)  # fmt: skip

METADATA = {
    *(getattr(torch.Tensor, name) for name in _METHODS),
    *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(torch.Tensor, name)),
    torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip
"""Answered without the value."""

_VIEW_NAMES = (
    "detach", "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "t",
    "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "adjoint", "narrow", "select", "diagonal",
    "chunk", "split", "split_with_sizes", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind", "expand", "expand_as",
    "as_strided", "unfold", "__getitem__",
)  # fmt: skip

VIEWS = {
    *(getattr(space, name) for space in (torch.Tensor, torch) for name in _VIEW_NAMES if hasattr(space, name)),
    *(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")),
}
"""Return tensors that share the bytes of the first argument (some of them: only where that is possible)."""

DETACH = {torch.Tensor.detach, torch.detach}

REFUSED = {
    **dict.fromkeys(
        (
            torch.Tensor.register_hook,
            torch.Tensor.register_post_accumulate_grad_hook,
            torch.Tensor.retain_grad,
        ),
        "its gradient never passes through autograd as one tensor. Read it after backward with "
        "mt.named_gradients(model) or p.grad",
    ),
    **dict.fromkeys(
        (torch.autograd.grad, torch.autograd.backward),
        "its gradient never passes through autograd as one tensor. Call loss.backward() alone and read it with "
        "mt.named_gradients(model) or p.grad",
    ),
    **dict.fromkeys(
        (
            torch.Tensor.set_,
            torch.Tensor.resize_,
            torch.Tensor.resize_as_,
            torch.Tensor.t_,
            torch.Tensor.transpose_,
            torch.Tensor.swapaxes_,
            torch.Tensor.swapdims_,
            torch.Tensor.squeeze_,
            torch.Tensor.unsqueeze_,
            torch.Tensor.as_strided_,
        ),
        "its shape and place are fixed by mt.stream: change the model first, then stream it",
    ),
    torch.Tensor.detach_: "freeze it with p.requires_grad_(False), or read it with p.detach()",
    **dict.fromkeys(
        (torch.Tensor.share_memory_, torch.Tensor.untyped_storage, torch.Tensor.storage),
        "its bytes live at home and are no storage of their own: take a copy with mt.named_parameters(model)",
    ),
}
"""Function -> what to do instead."""


def refusal(func: Callable[..., Any]) -> str | None:
    """Why `func` is refused, and what to do instead; None for all others."""
    if func.__name__.startswith("_fused_"):
        return "fused kernels of torch.optim do not reach its home: use mt.optim.AdamW(model)"
    if func.__name__ == "__set__":
        return "write values with p.copy_(...) under torch.no_grad(), and set .grad and .requires_grad on the parameter"
    return REFUSED.get(func)


def written(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """What `func` changes in place: a tensor, a list of tensors, or None."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    if not (_is_in_place(func) or kwargs.get("inplace")):
        return None
    # torch.nn.init hands over everything by keyword.
    return args[0] if args else next(iter(kwargs.values()))


def _is_in_place(func: Callable[..., Any]) -> bool:
    name = func.__name__
    if name.startswith("__i"):
        return name not in ("__init__", "__int__", "__index__", "__invert__", "__iter__")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
