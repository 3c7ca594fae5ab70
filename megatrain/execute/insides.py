"""What a layer computes inside, kept on the device from its forward to its backward, which then need not recompute it.

Autograd saves tensors for the backward. Among them are the layer's weights, which lie in a slot that others fill in
between: of these a note is kept in place of the tensor (where in the slot it lies, with shape and strides), and the
backward makes of it a view of whichever slot holds the layer then.

    InsidesStore   which layers keep theirs, and how many bytes all of them take
    Insides        of one call

Rule: no gradient is taken from a slot that was filled again. A layer that holds on to its weights in another way than
autograd's own (an attribute of a function's context) would do that. So behind its first forward one layer of each kind
is tried: it runs again on a copy of the weights, which is poisoned before a backward. If that shows in its gradients,
layers of this kind are recomputed. So is a call whose result was changed in place since.

A compiled layer may keep less than all, and then has a backward that computes the rest again. That one would draw other
random numbers than the forward did: a call that drew any is recomputed.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatrain.execute.context import without_saved_tensor_hooks
from megatrain.spec.kept import SavedTensors

if TYPE_CHECKING:
    from megatrain.execute.layer import StreamedLayer, Views
    from megatrain.execute.templates import Kind

logger = logging.getLogger("megatrain")

POISON = 0xFF
"""As every byte of a number, NaN in bf16 and fp32."""


class _Note(NamedTuple):
    """A tensor that views a layer's weights: what has to be known to view them in another slot."""

    dtype: torch.dtype
    offset: int
    """From the first byte of the weights, in elements."""
    shape: torch.Size
    strides: tuple[int, ...]


class InsidesStore:
    """
    Args:
        kinds: layers that keep something of what they compute inside, by name.
        budget_bytes: what all of it may take on the device; None: no bound.
        compiled: layers can keep less than all.
    """

    def __init__(self, kinds: Mapping[str, Kind], budget_bytes: int | None = None, *, compiled: bool = False) -> None:
        self._kinds, self._compiled = kinds, compiled
        self._budget_bytes = sys.maxsize if budget_bytes is None else budget_bytes
        self.kept_bytes = self.most_kept_bytes = 0
        self.num_kept = 0
        self._bytes_per_element: dict[str, float] = {}
        """By layer: of what it kept last, for each element of its hidden state."""
        self._is_fit: dict[Kind, bool] = {}
        """By kind, once one of it was tried."""

    @property
    def is_empty(self) -> bool:
        """Nothing is kept, nor will be."""
        return not self._kinds or self._budget_bytes == 0

    def offer(self, layer: StreamedLayer, arguments: Sequence[torch.Tensor], *, is_eager: bool) -> Insides | None:
        """For a call of `layer`; None: it is to recompute. is_eager: it is not compiled, and could keep all alone."""
        kind = self._kinds.get(layer.name)
        if kind is None or not self._is_fit.get(kind, True) or (is_eager and kind.keeps != "all"):
            return None
        return Insides(self, layer.name, kind, arguments) if self._has_room(layer.name, arguments) else None

    def reduce(self) -> str:
        """Keep less from now on: of compiled layers the input alone, then nothing. Returns in words what the others
        do; nothing where nothing was kept."""
        if self.is_empty:
            return ""
        if self._compiled and any(kind.keeps != "input" for kind in self._kinds.values()):
            self._kinds = {name: kind._replace(keeps="input") for name, kind in self._kinds.items()}
            self._bytes_per_element.clear()
            return "layers keep their input alone, and their backward computes the rest again"
        self._budget_bytes = 0
        return "every layer is computed again in the backward"

    def is_tried(self, kind: Kind) -> bool:
        """One of it was."""
        return kind in self._is_fit

    def judge(self, insides: Insides, *, is_fit: bool) -> None:
        """Behind the trial of a layer."""
        self._is_fit[insides.kind] = is_fit
        if not is_fit:
            logger.info(
                "%s holds on to its weights in a way of its own: layers of its kind are computed again in the backward",
                insides.name,
            )

    def _has_room(self, name: str, arguments: Sequence[torch.Tensor]) -> bool:
        """By what the layer's last call took; one that was never called takes what the most demanding other does."""
        known = self._bytes_per_element
        expected_bytes = known.get(name, max(known.values(), default=0.0)) * _num_elements(arguments)
        return self.kept_bytes + expected_bytes <= self._budget_bytes

    def count(self, insides: Insides) -> None:
        self._bytes_per_element[insides.name] = insides.num_bytes / max(1, insides.num_elements)
        self.num_kept += 1
        self.kept_bytes += insides.num_bytes
        self.most_kept_bytes = max(self.most_kept_bytes, self.kept_bytes)


class Insides:
    """What autograd saves in one forward. Goes with its call, or when that drops it."""

    def __init__(self, store: InsidesStore, name: str, kind: Kind, arguments: Sequence[torch.Tensor]) -> None:
        self.name, self.kind, self.num_bytes = name, kind, 0
        self.num_elements = _num_elements(arguments)
        self._store, self._is_counted = store, False
        # Masks and positions are there anyway, for all layers.
        self._saved = SavedTensors(tensor for tensor in arguments if not tensor.requires_grad)
        self._views: Views | None = None
        self._versions: list[int] = []

    @contextlib.contextmanager
    def saving(self, views: Views) -> Iterator[None]:
        """Around the layer's forward on `views`."""
        # Of its own alone: hooks around the layer see its arguments and results.
        with self.bound(views), without_saved_tensor_hooks():
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield

    def settle(self, outputs: Sequence[torch.Tensor]) -> None:
        """After the forward."""
        self.num_bytes = self._saved.num_bytes()
        self._versions = [output._version for output in outputs]
        self._store.count(self)
        self._is_counted = True

    def are_sound(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Nobody has changed the results since, which the graph may have saved."""
        return self._versions == [output._version for output in outputs]

    @contextlib.contextmanager
    def bound(self, views: Views) -> Iterator[None]:
        """The layer's weights are those of `views`, for the length of its forward or backward."""
        self._views = views
        try:
            yield
        finally:
            self._views = None

    def drop(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self._store.kept_bytes -= self.num_bytes

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.drop()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Note:
        views = self._views
        assert views is not None
        if views.hold(tensor):
            offset = (tensor.data_ptr() - views.weights.data_ptr()) // tensor.element_size()
            return _Note(tensor.dtype, offset, tensor.shape, tensor.stride())
        return self._saved.pack(tensor)

    def _unpack(self, saved: torch.Tensor | _Note) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        assert self._views is not None, "weights are there in a visit alone"
        weights = self._views.weights
        whole = weights[: weights.numel() // saved.dtype.itemsize * saved.dtype.itemsize].view(saved.dtype)
        return whole.as_strided(saved.shape, saved.strides, whole.storage_offset() + saved.offset)


def _num_elements(arguments: Sequence[torch.Tensor]) -> int:
    """Of the first one that has a gradient, the hidden state. Behind it come more and more from layer to layer, where a
    model fills a cache of keys and values."""
    return next((tensor.numel() for tensor in arguments if tensor.requires_grad), 0)
