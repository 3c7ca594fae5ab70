"""Which kernel of PyTorch's scaled_dot_product_attention layers run on.

A layer's forward and its recomputation are entered with the same preference, so that both have the same bits. What
somebody switched off around the model (`torch.nn.attention.sdpa_kernel`) stays off: a preference is an order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.compiler.config
from torch.nn.attention import SDPBackend

from megatrain.base.config import Config
from megatrain.base.errors import UserError

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""By the names of `mt.init(attention=...)`."""
ON_CPU = ("flash", "math")
LABELS = {"flash": "flash", "cudnn": "cuDNN", "efficient": "memory-efficient", "math": "math"}

_cuda = torch.backends.cuda
_SWITCHES = {
    "flash": (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    "cudnn": (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    "efficient": (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    "math": (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
}


@dataclass(frozen=True)
class AttentionState:
    """Kernels that may be taken, and the order in which they are tried: PyTorch's own, of the whole process."""

    enabled: frozenset[str]
    order: tuple[int, ...]

    @classmethod
    def get(cls) -> AttentionState:
        enabled = frozenset(name for name, (is_enabled, _) in _SWITCHES.items() if is_enabled())
        return cls(enabled, tuple(torch._C._get_sdp_priority_order()))

    def set(self) -> None:
        for name, (_, enable) in _SWITCHES.items():
            enable(name in self.enabled)
        torch._C._set_sdp_priority_order(list(self.order))

    def preferring(self, names: Sequence[str]) -> AttentionState:
        """The same with these kernels first. Nothing is enabled that was not."""
        if names[0] == "math" and "math" in self.enabled:
            # It takes every call; and on the CPU PyTorch keeps an order of its own.
            return AttentionState(frozenset(("math",)), self.order)
        first = [int(KERNELS[name]) for name in names]
        return AttentionState(self.enabled, (*first, *(kernel for kernel in self.order if kernel not in first)))


class AttentionKernels:
    """
    Args:
        order: names of kernels, the preferred one first; a call that one cannot take goes to the next, and then to
            PyTorch's own choice. Empty: PyTorch's own choice.
        reason: why, in words; empty for PyTorch's own choice.
    """

    def __init__(self, order: Sequence[str] = (), reason: str = "") -> None:
        self.order, self.reason = tuple(order), reason

    def __str__(self) -> str:
        return ", ".join(self.order) or "torch"

    def describe(self) -> str:
        """For the run's first line, where there is a preference."""
        return f"{LABELS[self.order[0]]} attention ({self.reason})"

    @contextlib.contextmanager
    def preferred(self) -> Iterator[None]:
        """Around a layer's forward, while it is compiled too."""
        if not self.order:
            yield
            return
        outside = AttentionState.get()
        try:
            outside.preferring(self.order).set()
            # Compiled code has its kernel in it, and PyTorch's cache of compiled code does not look at the preference.
            with torch.compiler.config.patch(cache_key_tag=f"{torch.compiler.config.cache_key_tag}attention {self}"):
                yield
        finally:
            outside.set()


def parse_kernels(text: str) -> tuple[str, ...]:
    """The order that `str` of an `AttentionKernels` tells. Empty for PyTorch's own, and for one that is not known."""
    names = tuple(text.split(", "))
    return names if all(name in KERNELS for name in names) else ()


def check_attention(config: Config, implementation: str | None, device: torch.device) -> None:
    """Raise UserError where a kernel was named that the model or the device has no use for.

    implementation: of a model of transformers, its `attn_implementation`.
    """
    name = config.attention
    if name in (None, "torch"):
        return
    if implementation not in (None, "sdpa"):
        raise UserError(
            f"attention={name!r} names a kernel of PyTorch's scaled_dot_product_attention, and this model computes its "
            f'attention by {implementation!r}: load it with attn_implementation="sdpa", or leave attention out'
        )
    if device.type == "cpu" and name not in ON_CPU:
        raise UserError(f"attention={name!r} is a kernel for GPUs: on the CPU use 'flash' or 'math', or leave it out")
