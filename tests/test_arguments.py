"""The table of TrainingArguments: complete for the installed transformers, refuses by name, and is what docs show."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from transformers import TrainingArguments

from megatrain import arguments
from megatrain.arguments import TABLE, changed_unknown_fields, check_arguments, render_markdown
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
    with pytest.raises(UserError, match=rf"optim='{name}' is refused.*init\(optimizer_compression='8bit'\)"):
        check_arguments(args)


@pytest.mark.parametrize(
    ("optim", "optim_args", "told"),
    [
        ("adamw_torch", "momentum=0.9", "optim='adamw_torch' takes none"),
        ("sgd", "momentum", "does not read 'momentum'"),
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
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_number_that_cannot_work_is_refused_before_work(args: TrainingArguments, name: str, value: object) -> None:
    for strategy in ("save_strategy", "logging_strategy", "eval_strategy"):
        setattr(args, strategy, "steps")
    check_arguments(args)
    setattr(args, name, value)
    with pytest.raises(UserError, match=f"{name}={value} is refused: it cannot work. Instead: .+"):
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
]


@pytest.mark.parametrize(("name", "value"), IN_RANGE)
def test_a_number_at_the_edge_passes(args: TrainingArguments, name: str, value: object) -> None:
    args.save_strategy = "steps"
    setattr(args, name, value)
    check_arguments(args)


def test_an_interval_that_is_not_read_may_be_anything(args: TrainingArguments) -> None:
    args.save_strategy, args.save_steps = "no", 0
    check_arguments(args)


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
