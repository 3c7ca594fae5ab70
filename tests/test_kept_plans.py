"""What a plan keeps on the device, and how many micro-batches it lets go together."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from comparing import closed_later
from planning_helpers import H200, machine, wide_llama
from update_training import assert_same, batches, result, start, train

import megatrain as mt
from megatrain.base.config import Config, StreamOptions
from megatrain.base.units import GB
from megatrain.execute.engine import engine_of
from megatrain.plan.cost import inside_bytes
from megatrain.plan.explain import describe
from megatrain.plan.placement import CPU, HBM
from megatrain.plan.planner import Planner
from megatrain.plan.schedule import Choice
from megatrain.plan.workload import Workload
from megatrain.run_plan import options_of, spec_of

STEP = Workload(num_sequences=32, length=1024, rows=8)


def planner(hbm_gb: float = 140, workload: Workload = STEP) -> Planner:
    return Planner(machine(hbm_gb, 200), wide_llama(), workload, Config())


def choice(planner: Planner, **numbers: object) -> Choice:
    places = (CPU,) * len(planner.spec.homes)
    return Choice(**{"rows": 8, "num_slots": 3, "places": places, "activation_bytes": 0, **numbers})


def test_what_a_block_keeps_is_counted_in_place_of_its_input() -> None:
    a_plan = planner()
    each = inside_bytes(a_plan.spec, a_plan.spec.layers[1], STEP.num_tokens, compiled=False)
    none, some = (a_plan.maker.timeline(choice(a_plan, kept=kept, activation_bytes=2**60)) for kept in (0, 5))
    an_input = 2 * STEP.num_tokens * a_plan.spec.hidden_size
    assert some.peak("hbm") == none.peak("hbm") + 5 * (each - an_input)
    assert (
        a_plan.plan_of(choice(a_plan, kept=5)).kept_bytes
        == 5 * each
        == a_plan.maker.inside_bytes(choice(a_plan, kept=5))
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
        a_plan.simulate(choice(a_plan, kept=kept, places=places, activation_bytes=2**60)).step_seconds
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
        found.append((best.step_seconds, best.choice.group, best.choice.kept, best.num_on_device))
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
        said = describe(a_plan.plan_of(choice(a_plan, kept=kept, group=2)))
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
        Choice(rows=2, num_slots=2, places=(others,) * len(spec.homes), activation_bytes=10**6, kept=2, group=1)
    )
    options = options_of(planned, StreamOptions())
    assert options.kept_layers == ("model.layers.1", "model.layers.2") and options.micro_batches_a_visit == 1
    model, optimizer = start(dataclasses.replace(options, kept_bytes=None, device_room_bytes=None))
    train(closed_later(model), optimizer, batches(3))
    assert_same(result(model, optimizer), truth)
    engine = engine_of(model)
    assert engine.insides.num_kept == 3 * 2 * 2 - 2, "of a first call it is not known that its layer is not the last"


def test_an_unknown_layer_is_refused() -> None:
    with pytest.raises(mt.UserError, match="kept_layers: 'model.layers.9' is no block of this model: its blocks are"):
        start(StreamOptions(kept_layers=("model.layers.9",)))


def test_a_search_looks_at_few_of_its_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each simulation takes some tens of milliseconds."""
    a_plan, looked_at, simulate = planner(40, Workload(num_sequences=64, length=1024)), [], Planner.simulate
    monkeypatch.setattr(Planner, "simulate", lambda self, choice: (looked_at.append(choice), simulate(self, choice))[1])
    best = a_plan.best()
    assert best is not None and best.timeline.peak("hbm") < 40 * GB
    assert len(looked_at) < 300


def test_torch_is_not_asked() -> None:
    """A plan is arithmetic: it takes no memory on a device."""
    before = torch.get_rng_state()
    planner().best()
    assert torch.equal(before, torch.get_rng_state())
