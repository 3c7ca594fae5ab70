"""Compiled templates: one graph a kind and mode, no fall-back to eager, and what layers keep is rebound in them too.

Compiled by dynamo, autograd's tracer and the partitioner of forward and backward, without a code generator (backend
aot_eager_decomp_partition): kernels are eager's, so the bits can be compared; and it takes seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_equal, closed_later, gradients, stream, the_engine
from model_zoo import Block, Stack, make_batch
from test_insides import HoldingLinear, loss_of
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._functorch import config as functorch_config
from update_training import assert_same, batches, result, start, train

import megatrain as mt
from megatrain.base.config import KEEPS, StreamOptions
from megatrain.execute import templates
from megatrain.execute.engine import Engine, engine_of
from megatrain.execute.insides import Insides, InsidesStore
from megatrain.plan.cost import kept_bytes
from megatrain.run_plan import spec_of

MIXED = {"model.layers.0": "input", "model.layers.1": "products", "model.layers.2": "all"}


@pytest.fixture(autouse=True)
def budgets(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Those under which graphs were compiled, so far."""
    used: list[float] = []
    compile_ = lookup_backend("aot_eager_decomp_partition")

    def generate(graph: Any, inputs: Any) -> Any:
        used.append(functorch_config.activation_memory_budget)
        return compile_(graph, inputs)

    monkeypatch.setattr(templates, "generate", generate)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield used
    torch._dynamo.reset()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Bytes for each element of the input, of each call that has kept something, by what it kept."""
    found: dict[str, list[float]] = defaultdict(list)
    count = InsidesStore.count

    def counted(self: InsidesStore, insides: Insides) -> None:
        found[insides.kind.keeps].append(insides.num_bytes / insides.num_elements)
        count(self, insides)

    monkeypatch.setattr(InsidesStore, "count", counted)
    return found


def trained(compiled: bool, **options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    model, optimizer = start(StreamOptions(**options), compile=compiled)
    train(closed_later(model), optimizer, batches(3))
    return result(model, optimizer), model


def num_graphs() -> int:
    assert not torch._dynamo.utils.counters["graph_break"] and not torch._dynamo.utils.counters["unimplemented"]
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_compiled_layers_train_as_eager_ones_do_whatever_they_keep(
    budgets: list[float], kept: dict[str, list[float]]
) -> None:
    """To rounding: what is traced is taken apart into other operations. Three steps of Adam at 1e-2 move a weight by at
    most 3e-2; a thousandth of that is far above rounding and far below a mistake. What is kept changes no bit."""
    eager, _ = trained(False)
    compiled, _ = trained(True)
    assert num_graphs() <= 4, "one kind of block, with and without gradients, for one length and then for any"
    for name, value in eager.items():
        assert (value - compiled[name]).abs().max() <= 3e-5 + 1e-3 * value.abs().max(), name
    torch._dynamo.utils.counters.clear()
    budgets.clear()
    state, model = trained(True, kept_layers=MIXED, num_slots=1, poison=True)
    assert_same(state, compiled)
    assert num_graphs() <= 8 and set(budgets) == set(KEEPS.values())
    assert functorch_config.activation_memory_budget == 1.0, "what others compile is their own affair"
    assert {name: len(found) for name, found in kept.items()} == dict.fromkeys(KEEPS, 3 * 2 - 1)
    # A plan knows how much that is before anything runs.
    spec = spec_of(model, engine_of(model).formats)
    predicted = kept_bytes(spec, spec.layers[1], 9, compiled=True)
    for name, tolerance in (("input", 0), ("products", 0.05), ("all", 0.1)):
        assert kept[name] == pytest.approx([predicted[name] / spec.hidden_size] * 5, rel=tolerance), name


def small_stack(make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    """(plain, streamed and compiled), of two blocks."""

    def run(model: Stack, x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = block(x)
        return x

    mt.init(device="cpu", compile=True)
    torch.manual_seed(0)
    return stream(Stack([make() for _ in range(2)], run), num_slots=1, poison=True, **options)


class Dropping(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(super().forward(x), 0.3, self.training)


def test_a_layer_that_draws_random_numbers_is_recomputed_or_kept_whole() -> None:
    """A backward that computes again would draw others. In evaluation none are drawn."""
    found, holds = {}, {}
    for keeps in (None, "all", "products"):
        names = {} if keeps is None else {"blocks.0": keeps, "blocks.1": keeps}
        _, model = small_stack(lambda: Dropping(16), kept_layers=names)
        holds[keeps] = []
        for is_training in (False, True, True):
            model.train(is_training)
            torch.manual_seed(5)
            loss = loss_of(model, make_batch())
            holds[keeps].append(the_engine(model).insides.kept_bytes > 0)
            loss.backward()
        found[keeps] = gradients(model)
    assert holds == {None: [False] * 3, "all": [True] * 3, "products": [True, False, False]}
    assert_equal(found["all"], found[None])
    assert_equal(found["products"], found[None])


class Held(Block):
    """What dynamo does not look into keeps the weight for itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch._dynamo.disable(HoldingLinear.apply)(torch.tanh(self.inner(x)), self.outer.weight)


def test_compiled_layers_that_hold_on_to_their_weights_are_recomputed(kept: dict[str, list[float]]) -> None:
    plain, model = small_stack(lambda: Held(16), kept_layers={"blocks.0": "input", "blocks.1": "input"})
    for _ in range(2):
        loss_of(plain, make_batch()).backward()
        loss_of(model, make_batch()).backward()
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], gradient)
    assert len(kept["input"]) == 1, "the one on trial"


def test_memory_that_lacks_leaves_compiled_layers_their_input_and_then_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kept: dict[str, list[float]]
) -> None:
    plain, model = small_stack(lambda: Block(16), kept_layers={"blocks.0": "products", "blocks.1": "products"})
    engine, visit = the_engine(model), Engine.visit
    failed: list[int] = []

    def failing(self: Engine, layer: Any, *what: Any) -> Any:
        if self.insides.kept_bytes and layer.name == "blocks.1" and len(failed) < 2:
            failed.append(self.insides.kept_bytes)
            raise torch.OutOfMemoryError("out of memory")
        return visit(self, layer, *what)

    monkeypatch.setattr(Engine, "visit", failing)
    many = [make_batch(n, seed=n) for n in (6, 9)]
    engine.accumulate([lambda batch=batch: loss_of(model, batch) for batch in many])
    for batch in many:
        loss_of(plain, batch).backward()
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], gradient)
    assert failed[1] < failed[0] and kept.keys() == {"products", "input"} and engine.insides.is_empty
    assert "layers keep their input alone" in caplog.text
    assert "every layer is computed again in the backward" in caplog.text


def test_layers_that_are_not_compiled_keep_all_or_nothing() -> None:
    with pytest.raises(mt.UserError, match="'blocks.1' can keep 'input' where it is compiled: set compile=True"):
        stream(Stack([Block(16), Block(16)], lambda model, x: x), kept_layers={"blocks.1": "input"})
    with pytest.raises(mt.UserError, match="'blocks.1' cannot keep 'some': use one of"):
        StreamOptions(kept_layers={"blocks.1": "some"})


TWO_STEPS = """
import json, torch
from torch import nn
import megatrain as mt
from megatrain.api import stream
from megatrain.base.config import StreamOptions
from megatrain.execute.engine import engine_of

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh())])

    def forward(self, x):
        return self.blocks[0](x)

torch.set_num_threads(1)
torch.manual_seed(0)
mt.init(device="cpu", compile=True)
model = stream(Model(), options=StreamOptions(kept_layers={"blocks.0": "products"}))
x = torch.randn(4, 8)
model(x).square().sum().backward()
gradients = [gradient.flatten().tolist() for _, gradient in mt.named_gradients(model)]
counters = torch._dynamo.utils.counters
print(json.dumps([gradients, engine_of(model).insides.num_kept, counters["inductor"]["fxgraph_cache_miss"],
                  counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"]]))
engine_of(model).close()
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler of C++")
def test_compiled_code_is_kept_for_the_next_run(tmp_path: Path) -> None:
    """With the code generator, for real, whose gradients are those of plain PyTorch to rounding."""
    environment = {**os.environ, "MEGATRAIN_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    outputs = [
        subprocess.run([sys.executable, "-c", TWO_STEPS], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    (gradients, *first), (_, *second) = (json.loads(output.stdout.splitlines()[-1]) for output in outputs)
    assert (first, second) == ([1, 2, 0, 1], [1, 0, 2, 0]), "kept, graphs compiled, found and not found"
    assert (tmp_path / "compiled" / "fxgraph").is_dir()
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    torch.tanh(layer(torch.randn(4, 8))).square().sum().backward()
    for parameter, found in zip(layer.parameters(), gradients, strict=True):
        torch.testing.assert_close(torch.tensor(found), parameter.grad.flatten())
