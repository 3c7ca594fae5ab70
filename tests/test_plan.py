"""Plan arithmetic: rows add up to what is allocated; FLOP counts are those of a model counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import megatrain as mt
from megatrain.api import stream
from megatrain.base.config import Config, StreamOptions
from megatrain.base.errors import UserError
from megatrain.execute.engine import engine_of
from megatrain.plan.flops import counted_flops, model_work, published_flops
from megatrain.plan.placement import CPU, HBM, STAGING_BYTES, part_bytes, place_homes, state_bytes
from megatrain.plan.rows import Placement, activation_bytes, check_device_memory, memory_rows, plan_placement
from megatrain.spec.discover import find_layers
from megatrain.spec.homes import Formats, HomePlan, plan_homes

FP32 = Formats(precision="fp32", master="fp32")


def tiny_llama(**changes) -> LlamaForCausalLM:
    config = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, vocab_size=120)  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**config, **changes}))


def plans_of(model: nn.Module, formats: Formats = FP32) -> list[HomePlan]:
    return plan_homes(model, find_layers(model), formats)


def placed(model: nn.Module, config: Config, options: StreamOptions, device_bytes: int | None) -> Placement:
    trainable = {id(parameter) for parameter in model.parameters()}
    return plan_placement(plans_of(model), trainable, config, options, device_bytes)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rows_are_what_is_allocated(precision: str) -> None:
    model = tiny_llama()
    mt.init(device="cpu", precision=precision)
    stream(model)
    optimizer = mt.optim.AdamW(model)
    engine = engine_of(model)
    rows = {row.name: row.num_bytes for row in memory_rows(engine.placement)}
    assert rows["compute weights (cross the link)"] == sum(home.wire.numel() for home in engine.homes)
    assert rows.get("low halves of fp32 masters", 0) == sum(home.low.nbytes for home in engine.homes)
    assert 0 <= rows["moments, fp32"] - optimizer.num_state_bytes() < 2 * 4096 * len(list(model.parameters()))
    assert rows["slots"] == engine.transport.total_device_bytes
    ids = torch.randint(0, 120, (1, 8))
    mt.accumulate(model, [{"input_ids": ids, "labels": ids}])
    engine.wait()
    assert rows["gradients, kept for the exact norm"] == sum(home.grads.slab_bytes for home in engine.homes)
    # All of it is host memory that was taken, in whole pages.
    planned = sum(row.num_bytes for row in memory_rows(engine.placement) if row.tier == "ram")
    assert 0 <= engine.memory.ram_bytes - planned < 4 * 4096 * len(engine.homes)


def test_slots_shrink_to_the_limit_before_it_is_refused() -> None:
    plans = plans_of(model := tiny_llama())
    block = max(sum(field.wire_bytes for field in plan.fields) for plan in plans if "layers" in plan.name)
    generous = check_device_memory(plans, Config(max_vram_gb=1), StreamOptions())
    assert generous.num_slots == 3
    one_slot = placed(model, Config(), StreamOptions(num_slots=1), None)
    needed = sum(row.num_bytes for row in memory_rows(one_slot) if row.tier == "hbm")
    tight = check_device_memory(plans, Config(max_vram_gb=(needed + block) / 1e9), StreamOptions())
    assert tight.num_slots < 3
    with pytest.raises(UserError, match=r"max_vram_gb=1e-06 is too small for one layer: .* need .* GB"):
        check_device_memory(plans, Config(max_vram_gb=1e-6), StreamOptions())


def test_activation_budget_is_what_is_left() -> None:
    def budget(device_bytes: int | None, activations: int | None = None, **settings: object) -> int:
        options = StreamOptions(activation_bytes=activations)
        return activation_bytes(placed(tiny_llama(), Config(**settings), options, device_bytes), device_bytes)

    assert budget(None) > 10**15
    assert budget(0) == 0
    assert budget(10**9, 5) == 5
    assert 0 < budget(10**9) < 10**9
    assert budget(10**9) < budget(10**9, hbm_home_gb=0)


# Places


def test_the_first_homes_of_the_forward_live_on_the_device() -> None:
    model = tiny_llama(num_hidden_layers=6)
    plans = plans_of(model)
    trainable = {id(parameter) for parameter in model.parameters()}
    per_block = state_bytes(plans[1], trainable, "fp32")
    assert per_block >= 16 * sum(field.numel for field in plans[1].fields)
    budget = state_bytes(plans[0], trainable, "fp32") + 2 * per_block
    config = Config(hbm_home_gb=(budget + 10) / 1e9)
    places = place_homes(plans, trainable, config, StreamOptions(), spare_hbm_bytes=10**9, ram_bytes=None)
    assert [places[plan] for plan in plans[:4]] == [HBM, HBM, HBM, CPU]
    assert places[plans[-1]] == CPU, "what is resident anyway stays"
    placement = placed(model, config, StreamOptions(), 10**9)
    rows = {row.name: row.num_bytes for row in memory_rows(placement)}
    assert 0 < rows["layers that live on the device"] <= budget + 10
    # Only what lives in host memory is counted there.
    left = [plan for plan in placement.plans if placement.places[plan] == CPU]
    sizes = [part_bytes(plan, placement.trainable, "fp32")["moments"] for plan in left]
    assert rows["moments, fp32"] == sum(sizes)
    assert sum(sizes) >= 8 * sum(field.numel for plan in left for field in plan.fields)


def test_nothing_is_placed_on_a_device_that_is_the_host() -> None:
    plans = plans_of(model := tiny_llama())
    trainable = {id(parameter) for parameter in model.parameters()}
    assert set(
        place_homes(plans, trainable, Config(), StreamOptions(), spare_hbm_bytes=None, ram_bytes=None).values()
    ) == {CPU}
    lossless = Config(optimizer_compression="lossless")
    assert set(
        place_homes(plans, trainable, lossless, StreamOptions(), spare_hbm_bytes=10**9, ram_bytes=None).values()
    ) == {CPU}


@pytest.mark.parametrize(
    ("places", "config", "message"),
    [
        ({"model.layers.7": "hbm"}, {}, "there is no home 'model.layers.7'"),
        ("gpu", {}, "'gpu' of .* is not known"),
        ("hbm", {"optimizer_compression": "lossless"}, "coded on the CPU"),
        (None, {"hbm_home_gb": 2}, "hbm_home_gb=2 is more than the 1 GB"),
    ],
)
def test_places_that_cannot_be_are_refused(places: object, config: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        place_homes(
            plans_of(tiny_llama()),
            set(),
            Config(**config),
            StreamOptions(places=places),
            spare_hbm_bytes=10**9,
            ram_bytes=None,
        )


def test_gradients_that_are_not_kept_take_a_ring() -> None:
    kept, ring = (
        {row.name: row.num_bytes for row in memory_rows(placed(tiny_llama(), Config(clip=clip), StreamOptions(), None))}
        for clip in ("global", "layer")
    )
    largest = max(sum(field.numel for field in plan.fields) for plan in plans_of(tiny_llama()))
    assert "gradients, kept for the exact norm" not in ring
    assert ring["gradients on their way"] == 3 * 4 * largest
    assert kept["moments, fp32"] == ring["moments, fp32"]


# FLOPs


def test_counts_of_a_dense_model() -> None:
    model = tiny_llama()
    work = model_work(model)
    block = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96
    assert work.matrix_parameters == 2 * block + 64 * 120
    assert work.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert work.attention_width == 2 * 4 * (16 + 16)
    assert published_flops(work, 10) == 60 * work.num_parameters
    # One sequence of 3: 6 pairs of query and key, 2 FLOPs each a width; everything three times for forward + backward.
    assert counted_flops(work, [3]) == 3 * (2 * work.matrix_parameters * 3 + 2 * work.attention_width * 6)


def test_a_tied_embedding_counts_as_the_head() -> None:
    untied, tied = model_work(tiny_llama()), model_work(tiny_llama(tie_word_embeddings=True))
    assert tied.matrix_parameters == untied.matrix_parameters
    assert tied.num_parameters == untied.num_parameters - 64 * 120


def test_only_active_experts_count() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 50}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = MixtralConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2)
    work = model_work(MixtralForCausalLM(config))
    attention, router, experts = 4 * 32 * 32, 4 * 32, 2 * 3 * 32 * 48
    assert work.matrix_parameters == attention + router + experts + 32 * 50


def test_counts_do_not_change_when_the_model_is_streamed() -> None:
    model = tiny_llama()
    before = model_work(model)
    mt.init(device="cpu")
    assert model_work(mt.stream(model)) == before


def test_a_module_without_a_config_counts_its_matrices() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 8))
    assert model_work(model).matrix_parameters == 32


def test_device_memory_of_updates_is_counted() -> None:
    def rows(config: Config, places: str) -> dict[str, int]:
        placement = placed(tiny_llama(), config, StreamOptions(places=places), 10**9)
        return {row.name: row.num_bytes for row in memory_rows(placement) if row.tier == "hbm"}

    largest = max(sum(field.numel for field in plan.fields) for plan in plans_of(tiny_llama()))
    assert "updates on the device" not in rows(Config(), "hbm")
    assert rows(Config(clip="layer"), "hbm")["updates on the device"] == 3 * 4 * largest
    assert rows(Config(), "stream")["updates on the device"] == 2 * STAGING_BYTES
