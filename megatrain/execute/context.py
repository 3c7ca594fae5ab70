"""What a layer's forward depends on besides its arguments and weights, so that a recomputation sees the same.

RNG, autocast, kernels of attention, the training flags of its modules, its buffers, and attributes that its forward
sets. Captured before the forward, restored around the recomputation, and the present state is put back afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatrain.execute.attention import AttentionState
from megatrain.execute.attributes import BUFFERS, MISSING, Attributes, Place, get_attributes, set_attributes

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

    def equals(self, other: RngState) -> bool:
        is_same_on_device = self.device is None or torch.equal(self.device, other.device)
        return is_same_on_device and torch.equal(self.cpu, other.cpu)

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
        self._attention = AttentionState.get()
        self._training = [module.training for module in modules]
        self._given = _buffers_of(modules)
        self._copies = {
            place: (buffer._version, buffer.clone()) for place, buffer in self._given.items() if buffer is not None
        }
        self._buffers: Attributes = {}
        """What those held that the forward has made, changed or deleted."""

        self._attributes: Attributes = {}

    def has_drawn(self) -> bool:
        """Whether random numbers have been drawn since it was captured."""
        return not RngState.get(self._device).equals(self._rng)

    def forward_done(self, changed: Iterable[Place]) -> None:
        """`changed`: attributes that the forward has set. They hold their old values still."""
        left = _buffers_of(self._modules)
        for place in dict.fromkeys((*self._given, *left)):
            buffer = self._given.get(place, MISSING)
            version, copy = self._copies.get(place, (None, buffer))
            has_changed = version is not None and (buffer._version != version or _may_hide_changes(buffer))
            if has_changed or left.get(place, MISSING) is not buffer:
                self._buffers[place] = copy
        self._given, self._copies = {}, {}
        self._attributes = get_attributes(changed)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """The state of the forward, for the length of the block."""
        rng, autocast = RngState.get(self._device), AutocastState.get(self._device)
        attention = AttentionState.get()
        training = [module.training for module in self._modules]
        buffers = get_attributes(self._buffers, BUFFERS)
        attributes = get_attributes(self._attributes)
        try:
            self._rng.set(self._device)
            self._autocast.set()
            self._attention.set()
            _set_training(self._modules, training, self._training)
            # Copies: the recomputation changes them as the forward did.
            set_attributes({place: _copy(buffer) for place, buffer in self._buffers.items()}, BUFFERS)
            set_attributes(self._attributes)
            yield
        finally:
            rng.set(self._device)
            autocast.set()
            torch.clear_autocast_cache()
            attention.set()
            _set_training(self._modules, self._training, training)
            set_attributes(buffers, BUFFERS)
            set_attributes(attributes)


def _buffers_of(modules: list[nn.Module]) -> Attributes:
    return {(module, name): buffer for module in modules for name, buffer in module._buffers.items()}


def _copy(buffer: Any) -> Any:
    return buffer.clone() if isinstance(buffer, torch.Tensor) else buffer


def _may_hide_changes(buffer: torch.Tensor) -> bool:
    """Batch norm writes its statistics without counting up their version. They are small; large masks are not kept."""
    return buffer.is_floating_point() and buffer.numel() <= 1 << 16


def _set_training(modules: list[nn.Module], now: list[bool], wanted: list[bool]) -> None:
    if now != wanted:
        for module, flag in zip(modules, wanted, strict=True):
            module.training = flag
