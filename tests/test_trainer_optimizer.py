"""The Trainer's optimizer: its groups, the names of transformers, one of the user's own, clipping, skipped steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from trainer_helpers import (
    arguments,
    assert_equal_weights,
    assert_same_logs,
    llama,
    rows,
    train,
    weights,
)
from transformers import LlamaForCausalLM

import megatrain as mt


def test_the_groups_have_the_members_they_have_in_transformers(tmp_path: Path) -> None:
    groups = []
    for trainer_class in (transformers.Trainer, mt.Trainer):
        trainer = trainer_class(model=llama(), args=arguments(tmp_path), train_dataset=rows())
        names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
        optimizer = trainer.create_optimizer()
        groups.append([(g["weight_decay"], [names[id(p)] for p in g["params"]]) for g in optimizer.param_groups])
    assert groups[0] == groups[1]
    assert isinstance(optimizer, mt.optim.AdamW)


def test_names_of_transformers_mean_the_rules_that_there_are(tmp_path: Path) -> None:
    numbers = {"learning_rate": 1e-3, "adam_beta1": 0.8}
    cases = {
        "adamw_torch": (mt.optim.AdamW, {"betas": (0.8, 0.999)}),
        "adamw_torch_fused": (mt.optim.AdamW, {"betas": (0.8, 0.999)}),
        "sgd": (mt.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        "lion_32bit": (mt.optim.Lion, {"betas": (0.8, 0.999)}),
    }
    for name, (optimizer_class, expected) in cases.items():
        optim_args = "momentum=0.9, nesterov=True" if name == "sgd" else None
        given = arguments(tmp_path, optim=name, optim_args=optim_args, **numbers)
        optimizer = mt.Trainer(model=llama(), args=given, train_dataset=rows()).create_optimizer()
        assert type(optimizer) is optimizer_class
        group = optimizer.param_groups[0]
        assert {"lr": 1e-3, **expected}.items() <= group.items()


def test_sgd_trains_as_in_transformers(tmp_path: Path) -> None:
    """The two round otherwise, as the two AdamW do (LOSS_RTOL)."""
    changes = {"optim": "sgd", "optim_args": "momentum=0.9,nesterov=True", "learning_rate": 0.1}
    plain, _ = train(transformers.Trainer, tmp_path, **changes)
    streamed, _ = train(mt.Trainer, tmp_path, **changes)
    assert_same_logs(plain, streamed)


def test_muon_goes_through_the_trainer_and_resumes(tmp_path: Path) -> None:
    given = {"optimizer_cls_and_kwargs": (mt.optim.Muon, {"lr": 1e-2, "adamw_lr": 1e-3})}
    whole, _ = train(mt.Trainer, tmp_path / "whole", given=given, max_steps=4)
    groups = whole.optimizer.param_groups
    assert [(group["use_muon"], group["weight_decay"]) for group in groups] == [
        (True, 0.1),
        (False, 0.1),
        (False, 0.0),
    ]
    assert [group["initial_lr"] for group in groups] == [1e-2, 1e-3, 1e-3]
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    train(mt.Trainer, tmp_path / "half", given=given, **changes)
    again = mt.Trainer(model=llama(), args=arguments(tmp_path / "half", **changes), train_dataset=rows(), **given)
    again.train(resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-2"))
    assert_equal_weights(weights(again.model), weights(whole.model))


def test_a_megatrain_optimizer_of_the_users_own_is_used(tmp_path: Path) -> None:
    model = mt.stream(llama())
    optimizer = mt.optim.AdamW(model, lr=1e-3)
    trainer, _ = train(mt.Trainer, tmp_path, model, {"optimizers": (optimizer, None)})
    assert trainer.optimizer is optimizer
    # The peak of the schedule is the optimizer's own learning rate.
    assert max(entry.get("learning_rate", 0) for entry in trainer.state.log_history) == 1e-3


@pytest.mark.parametrize(
    "given",
    [
        lambda model: {"optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None)},
        lambda model: {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})},
    ],
    ids=["optimizers", "class"],
)
def test_a_foreign_optimizer_is_refused_before_the_model_is_streamed(tmp_path: Path, given: Any) -> None:
    model = llama()
    with pytest.raises(mt.UserError, match=r"SGD cannot update streamed weights.*megatrain\.optim\.AdamW"):
        mt.Trainer(model=model, args=arguments(tmp_path), train_dataset=rows(), **given(model))
    assert type(model) is LlamaForCausalLM
    assert type(next(model.parameters())) is nn.Parameter


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    optimizer = mt.optim.AdamW(mt.stream(llama()))
    with pytest.raises(mt.UserError, match="optimizer of another model"):
        mt.Trainer(model=llama(), args=arguments(tmp_path), train_dataset=rows(), optimizers=(optimizer, None))


def test_a_foreign_optimizer_from_create_optimizer_is_refused(tmp_path: Path) -> None:
    class Own(mt.Trainer):
        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            self.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
            return self.optimizer

    with pytest.raises(mt.UserError, match="create_optimizer returned torch.optim.sgd.SGD"):
        train(Own, tmp_path)


def test_without_clipping_the_norm_is_logged_and_nothing_is_clipped(tmp_path: Path) -> None:
    loose, _ = train(mt.Trainer, tmp_path, max_grad_norm=1e9, max_steps=2)
    unclipped, _ = train(mt.Trainer, tmp_path, max_grad_norm=0.0, max_steps=2)
    assert unclipped.state.log_history[0]["grad_norm"] == loose.state.log_history[0]["grad_norm"] > 0
    assert_equal_weights(weights(unclipped.model), weights(loose.model))


def test_a_skipped_step_pauses_the_schedule(tmp_path: Path) -> None:
    class SpoilSecond(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                weight = next(model.parameters())
                weight.grad = torch.full(tuple(weight.shape), torch.nan)

    trainer = mt.Trainer(model=llama(), args=arguments(tmp_path), train_dataset=rows(), callbacks=[SpoilSecond()])
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates[1] == rates[2]
    assert len(set(rates)) == len(rates) - 1


def test_the_average_of_the_weights_is_saved_beside_the_model(tmp_path: Path) -> None:
    mt.init(device="cpu")
    options = {"lr": 1e-2, "ema_decay": 0.5}
    given = {"optimizer_cls_and_kwargs": (mt.optim.AdamW, options)}
    trainer, _ = train(mt.Trainer, tmp_path, llama(), given)
    trainer.save_model(str(tmp_path / "model"))
    weights, averages = (
        LlamaForCausalLM.from_pretrained(folder).state_dict() for folder in (tmp_path / "model", tmp_path / "model/ema")
    )
    with trainer.optimizer.ema_weights():
        expected = mt.full_state_dict(trainer.model)
    assert all(torch.equal(averages[name], value) for name, value in expected.items())
    assert not torch.equal(weights["model.norm.weight"], averages["model.norm.weight"])
