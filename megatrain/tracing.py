"""`mt.trace`: what each lane of a streamed model did, as a file for chrome://tracing or Perfetto."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from torch import nn

from megatrain.api import engine_for
from megatrain.base.errors import UserError
from megatrain.base.trace import writable, write_trace
from megatrain.execute.trace import Trace


@contextlib.contextmanager
def trace(model: nn.Module, file: str | os.PathLike[str] | None = None) -> Iterator[Trace]:
    """Record what the lanes of a streamed model do in the block, and write it as a Chrome trace (JSON).

    One track a lane; visits of layers with their micro-batches, fetches, drains, updates, reads and writes of the disk,
    each with its layer; stalls with their cause; arrows from what was waited for last; a track of Python's own time
    (docs/guides.md tells how to read it). Put whole steps into the block, two or more, so that the update of one
    is seen beside the forward of the next. No step waits for it; the end of the block waits until all lanes are done.
    Results are the same, bit for bit.

    Args:
        file: where it goes when the block ends; None: nowhere (`export_chrome_trace` of what is yielded writes it).

    Yields the Trace: `summary()` and `export_chrome_trace(file)` of it are for after the block. Nothing is written if
    the block raises. Raises UserError, before anything runs, for a model that is not streamed, a file that cannot be
    written, a model that is traced already.
    """
    engine = engine_for(model)
    path = None if file is None else writable(file, "mt.trace")
    if engine.transport.recorder is not None:
        raise UserError("mt.trace: this model is traced already; end that block first")
    found = Trace(engine)
    found.start()
    try:
        yield found
    except BaseException:
        found.abandon()
        raise
    found.stop()
    if path is not None:
        write_trace(found.chrome_trace(), path)
