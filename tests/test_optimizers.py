"""Optimizers as torch.optim.Optimizers: every format of masters and moments, skipped steps, averages, state dicts."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from update_training import COMPRESSIONS, assert_same, batches, result, spoil, start, tiny_llama, train

import megatrain as mt
from megatrain.base.config import StreamOptions
from megatrain.base.errors import NonFiniteError, UserError
from megatrain.base.units import format_bytes
from megatrain.execute.engine import engine_of
from megatrain.plan.rows import memory_rows

OPTIMIZERS = {
    "AdamW": {},
    "Adam": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Lion": {"lr": 1e-3},
}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_lanes_are_the_serial_twin_in_every_format(name: str, compression: bool | str) -> None:
    settings = {"precision": "bf16", "master": "bf16" if compression == "4bit" else "split"}
    results = []
    for options in (StreamOptions(serial=True), StreamOptions(lane_delay_seconds=0.001, poison=True)):
        model, optimizer = start(
            options, getattr(mt.optim, name), OPTIMIZERS[name], optimizer_compression=compression, **settings
        )
        before = mt.full_state_dict(model)
        train(model, optimizer, batches(3))
        results.append(result(model, optimizer))
        assert all(not torch.equal(before[key], results[-1][key]) for key in before), "weights did not move"
    assert_same(results[1], results[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_lossless_moments_are_fp32_moments(name: str) -> None:
    weights = []
    for compression in (False, "lossless"):
        model, optimizer = start(
            None, getattr(mt.optim, name), OPTIMIZERS[name], optimizer_compression=compression, precision="bf16"
        )
        train(model, optimizer, batches(3))
        weights.append(mt.full_state_dict(model))
    assert_same(weights[1], weights[0])


@pytest.mark.parametrize(
    ("compression", "bytes_a_parameter"), [(False, 8.0), ("bf16", 4.0), ("8bit", 2.0625), ("4bit", 1.0625)]
)
def test_bytes_of_the_moments_are_counted_from_what_is_allocated(
    compression: bool | str, bytes_a_parameter: float
) -> None:
    model, optimizer = start(optimizer_compression=compression)
    engine = engine_of(model)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert optimizer.num_state_bytes() == pytest.approx(bytes_a_parameter * num_parameters, rel=0.03)
    before = engine.memory.ram_bytes
    again = mt.optim.AdamW(model)
    allocated = engine.memory.ram_bytes - before
    # Each tensor in whole pages, two a moment.
    num_tensors = 4 * len(list(model.parameters()))
    assert again.num_state_bytes() <= allocated <= again.num_state_bytes() + num_tensors * 4096


def test_the_first_line_says_what_is_lossy(capsys: pytest.CaptureFixture[str]) -> None:
    start(precision="bf16", master="bf16", optimizer_compression=True)
    line = capsys.readouterr().out
    assert 'LOSSY bf16 master (stochastic rounding; exact: master="split")' in line
    assert 'LOSSY 4-bit moments (exact: optimizer_compression=False, or "lossless")' in line
    start(precision="bf16", optimizer_compression="lossless")
    line = capsys.readouterr().out
    assert "LOSSY" not in line
    assert "exact fp32 master" in line
    assert "losslessly coded" in line


# Gradients that are not finite


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_step_with_a_bad_gradient_is_skipped_whole(value: float, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = start()
    many = list(batches(3))
    train(model, optimizer, iter(many[:1]))
    before = result(model, optimizer)
    before = {name: tensor.clone() for name, tensor in before.items()}
    mt.accumulate(model, many[1])
    spoil(model, "model.layers.1.mlp.up_proj.weight", value)
    norm = mt.clip_grad_norm_(model, 1.0)
    assert not torch.isfinite(norm)
    with caplog.at_level(logging.WARNING, "megatrain"):
        optimizer.step()
    optimizer.zero_grad()
    assert optimizer.step_was_skipped
    assert optimizer.num_skipped_steps == 1
    assert "'model.layers.1'" in caplog.text
    assert_same(result(model, optimizer), before)
    # As if it had never been.
    train(model, optimizer, iter(many[2:]))
    assert not optimizer.step_was_skipped
    other, its_optimizer = start()
    train(other, its_optimizer, iter([many[0], many[2]]))
    assert_same(result(model, optimizer), result(other, its_optimizer))


def test_too_many_skipped_steps_in_a_row_end_the_run() -> None:
    model, optimizer = start(numbers={"max_skipped_steps": 2})
    for attempt, micro_batches in enumerate(batches(3)):
        mt.accumulate(model, micro_batches)
        spoil(model, "model.layers.2.input_layernorm.weight", float("nan"))
        if attempt < 2:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(
        NonFiniteError, match=r"3 steps in a row, this time first in 'model.layers.2'.*max_skipped_steps=2"
    ):
        optimizer.step()


def test_layer_clipping_leaves_out_the_bad_layer_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The weights of layer 2 are infinite in one step: its gradients and those below are not finite, the head's are."""
    model, optimizer = start(clip="layer")
    first, second = batches(2)
    weight = dict(model.named_parameters())["model.layers.0.mlp.down_proj.weight"]
    kept = weight.master()
    with torch.no_grad():
        weight.fill_(float("nan"))
    before = mt.full_state_dict(model)
    mt.accumulate(model, first)
    with caplog.at_level(logging.WARNING, "megatrain"):
        optimizer.step()
    assert optimizer.step_was_skipped
    assert optimizer.num_skipped_steps == 1
    assert "update of such layers was left out" in caplog.text
    with torch.no_grad():
        weight.copy_(kept)
    after = mt.full_state_dict(model)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(after[name], before[name])
    mt.accumulate(model, second)
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert not torch.equal(mt.full_state_dict(model)[name], before[name])


# The average of the weights


@pytest.mark.parametrize(("precision", "master"), [("fp32", "fp32"), ("bf16", "split"), ("bf16", "bf16")])
def test_the_average_of_the_weights(precision: str, master: str) -> None:
    decay = 0.75
    model, optimizer = start(precision=precision, master=master, numbers={"ema_decay": decay})
    averages = {name: value.float() for name, value in mt.full_state_dict(model).items()}
    for micro_batches in batches(3):
        train(model, optimizer, iter([micro_batches]))
        for name, value in mt.full_state_dict(model).items():
            averages[name] = averages[name].mul(decay).add_(value.float().mul(1 - decay))
    weights = mt.full_state_dict(model)
    with optimizer.ema_weights():
        held = mt.full_state_dict(model)
    assert_same(mt.full_state_dict(model), weights)
    for name, average in averages.items():
        if master == "bf16":
            # It averages the weight before it is rounded, so each step differs by less than a unit of bf16.
            assert torch.allclose(held[name].float(), average, rtol=2**-6, atol=1e-4), name
        else:
            assert torch.equal(held[name].float(), average), name


def test_without_an_average_it_says_how_to_get_one() -> None:
    _, optimizer = start()
    with pytest.raises(UserError, match="ema_decay="), optimizer.ema_weights():
        pass


# State dicts


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_training_goes_on_from_a_state_dict(compression: bool | str) -> None:
    settings = {"precision": "bf16", "optimizer_compression": compression, "numbers": {"ema_decay": 0.9}}
    many = list(batches(4))
    model, optimizer = start(**settings)
    train(model, optimizer, iter(many))
    first, its_optimizer = start(**settings)
    train(first, its_optimizer, iter(many[:2]))
    weights = mt.full_state_dict(first)
    saved = its_optimizer.state_dict()
    saved = {**saved, "state": {i: {k: t.clone() for k, t in s.items()} for i, s in saved["state"].items()}}
    second, other = start(**settings)
    second.load_state_dict(weights)
    other.load_state_dict(saved)
    train(second, other, iter(many[2:]))
    assert_same(result(second, other), result(model, optimizer))


@pytest.mark.parametrize("to", COMPRESSIONS)
@pytest.mark.parametrize("source", COMPRESSIONS)
def test_moments_are_converted_and_it_says_so(
    source: bool | str, to: bool | str, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = start(optimizer_compression=source)
    train(model, optimizer, batches(2))
    _, other = start(optimizer_compression=to)
    with caplog.at_level(logging.WARNING, "megatrain"):
        other.load_state_dict(optimizer.state_dict())
    assert ("were converted" in caplog.text) == (source != to)
    _, plain = start()
    plain.load_state_dict(other.state_dict())
    _, exact = start()
    exact.load_state_dict(optimizer.state_dict())
    for of_plain, of_exact in zip(plain.state.values(), exact.state.values(), strict=True):
        got, wanted = of_plain["exp_avg_sq"].sum().item(), of_exact["exp_avg_sq"].sum().item()
        # Stochastic rounding in few bits, twice: the sum over a parameter is right within some per cent.
        assert got == pytest.approx(wanted, rel=0.3 if "4bit" in (source, to) or True in (source, to) else 0.05)


def test_states_that_do_not_fit_are_refused() -> None:
    model, optimizer = start()
    train(model, optimizer, batches(1))
    saved = optimizer.state_dict()

    def changed(**state) -> dict:
        return {**saved, "state": {**saved["state"], 0: {**saved["state"][0], **state}}}

    with pytest.raises(UserError, match="exp_avg was saved as .* \\(1,\\), this one is"):
        optimizer.load_state_dict(changed(exp_avg=torch.zeros(1)))
    incomplete = {key: value for key, value in saved["state"][0].items() if key != "exp_avg_sq"}
    with pytest.raises(UserError, match="has no 'exp_avg_sq'"):
        optimizer.load_state_dict({**saved, "state": {**saved["state"], 0: incomplete}})
    for numbers, message in (({"amsgrad": True}, "amsgrad"), ({"lr": "x"}, "lr='x'")):
        groups = [{**group, **numbers} for group in saved["param_groups"]]
        with pytest.raises(UserError, match=message):
            optimizer.load_state_dict({**saved, "param_groups": groups})


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"num_threads": 2.5}, "num_threads must be a whole number"),
        ({"num_threads": True}, "num_threads must be a whole number"),
        ({"ema_decay": 1.0}, "ema_decay=1.0"),
        ({"seed": -1}, "seed=-1"),
        ({"max_skipped_steps": 1.5}, "max_skipped_steps=1.5"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"betas": (0.9,)}, "betas="),
    ],
)
def test_bad_numbers_are_named(numbers: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        start(numbers=numbers)


def test_an_optimizer_of_nothing_is_refused() -> None:
    with pytest.raises((UserError, ValueError), match="no parameters|empty parameter list"):
        mt.optim.AdamW([{"params": []}])


def test_two_bits_are_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match="2bit.*quality test"):
        mt.init(optimizer_compression="2bit")


def test_momentum_that_is_turned_on_later_is_refused_before_anything_is_updated() -> None:
    model, optimizer = start(optimizer=mt.optim.SGD)
    train(model, optimizer, batches(1))
    before = mt.full_state_dict(model)
    optimizer.param_groups[0]["momentum"] = 0.9
    mt.accumulate(model, next(batches(1)))
    with pytest.raises(UserError, match="asks for the rule 'momentum'.* those of 'sgd'"):
        optimizer.step()
    assert_same(mt.full_state_dict(model), before)


def test_layer_clipping_drops_gradients_that_no_optimizer_takes() -> None:
    mt.init(device="cpu", clip="layer")
    model = mt.stream(tiny_llama())
    names = [name for name, _ in model.named_parameters() if ".layers.1." not in name]
    parameters = dict(model.named_parameters())
    optimizer = mt.optim.AdamW([parameters[name] for name in names], lr=1e-2)
    before = mt.full_state_dict(model)
    train(model, optimizer, batches(3), "layer")
    after = mt.full_state_dict(model)
    assert all(torch.equal(before[name], after[name]) == (".layers.1." in name) for name in before)
    assert sum(home.grads.slab_bytes for home in engine_of(model).homes) == 0


def test_the_first_line_says_what_is_compiled_and_what_lies_on_disk(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    start(compile=True)
    assert "blocks compiled at their first call" in capsys.readouterr().out
    model, _ = start(max_ram_gb=1e-4, offload_dir=tmp_path)
    told = capsys.readouterr().out
    assert "on disk (compute weights, moments, gradients), in host memory " in told
    rows = memory_rows(engine_of(model).placement)
    slots = sum(row.num_bytes for row in rows if row.tier == "ram" and "slots" in row.name)
    assert f"{format_bytes(slots)} of slots for the disk" in told
