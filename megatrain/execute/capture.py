"""What a layer returns besides its result: outputs recorded by hooks inside it.

transformers records router logits and attentions through hooks on modules inside a layer, into a list that belongs to
the running forward. Such tensors must leave the layer as differentiable outputs, and must not be recorded again by the
recomputation.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

Recorded = dict[str, list[Any]]


def recording_keys() -> tuple[str, ...]:
    """Keys under which the running forward records outputs from inside layers.

    Hidden states are not among them: they are recorded on the layer's own call, outside of its streamed forward.
    """
    recorded = recorded_so_far()
    return tuple(key for key, value in recorded.items() if isinstance(value, list) and key != "hidden_states")


def recorded_so_far() -> Recorded:
    """What the running forward has recorded, by key."""
    collector = _collector()
    return (None if collector is None else collector.get()) or {}


@contextlib.contextmanager
def recording(keys: tuple[str, ...]) -> Iterator[Recorded]:
    """Within the block, hooks record into the yielded lists (one a key) and nowhere else."""
    recorded: Recorded = {key: [] for key in keys}
    collector = _collector()
    if collector is None:
        yield recorded
        return
    token = collector.set(recorded)
    try:
        yield recorded
    finally:
        collector.reset(token)


def publish(recorded: Recorded) -> None:
    """Hand what was recorded (by now differentiable) to the running forward."""
    if not recorded:
        return
    collector = _collector()
    assert collector is not None
    for key, values in recorded.items():
        collector.get()[key].extend(values)


def _collector() -> Any:
    # Looked up in what is loaded already: a model that records anything has imported it.
    module = sys.modules.get("transformers.utils.output_capturing")
    return None if module is None else module._active_collector
