"""What a layer's forward depends on besides its arguments and weights, so that a recomputation sees the same.

RNG, autocast, the training flags of its modules, its buffers, and attributes that its forward sets. Captured before the
forward, restored around the recomputation, and the present state is put back afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatrain.execute.attributes import Attributes, Place, get_attributes, set_attributes

Hooks = tuple[tuple[Callable[..., Any], Callable[..., Any]], ...]
"""(pack, unpack) of `torch.autograd.graph.saved_tensors_hooks`."""


@dataclass(frozen=True)
class RngState:
    """State of the CPU generator and, on a GPU, of the device's."""

    cpu: torch.Tensor
    device: torch.Tensor | None

    @classmethod
    def get(cls, device: torch.device) -> RngState:
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), on_device)

    def set(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


@dataclass(frozen=True)
class AutocastState:
    """(device type, enabled, dtype) for the CPU and the device."""

    states: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def get(cls, device: torch.device) -> AutocastState:
        kinds = dict.fromkeys(("cpu", device.type))
        return cls(tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds))

    def set(self) -> None:
        for kind, enabled, dtype in self.states:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)


def get_saved_tensor_hooks() -> Hooks:
    """The thread's stack of default hooks, outermost first."""
    hooks = []
    while (pair := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        hooks.append(pair)
    hooks.reverse()
    set_saved_tensor_hooks(tuple(hooks))
    return tuple(hooks)


def set_saved_tensor_hooks(hooks: Hooks) -> None:
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in hooks:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    hooks = get_saved_tensor_hooks()
    set_saved_tensor_hooks(())
    try:
        yield
    finally:
        set_saved_tensor_hooks(hooks)


class CallContext:
    """Captured at the forward of `modules` (a layer and all it contains).

    Call `forward_done` after the forward: it drops what the forward left alone.
    """

    def __init__(self, modules: list[nn.Module], device: torch.device) -> None:
        self._device = device
        self._modules = modules
        self._rng = RngState.get(device)
        self._autocast = AutocastState.get(device)
        self._training = [module.training for module in modules]
        self._buffers = [
            (module, name, buffer, buffer._version, buffer.clone())
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._attributes: Attributes = {}

    def forward_done(self, changed: Iterable[Place]) -> None:
        """`changed`: attributes that the forward has set. They hold their old values still."""
        self._buffers = [
            (module, name, buffer, version, value)
            for module, name, buffer, version, value in self._buffers
            if module._buffers.get(name) is not buffer or buffer._version != version or _may_hide_changes(buffer)
        ]
        self._attributes = get_attributes(changed)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """The state of the forward, for the length of the block."""
        rng, autocast = RngState.get(self._device), AutocastState.get(self._device)
        training = [module.training for module in self._modules]
        buffers = [(module, name, module._buffers.get(name)) for module, name, *_ in self._buffers]
        attributes = get_attributes(self._attributes)
        try:
            self._rng.set(self._device)
            self._autocast.set()
            _set_training(self._modules, training, self._training)
            for module, name, _, _, value in self._buffers:
                # A copy: the recomputation changes it as the forward did.
                module._buffers[name] = value.clone()
            set_attributes(self._attributes)
            yield
        finally:
            rng.set(self._device)
            autocast.set()
            torch.clear_autocast_cache()
            _set_training(self._modules, self._training, training)
            for module, name, buffer in buffers:
                module._buffers[name] = buffer
            set_attributes(attributes)


def _may_hide_changes(buffer: torch.Tensor) -> bool:
    """Batch norm writes its statistics without counting up their version. They are small; large masks are not kept."""
    return buffer.is_floating_point() and buffer.numel() <= 1 << 16


def _set_training(modules: list[nn.Module], now: list[bool], wanted: list[bool]) -> None:
    if now != wanted:
        for module, flag in zip(modules, wanted, strict=True):
            module.training = flag
