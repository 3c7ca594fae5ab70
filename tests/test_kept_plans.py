"""What a plan keeps on the device, and how many micro-batches it lets go together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from comparing import closed_later
from planning_helpers import H200, SPLIT, builtin, machine, wide_llama
from transformers import GPT2Config, GPT2LMHeadModel
from update_training import assert_same, batches, result, start, train

import megatrain as mt
from megatrain.base.config import Config, StreamOptions
from megatrain.base.units import GB, format_bytes
from megatrain.execute.engine import engine_of
from megatrain.plan.choice import Choice, Kept
from megatrain.plan.cost import (
    BACKWARD_LAUNCH_SECONDS,
    SUM_TRAFFIC_BYTES,
    inside_bytes,
    kept_bytes,
    visit_cost,
)
from megatrain.plan.explain import describe
from megatrain.plan.placement import CPU, HBM
from megatrain.plan.planner import Planner
from megatrain.plan.workload import Workload
from megatrain.run_plan import options_of, spec_of
from megatrain.spec.model import ModelSpec, model_spec

STEP = Workload(num_sequences=32, length=1024, rows=8)


def planner(hbm_gb: float = 140, workload: Workload = STEP) -> Planner:
    return Planner(machine(hbm_gb, 200), wide_llama(), workload, Config())


def choice(planner: Planner, **numbers: object) -> Choice:
    places = (CPU,) * len(planner.spec.homes)
    return Choice(**{"rows": 8, "num_slots": 3, "places": places, "activation_bytes": 0, **numbers})


def test_what_a_block_keeps_is_counted_in_place_of_its_input() -> None:
    a_plan = planner()
    each = inside_bytes(a_plan.spec, a_plan.spec.layers[1], "all", STEP.num_tokens, STEP.length, compiled=False)
    none, some = (a_plan.maker.timeline(choice(a_plan, kept=Kept(kept), activation_bytes=2**60)) for kept in (0, 5))
    an_input = 2 * STEP.num_tokens * a_plan.spec.hidden_size
    assert some.peak("hbm") == none.peak("hbm") + 5 * (each - an_input)
    assert (
        a_plan.plan_of(choice(a_plan, kept=Kept(5))).kept_bytes
        == 5 * each
        == a_plan.maker.inside_bytes(choice(a_plan, kept=Kept(5)))
    )


def test_a_group_holds_its_own_inputs_and_the_sums_of_all_gradients() -> None:
    a_plan = planner()
    whole, parts = (choice(a_plan, group=group, activation_bytes=2**60) for group in (None, 1))
    assert whole.group_sizes(STEP) == [4] and parts.group_sizes(STEP) == [1, 1, 1, 1]
    assert a_plan.maker.input_bytes(parts) == a_plan.maker.input_bytes(whole) // 4
    sums = 4 * (sum(f.numel for home in a_plan.spec.homes for f in home.fields))
    largest = 4 * max(sum(f.numel for f in home.fields) for home in a_plan.spec.homes)
    passed_on = 2 * a_plan.spec.hidden_size * (STEP.num_tokens - STEP.num_tokens // 4)
    inputs = a_plan.maker.input_bytes(whole) - a_plan.maker.input_bytes(parts)
    peaks = [a_plan.maker.timeline(one).peak("hbm") for one in (whole, parts)]
    assert peaks[1] - peaks[0] == sums - largest - passed_on - inputs


def test_a_step_without_recomputation_is_a_quarter_shorter() -> None:
    """Compute alone: forward, twice as long a backward, and no forward again."""
    a_plan = planner()
    every = sum(layer.kind == "block" for layer in a_plan.spec.layers)
    places = (HBM,) * len(a_plan.spec.homes)
    none, all_kept = (
        a_plan.simulate(choice(a_plan, kept=Kept(kept), places=places, activation_bytes=2**60)).step_seconds
        for kept in (0, every)
    )
    assert 0.74 < all_kept / none < 0.85  # the head recomputes nothing in either


def test_visits_of_groups_fetch_anew() -> None:
    a_plan = planner()
    fetches = {}
    for group in (None, 2, 1):
        tasks = a_plan.simulate(choice(a_plan, group=group, activation_bytes=2**60)).tasks
        fetches[group] = sum(task.what == "fetch" for task in tasks)
    assert fetches[None] < fetches[2] < fetches[1]


def test_where_it_fits_micro_batches_go_one_by_one_and_where_not_layer_by_layer() -> None:
    """The crossing point: with memory for all state and one micro-batch's insides, weights stay and nothing is computed
    twice; with less, a visit takes all micro-batches along."""
    found = []
    for hbm_gb in (20, 26, 40, 80):
        best = planner(hbm_gb, Workload(num_sequences=64, length=1024, rows=8)).best()
        assert best is not None and best.timeline.peak("hbm") <= best.budgets.hbm
        found.append((best.step_seconds, best.choice.group, best.choice.kept.all, best.num_on_device))
    seconds = [one[0] for one in found]
    assert all(more <= 1.025 * less for less, more in zip(seconds, seconds[1:], strict=False)), found
    assert found[0][1] is None, "a small device takes all micro-batches along"
    assert found[-1][1:] == (1, 12, 14), "a large one has all homes, and keeps everything of one"


def test_in_words() -> None:
    a_plan = planner()
    for kept, words in (
        (0, None),
        (1, "the last block keeps"),
        (5, "the last 5 of 12 blocks keep"),
        (12, "all blocks keep"),
    ):
        said = describe(a_plan.plan_of(choice(a_plan, kept=Kept(kept), group=2)))
        assert "4 micro-batches of 8 x 1,024 tokens, 2 at a time" in said
        assert words in said if words else "keep" not in said


@pytest.mark.parametrize("others", [CPU, HBM])
def test_a_run_does_as_planned_and_no_bit_depends_on_it(others: object) -> None:
    model, optimizer = start(StreamOptions(serial=True))
    train(closed_later(model), optimizer, batches(3))
    truth = result(model, optimizer)
    model, optimizer = start(StreamOptions())
    spec = spec_of(model, engine_of(model).formats)
    a_plan = Planner(dataclasses.replace(H200), spec, Workload(num_sequences=4, length=9, rows=2), Config())
    planned = a_plan.plan_of(
        Choice(rows=2, num_slots=2, places=(others,) * len(spec.homes), activation_bytes=10**6, kept=Kept(2), group=1)
    )
    options = options_of(planned, StreamOptions())
    assert (
        options.kept_layers == {"model.layers.1": "all", "model.layers.2": "all"} and options.micro_batches_a_visit == 1
    )
    model, optimizer = start(dataclasses.replace(options, kept_bytes=None, device_room_bytes=None))
    train(closed_later(model), optimizer, batches(3))
    assert_same(result(model, optimizer), truth)
    engine = engine_of(model)
    assert engine.insides.num_kept == 3 * 2 * 2 - 2, "of a first call it is not known that its layer is not the last"
    engine.plan = planned
    words = "the last 2 of 3 blocks keep what is computed inside for the backward, the others compute it again"
    assert engine.summary().endswith(f"; {words}")
    bytes_ = f"{format_bytes(planned.kept_bytes)} -> {format_bytes(engine.insides.most_kept_bytes)}"
    engine.report.step_seconds.append(1.0)
    assert f"kept in layers {bytes_}" in engine.report.line(planned.workload, planned)


def compiled_planner(hbm_gb: float, *, workload: Workload = STEP, spec: ModelSpec | None = None) -> Planner:
    return Planner(machine(hbm_gb, 200), spec or wide_llama(), workload, Config(compile=True))


# Qwen2-7B, 16 x 1024 tokens, one H200: docs/decisions.md.
MEASURED_LAYER = {"all": (159, 634), "products": (107, 629), "input": (7, 514), None: (None, 484)}


def test_what_a_compiled_layer_keeps_and_takes_is_predicted_as_measured() -> None:
    """KB a token; TFLOPS of a layer's forward and backward."""
    spec, workload = builtin("qwen2.5-7b"), Workload(num_sequences=16, length=1024, rows=16)
    layer = next(layer for layer in spec.layers if layer.kind == "block")
    cost = visit_cost(H200, spec, layer, workload, 16, compiled=True)
    pairs = 16 * layer.attention.num_pairs(1024)
    flops = 6 * (layer.matrix_parameters * workload.num_tokens + layer.attention.width * pairs)
    # Neither launching nor sums of gradients were in what was measured.
    others = BACKWARD_LAUNCH_SECONDS + SUM_TRAFFIC_BYTES * spec.homes[layer.home].numel / H200.hbm_bytes_per_second
    for keeps, (kept_kb, tflops) in MEASURED_LAYER.items():
        if keeps is not None:
            assert kept_bytes(spec, layer, 1024, compiled=True)[keeps] / 1e3 == pytest.approx(kept_kb, rel=0.03), keeps
        assert flops / (sum(cost.seconds(keeps)) - others) / 1e12 == pytest.approx(tflops, rel=0.03), keeps
    seconds = [sum(cost.seconds(keeps)) for keeps in MEASURED_LAYER]
    assert seconds == sorted(seconds), "the more is kept the faster"


def test_compiled_blocks_keep_what_memory_allows_input_first_then_products_then_all() -> None:
    """In place of few that keep all, beside others that keep nothing."""
    workload = Workload(num_sequences=64, length=1024, rows=8)
    found: list[tuple[float, Kept]] = []
    for hbm_gb in (8, 12, 20, 30, 45, 80, 120):
        a_plan = compiled_planner(hbm_gb, workload=workload)
        of_all = a_plan.plan_of(dataclasses.replace(choice(a_plan), kept=Kept()))
        (kept,) = a_plan.maker.most_kept(of_all.choice, a_plan.budgets.hbm)
        with_kept = a_plan.fitted(dataclasses.replace(of_all.choice, kept=kept))
        assert with_kept is not None
        assert a_plan.maker.timeline(with_kept).peak("hbm") <= a_plan.budgets.hbm
        one_more = [kept._replace(input=kept.input + 1)] if sum(kept) < 12 else []
        one_more += [kept._replace(input=kept.input - 1, products=kept.products + 1)] if kept.input else []
        for more in one_more:
            assert a_plan.fitted(dataclasses.replace(of_all.choice, kept=more)) is None, (kept, more)
        found.append((a_plan.simulate(with_kept).step_seconds, kept))
    kinds = [kept for _, kept in found]
    assert kinds[0].products == kinds[0].all == 0 and kinds[-1] == Kept(all=12), found
    assert any(kept.products and kept.input for kept in kinds) and any(kept.all and kept.products for kept in kinds)
    assert all(more[0] <= less[0] for less, more in zip(found, found[1:], strict=False)), found


def test_a_compiled_plan_in_words() -> None:
    a_plan = compiled_planner(140)
    for kept, words in (
        (Kept(0, 0, 12), "all blocks keep the input alone for the backward"),
        (Kept(0, 3, 2), "the last 3 of 12 blocks keep what matrix products and attention give, the 2 before the input "
                        "alone for the backward, the others compute it again"),
        (Kept(1, 11, 0), "the last block keeps what is computed inside, the 11 before what matrix products and "
                         "attention give for the backward"),
    ):  # fmt: skip
        assert words in describe(a_plan.plan_of(choice(a_plan, kept=kept)))


def test_blocks_with_dropout_keep_all_or_nothing() -> None:
    """A backward that computes again would draw other numbers."""
    for share, names in ((0.1, {"all"}), (0.0, {"all", "products", "input"})):
        config = GPT2Config(n_embd=512, n_head=8, n_layer=4, resid_pdrop=share, attn_pdrop=0.0, embd_pdrop=0.0)
        with torch.device("meta"):
            spec = model_spec(GPT2LMHeadModel(config).to(torch.bfloat16), SPLIT, "gpt2")
        assert kept_bytes(spec, spec.layers[3], 1024, compiled=True).keys() == names
        a_plan = compiled_planner(5, workload=Workload(num_sequences=64, length=1024, rows=8), spec=spec)
        found = [kept for gb in (3, 4, 5, 8) for kept in a_plan.maker.most_kept(choice(a_plan), gb * GB)]
        assert {name for kept in found for name, count in kept._asdict().items() if count} == names, found
        best = a_plan.best()
        assert best is not None and set(best.choice.kept_layers(spec).values()) <= names


def test_an_unknown_layer_is_refused() -> None:
    with pytest.raises(mt.UserError, match="kept_layers: 'model.layers.9' is no block of this model: its blocks are"):
        start(StreamOptions(kept_layers={"model.layers.9": "all"}))


@pytest.mark.parametrize("make", [planner, compiled_planner])
def test_a_search_looks_at_few_of_its_candidates(make: Callable[..., Planner], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each simulation takes some tens of milliseconds."""
    a_plan = make(40, workload=Workload(num_sequences=64, length=1024))
    looked_at, simulate = [], Planner.simulate
    monkeypatch.setattr(Planner, "simulate", lambda self, choice: (looked_at.append(choice), simulate(self, choice))[1])
    best = a_plan.best()
    assert best is not None and best.timeline.peak("hbm") < 40 * GB
    assert len(looked_at) < 300


def test_torch_is_not_asked() -> None:
    """A plan is arithmetic: it takes no memory on a device."""
    before = torch.get_rng_state()
    planner().best()
    assert torch.equal(before, torch.get_rng_state())
