"""Compiled templates: one graph a kind and mode, no fall-back to eager, and what layers keep is rebound in them too.

Compiled by dynamo and autograd's tracer, without a code generator (backend aot_eager): kernels are eager's, so the bits
can be compared; and it takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from comparing import closed_later
from update_training import assert_same, batches, result, start, train

from megatrain.base.config import StreamOptions
from megatrain.execute import templates
from megatrain.execute.engine import engine_of

LAYERS = tuple(f"model.layers.{number}" for number in range(3))


@pytest.fixture(autouse=True)
def traced_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    compile_ = torch.compile
    monkeypatch.setattr(templates.torch, "compile", lambda function, **_: compile_(function, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def trained(compiled: bool, **options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    model, optimizer = start(StreamOptions(**options), compile=compiled)
    train(closed_later(model), optimizer, batches(3))
    return result(model, optimizer), engine_of(model)


def num_graphs() -> int:
    assert not torch._dynamo.utils.counters["graph_break"] and not torch._dynamo.utils.counters["unimplemented"]
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_compiled_layers_train_as_eager_ones_do() -> None:
    """To rounding: what is traced is taken apart into other operations. Three steps of Adam at 1e-2 move a weight by at
    most 3e-2; a thousandth of that is far above rounding and far below a mistake."""
    eager, _ = trained(False)
    compiled, _ = trained(True)
    assert num_graphs() <= 4, "one kind of block, with and without gradients, for one length and then for any"
    for name, value in eager.items():
        assert (value - compiled[name]).abs().max() <= 3e-5 + 1e-3 * value.abs().max(), name


def test_what_compiled_layers_keep_changes_no_bit() -> None:
    recomputed, _ = trained(True)
    for group in (None, 1):
        kept, engine = trained(True, kept_layers=LAYERS, micro_batches_a_visit=group, num_slots=1, poison=True)
        assert_same(kept, recomputed)
        assert engine.insides.num_kept >= 12 and engine.insides.most_kept_bytes > 0
