"""Checkpoints of adapters (peft): resumed bit for bit, the best one read back, what is not in them refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from model_zoo import make_batch, make_model
from torch import nn
from trainer_helpers import arguments, assert_equal_weights, llama, rows, train

import megatrain as mt
from megatrain.save.adapters import TRAINED_NAME
from megatrain.save.weights import checkpoint_bytes, read_weights

LORA = peft.LoraConfig(target_modules=["q_proj"], r=2, lora_dropout=0.2, task_type="CAUSAL_LM")
HEAD = peft.LoraConfig(target_modules=["q_proj"], r=2, modules_to_save=["lm_head"], use_dora=True)
PROMPT = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
ENCODED_PROMPT = peft.PromptEncoderConfig(num_virtual_tokens=2, encoder_hidden_size=8, task_type="CAUSAL_LM")
PROJECTED_PREFIX = peft.PrefixTuningConfig(
    num_virtual_tokens=2, prefix_projection=True, encoder_hidden_size=8, task_type="CAUSAL_LM"
)


def adapted(config: peft.PeftConfig = LORA, **options: Any) -> nn.Module:
    model = llama()
    torch.manual_seed(3)
    return peft.get_peft_model(model, copy.deepcopy(config), **options)


def in_bf16() -> nn.Module:
    torch.manual_seed(3)
    return peft.get_peft_model(llama().bfloat16(), copy.deepcopy(LORA), autocast_adapter_dtype=False)


def with_two() -> nn.Module:
    model = adapted()
    model.add_adapter("second", copy.deepcopy(HEAD))
    model.set_adapter("second")
    return model


def with_norms() -> nn.Module:
    """Weights train that no adapter has."""
    model = adapted()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or "norm" in name)
    return model


def through_transformers() -> nn.Module:
    model = llama()
    torch.manual_seed(3)
    model.add_adapter(copy.deepcopy(LORA), "mine")
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lora": adapted,
    "a_name": lambda: adapted(adapter_name="mine"),
    "dora_and_head": lambda: adapted(HEAD),
    "two": with_two,
    "norms_too": with_norms,
    "bf16": in_bf16,
    "prompt": lambda: adapted(PROMPT),
    "encoded_prompt": lambda: adapted(ENCODED_PROMPT),
    "projected_prefix": lambda: adapted(PROJECTED_PREFIX),
    "through_transformers": through_transformers,
}


@pytest.fixture(autouse=True)
def any_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own adapters ask for a peft that may be newer than the installed one, which serves as well."""
    monkeypatch.setattr(transformers.integrations.peft, "MIN_PEFT_VERSION", "0.1", raising=False)


@pytest.mark.parametrize("name", MODELS)
def test_a_resumed_run_ends_bit_equal(tmp_path: Path, name: str) -> None:
    make = MODELS[name]
    whole, _ = train(mt.Trainer, tmp_path / "whole", make())
    train(mt.Trainer, tmp_path / "part", make(), save_strategy="steps", save_steps=2)
    checkpoint = tmp_path / "part" / "checkpoint-2"
    assert not (checkpoint / "model.safetensors").exists()
    resumed = mt.Trainer(model=make(), args=arguments(tmp_path / "part"), train_dataset=rows())
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_equal_weights(mt.full_state_dict(resumed.model), mt.full_state_dict(whole.model))


class Snapshots(transformers.TrainerCallback):
    """The exact weights at each checkpoint."""

    def __init__(self) -> None:
        self.at_step: dict[int, dict[str, torch.Tensor]] = {}

    def on_save(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        self.at_step[state.global_step] = mt.full_state_dict(model)


@pytest.mark.parametrize("save_only_model", [False, True])
@pytest.mark.parametrize("name", ["lora", "two", "encoded_prompt"])
def test_the_best_adapter_is_loaded_at_the_end(tmp_path: Path, name: str, save_only_model: bool) -> None:
    changes = {"eval_strategy": "epoch", "save_strategy": "epoch", "save_only_model": save_only_model}
    # A higher loss counts as better, so the last checkpoint is not the best one.
    changes |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    trainer = mt.Trainer(
        model=MODELS[name](),
        args=arguments(tmp_path, num_train_epochs=3, **changes),
        train_dataset=rows(),
        eval_dataset=rows(4),
        callbacks=[snapshots := Snapshots()],
    )
    trainer.train()
    best, last = trainer.state.best_global_step, trainer.state.global_step
    assert best < last == max(snapshots.at_step)
    assert_equal_weights(mt.full_state_dict(trainer.model), snapshots.at_step[best])


def test_a_checkpoint_of_plain_transformers_is_read_too(tmp_path: Path) -> None:
    plain, _ = train(transformers.Trainer, tmp_path, adapted(HEAD), save_strategy="epoch", num_train_epochs=1)
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    model = mt.stream(adapted(HEAD))
    read_weights(model, checkpoint)
    assert_equal_weights(mt.full_state_dict(model), dict(plain.model.state_dict()))


@pytest.mark.parametrize(
    ("name", "lacking"), [("norms_too", "norm.weight"), ("encoded_prompt", "prompt_encoder.default.mlp_head.0.bias")]
)
def test_what_peft_does_not_save_is_not_left_as_it_was(tmp_path: Path, name: str, lacking: str) -> None:
    train(mt.Trainer, tmp_path, MODELS[name](), save_strategy="epoch", num_train_epochs=1)
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    (checkpoint / TRAINED_NAME).unlink()
    with pytest.raises(mt.UserError, match=f"lacks .* weights that train, such as .*{lacking}.*{TRAINED_NAME}"):
        read_weights(mt.stream(MODELS[name]()), checkpoint)


def test_another_adapter_is_refused(tmp_path: Path) -> None:
    adapted().save_pretrained(tmp_path)
    wider = peft.LoraConfig(target_modules=["q_proj"], r=3)
    with pytest.raises(mt.UserError, match="another adapter than 'default'"):
        read_weights(mt.stream(adapted(wider)), tmp_path)
    with pytest.raises(mt.UserError, match="mine has no adapter_model.safetensors"):
        read_weights(mt.stream(adapted(adapter_name="mine")), tmp_path)


def test_the_space_of_a_checkpoint_leaves_the_base_out(tmp_path: Path) -> None:
    trainer, _ = train(mt.Trainer, tmp_path, in_bf16(), save_strategy="epoch", num_train_epochs=1)
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    tensors = list(checkpoint.glob("*.safetensors"))
    written_bytes = sum(path.stat().st_size for path in tensors)
    counted_bytes = checkpoint_bytes(trainer.model, trainer.engine, trainer.optimizer)
    # Names, shapes and small files are not counted.
    assert counted_bytes <= written_bytes <= counted_bytes + 2**14


def test_adapters_of_parameters_are_refused_before_anything_is_taken_home() -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    model = peft.get_peft_model(make_model("mixtral"), config)
    mt.init(device="cpu")
    with pytest.raises(mt.UserError, match="peft adapts a parameter here .* name modules instead"):
        mt.stream(model)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert torch.isfinite(model(**make_batch()).loss)
