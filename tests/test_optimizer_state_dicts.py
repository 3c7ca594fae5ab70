"""States of optimizers in the hands of others: writes that reach them or are refused, state_dicts that do not fit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from update_training import assert_same, batches, result, start, tiny_llama, train

import megatrain as mt
from megatrain.base.errors import RefusedError, UserError

WRITES: dict[str, Callable[[Any, Any], object]] = {
    "update": lambda state, p: state[p].update(exp_avg=torch.zeros(p.shape)),
    "or": lambda state, p: state[p].__ior__({"exp_avg": torch.zeros(p.shape)}),
    "item": lambda state, p: state[p].__setitem__("exp_avg", torch.zeros(p.shape)),
    "delete": lambda state, p: state[p].__delitem__("exp_avg"),
    "clear": lambda state, p: state[p].clear(),
    "pop": lambda state, p: state[p].pop("exp_avg"),
    "popitem": lambda state, p: state[p].popitem(),
    "setdefault": lambda state, p: state[p].setdefault("mine", 1),
    "set one": lambda state, p: state.__setitem__(p, {}),
    "delete one": lambda state, p: state.__delitem__(p),
    "clear all": lambda state, p: state.clear(),
    "pop one": lambda state, p: state.pop(p),
    "pop any": lambda state, p: state.popitem(),
    "setdefault one": lambda state, p: state.setdefault(p, {}),
    "update all": lambda state, p: state.update({p: {}}),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_that_would_not_reach_a_state_is_refused(write: Callable[[Any, Any], object]) -> None:
    model, optimizer = start()
    train(model, optimizer, batches(1))
    before = {name: value.clone() for name, value in result(model, optimizer).items()}
    with pytest.raises(RefusedError, match=r"optimizer\.state.* would not reach the states.*write into the tensors"):
        write(optimizer.state, next(model.parameters()))
    assert_same(result(model, optimizer), before)


def test_copies_of_a_state_are_plain_dicts() -> None:
    model, optimizer = start()
    train(model, optimizer, batches(1))
    state = optimizer.state[next(model.parameters())]
    for made in (dict(state), state.copy(), copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert type(made) is dict
        assert_same(made, dict(state))


def test_hooks_of_state_dict_get_plain_dicts() -> None:
    model, optimizer = start()
    train(model, optimizer, batches(1))
    calls = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before"))

    def add(_: object, state_dict: dict[str, Any]) -> None:
        assert type(state_dict["state"][0]) is dict and state_dict["moments"] == "fp32"
        state_dict["state"][0]["exp_avg"] = torch.ones(1)

    optimizer.register_state_dict_post_hook(add)
    optimizer.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, "mine": 1})
    saved = optimizer.state_dict()
    assert calls == ["before"]
    assert saved["mine"] == 1 and torch.equal(saved["state"][0]["exp_avg"], torch.ones(1))


def test_a_state_dict_is_torch_s_own() -> None:
    plain = tiny_llama()
    theirs = torch.optim.AdamW(plain.named_parameters(), lr=1e-2, weight_decay=0.1)
    plain(**next(batches(1))[0]).loss.backward()
    theirs.step()
    mt.init(device="cpu")
    model = mt.stream(tiny_llama())
    optimizer = mt.optim.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1)
    train(model, optimizer, batches(1))
    saved, of_torch = optimizer.state_dict(), theirs.state_dict()
    assert saved["state"].keys() == of_torch["state"].keys()
    assert saved["state"][3].keys() == of_torch["state"][3].keys()
    numbers = [group for group in saved["param_groups"]]
    assert [{key: group[key] for key in numbers[0]} for group in of_torch["param_groups"]] == numbers


def test_a_load_that_asks_for_another_rule_changes_nothing() -> None:
    plain = tiny_llama()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = start(optimizer=mt.optim.SGD, numbers={"momentum": 0.9})
    train(model, optimizer, batches(1))
    before = {name: value.clone() for name, value in result(model, optimizer).items()}
    with pytest.raises(UserError, match="asks for the rule 'sgd', and its states are those of 'momentum'"):
        optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert_same(result(model, optimizer), before)
    train(model, optimizer, batches(1))


def test_a_load_whose_later_group_does_not_fit_changes_no_earlier_one() -> None:
    mt.init(device="cpu")
    model = mt.stream(tiny_llama())
    parameters = list(model.parameters())
    optimizer = mt.optim.AdamW([{"params": parameters[:4]}, {"params": parameters[4:]}], lr=1e-2)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"], saved["param_groups"][1]["betas"] = 0.5, (2.0, 0.9)
    with pytest.raises(UserError, match="betas"):
        optimizer.load_state_dict(saved)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-2]


@pytest.mark.parametrize("rename", [str, lambda number: number + 100, lambda number: f"layer{number}"])
def test_states_that_no_group_names_are_refused(rename: Callable[[int], object]) -> None:
    model, optimizer = start()
    train(model, optimizer, batches(2))
    saved = copy.deepcopy(optimizer.state_dict())
    before = {name: value.clone() for name, value in result(model, optimizer).items()}
    saved["state"] = {rename(number): state for number, state in saved["state"].items()}
    with pytest.raises(UserError, match=r"states under .* and 27 more, and its param groups name 0, 1, 2 and 27 more"):
        optimizer.load_state_dict(saved)
    assert_same(result(model, optimizer), before)


def test_names_that_both_sides_use_are_taken() -> None:
    model, optimizer = start()
    train(model, optimizer, batches(2))
    saved = copy.deepcopy(optimizer.state_dict())
    named = {**saved, "state": {f"p{number}": state for number, state in saved["state"].items()}}
    named["param_groups"] = [{**group, "params": [f"p{n}" for n in group["params"]]} for group in saved["param_groups"]]
    _, other = start()
    other.load_state_dict(named)
    for number, state in other.state_dict()["state"].items():
        assert_same(state, saved["state"][number])


@pytest.mark.parametrize("groups", [[{"lr": 0.1}], [None], [{"params": 3}]])
def test_groups_without_parameters_are_no_saved_optimizer(groups: list) -> None:
    _, optimizer = start()
    with pytest.raises(UserError, match="has no 'params'"):
        optimizer.load_state_dict({"state": {}, "param_groups": groups})


@pytest.mark.parametrize("compression", [False, "bf16", "8bit", "lossless"])
def test_a_saved_state_with_a_graph_is_taken_without_it(compression: bool | str) -> None:
    model, optimizer = start(numbers={"ema_decay": 0.9})
    train(model, optimizer, batches(1))
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        for name, value in state.items():
            state[name] = value.requires_grad_() * 1
    _, other = start(optimizer_compression=compression, numbers={"ema_decay": 0.9})
    other.load_state_dict(saved)
    tensors = [value for state in other._states.values() for value in state.values() if isinstance(value, torch.Tensor)]
    assert tensors and not any(tensor.requires_grad for tensor in tensors)
