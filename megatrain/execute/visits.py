"""Visits: the time in which a layer's weights are on the device.

Rule: they nest. A layer that is visited inside its own visit (each micro-batch of it) has the same views.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from megatrain.execute.layer import StreamedLayer, Views
from megatrain.transport.recorder import on_host
from megatrain.transport.serial import SerialStream
from megatrain.transport.stream import LaneStream

Result = TypeVar("Result")


class Visits:
    """Of one model's layers."""

    def __init__(self, transport: LaneStream | SerialStream) -> None:
        self._transport = transport
        self._views: dict[StreamedLayer, Views] = {}
        self._last: tuple[StreamedLayer, Views] | None = None
        """Of the last backward. Each micro-batch has one of its own, mostly with the weights where they were."""

    @property
    def is_any_open(self) -> bool:
        return bool(self._views)

    def is_open(self, layer: StreamedLayer) -> bool:
        return layer in self._views

    def clear(self) -> None:
        """After an interrupt at any place."""
        self._views.clear()
        self.end_step()

    def end_step(self) -> None:
        """Homes and slots may change from now on."""
        self._last = None

    @contextlib.contextmanager
    def open(self, layer: StreamedLayer, what: str, micro_batch: int | None) -> Iterator[Views]:
        """The layer's parameters on the device for the length of the block.

        what, micro_batch: "forward" or "backward", and of which micro-batch if of one: for a recorder.
        """
        transport, recorder = self._transport, self._transport.recorder
        is_outermost = layer not in self._views
        with on_host(recorder, "acquire", layer.name):
            weights = transport.acquire(layer.home)
        try:
            if is_outermost:
                self._views[layer] = self._new_views(layer, weights, what)
            if recorder is None:
                yield self._views[layer]
            else:
                with recorder.computing(what, layer.name, micro_batch):
                    yield self._views[layer]
        finally:
            if is_outermost:
                self._views.pop(layer, None)
            with on_host(recorder, "release", layer.name):
                transport.release(layer.home)

    def _new_views(self, layer: StreamedLayer, weights: torch.Tensor, what: str) -> Views:
        last, self._last = self._last, None
        if what != "backward":
            return layer.views(weights)
        if last is not None and last[0] is layer and last[1].weights.data_ptr() == weights.data_ptr():
            views = last[1]
        else:
            views = layer.views(weights)
        self._last = layer, views
        return views


def told_to_recorder(what: str, layer_of: Callable[[Any], StreamedLayer]) -> Callable[..., Any]:
    """For methods of the engine that work on a layer: the caller's time in them is told to a recorder, if there is one.

    layer_of: their first argument -> the layer.
    """

    def decorate(method: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(method)
        def run(self: Any, first: Any, *args: Any, **kwargs: Any) -> Result:
            recorder = self.transport.recorder
            if recorder is None:
                return method(self, first, *args, **kwargs)
            with recorder.on_host(what, layer_of(first).name):
                return method(self, first, *args, **kwargs)

        return run

    return decorate
