"""The recipes under recipes/: each is read, fits the machine that it names, and runs in the small."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from command_helpers import command, save_tiny_model
from data_helpers import CHATML, tiny_tokenizer

from megatrain.commands import run
from megatrain.data.builtin import BUILTIN_SOURCES, python_library
from megatrain.models import resolve_tokenizer
from megatrain.planning import read_config
from megatrain.recipe import load_recipe
from megatrain.spec.formats import most_moment_bytes

ROOT = Path(__file__).resolve().parents[1]
ALL = sorted(file.stem for file in (ROOT / "recipes").glob("*.yaml"))
WITH_A_NAME = ["long_documents", "own_documents", "quickstart"]
SHAPES = [name for name in ALL if name not in WITH_A_NAME]
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
MORE_SMALL = {"gpt_oss_120b": {"head_dim": 16, "num_local_experts": 4}}
LENGTH = 64


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("plan_recipes")


def head_of(name: str) -> str:
    return (ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8").partition("\nmodel:")[0]


@pytest.mark.parametrize("name", ALL)
def test_it_is_read_and_says_how_to_run_it(name: str) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml", ["data.path=texts"] if name == "own_documents" else [])
    recipe.training_arguments()
    assert f"#     megatrain train recipes/{name}.yaml" in head_of(name)


def test_every_shape_is_planned_on_its_machine(script: ModuleType) -> None:
    assert sorted(script.PLANNED) == SHAPES
    text = script.DOCS.read_text(encoding="utf-8")
    assert script.render(text) == text, "run python scripts/plan_recipes.py"


@pytest.mark.parametrize("name", SHAPES)
def test_it_fits_its_machine_as_its_head_says(script: ModuleType, name: str) -> None:
    machine, ways = script.PLANNED[name]
    assert f"{machine.ram_bytes >> 30} GiB of host memory, {machine.num_cores} cores" in head_of(name)
    found = script.planned(name)
    room = {"hbm": machine.hbm_bytes, "ram": machine.ram_bytes, "disk": machine.disk_bytes}
    for tier, num_bytes in room.items():
        assert found.timeline.peak(tier) <= num_bytes
    if name == "qwen_14b_24gb":
        assert found.timeline.peak("hbm") <= 24e9
    kept = script.kept_lines(name)
    assert len(kept) == len(ways)
    told, now = ([float(number) for number in numbers(line)] for line in (kept[0], script.predicted(found)))
    assert told == pytest.approx(now, rel=0.15, abs=2), "run python scripts/plan_recipes.py"


def numbers(line: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?", line.replace(",", ""))


@pytest.mark.parametrize("name", SHAPES)
def test_its_bytes_a_parameter_are_those_of_its_settings(script: ModuleType, name: str) -> None:
    engine = script.recipe_of(name).engine
    weights_and_low = 2 if engine.master == "bf16" else 4
    gradients = 0 if engine.clip == "layer" else 2
    moments = 2 * most_moment_bytes(engine.moments, 10**9) / 10**9
    total = float(re.search(r"^# Bytes a parameter: ([\d.]+):", head_of(name), re.MULTILINE)[1])
    assert total == pytest.approx(weights_and_low + moments + gradients, rel=0.005)


@pytest.mark.parametrize("name", SHAPES)
def test_its_head_names_all_that_is_lossy_and_nothing_else(script: ModuleType, name: str) -> None:
    engine = script.recipe_of(name).engine
    lossy = re.search(r"^# LOSSY: (.*)$", head_of(name), re.MULTILINE)[1]
    assert ("bf16 masters" in lossy) == (engine.master == "bf16")
    assert [bits for bits in ("4bit", "8bit") if f"moments in {bits[0]} bits" in lossy] == (
        [] if engine.moments == "fp32" else [engine.moments]
    )
    assert ("gradients sent home in bf16" in lossy) == (engine.grad_dtype is None)
    assert ("Another algorithm" in head_of(name)) == (engine.clip == "layer")


@pytest.mark.parametrize("name", SHAPES)
def test_its_shape_has_room_for_the_ids_of_its_tokenizer(script: ModuleType, name: str) -> None:
    model = script.recipe_of(name).model
    assert model.tokenizer == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert read_config(model.shape, model.config).vocab_size >= 49_152


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides that make every recipe small, and a library of a few pages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pages = python_library()[0]["text"][:60_000]
    monkeypatch.setitem(BUILTIN_SOURCES, "python-library", lambda: [{"text": pages}])
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "tokenizer")
    assert resolve_tokenizer("tokenizer").path == Path("tokenizer")
    return [
        "model.tokenizer=tokenizer",
        f"data.sequence_length={LENGTH}",
        "training.max_steps=3",
        "training.learning_rate=1e-2",
        "engine.device=cpu",
    ]


def shrunk(name: str) -> list[str]:
    changes = {**SMALL, **MORE_SMALL.get(name, {})}
    return [f"model.config.{key}={value}" for key, value in changes.items()]


@pytest.mark.parametrize("name", SHAPES)
def test_it_trains_in_the_small_with_the_step_that_is_planned(
    name: str,
    small: list[str],
    script: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workloads: list[Any] = []
    stream = run.api.stream

    def noting(*arguments: Any, workload: Any, **keywords: Any) -> Any:
        workloads.append(workload)
        return stream(*arguments, workload=workload, **keywords)

    monkeypatch.setattr(run.api, "stream", noting)
    overrides = (*small, *shrunk(name))
    recipe = ROOT / "recipes" / f"{name}.yaml"
    code, out, err = command(capsys, "train", recipe, *overrides, "--dry-run")
    assert code == 0 and "every path works" in out, err
    code, out, err = command(capsys, "train", recipe, *overrides)
    assert code == 0, err
    losses = [float(loss) for loss in re.findall(r"^step \d/3 +loss ([\d.]+)", out, re.MULTILINE)]
    assert len(losses) == 3 and losses[2] < losses[0] - 0.1, out
    assert workloads == [script.workload_of(script.recipe_of(name, overrides))] * 2
    settings = script.recipe_of(name).engine
    assert ("LOSSY" in out) == (settings.moments != "fp32" or settings.master == "bf16")


def test_whole_documents_are_trained_on_in_the_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model")
    texts = [{"text": f"import module_{number}\n" * 2} for number in range(40)]
    monkeypatch.setitem(BUILTIN_SOURCES, "python-source", lambda: texts)
    recipe = ROOT / "recipes" / "long_documents.yaml"
    overrides = [
        "model.name=model",
        f"data.sequence_length={LENGTH}",
        "training.max_steps=6",
        "sample.max_new_tokens=2",
        "engine.device=cpu",
    ]
    code, out, err = command(capsys, "train", recipe, *overrides)
    assert code == 0 and "held-out loss" in out, err
    assert "held out: 2 samples" in out
