"""What is predicted of models that do not visit the same layers at every step, by counts; and that they are right.

A prediction is made at each visit but the first. `unknown`: behind two visits that were never seen one after the other.
Bounds are counts of what the predictor cannot know, derived beside each test; no other visit may be mispredicted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from comparing import assert_same_gradients, closed_later, stream, the_engine
from model_zoo import Block, Stack, make_batch, make_model
from update_training import assert_same, batches, result, start, train

import megatrain as mt
from megatrain.base.config import StreamOptions
from megatrain.transport.predictor import Predictor

NUM_BLOCKS = 8
SETTLED = 3
"""Steps after which all that repeats is known: one to see it, one for it to come true, one for the seam between."""


def wrong(model: torch.nn.Module) -> int:
    """Visits that were not predicted so far."""
    stats = mt.stats(model)
    return stats["prediction_misses"] + stats["prediction_unknown"]


def visits(model: torch.nn.Module) -> int:
    return sum(mt.stats(model)["visits"].values())


def step(plain: torch.nn.Module, model: torch.nn.Module, seed: int) -> None:
    """Forward and backward, compared with the plain model's."""
    for one in (plain, model):
        one.zero_grad()
        one(**make_batch(seed=seed))["loss"].backward()
    assert_same_gradients(plain, model)


class Dropping:
    """Calls the blocks in order, but for those in `dropped`."""

    def __init__(self) -> None:
        self.dropped: set[int] = set()

    def __call__(self, stack: Stack, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(stack.blocks):
            x = x if index in self.dropped else block(x)
        return x

    def __deepcopy__(self, memo: dict) -> Dropping:
        """A copied model drops the same."""
        return self


def make_dropping() -> tuple[Dropping, Stack, Stack]:
    run = Dropping()
    torch.manual_seed(0)
    plain, model = stream(Stack([Block(16) for _ in range(NUM_BLOCKS)], run))
    return run, plain, model


def test_a_model_that_is_always_the_same_is_predicted_whole() -> None:
    run, plain, model = make_dropping()
    for seed in range(SETTLED):
        step(plain, model, seed)
    before, late = wrong(model), mt.stats(model)["num_late_transfers"]
    for seed in range(5):
        step(plain, model, seed)
    assert wrong(model) == before
    assert mt.stats(model)["num_late_transfers"] == late, "a known visit was not prefetched"
    assert 0 < mt.stats(model)["prediction_seconds"]


@pytest.mark.parametrize(("rate", "share"), [(0.1, 0.85), (0.3, 0.6)])
def test_layers_dropped_at_random(rate: float, share: float) -> None:
    """A run of dropped layers is passed once on the way up and once on the way down. Each time the layer behind it
    comes instead of the first of them (one wrong), and the next one follows two that may never have met, or had another
    one behind them (one more). A miss replaces the prediction only if the last one was a miss as well; then the usual
    layer is a miss when it is back (one more for each). No more than 3 a run and direction."""
    run, plain, model = make_dropping()
    for seed in range(SETTLED):
        step(plain, model, seed)
    draws = random.Random(0)
    before, num_before, num_runs = wrong(model), visits(model), 0
    for seed in range(30):
        run.dropped = {index for index in range(NUM_BLOCKS) if draws.random() < rate}
        num_runs += sum(index - 1 in run.dropped and index not in run.dropped for index in range(1, NUM_BLOCKS + 1))
        step(plain, model, seed)
    num_wrong, num_visits = wrong(model) - before, visits(model) - num_before
    assert 0 < num_wrong <= 2 * 3 * num_runs
    assert num_wrong < (1 - share) * num_visits


def test_early_exit() -> None:
    """The head comes earlier than the next block (one wrong, and one when that block is back). What comes behind it
    depends on the place of the exit, which is known from its first time on (up to three that are unknown or wrong)."""
    run, plain, model = make_dropping()
    for seed in range(SETTLED):
        step(plain, model, seed)
    draws = random.Random(0)
    before, exits = wrong(model), []
    for seed in range(30):
        exits.append(draws.randrange(NUM_BLOCKS // 2, NUM_BLOCKS))
        run.dropped = set(range(exits[-1], NUM_BLOCKS))
        step(plain, model, seed)
    assert wrong(model) - before <= 2 * len(exits) + 3 * len(set(exits))


def test_experts_are_no_visits_of_their_own() -> None:
    """Whatever tokens are routed to, a layer moves whole: nothing is unknown."""
    plain, model = stream(make_model("qwen3_moe"))
    for seed in range(SETTLED + 5):
        if seed == SETTLED:
            before = wrong(model)
        for one in (plain, model):
            one.zero_grad()
            one(**make_batch(seed=seed)).loss.backward()
    assert_same_gradients(plain, model)
    assert wrong(model) == before


@pytest.mark.parametrize("what", ["eval", "generate"])
def test_forwards_between_steps(what: str) -> None:
    """Behind the head comes the first layer instead of the last: wrong twice until that is learned, and twice again
    when training goes on. So at most 4 a phase, however long it is, and 4 contexts that only such a phase has."""
    plain, model = stream(make_model("llama"))

    def between(one: torch.nn.Module) -> torch.Tensor:
        one.eval()
        with torch.no_grad():
            if what == "generate":
                found = one.generate(make_batch(5)["input_ids"], max_new_tokens=6, do_sample=False, min_new_tokens=6)
            else:
                found = torch.cat([one(**make_batch(seed=seed)).logits for seed in range(4)])
        one.train()
        return found

    for _ in range(SETTLED):
        for one in (plain, model):
            one(**make_batch()).loss.backward()
    before = wrong(model)
    num_phases = 6
    for seed in range(num_phases):
        assert torch.equal(between(plain), between(model))
        for _ in range(3):
            for one in (plain, model):
                one.zero_grad()
                one(**make_batch(seed=seed)).loss.backward()
        assert_same_gradients(plain, model)
    assert wrong(model) - before <= 4 * num_phases + 4
    assert mt.stats(model)["prediction_hits"] > 3 * wrong(model)


def test_states_on_disk_are_read_ahead(tmp_path: Path) -> None:
    """Updates come in the same order at every step: nothing is wrong once two steps were seen."""
    truth_model, truth_optimizer = start(StreamOptions(serial=True))
    train(truth_model, truth_optimizer, batches(5))
    model, optimizer = start(StreamOptions(places="disk", num_update_slots=3), offload_dir=tmp_path)
    closed_later(model)
    many: Iterator = batches(5)
    train(model, optimizer, [next(many), next(many)])
    the_engine(model).wait()
    before = mt.stats(model)
    train(model, optimizer, many)
    the_engine(model).wait()
    after = mt.stats(model)
    grown = {name: after[name] - before[name] for name in after if name.startswith("disk_")}
    assert grown["disk_prediction_misses"] == grown["disk_prediction_unknown"] == 0
    assert grown["disk_prediction_hits"] > 0
    homes = the_engine(model).homes
    state_bytes = sum(home.wire.numel() for home in homes if home.place.weights == "disk") + optimizer.num_state_bytes()
    # Weights and states are written once a step, in whole pages; both are read at least once.
    assert grown["disk_written_bytes"] >= 3 * state_bytes
    assert grown["disk_read_bytes"] >= 3 * state_bytes
    assert grown["disk_read_seconds"] > 0 and grown["disk_write_seconds"] > 0 and after["disk_wait_seconds"] > 0
    assert_same(result(model, optimizer), result(truth_model, truth_optimizer))


# The predictor alone


def observed(predictor: Predictor[str], visits: str) -> Predictor[str]:
    for visit in visits:
        predictor.observe(visit)
    return predictor


def test_one_exception_is_forgotten_and_two_in_a_row_are_learned() -> None:
    predictor = observed(Predictor(), "abcd" * 4 + "ab")
    assert predictor.predict(1) == ["c"]
    assert observed(predictor, "xdab").predict(1) == ["c"]
    assert observed(predictor, "cdab" + "xdab").predict(1) == ["c"]
    assert observed(predictor, "xdab").predict(1) == ["x"]


def test_every_prediction_is_a_hit_a_miss_or_unknown() -> None:
    visits = "".join(random.Random(0).choice("abcd") for _ in range(500))
    predictor = observed(Predictor(), visits)
    num_changes = sum(before != after for before, after in zip(visits, visits[1:], strict=False))
    assert predictor.num_hits + predictor.num_misses + predictor.num_unknown == num_changes
