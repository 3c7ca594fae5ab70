"""What a device's kernels save for the backward, on PyTorch's meta device, where other kernels or none would run.

Attention (on meta: the scores too), dropout (a mask of bytes), experts' grouped products (on meta: bf16 alone), and the
count of their tokens. What comes out has the shape, dtype and order of strides that it has on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

MOST_CALLS = 20_000
"""Of PyTorch's functions in one forward; a mixer that goes token by token is left at that, after a second or so."""


class DeviceKernels(TorchFunctionMode):
    """Around a forward on the meta device. Raises RuntimeError where it cannot tell."""

    def __init__(self) -> None:
        super().__init__()
        self._num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        self._num_calls += 1
        if self._num_calls > MOST_CALLS:
            raise RuntimeError(f"more than {MOST_CALLS} calls")
        return _STAND_INS.get(func, func)(*args, **(kwargs or {}))


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    return _FusedAttention.apply(query, key, value, attn_mask)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    del inplace  # what it saves is the same
    return torch.native_dropout(input, p, training)[0] if training and p > 0 else input


def _grouped_product(
    input: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    return _GroupedProduct.apply(input, weight, offs)


def _histogram(input: torch.Tensor, bins: int = 100, *_: Any, **__: Any) -> torch.Tensor:
    return input.new_empty(bins)


def _unknown(*_: Any, **__: Any) -> Any:
    raise RuntimeError("its attention is called where no stand-in sees it")


_STAND_INS: dict[Any, Callable[..., Any]] = {
    functional.scaled_dot_product_attention: _attention,
    functional.multi_head_attention_forward: _unknown,
    functional.dropout: _dropout,
    torch.dropout: _dropout,
    torch._grouped_mm: _grouped_product,
    torch.histc: _histogram,
}


class _FusedAttention(torch.autograd.Function):
    """Saves what flash kernels do: what they are given, their result, and its log-sum-exp in fp32."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> torch.Tensor:
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.empty_like(mask, dtype=query.dtype)  # each call makes its own, to be added to scores
        output = _laid_out_as(query, value.shape[-1])
        log_sum_exp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, output, log_sum_exp)
        return output


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(input, weight, offsets)
        return input.new_empty(*input.shape[:-1], weight.shape[-1])


def _laid_out_as(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """An empty one with the tensor's order of strides, its last dimension being `width`."""
    sizes = [*tensor.shape[:-1], width]
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.new_empty([sizes[place] for place in order]).permute([order.index(at) for at in range(tensor.dim())])
