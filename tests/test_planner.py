"""The planner: a plan adds up and stays within its budgets, more memory never hurts, refusals say the truth."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_zoo import ARCHITECTURES, make_model
from planning_helpers import SPLIT, STEP, builtin, llama_config, machine, planned, predicted, wide_llama, with_updates
from transformers import LlamaForCausalLM

from megatrain.base.config import Config, StreamOptions
from megatrain.base.errors import UserError
from megatrain.base.units import GB, GIB
from megatrain.plan.choice import Choice
from megatrain.plan.cost import (
    ALLOCATOR_GAPS,
    BACKWARD_LAUNCH_SECONDS,
    FORWARD_LAUNCH_SECONDS,
    visit_cost,
    working_bytes,
)
from megatrain.plan.explain import bottleneck, conventional_bytes, conventional_state_bytes, memory_table, why_late
from megatrain.plan.flops import model_work
from megatrain.plan.machine import Machine
from megatrain.plan.machines import H200, MACHINES
from megatrain.plan.placement import CPU, HBM, TIERS, Place
from megatrain.plan.planner import CLOSE, DISK_PRICE, ROOM_PRICE, Planner
from megatrain.plan.remedies import largest_context, plan
from megatrain.plan.rows import Placement, memory_rows
from megatrain.plan.schedule import SETTLING_STEPS
from megatrain.plan.timeline import CONTEXT_BYTES, PROCESS_BYTES, ROOM_SLACK, TimelineMaker
from megatrain.plan.workload import Workload
from megatrain.spec.formats import most_moment_bytes
from megatrain.spec.homes import Formats
from megatrain.spec.model import ModelSpec, model_spec, with_whole_logits

# Memory


def test_conventional_training_of_100b_parameters() -> None:
    """Where this project starts from: 400 GB of fp32 weights, over 1.6 TB with gradients, moments, activations."""
    state = conventional_state_bytes(100 * 10**9)
    assert state["weights"] == 400 * GB
    assert sum(state.values()) == 1600 * GB
    # And activations on top: a model of that size, one sequence of 1024 tokens.
    found = predicted(builtin("command-r-plus"), Workload(num_sequences=8, length=1024, rows=1))
    conventional = conventional_bytes(found)
    assert sum(conventional.values()) > sum(conventional_state_bytes(found.spec.num_parameters).values()) + 10 * GB


def test_the_table_of_100b_parameters_in_the_readme() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    cells = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in readme.splitlines() if line.startswith("|")}
    number = 100 * 10**9
    moments = {name: 2 * most_moment_bytes(name, number) for name in ("fp32", "8bit", "4bit")}
    state = conventional_state_bytes(number)
    expected = {
        "weights": [state["weights"], 4 * number, 4 * number, 2 * number],
        "gradients": [state["gradients"], 2 * number, 2 * number, 0],
        "moments": [state["moments"], moments["fp32"], moments["8bit"], moments["4bit"]],
    }
    expected["together"] = [sum(column) for column in zip(*expected.values(), strict=True)]
    for name, sizes in expected.items():
        for cell, num_bytes in zip(cells[name], sizes, strict=True):
            assert cell.strip().startswith(f"{num_bytes / GB:,.0f}") or not num_bytes, (name, cell)


def test_a_plan_holds_what_memory_rows_count() -> None:
    """The same places, counted by the rows that the engine allocates by."""
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config()).to(torch.bfloat16)
    spec = model_spec(model, SPLIT, "tiny")
    found = predicted(spec, Workload(num_sequences=2, length=16, rows=1), homes=3)
    places = {home: HBM if index < 3 else CPU for index, home in enumerate(spec.homes)}
    placement = Placement(
        plans=list(spec.homes), trainable=set(spec.trainable), places=places, config=Config(), options=StreamOptions()
    )
    rows = {(row.tier, row.name): row.num_bytes for row in memory_rows(placement)}
    table = memory_table(found)
    assert table["weights"]["ram"] == rows["ram", "compute weights (cross the link)"]
    assert table["low halves"]["ram"] == rows["ram", "low halves of fp32 masters"]
    assert table["moments"]["ram"] == rows["ram", "moments, fp32"]
    assert table["gradients"]["ram"] == rows["ram", "gradients, kept for the exact norm"]
    on_device = sum(table[name]["hbm"] for name in ("weights", "low halves", "moments", "gradients"))
    assert on_device == rows["hbm", "layers that live on the device"]
    buffers = sum(rows["hbm", name] for name in ("slots", "gradient sums and drains", "resident weights"))
    assert table["buffers"]["hbm"] == buffers + CONTEXT_BYTES + 2 * 2 * 16 * spec.hidden_size
    in_room = table["gradients"]["ram"] + table["activations"]["ram"]
    assert table["buffers"]["ram"] == PROCESS_BYTES + found.timeline.rooms["ram"] - in_room


def test_gradients_on_the_device_share_a_room_that_is_there_at_every_moment() -> None:
    spec = wide_llama()
    plan = Planner(H200, spec, STEP, Config()).plan_of(
        Choice(rows=1, num_slots=3, places=(HBM,) * len(spec.homes), activation_bytes=2**30)
    )
    room, line = plan.timeline.rooms["hbm"], plan.timeline.moving
    each = 8 * 512 * 2 * spec.hidden_size  # an input of a layer, all rows of it; an embedding's are token ids
    up = [min(each * number, 2**30) for number in range(len(spec.layers))]
    stay = [*up, *reversed(up)]
    most = max(a + b for a, b in zip(stay, line["hbm", "gradients"], strict=True))
    assert room == int((1 + ROOM_SLACK) * most) < (1 + ROOM_SLACK) * (max(stay) + max(line["hbm", "gradients"]))
    shown = zip(stay, line["hbm", "gradients"], line["hbm", "buffers"], strict=True)
    assert {sum(of) for of in shown} == {room}


def test_gradients_in_host_memory_rise_while_inputs_fall() -> None:
    spec = wide_llama()
    sizes = Planner(H200, spec, STEP, Config()).sizes
    choice = predicted(spec, dataclasses.replace(STEP, rows=1), inputs_gb=0).choice
    on_disk = dataclasses.replace(choice, places=(Place(gradients="disk"),) * len(spec.homes))
    maker = TimelineMaker(spec, STEP, sizes, keeps_gradients=True, compiled=False)
    shared, apart = maker.timeline(choice), maker.timeline(on_disk)
    gradients, inputs = shared.moving["ram", "gradients"], shared.moving["ram", "activations"]
    half = len(gradients) // 2
    assert list(gradients[:half]) == sorted(gradients[:half], reverse=True)
    assert list(gradients[half:]) == sorted(gradients[half:])
    assert list(inputs[half:]) == sorted(inputs[half:], reverse=True)
    total = sum(of["gradients"] for of in sizes)
    assert gradients[-1] == max(gradients) == total
    assert list(apart.moving["disk", "gradients"]) == [total] * len(gradients)
    room = max(a + b for a, b in zip(gradients, inputs, strict=True))
    assert room < total + max(inputs)
    assert shared.rooms == {"ram": int((1 + ROOM_SLACK) * room)}
    fixed_bytes = sum(of for (tier, _), of in shared.fixed.items() if tier == "ram")
    assert shared.peak("ram") == fixed_bytes + shared.rooms["ram"]


memory = st.tuples(st.floats(4, 60), st.floats(3, 60), st.sampled_from([0, 30]))
formats = st.sampled_from([{}, {"optimizer_compression": "8bit"}, {"clip": "layer"}, {"compile": True}])


@given(memory, formats)
@settings(max_examples=12)
def test_rows_add_up_and_no_tier_is_over_its_budget(sizes: tuple[float, float, int], settings: dict) -> None:
    found = planned(*sizes, **settings)
    if found is None:
        return
    table = memory_table(found)
    for tier in TIERS:
        peak = found.timeline.peak(tier)
        assert sum(cells[tier] for cells in table.values()) == peak == max(found.timeline.total(tier))
        assert peak <= getattr(found.budgets, tier)
    assert found.config.clip == settings.get("clip", "global")
    assert found.step_seconds >= max(found.simulation.busy_seconds().values()) - 1e-9


@given(memory, st.floats(0, 30), st.floats(0, 30), formats)
@settings(max_examples=12)
def test_more_memory_never_makes_a_plan_slower(
    sizes: tuple[float, float, int], more_hbm: float, more_ram: float, settings: dict
) -> None:
    hbm, ram, disk = sizes
    less, more = planned(hbm, ram, disk, **settings), planned(hbm + more_hbm, ram + more_ram, disk, **settings)
    if less is not None:
        price = ROOM_PRICE * (1 + CLOSE) * (DISK_PRICE if disk else 1)
        assert more is not None and more.step_seconds <= less.step_seconds * price


def test_limits_of_the_config_are_kept() -> None:
    found = plan(H200, wide_llama(), STEP, Config(max_vram_gb=12, max_ram_gb=20))
    assert found.timeline.peak("hbm") <= 12 * GB and found.timeline.peak("ram") <= 20 * GB
    assert plan(H200, wide_llama(), STEP, Config(hbm_home_gb=0)).num_on_device == 0


def test_spare_device_memory_is_used_where_it_helps() -> None:
    """8 x 1024 tokens: with everything in host memory the step is the update's, docs/performance.md."""
    work = Workload(num_sequences=8, length=1024)
    found = plan(H200, builtin("qwen2.5-7b"), work, Config())
    assert found.num_on_device >= 28
    assert found.step_seconds < 0.5 * predicted(found.spec, dataclasses.replace(work, rows=8)).step_seconds


def test_the_disk_is_taken_where_there_is_no_other_way() -> None:
    assert planned(8, 12) is None
    found = planned(8, 12, 100)
    assert found is not None and found.timeline.peak("disk") > 0
    moments = [place.moments for place in found.choice.places]
    # The last homes of the forward go first: their update has the most time.
    assert moments == sorted(moments, key=["hbm", "ram", "disk"].index)
    assert "disk" not in {place.gradients for place in found.choice.places}
    simulation, rate = found.simulation, found.machine.disk_write_bytes_per_second
    written = sum(task.seconds for task in simulation.tasks if task.what == "write states") * rate
    assert found.disk_written_bytes == pytest.approx(written / (SETTLING_STEPS + 1))
    roomy = planned(8, 60, 100)
    assert roomy is not None and roomy.timeline.peak("disk") == 0


# Context


def test_the_largest_context_is_the_largest() -> None:
    spec, small = wide_llama(), machine(8, 60)
    context = largest_context(small, spec, Config())
    assert context % 256 == 0
    fits = [
        Planner(small, spec, Workload(num_sequences=1, length=length), Config()).best() is not None
        for length in (context, context + 256)
    ]
    assert fits == [True, False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hbm_bytes": 0}, "has no GPU"),
        ({"h2d_bytes_per_second": 0.0}, "no rate for h2d"),
        ({"update_ns_per_parameter": {"8bit": 0.2}}, "update with fp32 moments"),
    ],
)
def test_a_machine_without_the_rates_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(dataclasses.replace(H200, **changes), wide_llama(), STEP, Config())


@pytest.mark.parametrize("values", [(0, 8, None), (8, 0, None), (8, 8, 0), (8, 8, 9)])
def test_workloads_that_cannot_be_are_refused(values: tuple[int, int, int | None]) -> None:
    with pytest.raises(UserError):
        Workload(num_sequences=values[0], length=values[1], rows=values[2])


# Machines and models


def test_machines_say_where_their_figures_are_from() -> None:
    h200 = {"h200-128gb", "h200-256gb", "h200-512gb", "h200-1.5tb"}
    assert h200 | {"b300-2tb", "gh200", "a100", "rtx4090", "rtx3090", "a6000"} == set(MACHINES)
    for name, known in MACHINES.items():
        assert known.name == name
        assert known.source.startswith("measured" if name == "h200-128gb" else "estimated from")
        assert Machine.from_json(known.to_json()) == known


PUBLISHED = {  # billions of parameters, by the model cards
    "qwen2.5-0.5b": 0.49,
    "qwen2.5-7b": 7.61,
    "qwen2.5-72b": 72.7,
    "qwen3-8b": 8.2,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.6,
    "llama-3.1-405b": 405.9,
    "mistral-large": 122.6,
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 140.6,
    "command-r-plus": 103.8,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "deepseek-v3": 671,
    "kimi-k2": 1026,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_built_in_shapes_have_the_published_parameters(name: str) -> None:
    assert builtin(name).num_parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


def test_active_parameters_of_experts_are_the_published_ones() -> None:
    published = {"gpt-oss-120b": 5.1, "deepseek-v3": 37, "kimi-k2": 32, "qwen3-30b-a3b": 3.3, "mixtral-8x7b": 12.9}
    for name, billions in published.items():
        assert builtin(name).active_parameters / 1e9 == pytest.approx(billions, rel=0.1)


def test_a_spec_counts_work_as_the_counter_of_whole_models_does() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config())
    spec, work = model_spec(model, Formats(precision="fp32", master="fp32"), "tiny"), model_work(model)
    assert (spec.num_parameters, spec.active_parameters) == (work.num_parameters, work.matrix_parameters)
    assert spec.attention_width == work.attention_width


def test_the_bottleneck_is_the_lane_that_compute_waits_for() -> None:
    work = Workload(num_sequences=8, length=1024, rows=8)
    assert bottleneck(predicted(builtin("qwen2.5-7b"), work).simulation)[0] == "cpu"
    assert bottleneck(predicted(builtin("qwen2.5-7b"), work, homes=30).simulation)[0] == "compute"
    slow = dataclasses.replace(H200, h2d_bytes_per_second=2e9)
    assert bottleneck(predicted(builtin("qwen2.5-7b"), work, machine=slow).simulation)[0] == "h2d"
    idle, by_layer = (predicted(builtin("qwen2.5-7b"), work, config=Config(clip=clip)) for clip in ("global", "layer"))
    assert "where the exact norm is known" in why_late(idle) and by_layer.step_seconds < 0.9 * idle.step_seconds
    for found in (by_layer, predicted(builtin("qwen2.5-7b"), work, homes=30)):
        assert why_late(found) == ""
    for busy in (slow, with_updates(30)):
        assert why_late(predicted(builtin("qwen2.5-7b"), work, machine=busy)) == ""
    # A drain waits for a slab that a late update frees: the link is not to blame.
    by_layer = predicted(builtin("qwen2.5-7b"), work, machine=with_updates(4), config=Config(clip="layer"))
    assert bottleneck(by_layer.simulation)[0] == "cpu" and "drain" not in by_layer.simulation.stall_seconds()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_can_be_planned(name: str) -> None:
    spec = model_spec(make_model(name), Formats(precision="bf16", master="split"), name)
    found = Planner(MACHINES["rtx3090"], spec, Workload(num_sequences=2, length=64), Config()).best()
    assert found is not None and found.step_seconds > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("h2d_bytes_per_second", float("nan")),
        ("h2d_bytes_per_second", -1),
        ("h2d_bytes_per_second", float("inf")),
        ("h2d_bytes_per_second", True),
        ("h2d_bytes_per_second", 1e-300),
        ("h2d_bytes_per_second", "x"),
        ("hbm_bytes", None),
        ("num_cores", 0),
        ("name", 3),
        ("update_ns_per_parameter", {"fp32": 0}),
        ("update_ns_per_parameter", [1]),
    ],
)
def test_a_profile_with_a_value_that_cannot_be_is_refused(field: str, value: object) -> None:
    text = json.dumps({**json.loads(MACHINES["rtx4090"].to_json()), field: value})
    with pytest.raises(UserError, match=rf"FILE is no profile of a machine \({field} is "):
        Machine.from_json(text, "FILE")


@pytest.mark.parametrize("count", [0, -1, 10**20, 1.5, True, None])
def test_a_workload_is_whole_and_of_a_size(count: object) -> None:
    with pytest.raises(UserError, match="must be a whole number from 1 to 1,000,000,000"):
        Workload(num_sequences=count, length=1)


def test_rows_of_micro_batches_are_the_divisors() -> None:
    for count in (1, 2, 12, 49, 97, 720):
        plain = [rows for rows in range(count, 0, -1) if count % rows == 0]
        assert Workload(num_sequences=count, length=1).row_choices() == plain
    assert Workload(num_sequences=10**9, length=1).row_choices()[0] == 10**9


def test_a_head_in_pieces_takes_what_a_piece_and_its_gradients_take() -> None:
    """Qwen2.5-7B: a vocabulary of 152064, a width of 3584."""
    spec = builtin("qwen2.5-7b")
    head = next(layer for layer in spec.layers if layer.kind == "head")

    def head_bytes(of: ModelSpec, rows: int) -> int:
        layer = next(layer for layer in of.layers if layer.kind == "head")
        work = Workload(num_sequences=64, length=1024, rows=rows)
        return int(working_bytes(of, layer, work, rows, compiled=False) / ALLOCATOR_GAPS)

    whole = with_whole_logits(spec)
    for rows in (1, 2):
        assert head_bytes(spec, rows) == head_bytes(whole, rows) == pytest.approx(24 * rows * 1024 * 152064, abs=1)
    for rows in (4, 16):
        gradients = 6 * head.matrix_parameters + 2 * rows * 1024 * 3584
        assert head_bytes(spec, rows) == pytest.approx(18 * 2048 * 152064 + gradients, abs=1)
        assert head_bytes(whole, rows) == pytest.approx(24 * rows * 1024 * 152064, abs=1)


def test_a_compiled_head_in_pieces_takes_its_logits_once_and_one_sum() -> None:
    """Pieces of up to 8192 tokens. Not in pieces a compiled head is as any other."""
    spec = builtin("qwen2.5-7b")
    head = next(layer for layer in spec.layers if layer.kind == "head")
    taken = []
    for rows in (1, 2, 3, 8, 16):
        work = Workload(num_sequences=64, length=1024, rows=rows)
        taken.append(int(working_bytes(spec, head, work, rows, compiled=True) / ALLOCATOR_GAPS))
        if rows < 3:
            assert taken[-1] == pytest.approx(24 * rows * 1024 * 152064, abs=1)
            continue
        gradients = 4 * head.matrix_parameters + 2 * rows * 1024 * 3584
        assert taken[-1] == pytest.approx(2 * min(rows, 8) * 1024 * 152064 + gradients, abs=1)
    eager, compiled = (visit_cost(H200, spec, head, work, 16, compiled=each).forward for each in (False, True))
    # 4 micro-batches in 2 pieces each in place of 8: 8 bytes a logit in place of 36; the sum (8 bytes a
    # parameter in place of 10, and zeros), and the weights twice in place of three times; launches.
    bytes_less = (36 - 8) * 65_536 * 152_064
    bytes_less += 4 * ((80 - 16 - 4) + 2 * (24 - 4)) * head.matrix_parameters
    launches = BACKWARD_LAUNCH_SECONDS + FORWARD_LAUNCH_SECONDS
    seconds_less = bytes_less / H200.hbm_bytes_per_second + 4 * 6 * launches / 2
    assert eager - compiled == pytest.approx(seconds_less)


def test_losses_that_read_logits_are_planned_with_whole_ones() -> None:
    work = Workload(num_sequences=64, length=1024, rows=16)
    in_pieces = predicted(builtin("qwen2.5-7b"), work)
    whole = predicted(builtin("qwen2.5-7b"), dataclasses.replace(work, reads_logits=True))
    told = predicted(builtin("qwen2.5-7b"), work, config=Config(logits_in_pieces=False))
    assert in_pieces.timeline.peak("hbm") < whole.timeline.peak("hbm") - 30 * GIB
    assert told.timeline.rows() == whole.timeline.rows() and told.step_seconds == whole.step_seconds
    # Sums of the pieces' gradients, and more launches.
    assert whole.step_seconds < in_pieces.step_seconds < 1.03 * whole.step_seconds


def test_only_plain_heads_are_planned_in_pieces() -> None:
    model = make_model("llama")
    heads = [layer for layer in model_spec(model, SPLIT, "tiny").layers if layer.kind == "head"]
    assert [layer.has_plain_logits for layer in heads] == [True]
    model.lm_head.register_forward_hook(lambda module, args, output: output)
    assert not any(layer.has_plain_logits for layer in model_spec(model, SPLIT, "tiny").layers)
