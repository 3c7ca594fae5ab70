"""megatrain.Trainer against transformers.Trainer on a plain copy of the same model, with the same seed and data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from trainer_helpers import (
    LOSS_RTOL,
    Blocks,
    Recorder,
    SeededMicroBatches,
    arguments,
    assert_same_logs,
    llama,
    rows,
    train,
    weights,
)

import megatrain as mt
from megatrain.execute.engine import engine_of

# Same losses, schedule and events


def test_logs_and_events_are_those_of_transformers(tmp_path: Path) -> None:
    plain, expected = train(transformers.Trainer, tmp_path)
    streamed, got = train(mt.Trainer, tmp_path)
    assert_same_logs(plain, streamed)
    assert got.events == expected.events
    # 14 rows make 7 micro-batches: the third step of an epoch has one, and its loss is scaled accordingly.
    assert [entry["step"] for entry in streamed.state.log_history] == [1, 2, 3, 4, 5, 6, 6]


def smoothed_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    logits = outputs["logits"][:, :-1].flatten(0, 1).float()
    summed = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum", label_smoothing=0.2)
    return summed / num_items_in_batch


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({}, {"label_smoothing_factor": 0.1}),
        ({"compute_loss_func": smoothed_loss}, {}),
        ({}, {"gradient_accumulation_steps": 1, "adam_beta2": 0.9, "adam_epsilon": 1e-6, "torch_empty_cache_steps": 1}),
        ({}, {"max_grad_norm": 0.0, "lr_scheduler_type": "linear", "max_steps": 4}),
        ({}, {"logging_strategy": "epoch", "include_num_input_tokens_seen": "all"}),
        ({}, {"train_sampling_strategy": "sequential", "dataloader_num_workers": 1, "data_seed": 5}),
        ({}, {"neftune_noise_alpha": 5.0, "gradient_checkpointing": True, "gradient_accumulation_steps": 1}),
    ],
    ids=["smoothing", "loss_func", "one_micro_batch", "no_clip", "epoch_logs", "loader", "neftune_checkpointing"],
)
def test_arguments_have_the_effect_they_have_in_transformers(
    tmp_path: Path, given: dict[str, Any], changes: dict[str, Any]
) -> None:
    plain, expected = train(transformers.Trainer, tmp_path, given=given, **changes)
    streamed, got = train(mt.Trainer, tmp_path, given=given, **changes)
    assert_same_logs(plain, streamed)
    assert got.events == expected.events


@pytest.mark.parametrize(("accumulation", "plain_class"), [(1, transformers.Trainer), (3, SeededMicroBatches)])
def test_dropout_draws_the_same_numbers(tmp_path: Path, accumulation: int, plain_class: type) -> None:
    changes = {"gradient_accumulation_steps": accumulation}
    plain, _ = train(plain_class, tmp_path, llama(attention_dropout=0.3), **changes)
    streamed, _ = train(mt.Trainer, tmp_path, llama(attention_dropout=0.3), **changes)
    assert_same_logs(plain, streamed)


class DoubledLoss:
    """Mixed into both trainers: an overridden compute_loss that returns a mean over its own micro-batch."""

    if hasattr(transformers.Trainer, "loss_is_scaled_for_ga"):  # not in every supported version
        loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        return (2 * outputs.loss, outputs) if return_outputs else 2 * outputs.loss


def test_an_overridden_compute_loss_is_used(tmp_path: Path) -> None:
    plain, _ = train(type("Plain", (DoubledLoss, transformers.Trainer), {}), tmp_path)
    streamed, _ = train(type("Streamed", (DoubledLoss, mt.Trainer), {}), tmp_path)
    assert_same_logs(plain, streamed)
    assert plain.state.log_history[0]["loss"] > 1.5 * train(mt.Trainer, tmp_path)[0].state.log_history[0]["loss"]


@pytest.mark.parametrize("output", ["dict", "tuple", "tensor"])
def test_a_module_of_the_users_own(tmp_path: Path, output: str) -> None:
    # A bare tensor is more than transformers takes: there the plain run returns the 1-tuple.
    plain, _ = train(transformers.Trainer, tmp_path, Blocks("tuple" if output == "tensor" else output))
    streamed, _ = train(mt.Trainer, tmp_path, Blocks(output), eval_strategy="epoch", given={"eval_dataset": rows(4)})
    logged = [
        [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] for trainer in (plain, streamed)
    ]
    assert logged[0] == pytest.approx(logged[1], rel=LOSS_RTOL)
    assert sum("eval_loss" in entry for entry in streamed.state.log_history) == 2


def test_nan_losses_are_left_out_of_the_log(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        value = smoothed_loss(outputs, labels, num_items_in_batch)
        # The third row of the data set makes a NaN whose gradient is fine.
        return value + torch.where((labels == rows()[2]["labels"]).all(), torch.nan, 0.0)

    changes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 7, "logging_steps": 2}
    plain, _ = train(transformers.Trainer, tmp_path, given={"compute_loss_func": loss}, **changes)
    streamed, _ = train(mt.Trainer, tmp_path, given={"compute_loss_func": loss}, **changes)
    assert_same_logs(plain, streamed)


# Layer-major steps


def test_a_step_visits_a_layer_twice_whatever_the_number_of_micro_batches(tmp_path: Path) -> None:
    visits = {}
    for accumulation in (1, 7):
        changes = {"gradient_accumulation_steps": accumulation, "max_steps": 3, "logging_strategy": "no"}
        trainer, _ = train(mt.Trainer, tmp_path, **changes)
        visits[accumulation] = trainer.engine.stats()["visits"]
    assert visits[1] == visits[7]
    assert visits[7]["model.layers.0"] == 2 * 3


def test_training_step_refuses_a_micro_batch_that_was_changed_after_it_ran(tmp_path: Path) -> None:
    class Changing(mt.Trainer):
        def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
            if len(self._losses) == 2:
                inputs = dict(inputs)
            return super().training_step(model, inputs, num_items_in_batch)

    with pytest.raises(mt.RefusedError, match="data collator"):
        train(Changing, tmp_path)


def test_batches_replaced_after_they_were_fetched_run_as_given(tmp_path: Path) -> None:
    class Shortening:
        def get_batch_samples(self, *args: Any) -> Any:
            batches, num_items = super().get_batch_samples(*args)
            return [{name: tensor[:, :6] for name, tensor in batch.items()} for batch in batches], num_items

    plain, _ = train(type("Plain", (Shortening, transformers.Trainer), {}), tmp_path)
    streamed, _ = train(type("Streamed", (Shortening, mt.Trainer), {}), tmp_path)
    assert_same_logs(plain, streamed)


def test_the_summary_is_printed_once_and_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, _ = train(mt.Trainer, tmp_path)
    printed = capsys.readouterr().out
    assert printed.startswith(trainer.engine.summary() + "\n")
    assert printed.count(trainer.engine.summary()) == 1


# Reports of layers


def test_layers_are_reported_to_callbacks_and_not_to_console_or_history(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, recorder = train(mt.Trainer, tmp_path, max_steps=4, logging_steps=2)
    first, second = (log for log in recorder.logs if "grad_norm" in log)
    for log in (first, second):
        norms = [value for name, value in log.items() if name.startswith("grad_norm/")]
        assert sum(norm**2 for norm in norms) ** 0.5 == pytest.approx(log["grad_norm"], rel=1e-5)
        assert {"grad_norm/model.layers.0", "update_ratio/model.layers.0"} <= log.keys()
    assert not any("/" in name for entry in trainer.state.log_history for name in entry)
    assert "grad_norm/" not in capsys.readouterr().out


def test_the_update_ratio_is_that_of_the_update_before(tmp_path: Path) -> None:
    snapshots = []

    class Snapshot(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
            snapshots.append(weights(model))

    recorder = Recorder()
    trainer = mt.Trainer(
        model=llama(), args=arguments(tmp_path, max_steps=3, logging_steps=3), train_dataset=rows(),
        callbacks=[Snapshot(), recorder],
    )  # fmt: skip
    trainer.train()
    names = [name for name in snapshots[0] if name.startswith("model.layers.1.")]
    before, after = (torch.cat([snapshot[name].flatten() for name in names]) for snapshot in snapshots[:2])
    ratio = ((after - before).norm() / before.norm()).item()
    assert recorder.logs[0]["update_ratio/model.layers.1"] == pytest.approx(ratio, rel=1e-3)


def test_updates_are_measured_only_where_a_log_needs_them(tmp_path: Path) -> None:
    measured = []

    class Watch(transformers.TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            measured.append(trainer.engine.measure_updates)

    trainer = mt.Trainer(
        model=llama(), args=arguments(tmp_path, logging_steps=3), train_dataset=rows(), callbacks=[Watch()]
    )
    trainer.train()
    assert measured == [False, True, False, False, True, False]


def test_layer_reports_can_be_turned_off(tmp_path: Path) -> None:
    quiet = type("Quiet", (mt.Trainer,), {"log_layers": False})
    _, recorder = train(quiet, tmp_path, max_steps=2)
    assert not any("/" in name for log in recorder.logs for name in log)


# Evaluation


def test_evaluation_between_steps_is_that_of_transformers(tmp_path: Path) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "per_device_eval_batch_size": 3}
    given = {"eval_dataset": rows(5)}
    runs = [
        train(trainer_class, tmp_path, llama(attention_dropout=0.1), given, **changes)
        for trainer_class in (SeededMicroBatches, mt.Trainer)
    ]
    (plain, expected), (streamed, got) = runs
    evaluations = [
        [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        for trainer in (plain, streamed)
    ]
    assert len(evaluations[0]) == 4
    assert evaluations[0] == pytest.approx(evaluations[1], rel=LOSS_RTOL)
    losses = [
        [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] for trainer in (plain, streamed)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=LOSS_RTOL)
    assert got.events == expected.events


def test_evaluation_keeps_no_logits_unless_metrics_need_them(tmp_path: Path) -> None:
    kept = []

    class Watched(mt.Trainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            result = super().prediction_step(*args, **kwargs)
            kept.append(result[1])
            return result

    given = {"args": arguments(tmp_path), "eval_dataset": rows(4)}
    Watched(model=llama(), **given).evaluate()
    assert kept == [None]
    metrics = Watched(model=llama(), compute_metrics=lambda p: {"shape": list(p.predictions.shape)}, **given).evaluate()
    assert metrics["eval_shape"] == [4, 9, 64]


# Setting up


def test_model_init_makes_a_streamed_model(tmp_path: Path) -> None:
    runs = []
    for trainer_class in (transformers.Trainer, mt.Trainer):
        runs.append(trainer_class(model_init=lambda: llama(), args=arguments(tmp_path), train_dataset=rows()))
        runs[-1].train()
    assert_same_logs(*runs)


def test_refused_arguments_leave_the_model_alone(tmp_path: Path) -> None:
    model = llama()
    with pytest.raises(mt.UserError, match="fp16=True"):
        mt.Trainer(model=model, args=arguments(tmp_path, fp16=True), train_dataset=rows())
    assert type(next(model.parameters())) is nn.Parameter


def test_the_arguments_follow_the_device_of_the_stream(tmp_path: Path) -> None:
    args = arguments(tmp_path, use_cpu=False)
    args.__dict__["_setup_devices"] = torch.device("cuda", 0)  # as on a machine with four GPUs
    args._n_gpu = 4
    trainer = mt.Trainer(model=mt.stream(llama()), args=args, train_dataset=rows())
    assert trainer.args.device == trainer.engine.device == torch.device("cpu")
    assert trainer.args.train_batch_size == 2
    trainer.train()


@pytest.mark.parametrize(("model", "got"), [("tiny", "a str"), (3, "an int"), (nn.Linear, "Linear")])
def test_what_is_no_model_is_refused(tmp_path: Path, model: object, got: str) -> None:
    refused = pytest.raises(mt.UserError, match=f"model must be a model, got {got}: load it first")
    with refused:
        mt.Trainer(model=model, args=arguments(tmp_path), train_dataset=rows())
    with refused:
        mt.Trainer(model_init=lambda: model, args=arguments(tmp_path), train_dataset=rows())


def test_use_cpu_with_a_stream_on_another_device_is_refused(tmp_path: Path) -> None:
    model = mt.stream(llama())
    engine_of(model).device = torch.device("cuda", 0)
    with pytest.raises(mt.UserError, match=r"use_cpu=True, but the model is streamed on cuda:0.*megatrain\.init"):
        mt.Trainer(model=model, args=arguments(tmp_path), train_dataset=rows())


def test_label_smoothing_of_a_model_with_adapters_shifts_the_labels_as_in_transformers(tmp_path: Path) -> None:
    def adapted() -> nn.Module:
        return peft.get_peft_model(llama(), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))

    plain, _ = train(transformers.Trainer, tmp_path, adapted(), label_smoothing_factor=0.1)
    streamed, _ = train(mt.Trainer, tmp_path, adapted(), label_smoothing_factor=0.1)
    assert_same_logs(plain, streamed)


def test_bf16_makes_a_bf16_stream_without_autocast(tmp_path: Path) -> None:
    trainer, _ = train(mt.Trainer, tmp_path, bf16=True, max_steps=2)
    assert trainer.engine.precision == "bf16"
    assert trainer.args.bf16
    assert trainer.accelerator.mixed_precision == "no"


def test_bf16_on_an_fp32_stream_is_refused(tmp_path: Path) -> None:
    model = mt.stream(llama())
    with pytest.raises(mt.UserError, match=r"bf16=True, but the model is streamed in fp32.*megatrain\.init"):
        mt.Trainer(model=model, args=arguments(tmp_path, bf16=True), train_dataset=rows())


def test_nothing_is_pinned_for_a_stream_on_the_cpu(tmp_path: Path) -> None:
    args = arguments(tmp_path, dataloader_pin_memory=True)
    trainer = mt.Trainer(model=llama(), args=args, train_dataset=rows())
    assert not trainer.get_train_dataloader().pin_memory  # torch warns of it where there is no GPU
