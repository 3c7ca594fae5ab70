"""The table of TrainingArguments: complete for the installed transformers, refuses by name, and is what docs show."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from transformers import SchedulerType, TrainingArguments

from megatrain import arguments
from megatrain.argument_ranges import ANY, plain
from megatrain.arguments import HONOURED, TABLE, changed_unknown_fields, check_arguments, render_markdown
from megatrain.base.errors import UserError

RESTRICTED = [name for name, row in TABLE.items() if row.allowed is not None]


@pytest.fixture
def args(tmp_path: Path) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True)


def test_every_field_of_the_installed_version_has_a_row() -> None:
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert fields - TABLE.keys() == set(), "add a row for each to megatrain/arguments.py"


def test_the_defaults_pass(args: TrainingArguments) -> None:
    check_arguments(args)


@pytest.mark.parametrize("name", RESTRICTED)
def test_a_value_that_is_not_allowed_is_refused_with_name_and_remedy(args: TrainingArguments, name: str) -> None:
    if not hasattr(args, name):
        pytest.skip(f"the installed transformers has no {name}")
    setattr(args, name, "something else")
    with pytest.raises(UserError) as error:
        check_arguments(args)
    assert f"{name}='something else'" in str(error.value)
    assert TABLE[name].remedy in str(error.value)


@pytest.mark.parametrize("name", RESTRICTED)
def test_an_allowed_value_passes(args: TrainingArguments, name: str) -> None:
    for value in TABLE[name].allowed:
        setattr(args, name, value)
        check_arguments(args)


@pytest.mark.parametrize(
    ("name", "value"),
    [("fp16", True), ("torch_compile", True), ("optim", "adafactor"), ("auto_find_batch_size", True)],
)
def test_real_arguments_are_refused(tmp_path: Path, name: str, value: object) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **{name: value})
    with pytest.raises(UserError, match=f"{name}="):
        check_arguments(args)


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_bnb_8bit", "paged_adamw_32bit", "lion_8bit"])
def test_fewer_bits_are_a_setting_of_the_engine(tmp_path: Path, name: str) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, optim=name)
    with pytest.raises(UserError, match=rf"optim='{name}' must be one of.*init\(optimizer_compression='8bit'\)"):
        check_arguments(args)


@pytest.mark.parametrize(
    ("optim", "optim_args", "told"),
    [
        ("adamw_torch", "momentum=0.9", "optim='adamw_torch' takes none"),
        ("sgd", "momentum", "does not take 'momentum'"),
        ("sgd", "momentum=5", "does not take 'momentum=5'"),
        ("sgd", "momentum=nan", "does not take"),
        ("sgd", "nesterov=True", "nesterov without momentum"),
        ("sgd", "weight_decay=0.1", "weight_decay is an argument of its own"),
        ("sgd", "momentum=fast", "could not convert string to float"),
    ],
)
def test_optim_args_that_nobody_reads_are_refused(tmp_path: Path, optim: str, optim_args: str, told: str) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, optim=optim, optim_args=optim_args)
    with pytest.raises(UserError, match=f"optim_args='{optim_args}' is refused.*{told}"):
        check_arguments(args)


def test_all_refusals_come_in_one_message(args: TrainingArguments) -> None:
    args.fp16 = True
    args.use_liger_kernel = True
    with pytest.raises(UserError, match="(?s)fp16=True.*use_liger_kernel=True"):
        check_arguments(args)


UNCHECKED = {"run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "hub_token"}
"""Handed on as they are."""


def test_every_field_that_is_honoured_is_checked(args: TrainingArguments) -> None:
    honoured = {name for name, row in TABLE.items() if row.status == HONOURED and row.allowed is None}
    assert {name for name in honoured if TABLE[name].check is ANY} == UNCHECKED
    for name in honoured - UNCHECKED:
        if hasattr(args, name) and "tried" not in TABLE[name].check.wanted:
            assert TABLE[name].check.fits(plain(getattr(args, name))), name
            assert not TABLE[name].check.fits(object()), name


@pytest.mark.parametrize("given", [None, {}, "training_args.bin"])
def test_what_is_no_training_arguments_is_refused(given: object) -> None:
    with pytest.raises(UserError, match=f"transformers.TrainingArguments, got a {type(given).__name__}"):
        check_arguments(given)


NAN = float("nan")
OUT_OF_RANGE: list[tuple[str, object]] = [
    ("per_device_train_batch_size", 0),
    ("per_device_eval_batch_size", -1),
    ("gradient_accumulation_steps", 0),
    ("max_steps", 0),
    ("max_steps", -5),
    ("learning_rate", NAN),
    ("learning_rate", -1.0),
    ("num_train_epochs", -1.0),
    ("num_train_epochs", float("inf")),
    ("adam_beta1", 1.0),
    ("adam_epsilon", -1e-8),
    ("label_smoothing_factor", 1.5),
    ("max_grad_norm", NAN),
    ("max_grad_norm", -1.0),
    ("seed", -1),
    ("seed", 2**32),
    ("data_seed", 2**70),
    ("save_steps", 0),
    ("save_steps", NAN),
    ("logging_steps", -1),
    ("eval_steps", -1),
    ("warmup_steps", NAN),
    ("warmup_steps", -1),
    ("neftune_noise_alpha", -1),
    ("neftune_noise_alpha", NAN),
    ("neftune_noise_alpha", 1e300),
    ("eval_accumulation_steps", 0),
    ("eval_delay", -1),
    ("save_total_limit", -1),
    ("save_total_limit", 0),
    ("dataloader_num_workers", -1),
    ("dataloader_num_workers", 2**31),
    ("dataloader_prefetch_factor", 0),
    ("per_device_eval_batch_size", 2**70),
    ("num_train_epochs", 1e308),
    # Of another type, as only Python can hand them over
    ("learning_rate", "1e-4"),
    ("max_steps", 10.0),
    ("seed", None),
    ("per_device_train_batch_size", True),
    ("bf16", "false"),
    ("label_names", "labels"),
    ("metric_for_best_model", 3),
    # Choices
    ("log_level", "foo"),
    ("log_level_replica", "foo"),
    ("train_sampling_strategy", "foo"),
    ("include_num_input_tokens_seen", "foo"),
    ("dataloader_multiprocessing_context", "foo"),
    ("include_for_metrics", ["foo"]),
    ("hub_strategy", "foo"),
    ("gradient_checkpointing_kwargs", "x"),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_number_that_cannot_work_is_refused_before_work(args: TrainingArguments, name: str, value: object) -> None:
    for strategy in ("save_strategy", "logging_strategy", "eval_strategy"):
        setattr(args, strategy, "steps")
    check_arguments(args)
    setattr(args, name, value)
    with pytest.raises(UserError, match=re.escape(f"TrainingArguments: {name}={value!r} must be ") + ".+"):
        check_arguments(args)


IN_RANGE: list[tuple[str, object]] = [
    ("max_steps", -1),
    ("max_grad_norm", 0.0),
    ("max_grad_norm", float("inf")),
    ("seed", 2**32 - 1),
    ("data_seed", None),
    ("save_steps", 0.1),
    ("eval_steps", None),
    ("learning_rate", 0.0),
    ("learning_rate", np.float32(1e-3)),
    ("max_steps", np.int64(3)),
    ("max_grad_norm", None),
    ("remove_unused_columns", 0),
    ("save_total_limit", None),
    ("dataloader_num_workers", 8),
]


@pytest.mark.parametrize(("name", "value"), IN_RANGE)
def test_a_number_at_the_edge_passes(args: TrainingArguments, name: str, value: object) -> None:
    args.save_strategy = "steps"
    setattr(args, name, value)
    check_arguments(args)


def test_an_interval_that_is_not_read_may_be_anything(args: TrainingArguments) -> None:
    args.save_strategy, args.save_steps = "no", 0
    check_arguments(args)


TOGETHER: list[tuple[dict[str, object], str]] = [
    ({"dataloader_persistent_workers": True}, "dataloader_persistent_workers=True .*dataloader_num_workers"),
    ({"dataloader_multiprocessing_context": "spawn"}, "multiprocessing_context='spawn' .*dataloader_num_workers"),
    ({"save_strategy": "best"}, "save_strategy='best' .*eval_strategy"),
    ({"save_strategy": "best", "eval_strategy": "epoch"}, "save_strategy='best' .*metric_for_best_model"),
    ({"load_best_model_at_end": True, "save_strategy": "no"}, "load_best_model_at_end=True .*eval_strategy"),
    (
        {"lr_scheduler_type": "cosine_with_min_lr"},
        "kwargs=None is refused.*Instead: .*num_cycles, min_lr, min_lr_rate",
    ),
    ({"lr_scheduler_type": "warmup_stable_decay"}, "lr_scheduler_type='warmup_stable_decay' .*num_decay_steps"),
    ({"lr_scheduler_kwargs": {"a": 1}}, "lr_scheduler_kwargs={'a': 1} is refused.*unexpected .*takes \\(nothing\\)"),
    ({"lr_scheduler_kwargs": "x"}, "lr_scheduler_kwargs='x' is refused"),
    ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": "x"}}, "lr_scheduler_kwargs=.* is refused"),
    ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": NAN}}, "num_cycles is nan"),
    ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": -1.0}}, "it gives a learning rate of -0.0"),
    ({"report_to": "foo"}, "report_to: 'foo' is refused: no such integration.*tensorboard"),
    ({"report_to": "flyte"}, "report_to: 'flyte' is refused: .*pip install"),
    ({"accelerator_config": {"even_batches": "foo"}}, "accelerator_config: even_batches='foo' must be True or False"),
    ({"accelerator_config": {"dispatch_batches": True}}, "accelerator_config: dispatch_batches=True is refused"),
    ({"accelerator_config": {"gradient_accumulation_kwargs": {"foo": 1}}}, "accelerator_config: .*'foo'"),
    ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 0}}}, "accelerator_config: .*num_steps"),
    ({"push_to_hub": True, "hub_model_id": "../x", "hub_token": "t"}, "hub_model_id='../x' is refused"),
]


@pytest.mark.parametrize(("given", "told"), TOGETHER, ids=str)
def test_what_cannot_work_together_is_refused(tmp_path: Path, given: dict[str, object], told: str) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **given)
    with pytest.raises(UserError, match=told):
        check_arguments(args)


@pytest.mark.parametrize("kind", [kind.value for kind in SchedulerType])
def test_every_schedule_passes_with_what_it_needs(tmp_path: Path, kind: str) -> None:
    needed = {"warmup_stable_decay": {"num_decay_steps": 5}}
    needed |= dict.fromkeys(("cosine_with_min_lr", "cosine_warmup_with_min_lr"), {"min_lr_rate": 0.1})
    for max_steps, warmup_steps in ((-1, 0), (1, 0), (7, 0.1), (20, 30), (10**12, 10)):
        check_arguments(
            TrainingArguments(
                output_dir=str(tmp_path),
                use_cpu=True,
                lr_scheduler_type=kind,
                lr_scheduler_kwargs=needed.get(kind),
                max_steps=max_steps,
                warmup_steps=warmup_steps,
                eval_strategy="epoch",
            )
        )


def test_bf16_and_the_usual_flags_pass(tmp_path: Path) -> None:
    check_arguments(
        TrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=True, gradient_checkpointing=True, do_train=True)
    )


def test_an_unknown_field_passes_at_its_default_and_is_refused_else(
    args: TrainingArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "TABLE", {name: row for name, row in TABLE.items() if name != "weight_decay"})
    check_arguments(args)
    args.weight_decay = 0.5
    assert changed_unknown_fields(args) == ["weight_decay"]
    with pytest.raises(UserError, match="weight_decay=0.5 is refused"):
        check_arguments(args)


def test_fields_of_a_subclass_are_its_own(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class MyArguments(TrainingArguments):
        my_field: int = 1

    check_arguments(MyArguments(output_dir=str(tmp_path), use_cpu=True, my_field=2))


def test_docs_show_the_table() -> None:
    path = Path(__file__).parent.parent / "docs" / "training_arguments.md"
    assert path.read_text(encoding="utf-8") == render_markdown(), (
        "write it again: python -c 'from megatrain.arguments import render_markdown; "
        'open("docs/training_arguments.md", "w").write(render_markdown())\''
    )
