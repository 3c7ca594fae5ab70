"""The walls of the package: which room may import which, what an import costs, nothing dead, nothing oversized."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatrain

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatrain"

ROOMS = ["base", "spec", "plan", "store", "transport", "execute", "optim", "probe", "save", "load", "data"]
"""Each imports only from itself and from those before it. Files of the package itself, `bench` and `commands` come
last."""

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_BLOCK_DEPTH = 3

MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = [
    *MODULES,
    *(p for d in ("tests", "examples", "benchmarks", "scripts") for p in sorted((ROOT / d).rglob("*.py"))),
]


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path): path for path in MODULES}


def imports(path: Path, *, only_at_import: bool) -> Iterator[str]:
    """Modules of the package that `path` imports, TYPE_CHECKING blocks apart.

    Args:
        only_at_import: leave out imports inside functions.
    """
    stack: list[ast.AST] = [parse(path)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            stack += node.orelse
            continue
        if only_at_import and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in NAMES)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write the whole name of what is imported"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                name = full if full in NAMES else node.module or ""
                yield from ([name] if name in NAMES else [])
        stack += ast.iter_child_nodes(node)


def room(name: str) -> int:
    """Place of a module's room in the order."""
    parts = name.split(".")
    return ROOMS.index(parts[1]) if len(parts) > 1 and parts[1] in ROOMS else len(ROOMS)


def test_every_folder_is_a_room() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders <= {*ROOMS, "bench", "commands"}


def test_a_room_imports_only_from_rooms_above_it() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, path in NAMES.items()
        for other in imports(path, only_at_import=False)
        if room(other) > room(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles() -> None:
    graph = {name: set(imports(path, only_at_import=True)) - {name} for name, path in NAMES.items()}
    # Importing a.b imports a first, unless that is going on already.
    for name, others in graph.items():
        others |= {parent for other in others if (parent := other.rpartition(".")[0]) and not name.startswith(parent)}
    # Take away what imports nothing that is left, and what nothing that is left imports: cycles remain.
    while True:
        imported = {other for others in graph.values() for other in others}
        loose = [name for name, others in graph.items() if not others & graph.keys() or name not in imported]
        if not loose:
            break
        for name in loose:
            del graph[name]
    assert {name: sorted(others & graph.keys()) for name, others in graph.items()} == {}


# What an import costs

QUIET = """
import importlib, socket, sys
def refuse(*_): raise AssertionError("an import used the network")
socket.socket.connect = socket.getaddrinfo = refuse
for name in {modules}: importlib.import_module(name)
loaded = {{name.partition(".")[0] for name in sys.modules}}
assert not loaded & {forbidden}, loaded & {forbidden}
torch = sys.modules.get("torch")
assert torch is None or not torch.cuda.is_initialized()
"""

HEAVY = {"torch", "numpy", "transformers", "datasets", "accelerate", "safetensors", "greenlet", "psutil", "peft", "trl"}
LEAN: dict[tuple[str, ...], set[str]] = {
    ("megatrain",): HEAVY | {"rich", "typer", "yaml"},
    ("megatrain.cli", "megatrain.recipe"): HEAVY,
    ("megatrain.api", "megatrain.optim", "megatrain.data"): {
        "transformers",
        "datasets",
        "accelerate",
        "peft",
        "trl",
        "rich",
    },
    # transformers' own Trainer imports peft and datasets where they are installed.
    ("megatrain.trainer",): {"trl", "rich", "typer"},
}


@pytest.mark.parametrize("modules", LEAN, ids="+".join)
def test_imports_are_lean_and_quiet(modules: tuple[str, ...]) -> None:
    code = QUIET.format(modules=modules, forbidden=LEAN[modules])
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_public_names_are_there() -> None:
    for name in megatrain.__all__:
        assert getattr(megatrain, name) is not None
    assert set(megatrain.__all__) <= set(dir(megatrain))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = megatrain.nothing


# Nothing dead


def test_no_dead_modules() -> None:
    reached = set()
    todo = ["megatrain", "megatrain.cli", "megatrain.optim", *megatrain._PUBLIC.values()]
    while todo:
        name = todo.pop()
        if name in reached:
            continue
        reached.add(name)
        todo += [name.rpartition(".")[0]] if "." in name else []
        todo += imports(NAMES[name], only_at_import=False)
    # A room that waits for its first module.
    empty = {name for name, path in NAMES.items() if len(parse(path).body) <= 1}
    assert NAMES.keys() - reached - empty == set()


MODULE_NAMES = ("__version__", "__getattr__", "__dir__")
SEEN_FROM_OUTSIDE = {"is_recorded", "is_trainable", "slab_bytes", "total_device_bytes"}
"""Read by tests alone, to see what the package did."""


def definitions(path: Path) -> Iterator[str]:
    """Names that a module defines at its top level, and methods of its classes that override nothing from outside."""
    for node in parse(path).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        if isinstance(node, ast.ClassDef):
            methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            methods = {name for name in methods if not (name.startswith("__") and name.endswith("__"))}
            yield from methods - inherited()[f"{module_name(path)}.{node.name}"]
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


@functools.cache
def inherited() -> dict[str, set[str]]:
    """Class of the package -> names that it, or a subclass in the package, has from classes outside of the package."""
    modules = [importlib.import_module(name) for name in NAMES]
    classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    found: dict[str, set[str]] = defaultdict(set)
    for cls in classes:
        outside = {name for base in cls.__mro__ if not base.__module__.startswith("megatrain") for name in vars(base)}
        for base in cls.__mro__:
            found[f"{base.__module__}.{base.__qualname__}"] |= outside
    return found


def mentions(path: Path) -> Counter[str]:
    """Every identifier that a module uses (not those it defines), strings that may name one included."""
    found: Counter[str] = Counter()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found[node.id] += 1
        elif isinstance(node, ast.Attribute):
            found[node.attr] += 1
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found[node.value] += 1
    return found


def test_no_dead_names() -> None:
    outside = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in ("benchmarks", "scripts")]
    used = sum((mentions(path) for path in [*MODULES, *outside]), Counter())
    # What the documentation tells users to call.
    told = {word for path in ROOT.glob("docs/*.md") for word in re.findall(r"[\w.]+", path.read_text(encoding="utf-8"))}
    told = {word.rpartition(".")[2] for word in told} | SEEN_FROM_OUTSIDE | set(MODULE_NAMES)
    dead = [
        f"{module_name(path)}: {name}"
        for path in MODULES
        for name in definitions(path)
        if not used[name] and name not in told
    ]
    assert not dead, "\n".join(dead)


# Nothing oversized

BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.AsyncFor, ast.AsyncWith)


def block_depth(node: ast.AST, depth: int = 0) -> int:
    """Of nested blocks in a function; `elif` is not deeper than its `if`."""
    deepest = depth
    for name, field in ast.iter_fields(node):
        for child in field if isinstance(field, list) else [field]:
            is_elif = name == "orelse" and isinstance(node, ast.If) and isinstance(child, ast.If) and len(field) == 1
            inner = depth + isinstance(child, BLOCKS) - is_elif
            if isinstance(child, ast.AST) and not isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                deepest = max(deepest, block_depth(child, inner))
    return deepest


def test_files_and_functions_are_of_a_size_to_read() -> None:
    wrong = []
    for path in SOURCES:
        name, num_lines = path.relative_to(ROOT), len(path.read_text(encoding="utf-8").splitlines())
        wrong += [f"{name}: {num_lines} lines"] if num_lines > MAX_FILE_LINES else []
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.FunctionDef):
                continue
            num_lines, depth = (node.end_lineno or 0) - node.lineno + 1, block_depth(node)
            wrong += [f"{name}: {node.name}: {num_lines} lines"] if num_lines > MAX_FUNCTION_LINES else []
            wrong += [f"{name}: {node.name}: blocks {depth} deep"] if depth > MAX_BLOCK_DEPTH else []
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is_and_annotates() -> None:
    wrong = []
    for path in MODULES:
        wrong += [] if ast.get_docstring(parse(path)) else [f"{module_name(path)} has no docstring"]
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls", "ctx", "_")]
                bare += [] if node.returns is not None else ["the return value"]
                wrong += [f"{module_name(path)}: {node.name}: no type for {', '.join(bare)}"] if bare else []
    assert not wrong, "\n".join(wrong)


# Nothing unfinished, nothing of the machine it was written on

TEXTS = [
    path
    for pattern in (
        "*.md",
        "*.toml",
        "*.py",
        "docs/*",
        "recipes/*",
        "megatrain/**/*",
        "tests/*",
        "examples/*",
        "scripts/*",
    )
    for path in sorted(ROOT.glob(pattern))
    if path.suffix in (".md", ".toml", ".py", ".yaml", ".c", ".txt") and path != Path(__file__)
]

UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK|WIP)\b|NotImplementedError\(\)")
MACHINE_PATH = re.compile(r"(?<![\w.:/~*\])}<-])/(?!(?:proc|sys|dev|tmp|etc|usr|bin|fast|no)\b)[a-z][a-z_]*/[a-z_.]+")
HOST = re.compile(r"https?://([\w.-]+)")
HOSTS = {
    "github.com",
    "huggingface.co",
    "arxiv.org",
    "pytorch.org",
    "docs.pytorch.org",
    "pypi.org",
    "www.apache.org",
    "127.0.0.1",
}


def test_nothing_is_unfinished_and_nothing_names_a_machine() -> None:
    wrong = []
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        found = [match[0] for match in (*UNFINISHED.finditer(text), *MACHINE_PATH.finditer(text))]
        found += [match[0] for match in HOST.finditer(text) if match[1] not in HOSTS]
        wrong += [f"{path.relative_to(ROOT)}: {word}" for word in found]
    assert not wrong, "\n".join(wrong)
