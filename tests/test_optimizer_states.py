"""Who looks and writes beside a step: gradients, states and averages that somebody holds, files, interrupts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from update_training import COMPRESSIONS, assert_same, batches, result, spoil, start, tiny_llama, train

import megatrain as mt
from megatrain.base.config import StreamOptions
from megatrain.base.errors import RefusedError, UserError
from megatrain.execute.engine import engine_of
from megatrain.plan.rows import host_bytes


def test_gradients_set_to_none_leave_no_factor_behind() -> None:
    results = []
    for drops_by_hand in (False, True):
        model, optimizer = start(optimizer=mt.optim.SGD)
        norms = []
        for micro_batches in batches(3):
            mt.accumulate(model, micro_batches[:1])
            mt.accumulate(model, micro_batches[1:])
            norms.append(mt.clip_grad_norm_(model, 0.1).item())
            optimizer.step()
            for parameter in model.parameters() if drops_by_hand else ():
                parameter.grad = None
            if not drops_by_hand:
                optimizer.zero_grad()
        results.append((norms, mt.full_state_dict(model)))
    assert results[0][0] == results[1][0]
    assert_same(results[1][1], results[0][1])


def test_a_bad_gradient_of_another_optimizer_skips_this_ones_step_too() -> None:
    """The clip factor is of all gradients: it is NaN."""
    mt.init(device="cpu")
    model = mt.stream(tiny_llama())
    optimizer = mt.optim.SGD(list(model.model.layers.parameters()), lr=0.1)
    (micro_batches,) = batches(1)
    mt.accumulate(model, micro_batches)
    spoil(model, "lm_head.weight", float("nan"))
    mt.clip_grad_norm_(model, 1.0)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert all(value.isfinite().all() for value in mt.full_state_dict(model).values())


@pytest.mark.parametrize("clip", ["global", "layer"])
def test_a_learning_rate_in_a_tensor_is_taken_when_the_step_is_called(clip: str) -> None:
    results = []
    for options in (StreamOptions(serial=True), StreamOptions(lane_delay_seconds=0.01)):
        model, optimizer = start(options, mt.optim.SGD, {"lr": torch.tensor(0.1)}, clip=clip)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        for micro_batches in batches(3):
            train(model, optimizer, iter([micro_batches]), clip)
            scheduler.step()
        results.append(mt.full_state_dict(model))
    assert_same(results[1], results[0])


def test_what_is_held_is_never_seen_half_updated() -> None:
    """Gradients, their aliases and states that somebody holds: a step waits for its updates then."""
    results = []
    for options in (StreamOptions(serial=True), StreamOptions(lane_delay_seconds=0.01)):
        model, optimizer = start(options, mt.optim.SGD, {"momentum": 0.9})
        for micro_batches in batches(3):
            mt.accumulate(model, micro_batches)
            held = [parameter.grad.detach().view(-1) for parameter in model.parameters()]
            optimizer.step()
            for gradient in held:
                gradient.zero_()
            for parameter in model.parameters():
                optimizer.state[parameter]["momentum_buffer"].mul_(0.5)
            del held
            optimizer.zero_grad()
        results.append(result(model, optimizer))
    assert_same(results[1], results[0])


def test_an_alias_of_a_gradient_keeps_its_values() -> None:
    model, optimizer = start()
    first, second = batches(2)
    mt.accumulate(model, first)
    held = [parameter.grad.detach() for parameter in model.parameters()]
    copies = [gradient.clone() for gradient in held]
    optimizer.zero_grad()
    mt.accumulate(model, second)
    mt.clip_grad_norm_(model, 0.1)
    assert all(map(torch.equal, held, copies))


def test_a_change_through_an_alias_is_seen_by_the_norm() -> None:
    model, optimizer = start()
    mt.accumulate(model, next(batches(1)))
    held = [parameter.grad.view(-1) for parameter in model.parameters()]
    before = mt.clip_grad_norm_(model, 1e9)
    for gradient in held:
        gradient.mul_(100)
    assert mt.clip_grad_norm_(model, 1e9).item() == pytest.approx(100 * before.item(), rel=1e-5)
    held[0].fill_(float("nan"))
    optimizer.step()
    assert optimizer.step_was_skipped


def test_every_parameter_has_random_numbers_of_its_own_however_it_is_grouped() -> None:
    weights = []
    for order in (1, -1):
        model, _ = start(precision="bf16", master="bf16", optimizer_compression="8bit")
        parameters = list(model.parameters())
        groups = [{"params": parameters[:7]}, {"params": parameters[7:]}][::order]
        optimizer = mt.optim.AdamW(groups, lr=1e-2)
        train(model, optimizer, batches(2))
        weights.append(mt.full_state_dict(model))
        assert len(set(optimizer._numbers.values())) == len(optimizer._numbers) == len(parameters)
    assert_same(weights[1], weights[0])


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_a_state_dict_goes_through_a_file(compression: bool | str, ema_decay: float | None, tmp_path: Path) -> None:
    settings = {"precision": "bf16", "optimizer_compression": compression, "numbers": {"ema_decay": ema_decay}}
    model, optimizer = start(**settings)
    train(model, optimizer, batches(2))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    _, other = start(**settings)
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True, mmap=True))
    own, its = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert all(torch.equal(own[index][key], its[index][key]) for index in own for key in own[index])
    size = (tmp_path / "optimizer.pt").stat().st_size
    assert size < 1.2 * optimizer.num_state_bytes() + 2**16 or compression == "lossless"


def test_training_inside_the_average_is_refused() -> None:
    model, optimizer = start(numbers={"ema_decay": 0.9})
    with optimizer.ema_weights(), pytest.raises(RefusedError, match="leave the block first"):
        train(model, optimizer, batches(1))


def test_an_average_that_does_not_fit_is_refused_with_the_bytes() -> None:
    needed = host_bytes(engine_of(start()[0]).placement)
    with pytest.raises(UserError, match=r"an average of the weights \(ema_decay\).* needs"):
        start(max_ram_gb=1.1 * needed / 1e9, numbers={"ema_decay": 0.9})


def test_a_load_that_fails_changes_nothing() -> None:
    model, optimizer = start()
    train(model, optimizer, batches(2))
    _, other = start()
    before = {k: t.clone() for s in other.state_dict()["state"].values() for k, t in s.items()}
    saved = optimizer.state_dict()
    for index, change in enumerate([{"exp_avg": None}, {"step": torch.tensor(-1.0)}, {"exp_avg_sq": "x"}]):
        bad = {**saved["state"], 5: {**saved["state"][5], **change}}
        with pytest.raises(UserError, match="layers"):
            other.load_state_dict({**saved, "state": bad})
        after = {k: t for s in other.state_dict()["state"].values() for k, t in s.items()}
        assert all(torch.equal(before[key], after[key]) for key in before), index
    with pytest.raises(UserError, match="no 'param_groups'"):
        other.load_state_dict({"state": {}})


def test_an_interrupted_backward_of_layer_clipping_can_be_started_again() -> None:
    model, optimizer = start(clip="layer")
    first, second = batches(2)
    hook = model.model.layers[0].register_full_backward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        mt.accumulate(model, first)
    hook.remove()
    optimizer.zero_grad()
    mt.accumulate(model, second)
    optimizer.step()


def test_a_state_of_another_rule_is_refused() -> None:
    model, optimizer = start()
    train(model, optimizer, batches(1))
    _, lion = start(optimizer=mt.optim.Lion)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["eps"]  # by which tests/test_saved_rule.py has it refused
    with pytest.raises(UserError, match="of another rule than lion: it has 'exp_avg_sq'"):
        lion.load_state_dict(saved)


def test_lossless_moments_keep_room_in_memory_that_homes_do_not_take(tmp_path: Path) -> None:
    other, its_optimizer = start(optimizer_compression="lossless")
    limit = int(0.85 * host_bytes(engine_of(other).placement))
    model, optimizer = start(optimizer_compression="lossless", max_ram_gb=limit / 1e9, offload_dir=tmp_path)
    engine = engine_of(model)
    assert engine.placement.part_bytes("moments", "ram") <= limit - engine.memory.ram_bytes
    assert engine.placement.part_bytes("moments", "disk") > 0
    train(model, optimizer, batches(3))
    train(other, its_optimizer, batches(3))
    assert_same(result(model, optimizer), result(other, its_optimizer))


def test_averages_nest_and_nobody_trains_in_them() -> None:
    for clip in ("global", "layer"):
        options = StreamOptions(lane_delay_seconds=0.01)
        model, optimizer = start(options, numbers={"ema_decay": 0.9}, clip=clip)
        train(model, optimizer, batches(2), clip)
        before = result(model, optimizer)
        before = {name: value.clone() for name, value in before.items()}
        with optimizer.ema_weights():
            with optimizer.ema_weights():
                pass
            with pytest.raises(RefusedError, match="leave the block first"):
                train(model, optimizer, batches(1), clip)
        optimizer.zero_grad()
        assert_same(result(model, optimizer), before)
        train(model, optimizer, batches(1), clip)


def test_averages_of_several_groups_are_counted_together() -> None:
    needed = host_bytes(engine_of(start()[0]).placement)
    num_parameters = sum(parameter.numel() for parameter in tiny_llama().parameters())
    mt.init(device="cpu", max_ram_gb=(needed + 2.6 * num_parameters) / 1e9)
    model = mt.stream(tiny_llama())
    parameters = list(model.parameters())
    with pytest.raises(UserError, match="an average of the weights"):
        mt.optim.AdamW([{"params": parameters[:9]}, {"params": parameters[9:]}], ema_decay=0.9)


def test_what_somebody_puts_in_place_of_a_gradient_leaves_the_held_one() -> None:
    model, _ = start()
    mt.accumulate(model, next(batches(1)))
    parameter = model.model.layers[0].mlp.up_proj.weight
    held, others = parameter.grad, model.model.layers[0].mlp.down_proj.weight.grad.clone()
    kept = held.clone()
    parameter.grad = torch.zeros(parameter.shape)
    assert torch.equal(held, kept)
    assert not parameter.grad.any()
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight.grad, others)


def test_parameters_without_elements_and_groups_without_parameters() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.empty = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.zeros(0, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(x) + self.empty.sum()

    mt.init(device="cpu")
    model = mt.stream(torch.nn.Sequential(*(Block() for _ in range(3))))
    optimizer = mt.optim.AdamW([{"params": list(model.parameters())}, {"params": []}])
    model(torch.ones(1, 8)).sum().backward()
    assert next(model.parameters()).grad is not None
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


def test_writes_that_would_vanish_are_refused() -> None:
    model, optimizer = start()
    train(model, optimizer, batches(1))
    parameter = next(model.parameters())
    with pytest.raises(RefusedError, match="write into the tensor"):
        optimizer.state[parameter]["exp_avg"] = torch.zeros(1)
    with pytest.raises(RefusedError, match="cannot be replaced"):
        optimizer.state = {}
    assert torch.nn.Parameter(torch.zeros(2)) not in optimizer.state
    optimizer.state[parameter]["exp_avg"].zero_()
    assert not optimizer.state[parameter]["exp_avg"].any()


def test_momentum_of_torch_is_taken_over_and_hooks_are_called() -> None:
    plain = tiny_llama()
    theirs = torch.optim.SGD(plain.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    plain(**next(batches(1))[0]).loss.backward()
    theirs.step()
    model, optimizer = start(optimizer=mt.optim.SGD, numbers={"momentum": 0.9})
    calls = []
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after"))
    optimizer.load_state_dict(theirs.state_dict())
    assert calls == ["after"]
    expected = [state["momentum_buffer"] for state in theirs.state.values()]
    got = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
    assert all(map(torch.equal, got, expected))
    optimizer.param_groups[0]["lr"].mul_(0.5)
    assert theirs.param_groups[0]["lr"] == pytest.approx(0.1)


def test_a_first_group_without_parameters_is_taken_as_in_pytorch() -> None:
    mt.init(device="cpu")
    model = mt.stream(tiny_llama())
    optimizer = mt.optim.AdamW([{"params": []}, {"params": list(model.parameters())}], lr=1e-2, ema_decay=0.9)
    before = mt.full_state_dict(model)
    train(model, optimizer, batches(1))
    assert not torch.equal(mt.full_state_dict(model)["lm_head.weight"], before["lm_head.weight"])
