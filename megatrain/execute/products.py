"""Matrix products that are added to a sum in fp32."""

from __future__ import annotations

import functools
import logging

import torch

SLAB_NUMBERS = 1 << 25
"""Of the sum, at once, where a product has to exist before it is added: 64 MiB in bf16."""

_log = logging.getLogger(__name__)


def add_product_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, with no more memory than a slab of the product.

    On a GPU the product is added to the sum where it is made, in fp32 and without a pass of its own. Elsewhere (and
    where this PyTorch or its settings refuse that) it is rounded to the dtype of its factors before, as autograd does.

    Args:
        total: (M, N), in fp32 at least.
        a: (M, K), in the dtype of `total` or a smaller one.
        b: (K, N), as `a`.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif _adds_wider(total.device, a.dtype, total.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        rows = max(1, SLAB_NUMBERS // total.shape[1])
        for slab, of_slab in zip(total.split(rows), a.split(rows), strict=True):
            slab.add_(of_slab @ b)


@functools.cache
def _adds_wider(device: torch.device, dtype: torch.dtype, wider: torch.dtype) -> bool:
    """Whether products of `dtype` can be added to a sum of `wider` there. Tried once; nothing waits for the device."""
    total, factor = (torch.zeros((16, 16), dtype=each, device=device) for each in (wider, dtype))
    try:
        torch.addmm(total, factor, factor, out_dtype=wider, out=total)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        _log.debug("gradients of a head pass through memory on %s before they are added up: %s", device, reason)
        return False
    return True
