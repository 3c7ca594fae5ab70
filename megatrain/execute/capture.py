"""What a layer returns besides its result: outputs recorded by hooks inside it, and attributes that it sets.

transformers records router logits and attentions through hooks on modules inside a layer, into a list that belongs to
the running forward. Others set an attribute (`self.aux_loss = ...`) that the model reads later. Such tensors must leave
the layer as differentiable outputs, and a recomputation must neither record nor set them again.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

Recorded = dict[str, list[Any]]

Attributes = dict[tuple[int, str], Any]
"""(index of the module in the layer, name) -> value."""


def recording_keys() -> tuple[str, ...]:
    """Keys under which the running forward records outputs from inside layers.

    Hidden states are not among them: they are recorded on the layer's own call, outside of its streamed forward.
    """
    collector = _collector()
    recorded = None if collector is None else collector.get()
    if not recorded:
        return ()
    return tuple(key for key, value in recorded.items() if isinstance(value, list) and key != "hidden_states")


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


@contextlib.contextmanager
def setting_attributes(modules: list[nn.Module]) -> Iterator[Attributes]:
    """What the block sets as attributes of `modules` is in the yielded dict afterwards, and undone on the modules."""
    changed: Attributes = {}
    before = [dict(vars(module)) for module in modules]
    try:
        yield changed
    finally:
        for index, (module, old) in enumerate(zip(modules, before, strict=True)):
            now = vars(module)
            for name in [name for name, value in now.items() if name not in old or old[name] is not value]:
                changed[index, name] = now.pop(name)
            now.update(old)


def publish(modules: list[nn.Module], recorded: Recorded, attributes: Attributes) -> None:
    """Hand what was recorded and set (by now differentiable) to the running forward and to the modules."""
    for (index, name), value in attributes.items():
        vars(modules[index])[name] = value
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
