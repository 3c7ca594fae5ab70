"""Weights that a layer hands out as they are: its parameter, a row of it, its transpose.

They view a slot, whose next fill would change them, so they leave the layer as copies. Copies have the strides of the
views: PyTorch picks kernels by strides.
"""

from __future__ import annotations

from typing import Any

import torch

from megatrain.execute.containers import Filling, Taker
from megatrain.execute.layer import Views


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, outside of autograd."""
    num_elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.detach().as_strided((num_elements if tensor.numel() else 0,), (1,)).clone()
    return flat.as_strided(tensor.shape, tensor.stride(), 0)


def apart(value: Any, views: Views) -> Any:
    """`value` with copies in place of the tensors that view the slot of `views`. Changed in place where it can be.

    Key-value caches are not looked into: they are long, and hold what was computed.
    """
    taker = Taker(enters_caches=False)
    pattern = taker.take(value)
    if not any(map(views.hold, taker.tensors)):
        return value
    filling = Filling([copied(t).requires_grad_(t.requires_grad) if views.hold(t) else t for t in taker.tensors])
    filling.made.update(taker.mutable)
    for node, container in taker.mutable:
        filling.write(container, node.contents)
    return filling.fill(pattern)
