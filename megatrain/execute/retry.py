"""A step that the device's memory did not hold is done again with less kept there: first without what the run itself
has moved there (`execute/changes.py`), then by the caller with smaller micro-batches if it had merged some
(`megatrain/micro_batches.py`), then without what layers compute inside, then with half of the inputs of layers, then
with all of them in host memory.

Rule: the result is that of a step that went through at once, bit for bit: random numbers are drawn again from where
they were, and nothing that a failed try left behind counts. Where that cannot be (gradients were added to earlier
ones, updates have run, buffers have changed), or where it is of no use, StepTooLargeError says so. Its caller may go on
with fewer rows at a time if the step `is_undone`.
"""

from __future__ import annotations

import logging
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from megatrain.base.errors import one_line
from megatrain.base.units import format_bytes, format_number
from megatrain.execute.dropped import model_of
from megatrain.execute.runs import run_accumulated
from megatrain.store.memory import DeviceMemory
from megatrain.transport.activations import MIN_BYTES

if TYPE_CHECKING:
    from megatrain.execute.engine import Engine

logger = logging.getLogger("megatrain")

_num_carrying: weakref.WeakKeyDictionary[Engine, int] = weakref.WeakKeyDictionary()
"""Steps in which buffers changed."""

REMEDIES = (
    "shorter rows; blocks in tiles of tokens (mt.init(tile_tokens=4096)); more of the device's memory "
    "(mt.init(max_vram_gb=...)); less that lives there (mt.init(hbm_home_gb=0)); "
    "mt.init(workload=mt.Workload(num_sequences=, length=, rows=)), which plans memory for what is to come"
)


class StepTooLargeError(torch.OutOfMemoryError):
    """The device's memory does not hold a step, with nothing kept there that need not be."""

    def __init__(self, reason: str, error: BaseException, engine: Engine, *, is_undone: bool) -> None:
        self.is_undone = is_undone
        """All is as before the step, random numbers too: it may be run in another way."""

        self.free_bytes = free_device_bytes(engine)
        """After all that the step had taken was given back."""

        super().__init__(
            f"the device's memory does not hold this step ({format_bytes(self.free_bytes)} are free before it): "
            f"{reason}. What helps: smaller micro-batches, more of them; {REMEDIES}. (PyTorch: {one_line(error)})"
        )


def free_device_bytes(engine: Engine) -> int:
    """What may still be taken from the device's memory, within `max_vram_gb` where that is set."""
    free_bytes = DeviceMemory(engine.device).free_bytes()
    limit_bytes = engine.config.max_vram_bytes
    if engine.device.type != "cuda" or limit_bytes is None:
        return free_bytes
    return max(0, min(free_bytes, limit_bytes - torch.cuda.memory_allocated(engine.device)))


def accumulate_with_room(
    engine: Engine, thunks: Sequence[Callable[[], torch.Tensor]], sizes: Sequence[int]
) -> list[torch.Tensor]:
    """As `run_accumulated`. Raises StepTooLargeError where another try is of no use, or with micro-batches that are
    merged of less than ones that are not."""
    start = _Start(engine)
    while True:
        try:
            losses = run_accumulated(engine, thunks, sizes)
            if len(thunks) > 1:
                start.warn_of_carried_state()
            return losses
        except torch.OutOfMemoryError as error:
            _let_go(error)
            obstacle = start.obstacle()
            if obstacle:
                reason = f"it cannot be done again, because {obstacle}"
                raise StepTooLargeError(reason, error, engine, is_undone=False) from error
            start.return_to()
            if engine.changes.give_way():
                _empty_cache(engine)
                continue
            if any(size > 1 for size in sizes):
                raise StepTooLargeError("its micro-batches are merged", error, engine, is_undone=True) from error
            if not _keep_less(engine):
                reason = "all inputs of layers wait in host memory already"
                raise StepTooLargeError(reason, error, engine, is_undone=True) from error


def _let_go(error: BaseException | None) -> None:
    """The frames of an error, and of those that it came from, hold what is to be freed."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _keep_less(engine: Engine) -> bool:
    """Keep less of layers on the device from now on, and say so. False: nothing is kept there already."""
    if what := engine.insides.reduce():
        _say_slower(engine, what)
        return True
    activations = engine.activations
    if activations.budget_bytes == 0:
        return False
    half_bytes = min(activations.budget_bytes, activations.most_kept_bytes) // 2
    if activations.device_buffers is None and not activations.is_reduced and half_bytes >= MIN_BYTES:
        activations.reduce(half_bytes)
        what = f"at most {format_bytes(half_bytes)} of the inputs of layers stay on the device, and the others wait"
    else:
        # What was planned for them there is for whatever needs it now.
        activations.reduce(0)
        what = "all inputs of layers wait"
    _say_slower(engine, f"{what} in host memory for the backward")
    return True


def _say_slower(engine: Engine, what: str) -> None:
    _empty_cache(engine)
    logger.warning(
        "the device's memory did not hold this step, which is done again: from now on %s, which is slower. What "
        "helps: smaller micro-batches, more of them; %s",
        what,
        REMEDIES,
    )


def _empty_cache(engine: Engine) -> None:
    if engine.device.type == "cuda":
        # Meanwhile autograd's thread of the device drops what was next in its queue.
        torch.cuda.synchronize(engine.device)
        torch.cuda.empty_cache()


def _growing_frequencies(engine: Engine) -> list[str]:
    """Of dynamic RoPE, as transformers has it: a long row lets them grow, and a short one brings the first ones back,
    so that a step may end with those that it began with."""
    model = model_of(engine)
    modules = () if model is None else model.named_modules()
    types = {name: getattr(module, "rope_type", None) for name, module in modules}
    return [
        f"{name}.inv_freq"
        for name, of in types.items()
        if "dynamic" in (of.values() if isinstance(of, dict) else (of,))
    ]


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
        self._num_seen = engine.report.num_seen

    def obstacle(self) -> str:
        """Why there is no way back, or nothing."""
        engine = self._engine
        if len(engine.consumed) > self._num_consumed:
            return 'updates have run in its backward (clip="layer")'
        if engine.transport.counters.num_drains > self._num_drains and self._had_gradients:
            return "it has added to gradients that were there before (call optimizer.zero_grad() between steps)"
        if self._changed_buffers():
            return "it has changed buffers of the model (running statistics of a batch norm?)"
        return ""

    def return_to(self) -> None:
        """Undo the try."""
        engine = self._engine
        engine.recover()
        for home in engine.homes:
            if home not in self._had_gradients:
                home.grads.clear()
        engine.report.forget(self._num_seen)
        torch.set_rng_state(self._random)
        _empty_cache(engine)
        if self._device_random is not None:
            torch.cuda.set_rng_state(self._device_random, engine.device)

    def warn_of_carried_state(self) -> None:
        """Behind a step of several micro-batches. In a first step buffers may be made that stay."""
        engine = self._engine
        names = self._changed_buffers() or _growing_frequencies(engine)
        if not names:
            return
        _num_carrying[engine] = _num_carrying.get(engine, 0) + 1
        if _num_carrying[engine] == 2:
            logger.warning(
                "%s changes in a forward%s. The micro-batches of a step come to it last to first, where plain "
                "accumulation goes first to last: what depends on it differs from plain training (docs/decisions.md, "
                "'What is not equal'). A single micro-batch a step is as in plain PyTorch.",
                names[0],
                f", and so do {format_number(len(names) - 1, 'buffer')} more" if len(names) > 1 else "",
            )

    def _changed_buffers(self) -> list[str]:
        """Names of buffers that are others now, or have other values."""
        now, before = self._versions(), self._buffers
        same = {
            name
            for name, (buffer, version) in now.items()
            if name in before and before[name][0] is buffer and before[name][1] == version
        }
        return [name for name in {**before, **now} if name not in same]

    def _versions(self) -> dict[str, tuple[torch.Tensor, int]]:
        """Of all buffers of the model: blocks may change theirs in a forward (running statistics), and so may what
        stands before them (frequencies that depend on the lengths seen). The buffers themselves, not their ids: one
        that is put in the place of another may get the id of one that is gone."""
        model = model_of(self._engine)
        buffers = () if model is None else model.named_buffers()
        return {name: (buffer, 0 if buffer.is_inference() else buffer._version) for name, buffer in buffers}
