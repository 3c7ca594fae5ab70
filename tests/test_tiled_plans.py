"""Plans know of tiles: what a block keeps around them, what they cost, and where there are none."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from comparing import stream
from live_bytes import LiveBytes
from model_zoo import make_model
from planning_helpers import builtin, machine, predicted, wide_llama

import megatrain as mt
from megatrain.base.config import Config
from megatrain.base.errors import UserError
from megatrain.base.units import GB
from megatrain.plan.cost import ALLOCATOR_GAPS, LONG_ROW_TOKENS, tile_of, whole_bytes, working_bytes
from megatrain.plan.explain import as_data, describe
from megatrain.plan.machines import MACHINES
from megatrain.plan.planner import Planner
from megatrain.plan.remedies import largest_context, plan
from megatrain.plan.workload import Workload
from megatrain.spec.homes import Formats
from megatrain.spec.model import ModelSpec, model_spec

LONG = Workload(num_sequences=1, length=1 << 19)
H200 = MACHINES["h200-128gb"]


def in_tiles(spec: ModelSpec, setting: int | None = None) -> ModelSpec:
    return dataclasses.replace(spec, tile_tokens=setting)


def test_half_a_million_tokens_are_predicted_to_fit_in_tiles_alone() -> None:
    spec, whole = builtin("qwen2.5-7b"), Config(offload_dir=".", tile_tokens=False)
    with pytest.raises(UserError, match="device memory is 147.7 GB") as refusal:
        plan(H200, spec, LONG, whole)
    assert "mt.init(tile_tokens=4096)" in str(refusal.value)
    found = plan(H200, spec, LONG, Config(offload_dir="."))
    assert found.timeline.peak("hbm") <= found.budgets.hbm
    assert as_data(found)["plan"]["tile_tokens"] == 4096
    assert "runs in tiles of 4,096 tokens" in describe(found)
    context = largest_context(H200, spec, Config(offload_dir="."))
    assert context > 1.5 * largest_context(H200, spec, whole) > LONG_ROW_TOKENS
    at_most = Workload(num_sequences=1, length=context)
    assert Planner(H200, spec, at_most, Config(offload_dir=".")).fits()


def test_the_largest_context_passes_by_rows_that_would_have_to_be_whole() -> None:
    """On 7 GB 32,768 tokens run whole and do not fit, and 33,024 in tiles do."""
    small, spec = machine(7, 60), wide_llama()
    assert not Planner(small, spec, Workload(num_sequences=1, length=LONG_ROW_TOKENS), Config()).fits()
    context = largest_context(small, spec, Config())
    assert context > LONG_ROW_TOKENS
    for length, fits in ((context, True), (context + 256, False)):
        assert Planner(small, spec, Workload(num_sequences=1, length=length), Config()).fits() is fits


@pytest.mark.parametrize(("hbm", "length", "settings"), [(4.5, 16384, {}), (6, 32768, {"compile": True})])
def test_a_remedy_in_tiles_is_enough(hbm: float, length: int, settings: dict[str, bool]) -> None:
    small, spec, work = machine(hbm, 60), wide_llama(), Workload(num_sequences=1, length=length)
    with pytest.raises(UserError, match="does not fit") as refusal:
        plan(small, spec, work, Config(**settings))
    remedy = re.search(r"mt\.init\(tile_tokens=(\d+)(, compile=False)?\)", str(refusal.value))
    assert bool(remedy[2]) == bool(settings)
    assert plan(small, spec, work, Config(tile_tokens=int(remedy[1])))


def test_what_tiles_take_adds_up() -> None:
    spec = in_tiles(builtin("qwen2.5-7b"))
    layer = next(layer for layer in spec.layers if layer.kind == "block")
    # 4 hidden states; 28 heads of queries and their results, 4 of keys and values, of 128.
    assert whole_bytes(spec, layer, 1024) == 2 * (4 * 3584 + 28 * 256 + 4 * 256)
    work = Workload(num_sequences=1, length=1 << 17)
    mlp = 4 * 3 * 3584 * 18944
    whole_tile = working_bytes(builtin("qwen2.5-7b"), layer, work, 1, compiled=False) / ALLOCATOR_GAPS / work.length
    expected = work.length * (whole_bytes(spec, layer, work.length) + 2 * 2 * 3584) + 2 * 4096 * whole_tile + mlp
    assert working_bytes(spec, layer, work, 1, compiled=False) == pytest.approx(ALLOCATOR_GAPS * expected, rel=1e-6)
    lengths = [Workload(num_sequences=1, length=length) for length in range(LONG_ROW_TOKENS + 1, 1 << 18, 7777)]
    taken = [working_bytes(spec, layer, work, 1, compiled=False) for work in lengths]
    assert taken == sorted(taken)


def test_what_is_kept_around_tiles_is_what_a_run_keeps() -> None:
    """Counted over the backward of a block, a token: as much as is planned to be kept, or as it is to be at work."""
    sizes = {"hidden_size": 64, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 16}
    peaks, lengths = [], (512, 1024)
    mt.init(device="cpu", tile_tokens=32)
    built = make_model("llama", **sizes, max_position_embeddings=2048, attn_implementation="sdpa", num_hidden_layers=1)
    _, model = stream(built, serial=True)
    spec = model_spec(built, Formats(precision="fp32", master="fp32"), "tiny")
    for length in lengths:
        hidden = torch.randn(1, length, 64, requires_grad=True)
        turned = model.model.rotary_emb(hidden, torch.arange(length)[None])
        output = model.model.layers[0](hidden, position_embeddings=turned, attention_mask=None)
        with LiveBytes() as live:
            output.sum().backward()
        peaks.append(live.peak)
    a_token = (peaks[1] - peaks[0]) / (lengths[1] - lengths[0])
    (layer,) = (layer for layer in spec.layers if layer.kind == "block")
    kept, passing = whole_bytes(spec, layer, lengths[1]), 4 * 2 * 64
    assert 0.95 * kept < a_token < 1.05 * (kept + passing)


def test_tiles_cost_little_time() -> None:
    """An MLP is computed once more: at 64K tokens less than a sixth of a step (estimated)."""
    work = Workload(num_sequences=1, length=1 << 16)
    whole, tiled = (predicted(builtin("qwen2.5-7b"), work, config=Config(tile_tokens=s)) for s in (False, None))
    assert whole.step_seconds < tiled.step_seconds < 7 / 6 * whole.step_seconds
    assert tiled.timeline.peak("hbm") < whole.timeline.peak("hbm") - 5 * GB


@pytest.mark.parametrize("name", ["gpt-oss-20b", "mixtral-8x7b"])
def test_experts_are_planned_whole(name: str) -> None:
    assert not any(layer.may_tile for layer in builtin(name).layers)


def test_compiled_blocks_and_dropout_are_planned_whole() -> None:
    work = Workload(num_sequences=1, length=1 << 16)
    found = predicted(wide_llama(), work, config=Config(compile=True))
    assert as_data(found)["plan"]["tile_tokens"] is None
    model = make_model("gpt2", resid_pdrop=0.1)
    spec = in_tiles(model_spec(model, Formats(precision="fp32", master="fp32"), "tiny"), 4)
    assert all(tile_of(spec, layer, 1, 64) is None for layer in spec.layers)
    assert any(tile_of(in_tiles(wide_llama(), 4), layer, 1, 64) == 4 for layer in wide_llama().layers)
