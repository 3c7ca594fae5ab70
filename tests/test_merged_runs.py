"""Runs whose micro-batches are merged: what memory does not hold, mt.Trainer, checkpoints, plans."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bench_helpers import silent, small_work
from command_helpers import command
from comparing import gradients
from planning_helpers import builtin, machine, wide_llama
from rows_helpers import Memory, assert_close, batches
from saving_helpers import make_trainer
from trainer_helpers import arguments, assert_equal_weights, llama, train

import megatrain as mt
from megatrain.arithmetic import MERGED, arithmetic_of
from megatrain.base.config import Config, StreamOptions
from megatrain.base.errors import UserError
from megatrain.bench.streamed import _rows_at_once, measure_streamed
from megatrain.data.lengths import likely_workload
from megatrain.execute.engine import engine_of
from megatrain.execute.retry import StepTooLargeError
from megatrain.outline import outline_model
from megatrain.plan.cost import MERGED_TOKENS, mergeable_tokens, working_bytes
from megatrain.plan.explain import describe
from megatrain.plan.planner import Planner
from megatrain.plan.workload import Workload
from megatrain.run_plan import options_of


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    mt.init(device="cpu", exact=False)
    yield
    mt.init(device="cpu")


def result(model: Any, many: list[dict]) -> dict[str, torch.Tensor]:
    losses = mt.accumulate(model.train(), many)
    found = {**gradients(model), "losses": torch.stack(losses).sum()}
    model.zero_grad()
    return found


# What memory does not hold


@pytest.mark.parametrize(("most_rows", "runs"), [(8, [8]), (4, [4, 4]), (3, [2, 2, 2, 2]), (1, [1] * 8)])
def test_what_does_not_fit_is_taken_apart_before_less_is_kept(
    most_rows: int, runs: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    many = batches(*((1, 8) for _ in range(8)))
    for batch in many:
        batch["labels"] = batch["input_ids"]
    expected = result(mt.stream(llama()), many)
    model = mt.stream(llama())
    budget_bytes = engine_of(model).activations.budget_bytes
    memory = Memory(model, most_rows)
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        assert_close(result(model, many), expected)
    assert memory.rows[-len(runs) :] == runs
    assert engine_of(model).activations.budget_bytes == budget_bytes
    assert caplog.text.count("did not hold the merged micro-batches") == (most_rows < 8)
    assert f"merged up to {runs[0] * 8} tokens" in caplog.text or most_rows == 8
    failures = memory.num_failures
    assert_close(result(model, many), expected)
    assert memory.num_failures == failures


def test_a_trainer_takes_apart_and_then_cuts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    plain, _ = train(transformers.Trainer, tmp_path / "plain", **changes)
    trainer = make_trainer(tmp_path / "run", llama(), save_strategy="no", **changes)
    memory = Memory(trainer.model, 1)
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        trainer.train()
    assert "merged up to" in caplog.text and "they are run 1 row at a time" in caplog.text
    assert memory.rows[-6:] == [1] * 6


def test_a_step_that_cannot_be_undone_names_the_setting() -> None:
    many = batches((2, 9), (2, 9))
    model = mt.stream(llama())
    mt.accumulate(model, many)
    Memory(model, 2, in_backward=True)
    with pytest.raises(StepTooLargeError, match=r"mt.init\(exact=True\) merges no micro-batches"):
        mt.accumulate(model, many)


# mt.Trainer, and checkpoints


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_trainer_logs_what_transformers_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, expected = train(transformers.Trainer, tmp_path / "plain")
    merged, found = train(mt.Trainer, tmp_path / "merged")
    stats = mt.stats(merged.model)
    # 14 rows in micro-batches of 2: 3, 3 and 1 in a step; twice.
    assert (stats["num_micro_batches"], stats["num_micro_batches_run"]) == (14, 6)
    assert losses(merged) == pytest.approx(losses(plain), rel=1e-5)
    assert found.events == expected.events
    assert merged.state.total_flos == plain.state.total_flos
    assert "merged up to 16,384 tokens (3 of 2 x 9 into 1) where nothing couples" in capsys.readouterr().out


class OwnLoss(mt.Trainer):
    def compute_loss(self, model: Any, inputs: dict, return_outputs: bool = False, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


def test_a_loss_of_your_own_is_not_merged(tmp_path: Path) -> None:
    own, _ = train(OwnLoss, tmp_path / "own")
    mt.init(device="cpu", exact=True)
    exact, _ = train(mt.Trainer, tmp_path / "exact")
    assert losses(own) == losses(exact)
    assert "may couple rows" in mt.stats(own.model)["unmerged_because"]


def test_a_merged_run_goes_on_bit_for_bit_under_other_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mt.init(device="cpu", precision="bf16")
    whole = make_trainer(tmp_path, llama(), max_steps=4)
    engine_of(whole.model).merging.most_tokens = 36  # two of 2 x 9 tokens
    whole.train()
    expected = mt.full_state_dict(whole.model)
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = make_trainer(tmp_path, mt.stream(llama(), options=StreamOptions(places="hbm")), max_steps=4)
    assert engine_of(resumed.model).merging.most_tokens == MERGED_TOKENS
    resumed.train(resume_from_checkpoint=True)
    assert mt.stats(resumed.model)["num_micro_batches_run"] == 1 + 2, "of one, and of three"
    assert_equal_weights(mt.full_state_dict(resumed.model), expected)
    assert "bit for bit as if it had never stopped" in capsys.readouterr().out


@pytest.fixture(scope="module")
def unmerged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The folder of a run of a time at which nothing was merged, and nothing told of it; and its last weights."""
    folder = tmp_path_factory.mktemp("unmerged")
    mt.init(device="cpu", precision="bf16", exact=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatrain.trainer_checkpoints.arithmetic_of", without_merging)
        trainer = make_trainer(folder, llama(), max_steps=4)
        trainer.train()
    shutil.rmtree(folder / "checkpoint-4")
    return folder, mt.full_state_dict(trainer.model)


def without_merging(*args: Any) -> Any:
    facts = arithmetic_of(*args)
    del facts["rounding"][MERGED]
    return facts


SAME = "bit for bit as if it had never stopped"


@pytest.mark.parametrize(
    ("exact", "told", "num_merged"),
    [
        (None, SAME, 4),
        (True, SAME, 4),
        (False, f"not bit for bit: merging of micro-batches was off, is on (up to {MERGED_TOKENS:,} tokens)", 2),
    ],
)
def test_a_run_that_was_not_merged_goes_on_so_unless_told_otherwise(
    exact: bool | None,
    told: str,
    num_merged: int,
    unmerged: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, expected = unmerged
    shutil.copytree(folder, tmp_path / "run")
    mt.init(device="cpu", precision="bf16", exact=exact)
    resumed = make_trainer(tmp_path / "run", llama(), max_steps=4)
    resumed.train(resume_from_checkpoint=True)
    assert told in capsys.readouterr().out
    assert mt.stats(resumed.model)["num_micro_batches_run"] == num_merged
    found = mt.full_state_dict(resumed.model)
    assert all(torch.equal(found[name], expected[name]) for name in expected) == (exact is not False)


# Plans


def test_a_plan_merges_micro_batches_where_that_is_faster() -> None:
    spec, config = wide_llama(), Config()
    given = Workload(num_sequences=32, length=1024, rows=1)
    apart, merged = (
        Planner(machine(80, 200), spec, dataclasses.replace(given, merges=merges), config).best()
        for merges in (False, True)
    )
    assert apart.choice.rows == 1 and apart.num_merged == 1
    assert merged.num_merged == merged.choice.rows > 1 and 32 % merged.choice.rows == 0
    assert merged.step_seconds < 0.9 * apart.step_seconds
    assert merged.timeline.peak("hbm") <= merged.budgets.hbm
    words = describe(merged)
    assert words.startswith("32 micro-batches of 1 x 1,024 tokens, merged into ")
    assert "equal within rounding; exact=True: not" in words and "merged" not in describe(apart)
    few = Planner(machine(10, 200), spec, dataclasses.replace(given, merges=True), config).best()
    assert few.timeline.peak("hbm") <= few.budgets.hbm and few.num_merged <= merged.num_merged


@pytest.mark.parametrize(
    ("changes", "exact", "of_work", "merges"),
    [({}, False, {}, True), ({}, True, {}, False), ({}, None, {}, False), ({}, False, {"reads_logits": True}, False),
     ({}, False, {"varied": True}, False), ({"attention_dropout": 0.1}, False, {}, False)],
)  # fmt: skip
def test_a_run_on_a_gpu_is_planned_as_it_may_be_merged(
    changes: dict[str, float],
    exact: bool | None,
    of_work: dict[str, bool],
    merges: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def plan_run(model: Any, formats: Any, config: Config, workload: Workload, device: torch.device) -> None:
        assert workload.merges == merges and workload.rows == 1
        raise StopIteration

    monkeypatch.setattr("megatrain.outline._device", lambda config: torch.device("cuda", 0))
    monkeypatch.setattr("megatrain.outline.plan_run", plan_run)
    work = Workload(num_sequences=4, length=9, rows=1, **of_work)
    with pytest.raises(StopIteration):
        outline_model(
            llama(**changes), Config(exact=exact), StreamOptions(), bf16=None, may_be_meta=False, workload=work
        )


def test_sequences_of_several_lengths_are_not_planned_to_be_merged(tmp_path: Path) -> None:
    one, several = (
        likely_workload([{"input_ids": [1] * length} for length in lengths], arguments(tmp_path))
        for lengths in ((9, 9, 9), (9, 7, 9))
    )
    assert not one.varied and several.varied
    with pytest.raises(UserError, match="varied=1 must be True or False"):
        Workload(num_sequences=4, length=9, varied=1)


def test_groups_of_a_plan_are_told_in_micro_batches_as_they_are_given() -> None:
    work = Workload(num_sequences=32, length=1024, rows=2, merges=True)
    planner = Planner(machine(80, 200), wide_llama(), work, Config())
    choice = dataclasses.replace(planner.best().choice, rows=8, group=2)
    assert options_of(planner.plan_of(choice), StreamOptions()).micro_batches_a_visit == 8
    whole = planner.plan_of(dataclasses.replace(choice, group=None))
    assert options_of(whole, StreamOptions()).micro_batches_a_visit is None


@pytest.mark.parametrize(("rows", "merges", "choices"), [
    (None, False, [12, 6, 4, 3, 2, 1]), (None, True, [12, 6, 4, 3, 2, 1]), (2, False, [2]), (2, True, [12, 6, 4, 2]),
    (5, True, [5]),
])  # fmt: skip
def test_merged_rows_are_multiples_that_leave_no_rest(rows: int | None, merges: bool, choices: list[int]) -> None:
    assert Workload(num_sequences=12, length=8, rows=rows, merges=merges).row_choices() == choices


def test_without_a_plan_they_are_as_large_as_memory_has_room_for() -> None:
    spec = builtin("qwen2.5-7b")
    assert mergeable_tokens(spec, 10**12, compiled=False) == MERGED_TOKENS
    sizes = [mergeable_tokens(spec, int(gb * 1e9), compiled=False) for gb in (8, 4, 2)]
    assert sizes[0] > sizes[1] > sizes[2] >= 0
    for gb, tokens in zip((8, 4, 2), sizes, strict=True):
        work = Workload(num_sequences=2, length=max(1, tokens), rows=1)
        taken = max(working_bytes(spec, layer, work, 1, compiled=False) for layer in spec.layers)
        assert taken <= gb * 1e9 or tokens == 0


def test_a_device_without_room_merges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.outline.free_host_bytes", lambda: 0)
    outline = outline_model(llama(), Config(device="cpu", exact=False), StreamOptions(), bf16=None, may_be_meta=False)
    assert outline.merging.most_tokens == 0 and "memory has no room" in outline.merging.reason


def test_the_command_plans_with_merged_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*options: str) -> tuple[dict[str, Any], str]:
        call = ("plan", "qwen2.5-0.5b", "--machine", "h200-128gb", "--tokens", "16x512", "--rows", "1", *options)
        return json.loads(command(capsys, *call, "--json")[1])["plan"], command(capsys, *call)[1]

    merged, text = planned()
    assert merged["merged"] == merged["rows"] > 1 and "merged into" in " ".join(text.split())
    assert "--exact: not" in text and "--exact: not" in merged["words"]
    for options, reason in (
        (("--exact",), ""),
        (("--precision", "fp32"), "warning: micro-batches are not merged: with fp32 compute"),
    ):
        apart, text = planned(*options)
        assert apart["merged"] == apart["rows"] == 1
        assert reason in text and ("warning" in text) == bool(reason)


def test_a_benchmark_tells_what_was_merged(tmp_path: Path) -> None:
    work = small_work(tmp_path)
    counts = [
        measure_streamed(dataclasses.replace(work, exact=exact), silent)["num_micro_batches_run"]
        for exact in (False, True)
    ]
    assert counts == [1, 2]
    mt.init(device="cpu", exact=False)
    model = mt.stream(llama())
    assert _rows_at_once(2, dataclasses.replace(work, num_sequences=14, length=1000), engine_of(model)) == 14
    engine_of(model).merging.most_tokens = 9000  # four of 2 x 1000 each: 7 are a 3 and a 4
    assert _rows_at_once(2, dataclasses.replace(work, num_sequences=14, length=1000), engine_of(model)) == 8
