"""A step that the device's memory did not hold is done once more, with all inputs of layers in host memory.

Rule: the result is that of a step that went through at once, bit for bit: random numbers are drawn again from where
they were, and nothing that the first try left behind counts. Where that cannot be (gradients were added to earlier
ones, updates have run, buffers have changed) the error is raised as it came.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from megatrain.execute.runs import run_accumulated

if TYPE_CHECKING:
    from megatrain.execute.engine import Engine

logger = logging.getLogger("megatrain")

_REMEDY = (
    "smaller micro-batches take less; mt.init(workload=mt.Workload(num_sequences=, length=, rows=)) plans memory for "
    "what is to come"
)


def accumulate_with_room(engine: Engine, thunks: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
    """As `run_accumulated`. Raises torch.OutOfMemoryError where a second try is of no use."""
    start = _Start(engine)
    try:
        return run_accumulated(engine, thunks)
    except torch.OutOfMemoryError as error:
        # Its frames hold what is to be freed.
        traceback.clear_frames(error.__traceback__)
        if not start.can_return():
            logger.warning("the device's memory does not hold this step: %s", _REMEDY)
            raise
    start.return_to()
    logger.warning(
        "the device's memory did not hold this step, which is done again: from now on inputs of layers wait in host "
        "memory for the backward, which is slower. Else, %s",
        _REMEDY,
    )
    return run_accumulated(engine, thunks)


class _Start:
    """What a step began with."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._random = torch.get_rng_state()
        is_cuda = engine.device.type == "cuda"
        self._device_random = torch.cuda.get_rng_state(engine.device) if is_cuda else None
        self._had_gradients = {home for home in engine.homes if home.grads.is_holding()}
        self._num_drains = engine.transport.counters.num_drains
        self._num_consumed = len(engine.consumed)
        self._buffers = self._versions()

    def can_return(self) -> bool:
        engine = self._engine
        has_drained = engine.transport.counters.num_drains > self._num_drains
        if engine.activations.budget_bytes == 0 or len(engine.consumed) > self._num_consumed:
            return False
        return not (has_drained and self._had_gradients) and self._versions() == self._buffers

    def return_to(self) -> None:
        """Undo the try, and keep less on the device from now on."""
        engine = self._engine
        engine.recover()
        for home in engine.homes:
            if home not in self._had_gradients:
                home.grads.clear()
        engine.activations.budget_bytes = 0
        torch.set_rng_state(self._random)
        if self._device_random is not None:
            torch.cuda.empty_cache()
            torch.cuda.set_rng_state(self._device_random, engine.device)

    def _versions(self) -> list[tuple[int, int]]:
        """Of all buffers inside layers: blocks may change theirs in a forward (running statistics)."""
        modules = [module for layer in self._engine.layers for module in layer.modules]
        buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
        return [(id(buffer), 0 if buffer.is_inference() else buffer._version) for buffer in buffers]
