"""A checkpoint on its way to the disk while training goes on.

    capture: a home's last update is over -> copied, or viewed -> queue          (its next update waits for `captured`)
    write:   queue -> files, checksums, sync -> the folder takes its place

Where spare memory takes a home, it is copied there and free for its next update at once. Where it does not, the writer
reads it at home, and its next update waits until that is done. Homes come in the order in which they are updated, so
training waits only for what the disk is behind.

Rule: whatever happens in either thread, every home's `captured` is recorded in the end, and the target is complete or
as it was.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatrain.base.cgroup import free_host_bytes
from megatrain.base.fence import Fence, bare
from megatrain.execute.engine import Engine
from megatrain.optim.base import HomeOptimizer
from megatrain.optim.saved import settings_of
from megatrain.save.checkpoints import OPTIMIZER_STEM, SETTINGS_NAME, TRAINING, WEIGHTS, Written, write_manifest
from megatrain.save.failed_writes import writing
from megatrain.save.layers import SavedLayers, Tensors
from megatrain.save.tensor_files import SHARD_BYTES, WEIGHTS_STEM, Shards

SPARE_SHARE = 0.5
"""Of the host memory that is free, for copies: the rest is for what training may still ask for."""

_alive: weakref.WeakSet[Saving] = weakref.WeakSet()


class SavingEndedError(RuntimeError):
    """Writing was called off."""


class Saving:
    """One folder that is being written. Made in the thread that trains, between two steps: it is of that moment.

    Args:
        folder: to write in.
        optimizer: None saves weights alone.
        has_weights: see `SavedLayers`.
        spare_bytes: host memory for copies. A home that is larger is copied only where it does not lie in host memory.
        has_manifest: of its files. is_checkpoint: the manifest says what must be there.
        notes: kept beside the optimizer's settings, as JSON takes them.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        optimizer: HomeOptimizer | None,
        folder: Path,
        *,
        has_weights: bool = True,
        spare_bytes: int = 0,
        has_manifest: bool = True,
        is_checkpoint: bool = True,
        shard_bytes: int = SHARD_BYTES,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        self._engine, self._folder = engine, folder
        self._spare_bytes, self._has_manifest, self._is_checkpoint = spare_bytes, has_manifest, is_checkpoint
        self._layers = SavedLayers(model, engine, optimizer, has_weights=has_weights)
        self._settings = None
        if optimizer is not None:
            if engine.config.clip == "layer":
                engine.wait()  # such updates, of the backward, count their steps when they run
            self._settings = {**settings_of(optimizer), "master": engine.formats.master, **(notes or {})}
        counted = {"total_parameters": sum(field.numel for home in engine.homes for field in home.fields)}
        make = functools.partial(Shards, folder, shard_bytes=shard_bytes, check=self._check)
        self._weights = make(WEIGHTS_STEM, self._layers.weight_groups(), metadata=counted)
        self._states = make(OPTIMIZER_STEM, self._layers.state_groups())
        self._has_weights = has_weights
        self._ready: deque[tuple[Tensors, Tensors, int, Fence | None]] = deque()
        self._turn = threading.Condition()
        self._held_bytes = 0
        self._is_writing = self._is_called_off = False
        self._error: BaseException | None = None
        self._captured = {home: Fence() for home in self._layers.homes}
        self._updated = {home: home.updated for home in self._layers.homes}
        self._thread: threading.Thread | None = None
        self.seconds = 0.0
        """That it took, in all."""
        self.num_bytes = 0
        """Of all files of tensors."""

    # In the thread that trains.

    def run(self, context: contextlib.ExitStack) -> None:
        """Write it now, and leave `context`, which puts the folder in its place."""
        self._write_all(context)
        self.result()

    def start(self, context: contextlib.ExitStack) -> None:
        """Write it beside what comes."""
        self._thread = threading.Thread(target=self._write_all, args=(context,), name="megatrain-save", daemon=True)
        _alive.add(self)
        try:
            for home, fence in self._captured.items():
                home.captured = fence
            self._thread.start()
        except BaseException:
            if self._thread.ident is None:  # interrupted before it began: nobody will do it
                self._release_all()
            raise

    @property
    def is_over(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Until it is over, well or not."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout=0.5)  # so that an interrupt comes through

    def result(self) -> None:
        """Raise what went wrong."""
        if self._error is not None:
            raise bare(self._error)

    def call_off(self) -> None:
        """End it soon; the target stays as it was."""
        with self._turn:
            self._is_called_off = True
            self._turn.notify_all()
        self.wait()

    # In threads of its own.

    def _write_all(self, context: contextlib.ExitStack) -> None:
        started = time.perf_counter()
        capturing = threading.Thread(target=self._capture_all, name="megatrain-capture", daemon=True)
        try:
            with context:
                capturing.start()
                for _ in self._layers.homes:
                    self._write_next()
                with writing(self._folder):
                    self._finish()
        except BaseException as error:  # noqa: BLE001 - whoever waits has to see it
            self._fail(error)
        finally:
            if capturing.ident is not None:
                capturing.join()
            self._release_all()
            self._weights.abandon()
            self._states.abandon()
            self._ready.clear()
            self.seconds = time.perf_counter() - started

    def _release_all(self) -> None:
        for fence in self._captured.values():
            if not fence.is_recorded:
                fence.record()

    def _write_next(self) -> None:
        with self._turn:
            self._is_writing = False
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._ready or self._error is not None or self._is_called_off)
            self._check()
            self.result()
            weights, states, num_bytes, captured = self._ready.popleft()
            self._is_writing = True
        if self._has_weights:
            self._weights.write_group(weights)
        if self._settings is not None:
            self._states.write_group(states)
        del weights, states
        if captured is not None:
            captured.record()
        with self._turn:
            self._held_bytes -= num_bytes

    def _finish(self) -> None:
        if self._has_weights:
            self._weights.write_group(self._layers.others)
        self._weights.close()
        self._states.close()
        written: Mapping[str, Written] = {**self._weights.written, **self._states.written}
        self.num_bytes = sum(one.num_bytes for one in written.values())
        if self._settings is not None:
            text = json.dumps(self._settings, indent=1)
            (self._folder / SETTINGS_NAME).write_text(text, encoding="utf-8")
        if self._has_manifest:
            kind = WEIGHTS if self._settings is None else TRAINING
            write_manifest(self._folder, written, kind=kind if self._is_checkpoint else None)

    def _capture_all(self) -> None:
        try:
            with torch.no_grad(), _on_own_stream(self._engine.device):
                for home in self._layers.homes:
                    self._capture(home)
        except BaseException as error:  # noqa: BLE001 - the writer waits for it
            self._fail(error)

    def _capture(self, home: Any) -> None:
        self._updated[home].wait()
        num_bytes = self._layers.num_bytes(home)
        with self._turn:
            self._turn.wait_for(lambda: self._is_idle or self._fits(num_bytes) or self._is_called_off)
            self._check()
            copies = self._fits(num_bytes)
            self._held_bytes += num_bytes
        weights, states, has_views = self._layers.capture(home, copies=copies)
        fence = self._captured[home]
        if not has_views:
            fence.record()
        with self._turn:
            self._ready.append((weights, states, num_bytes, fence if has_views else None))
            self._turn.notify_all()

    @property
    def _is_idle(self) -> bool:
        """The writer has nothing left."""
        return not (self._ready or self._is_writing or self._held_bytes)

    def _fits(self, num_bytes: int) -> bool:
        return self._held_bytes + num_bytes <= self._spare_bytes

    def _check(self) -> None:
        if self._is_called_off:
            raise SavingEndedError("saving was called off")

    def _fail(self, error: BaseException) -> None:
        with self._turn:
            self._error = self._error or bare(error)
            self._is_called_off = True
            self._turn.notify_all()


def spare_host_bytes(engine: Engine) -> int:
    """Of host memory, for copies of layers on their way to the disk."""
    return int(SPARE_SHARE * min(engine.memory.free_bytes(), free_host_bytes()))


@contextlib.contextmanager
def _on_own_stream(device: torch.device) -> Any:
    """Copies from the device go beside its work, not behind it."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def _call_off_all() -> None:
    """A thread that is still inside PyTorch when the interpreter goes would abort the process."""
    for saving in list(_alive):
        saving.call_off()


atexit.register(_call_off_all)
