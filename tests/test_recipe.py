"""Recipes: what is read, what is refused and with which words."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainingArguments

import megatrain as mt
from megatrain.base.config import Config
from megatrain.base.errors import UserError
from megatrain.recipe import SECTIONS, Recipe, load_recipe
from megatrain.typecheck import accepts, describe, field_types

REPOSITORY = Path(__file__).resolve().parents[1]
MINIMAL = """
model: {name: some/model}
data:
  path: texts
  sequence_length: 128
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    file = tmp_path / "minimal.yaml"
    file.write_text(MINIMAL, encoding="utf-8")
    return file


def refusal(file: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(file, overrides)
    return str(caught.value)


def test_a_minimal_recipe_gets_the_defaults(minimal: Path) -> None:
    recipe = load_recipe(minimal)
    assert recipe.model.name == "some/model"
    assert recipe.model.dtype == "float32"
    assert recipe.data.sequence_length == 128
    assert recipe.engine == Config()
    assert recipe.output_dir == Path("runs/minimal")
    assert recipe.training == {}


def test_a_recipe_is_frozen_and_takes_keywords_only(minimal: Path) -> None:
    recipe = load_recipe(minimal)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.model.name = "another"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Recipe(recipe.model)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("modle.name=x", "modle: unknown key; did you mean model?"),
        ("model.nam=x", "model.nam: unknown key; did you mean model.name?"),
        ("data.sequence_lenght=3", "data.sequence_lenght: unknown key; did you mean data.sequence_length?"),
        ("engine.max_vram=3", "engine.max_vram: unknown key; did you mean engine.max_vram_gb?"),
        ("sample.promts=[]", "sample.promts: unknown key; did you mean sample.prompts?"),
        ("output.directory=x", "output.directory: unknown key; known here: dir, trace_step, save_model, overwrite"),
        ("training.learningrate=1", "training.learningrate: unknown key; did you mean training.learning_rate?"),
        ("learning_rate=1", "learning_rate: unknown key; did you mean training.learning_rate?"),
        ("sequence_length=1", "sequence_length: unknown key; did you mean data.sequence_length?"),
        ("training.max_vram_gb=1", "training.max_vram_gb: unknown key; did you mean engine.max_vram_gb?"),
        ("xyzzy=1", "xyzzy: unknown key; known here: model, data, optimizer, engine, sample, output, training"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(minimal: Path, override: str, told: str) -> None:
    assert refusal(minimal, override) == told


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("training.learning_rate=fast", "training.learning_rate: wants a number, got 'fast' (text)"),
        ("training.bf16=yes", "training.bf16: wants true or false, got 'yes' (text)"),
        ("training.bf16=1", "training.bf16: wants true or false, got 1 (a whole number)"),
        ("training.max_steps=2.5", "training.max_steps: wants a whole number, got 2.5 (a number)"),
        ("training.max_steps=true", "training.max_steps: wants a whole number, got True (true or false)"),
        ("data.path=3", "data.path: wants text or a list of sections or a list of texts, got 3 (a whole number)"),
        ("data.path=", "data.path: wants text or a list of sections or a list of texts, got nothing"),
        ("engine.max_vram_gb=80GB", "engine.max_vram_gb: wants a number or nothing, got '80GB' (text)"),
        ("sample.prompts=hello", "sample.prompts: wants a list of texts, got 'hello' (text)"),
        ("optimizer.momentum=yes", "optimizer.momentum: wants a number or nothing, got 'yes' (text)"),
        ("optimizer.betas=0.9", "optimizer.betas: wants a list of numbers or nothing, got 0.9 (a number)"),
        ("output.overwrite=1", "output.overwrite: wants true or false, got 1 (a whole number)"),
        ("model=some/model", "model: wants a section with keys below it, got 'some/model' (text)"),
    ],
)
def test_a_wrong_type_names_the_key_the_given_and_the_wanted(minimal: Path, override: str, told: str) -> None:
    assert refusal(minimal, override) == told


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.dtype=fp32", ["model.dtype", "float32, bfloat16, auto"]),
        ("data.format=xml", ["data.format", "messages"]),
        ("engine.precision=fp64", ["engine: precision", "bf16"]),
        ("sample.max_new_tokens=0", ["sample.max_new_tokens", "1 or more"]),
        ('output.dir="x\\0y"', ["output.dir", "NUL", "remove it"]),
        ('data.path=["a", "x\\0y"]', ["data.path", "NUL"]),
        ('training.run_name="\\0"', ["training.run_name", "NUL"]),
        ("training.output_dir=x", ["training.output_dir", "output.dir"]),
        ("model.name.deeper=x", ["model.name is 'some/model'"]),
        ("learning rate", ["key=value"]),
        ("=3", ["key=value"]),
        ("data.seed=a: b: c", ["the value of data.seed", "YAML"]),
    ],
)
def test_a_value_that_cannot_work_is_refused(minimal: Path, override: str, named: list[str]) -> None:
    told = refusal(minimal, override)
    assert all(word in told for word in named), told


def test_a_missing_key_says_how_to_give_it(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("model: {name: m}\ndata: {sequence_length: 64}", encoding="utf-8")
    assert refusal(file) == f"data.path is missing: set it in {file}, or add data.path=... to the command"
    assert load_recipe(file, ["data.path=here"]).data.path == "here"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["name=adafactor"], "optimizer.name is 'adafactor'; use one of adamw, adam, sgd, lion, muon"),
        (["momentum=0.9"], "optimizer.momentum needs optimizer.name"),
        (["name=adamw", "momentum=0.9"], "optimizer.momentum is no number of adamw, which reads betas, eps"),
        (["name=sgd", "momentum=1.5"], "optimizer.momentum is 1.5; use a number from 0 to below 1"),
        (["name=lion", "betas=[0.9]"], "optimizer.betas is [0.9]; use two numbers"),
        (["name=adam", "eps=-1"], "optimizer.eps is -1; use 0 or more"),
        (["name=muon", "adjust_lr_fn=fast"], "optimizer.adjust_lr_fn is 'fast'; use one of original"),
        (["name=muon", "ns_coefficients=[1, 2]"], "optimizer.ns_coefficients is [1, 2]; use three within 100 of 0"),
        (["name=muon", "ns_steps=100"], "optimizer.ns_steps is 100; use 0 to 99"),
        (["max_skipped_steps=-1"], "optimizer.max_skipped_steps is -1; use 0 or more"),
    ],
)
def test_numbers_of_an_optimizer_that_cannot_work_are_refused(minimal: Path, overrides: list[str], told: str) -> None:
    assert told in refusal(minimal, *(f"optimizer.{override}" for override in overrides))


@pytest.mark.parametrize(
    ("overrides", "chosen", "numbers"),
    [
        (["name=adamw"], mt.optim.AdamW, {"lr": 3e-4, "betas": (0.8, 0.999), "eps": 1e-8}),
        (["name=adam", "betas=[0.5, 0.6]"], mt.optim.Adam, {"lr": 3e-4, "betas": (0.5, 0.6), "eps": 1e-8}),
        (["name=sgd", "momentum=0.9", "nesterov=true"], mt.optim.SGD, {"lr": 3e-4, "momentum": 0.9, "nesterov": True}),
        (["name=lion"], mt.optim.Lion, {"lr": 3e-4}),
        (
            ["name=muon", "momentum=0.8", "adamw_lr=1e-5"],
            mt.optim.Muon,
            {
                "lr": 3e-4,
                "momentum": 0.8,
                "adjust_lr_fn": "match_rms_adamw",
                "adamw_lr": 1e-5,
                "adamw_betas": (0.8, 0.999),
                "adamw_eps": 1e-8,
            },
        ),
    ],
)
def test_a_recipe_chooses_the_optimizer(minimal: Path, overrides: list[str], chosen: type, numbers: dict) -> None:
    training = ["training.learning_rate=3e-4", "training.adam_beta1=0.8"]
    recipe = load_recipe(minimal, [*training, *(f"optimizer.{override}" for override in overrides)])
    assert recipe.optimizer.choice(recipe.training_arguments()) == (chosen, {**numbers, "max_skipped_steps": 10})


def test_an_optimizer_is_chosen_once(minimal: Path) -> None:
    assert load_recipe(minimal).optimizer.choice(load_recipe(minimal).training_arguments()) is None
    recipe = load_recipe(minimal, ["optimizer.name=lion", "training.optim=sgd"])
    with pytest.raises(UserError, match="training.optim is 'sgd' and optimizer.name is 'lion'"):
        recipe.optimizer.choice(recipe.training_arguments())


def test_values_that_transformers_refuses_are_the_users_mistake(minimal: Path) -> None:
    recipe = load_recipe(minimal, ["training.lr_scheduler_type=sawtooth"])
    with pytest.raises(UserError, match=r"training.lr_scheduler_type: sawtooth .*cosine"):
        recipe.training_arguments()


def test_overrides_reach_the_training_arguments(minimal: Path, tmp_path: Path) -> None:
    overrides = [
        "training.learning_rate=1e-5",
        "training.eval_strategy=no",
        "training.lr_scheduler_type=cosine_with_restarts",
        "training.lr_scheduler_kwargs.num_cycles=2",
        "training.logging_steps=7",
        f"output.dir={tmp_path}/out",
    ]
    arguments = load_recipe(minimal, overrides).training_arguments()
    assert arguments.learning_rate == 1e-5
    assert arguments.eval_strategy == "no"
    assert arguments.lr_scheduler_kwargs == {"num_cycles": 2}
    assert arguments.logging_steps == 7
    assert arguments.output_dir == f"{tmp_path}/out"
    assert arguments.report_to == []


def test_a_missing_recipe_names_the_nearest_file(minimal: Path) -> None:
    assert refusal(minimal.with_name("minimum.yaml")).endswith(f"did you mean {minimal}?")
    assert "check the path" in refusal(minimal.with_name("qqq.yaml"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("model: [", "not valid YAML"),
        ("- a\n- b", "wants a section"),
        ("model: {name: a, name: b}", "the key name stands twice"),
        ("training:\n  max_steps: 1\n  max_steps: 2", "the key max_steps stands twice"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(text, encoding="utf-8")
    assert named in refusal(file)


@pytest.mark.parametrize(
    ("text", "place", "shown", "caret", "remedy"),
    [
        ("a: 1\nb: [What is a home?]", "line 2, column 19", "b: [What is a home?]", 18, "wants quotes"),
        ("b: 50% off: now", "line 1, column 11", "b: 50% off: now", 10, "wants quotes"),
        ("b: [1,\n", "line 1, column 7", "b: [1,", 6, "not closed"),
        ("b: 'it", "line 1, column 7", "b: 'it", 6, "not closed"),
        ("b:\n\tc: 1", "line 2, column 1", " c: 1", 0, "spaces"),
    ],
)
def test_a_slip_in_yaml_is_shown_in_its_line(
    minimal: Path, text: str, place: str, shown: str, caret: int, remedy: str
) -> None:
    file = minimal.with_name("slip.yaml")
    file.write_text(text, encoding="utf-8")
    for told in (refusal(file), refusal(minimal, f"sample={text}")):
        first, line, pointer, last = told.split("\n")
        assert f"not valid YAML, {place}: " in first
        assert (line, pointer) == (f"    {shown}", " " * (4 + caret) + "^")
        assert remedy in last


def test_a_slip_in_a_value_of_the_command_line_is_shown(minimal: Path) -> None:
    told = refusal(minimal, "sample.prompts=[What is a home?]")
    assert told.startswith("the value of sample.prompts: not valid YAML, line 1, column 16: expected")
    assert "\n    [What is a home?]\n                   ^\ntext that" in told


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refusal(file)


@given(st.floats(allow_nan=False) | st.integers(-(10**18), 10**18))
def test_numbers_come_through_as_python_writes_them(value: float) -> None:
    text = {math.inf: ".inf", -math.inf: "-.inf"}.get(value, repr(value))
    read = _override(f"training.weight_decay={text}")["weight_decay"]
    assert read == value and type(read) is type(value)


@given(st.sampled_from(["yes", "no", "on", "off", "y", "n", "2026-01-31", "1.2.3", "e5", "-", "1e", "."]))
def test_words_of_older_yaml_stay_text(word: str) -> None:
    assert _override(f"training.run_name='{word}'")["run_name"] == word
    if word != "-":
        assert _override(f"training.run_name={word}")["run_name"] == word


def _override(override: str) -> Any:
    from megatrain.recipe import _apply

    found: dict[str, Any] = {}
    _apply(found, override)
    return found["training"]


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)))
def test_true_never_passes_for_a_number(value: object) -> None:
    assert accepts(value, int | None) == (value is None or type(value) is int)
    assert accepts(value, bool) == (type(value) is bool)
    assert accepts(value, list[int]) == (isinstance(value, list) and all(type(item) is int for item in value))


def test_every_field_of_the_installed_training_arguments_has_a_type_that_can_be_checked() -> None:
    types = field_types(TrainingArguments)
    for field in dataclasses.fields(TrainingArguments):
        if not field.init:
            continue
        assert describe(types[field.name]) or field.name == "parallelism_config", field.name
        if isinstance(field.default, str | bool | int | float | None):
            assert accepts(getattr(field.default, "value", field.default), types[field.name]), field.name


def test_the_engine_section_is_megatrain_init() -> None:
    # What a step trains on stands in the recipe's other sections.
    assert {*field_types(Config), "workload"} == inspect.signature(mt.init).parameters.keys()


@pytest.mark.parametrize("file", sorted((REPOSITORY / "recipes").glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_recipes_load(file: Path) -> None:
    from megatrain.arguments import check_arguments

    needs_path = file.stem == "own_documents"
    if needs_path:
        assert "data.path is missing" in refusal(file)
    recipe = load_recipe(file, ["data.path=somewhere"] if needs_path else [])
    check_arguments(recipe.training_arguments())
    # An evaluation makes the logits of a row whole, and those of its row have no room.
    assert recipe.data.eval_fraction > 0 or file.stem == "long_context_7b"


def test_the_docs_are_what_the_dataclasses_say() -> None:
    spec = importlib.util.spec_from_file_location("write_recipe_docs", REPOSITORY / "scripts/write_recipe_docs.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    rendered = script.render()
    assert (REPOSITORY / "docs/recipes.md").read_text(encoding="utf-8") == rendered, (
        "run python scripts/write_recipe_docs.py"
    )
    for name, section in SECTIONS.items():
        docs = script.field_docs(section)
        for key in field_types(section):
            assert docs[key] and f"`{name}.{key}`" in rendered


def test_folders_of_runs_that_the_docs_name_are_those_that_recipes_make() -> None:
    root = Path(__file__).resolve().parents[1]
    texts = [*(root / "docs").glob("*.md"), root / "README.md", *(root / "recipes").glob("*.yaml")]
    named = {folder for path in texts for folder in re.findall(r"\bruns/[\w.-]*\w", path.read_text())}
    recipes = [load_recipe(file, ["data.path=x"]) for file in (root / "recipes").glob("*.yaml")]
    made = {str(folder) for recipe in recipes for folder in (recipe.output_dir, *recipe.engine.offload_folders)}
    assert "runs/own-documents" in named
    assert named <= made
