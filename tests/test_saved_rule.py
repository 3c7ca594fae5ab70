"""An optimizer that was saved by another rule is refused by the names of both, and nothing has changed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_helpers import arguments, llama, rows, train
from update_training import assert_same, result

import megatrain as mt

RULES = {
    "AdamW": mt.optim.AdamW,
    "Adam": mt.optim.Adam,
    "Lion": mt.optim.Lion,
    "SGD": mt.optim.SGD,
    "SGD with momentum": functools.partial(mt.optim.SGD, momentum=0.9),
    "Muon": mt.optim.Muon,
}
FAMILY = {"AdamW": "AdamW or Adam", "Adam": "AdamW or Adam", "SGD with momentum": "SGD"}


def stepped(name: str) -> tuple[Any, Any]:
    mt.init(device="cpu")
    model = mt.stream(llama()).train()
    optimizer = RULES[name](model, lr=1e-2)
    ids = torch.arange(8)[None]
    mt.accumulate(model, [{"input_ids": ids, "labels": ids}])
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("here", RULES)
@pytest.mark.parametrize("there", RULES)
def test_another_rule_is_refused_by_name(there: str, here: str) -> None:
    _, saved = stepped(there)
    model, optimizer = stepped(here)
    before = {name: value.clone() for name, value in result(model, optimizer).items()}
    both = FAMILY.get(there, there), FAMILY.get(here, here)
    if both[0] == both[1]:
        if there == here or both[0] == "AdamW or Adam":
            optimizer.load_state_dict(saved.state_dict())
        return
    with pytest.raises(mt.UserError) as caught:
        optimizer.load_state_dict(saved.state_dict())
    assert f"{both[0]} was saved, and this one is {both[1]}" in str(caught.value)
    assert f"mt.optim.{both[0].split()[0]}" in str(caught.value)
    assert_same(result(model, optimizer), before)


def test_what_pytorch_saved_is_known(tmp_path: Path) -> None:
    plain = llama()
    for made in (torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(plain.parameters())):
        _, optimizer = stepped("Lion")
        with pytest.raises(mt.UserError, match="was saved, and this one is Lion"):
            optimizer.load_state_dict(made.state_dict())
    _, optimizer = stepped("AdamW")
    optimizer.load_state_dict(torch.optim.AdamW(plain.parameters()).state_dict())


@pytest.mark.parametrize("optimizer_class", [mt.optim.Lion, mt.optim.Muon, mt.optim.SGD])
def test_a_trainer_that_goes_on_with_another_rule(tmp_path: Path, optimizer_class: type) -> None:
    mt.init(device="cpu")
    train(mt.Trainer, tmp_path, save_strategy="steps", save_steps=2)
    given = {"optimizer_cls_and_kwargs": (optimizer_class, {"lr": 1e-2})}
    trainer = mt.Trainer(llama(), arguments(tmp_path), train_dataset=rows(), **given)
    with pytest.raises(mt.UserError, match=r"AdamW or Adam was saved, and this one is \w+\. Go on with AdamW"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
