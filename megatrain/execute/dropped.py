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

PAUSES_SECONDS = (0.01, 0.04, 0.15)
"""A lane's thread lets go of its last work a moment after that is over."""

_models: weakref.WeakKeyDictionary[Engine, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
_held: weakref.WeakSet[Engine] = weakref.WeakSet()
"""Of dropped models, what was waited for once and stayed: who holds an optimizer or an error holds the homes."""


def note_streamed(model: nn.Module, engine: Engine) -> None:
    _models[engine] = weakref.ref(model)


def model_of(engine: Engine) -> nn.Module | None:
    """None where nobody holds it any more."""
    reference = _models.get(engine)
    return None if reference is None else reference()


def collect_dropped() -> None:
    """Until no model that nobody holds any more takes memory. Its last updates are done first: they hold its homes."""
    if not _models:
        return
    gc.collect()
    gone = [engine for engine, model in list(_models.items()) if model() is None and engine not in _held]
    for engine in gone:
        with contextlib.suppress(Exception):  # a lane that failed: nobody is there to be told
            engine.wait()
    engines = [weakref.ref(engine) for engine in gone]
    engine = None
    gone.clear()
    for pause_seconds in (0.0, *PAUSES_SECONDS) if engines else ():
        time.sleep(pause_seconds)
        gc.collect()
        if not any(engine() is not None for engine in engines):
            break
    _held.update(engine for one in engines if (engine := one()) is not None)
    engine = None
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
