"""Models that were streamed and dropped: their memory is given back when it is needed, and not only when the garbage
collector happens to come by, or the updates that are still queued happen to be over.
"""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from megatrain.execute.engine import Engine

NUM_LOOKS, LOOK_SECONDS = 20, 0.01
"""A lane's thread lets go of its last work a moment after that is over. Who holds an optimizer holds its homes."""

_models: weakref.WeakKeyDictionary[Engine, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def note_streamed(model: nn.Module, engine: Engine) -> None:
    _models[engine] = weakref.ref(model)


def collect_dropped() -> None:
    """Until no model that nobody holds any more takes memory. Its last updates are done first: they hold its homes."""
    if not _models:
        return
    gc.collect()
    gone = [engine for engine, model in list(_models.items()) if model() is None]
    for engine in gone:
        with contextlib.suppress(Exception):  # a lane that failed: nobody is there to be told
            engine.wait()
    engines = [weakref.ref(engine) for engine in gone]
    engine = None
    gone.clear()
    for _ in range(NUM_LOOKS):
        gc.collect()
        if not any(engine() is not None for engine in engines):
            break
        time.sleep(LOOK_SECONDS)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
