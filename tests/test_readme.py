"""The snippets of README and guides run as they stand, on a tiny model in place of a large one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain as mt
from megatrain.execute.engine import engine_of
from megatrain.recipe import load_recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
GUIDES = (ROOT / "docs" / "guides.md").read_text()


def blocks(language: str, document: str = README) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", document, flags=re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def tiny_llama(*_: object, dtype: str = "float32", **__: object) -> LlamaForCausalLM:
    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=2, vocab_size=64)  # fmt: skip
    return LlamaForCausalLM(config).to(getattr(torch, dtype))


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, object]:
    """What the snippets expect to be there: data, and a model to load."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", tiny_llama)
    ids = torch.arange(64 * 8).remainder(64).view(64, 8)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    micro_batches = [{"input_ids": part, "labels": part} for part in ids[:8].split(2)]
    return {"dataset": rows, "steps": [micro_batches] * 3}


def test_the_trainer_snippet(names: dict[str, object]) -> None:
    exec(blocks("python")[0], names)
    assert engine_of(names["model"]).num_steps == 10
    assert names["model"].dtype == torch.bfloat16


def test_the_loop_snippet(names: dict[str, object]) -> None:
    names |= {"mt": mt, "model": tiny_llama().eval()}
    before = {name: p.detach().clone() for name, p in names["model"].named_parameters()}
    exec(blocks("python")[1], names)
    assert all(not torch.equal(before[name], weight) for name, weight in mt.named_parameters(names["model"]))
    assert len(names["losses"]) == 4
    assert names["model"].training
    assert (Path("trained") / "model.safetensors").is_file()


def test_the_snippet_for_a_model_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    plain = tiny_llama(dtype="bfloat16")
    plain.save_pretrained("large-model", max_shard_size="4KB")
    names: dict[str, object] = {}
    try:
        exec(blocks("python", GUIDES)[0], names)
    finally:
        mt.init()
    assert len(list(Path("large-model").glob("*.safetensors"))) > 1
    state = names["model"].state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in plain.state_dict().items())
    batch = {"input_ids": torch.arange(8).view(1, 8), "labels": torch.arange(8).view(1, 8)}
    assert torch.equal(names["model"](**batch).loss, plain(**batch).loss)


def test_the_commands_are_those_that_ci_and_the_recipe_know() -> None:
    quickstart, tests = (text.strip() for text in blocks("")[:2])
    assert tests == "pip install -e '.[test]' && pytest -n 2 --dist worksteal"
    assert tests in (ROOT / ".ci" / "run").read_text()
    install, _, command = quickstart.partition(" && ")
    assert install == "pip install -e ."
    assert command.startswith("megatrain train ")
    name = load_recipe(ROOT / command.removeprefix("megatrain train "), ()).model.name
    assert name.startswith("HuggingFaceTB/SmolLM2")


def test_the_file_tree_names_every_room_and_file_at_the_top() -> None:
    tree = blocks("")[2]
    package = ROOT / "megatrain"
    for path in package.iterdir():
        if path.is_dir() and (path / "__init__.py").is_file():
            assert f"  {path.name}/" in tree, f"README's file tree lacks the room {path.name}"
        elif path.suffix == ".py":
            assert f"  {path.name} " in tree, f"README's file tree lacks {path.name}"


def test_the_file_tree_names_every_script() -> None:
    tree = blocks("")[2]
    assert all(path.name in tree for path in (ROOT / "scripts").glob("*.py"))


def test_every_path_of_the_file_tree_is_there() -> None:
    """The other way round: a file that has moved, or gone, leaves the tree too."""
    folder = ROOT
    for line in blocks("")[2].splitlines():
        name = line.split()[0]
        is_inside = line.startswith("  ")
        folder = folder if is_inside else ROOT / name
        path = folder / name if is_inside else folder
        assert path.is_dir() if name.endswith("/") else path.is_file(), f"README's file tree names {path}"
    for name in re.findall(
        r"\w+\.(?:py|yaml)", " ".join(line for line in blocks("")[2].splitlines() if line[0] != " ")
    ):
        assert list(ROOT.glob(f"*/{name}")), f"README's file tree names {name}"
