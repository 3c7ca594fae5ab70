"""A recipe: one YAML file that says which model, which data and how to train. `load_recipe` reads and checks it.

Rule: every key is checked by name and type before any work; an unknown one is refused with the nearest known one.
YAML is read by its newer rules where the older ones bite: `no` and `off` are text (`eval_strategy: no` works), 1e-5 is
a number, and a key that stands twice is refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.base.config import Config
from megatrain.base.errors import UserError
from megatrain.base.paths import looking_at, user_path
from megatrain.data.config import DataConfig
from megatrain.model_choice import ModelConfig
from megatrain.optimizer_choice import OptimizerConfig
from megatrain.typecheck import accepts, describe, field_types

if TYPE_CHECKING:
    from transformers import TrainingArguments

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "section"}
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 100


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Text to generate before and after the training, to see the difference."""

    prompts: Sequence[str] = ()
    """What to continue. Put as a user's question where the tokenizer has a chat template. Empty: no samples."""

    max_new_tokens: int = 60
    """Most tokens of an answer. The likeliest token is taken each time, so answers do not vary by chance."""

    chat: bool = True
    """false: continue the prompt as it stands, also where there is a chat template."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"sample.max_new_tokens is {self.max_new_tokens}; use 1 or more")


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """What is written, and where."""

    dir: str | None = None
    """Folder for the trained model and its checkpoints. Left out: `runs/` and the recipe's file name."""

    trace_step: int | None = None
    """What each lane does in this step and the next is written to `trace.json` in `dir`, for Perfetto and `megatrain
    report`. Left out: no trace."""

    save_model: bool = True
    """false: the trained model is not saved at the end, and needs no room: for measurements. Checkpoints are as
    `training.save_strategy` says."""

    overwrite: bool = False
    """true: write over an earlier run: its checkpoints are removed when all is checked and the new run begins to train,
    its model when the new one is saved. Otherwise a folder that holds any is refused."""

    def __post_init__(self) -> None:
        if self.dir is not None and not self.dir.strip():
            raise UserError(f"output.dir is {self.dir!r}; give a folder, or leave it out")
        if self.trace_step is not None and self.trace_step < 1:
            raise UserError(f"output.trace_step is {self.trace_step}; use 1 or more")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All of a recipe's sections."""

    model: ModelConfig
    """The model to start from: `name` for one with its weights, or `shape` and `tokenizer` for a new one."""

    data: DataConfig
    """What to train on and how it is cut into rows of tokens."""

    training: Mapping[str, Any] = field(default_factory=dict)
    """Any field of transformers.TrainingArguments."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The update rule and the numbers that are its own. Learning rate and weight decay are `training.learning_rate` and
    `training.weight_decay`."""

    engine: Config = field(default_factory=Config)
    """The arguments of `megatrain.init`: memory limits, precision, device."""

    sample: SampleConfig = field(default_factory=SampleConfig)
    """Text to generate before and after."""

    output: OutputConfig = field(default_factory=OutputConfig)
    """What is written, and where."""

    file: Path
    """The recipe itself; no key of it."""

    @property
    def output_dir(self) -> Path:
        return user_path(self.output.dir or Path("runs") / self.file.stem, "output.dir")

    def training_arguments(self) -> TrainingArguments:
        """The TrainingArguments of this recipe. Raises UserError for values that transformers refuses."""
        import torch
        from transformers import TrainingArguments

        from megatrain.arguments import check_given

        check_given(self.training)
        has_device = torch.cuda.is_available() and self.engine.device != "cpu"
        base = {
            "output_dir": str(self.output_dir),
            "report_to": "none",
            "disable_tqdm": True,  # the command shows its own progress
            "use_cpu": not has_device,
            "dataloader_pin_memory": has_device,
        }

        def build(given: Mapping[str, Any]) -> TrainingArguments:
            return TrainingArguments(**{**base, **given})

        try:
            return build(self.training)
        except Exception as error:  # transformers checks little: anything may come out of how it reads a value
            build({})  # what fails without the user's values is no mistake of the user's
            raise UserError(_refusal(build, self.training, error)) from error


def _refusal(build: Callable[[Mapping[str, Any]], object], training: Mapping[str, Any], error: Exception) -> str:
    """What `build` said, behind the key with which alone it says the same. Without one it takes several together."""
    from megatrain.arguments import TABLE

    told = " ".join(str(error).split())
    key = next((key for key, value in training.items() if _complaint(build, {key: value}) == str(error)), None)
    if key is None:
        return f"training: {told}"
    # A ValueError tells what is wanted; others only what broke.
    if not isinstance(error, ValueError) and key in TABLE and not TABLE[key].check.fits(training[key]):
        told += f". Instead: {TABLE[key].check.wanted}"
    return f"training.{key}: {told}"


def _complaint(build: Callable[[Mapping[str, Any]], object], given: Mapping[str, Any]) -> str | None:
    try:
        build(given)
    except Exception as error:
        return str(error)
    return None


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "engine": Config,
    "sample": SampleConfig,
    "output": OutputConfig,
}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe and applies overrides such as `training.learning_rate=1e-5`.

    Raises UserError that names the key: file missing or not YAML, unknown or missing key, wrong type, bad value.
    """
    path = Path(path)
    given = _read(path)
    for override in overrides:
        _apply(given, override)
    _check_keys(given, [*SECTIONS, "training"], prefix="")
    parts: dict[str, Any] = {}
    for name, section in SECTIONS.items():
        parts[name] = _section(section, given.get(name, {}), name, path)
    parts["training"] = _training(given.get("training", {}))
    return Recipe(**parts, file=path)


def _section(cls: type, given: object, name: str, path: Path) -> Any:
    """One section of the recipe as its dataclass."""
    given = _mapping(given, name)
    types = field_types(cls)
    _check_keys(given, list(types), prefix=f"{name}.")
    _check_types(given, types, prefix=f"{name}.")
    for known in dataclasses.fields(cls):
        has_default = known.default is not dataclasses.MISSING or known.default_factory is not dataclasses.MISSING
        if known.name not in given and not has_default:
            key = f"{name}.{known.name}"
            raise UserError(f"{key} is missing: set it in {path}, or add {key}=... to the command")
    try:
        return cls(**given)
    except UserError as error:
        told = str(error)
        raise UserError(told if told.startswith(f"{name}.") else f"{name}: {told}") from error


def _training(given: object) -> dict[str, Any]:
    """The section `training`, checked against the fields of the installed TrainingArguments."""
    given = _mapping(given, "training")
    if "output_dir" in given:
        raise UserError("training.output_dir: the recipe says it once, as output.dir; use that instead")
    if given:
        from transformers import TrainingArguments

        types = field_types(TrainingArguments)
        types["resume_from_checkpoint"] = str | bool | None  # true: the last one in output.dir
        _check_keys(given, list(types), prefix="training.")
        _check_types(given, types, prefix="training.")
    return given


def _mapping(given: object, name: str) -> dict[str, Any]:
    """A section; one with nothing in it may be left empty."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise UserError(f"{name}: wants a section with keys below it, got {_show(given)}")
    return given


def _check_keys(given: Mapping[str, Any], known: Sequence[str], prefix: str) -> None:
    """Refuses unknown keys; names the nearest known one, or where the key belongs if it fits another section."""
    for key in given:
        if key in known:
            continue
        close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
        if close:
            remedy = f"did you mean {prefix}{close[0]}?"
        elif elsewhere := _where_it_belongs(str(key)):
            remedy = f"did you mean {elsewhere}?"
        elif len(known) <= 12:
            remedy = f"known here: {', '.join(known)}"
        else:
            remedy = "see docs/recipes.md for the keys"
        raise UserError(f"{prefix}{key}: unknown key; {remedy}")


def _where_it_belongs(key: str) -> str | None:
    """`training.learning_rate` for `learning_rate`."""
    for name, section in SECTIONS.items():
        if key in field_types(section):
            return f"{name}.{key}"
    from transformers import TrainingArguments

    return f"training.{key}" if key in field_types(TrainingArguments) else None


def _check_types(given: Mapping[str, Any], types: Mapping[str, Any], prefix: str) -> None:
    for key, value in given.items():
        if not accepts(value, types[key]):
            raise UserError(f"{prefix}{key}: wants {describe(types[key])}, got {_show(value)}")
        for text in value if isinstance(value, list) else [value]:
            _check_characters(text, f"{prefix}{key}")


def _check_characters(text: object, key: str) -> None:
    """No file can be named with these, no tokenizer takes them, and no text is meant so."""
    found = [c for c in text if c == "\0" or "\ud800" <= c <= "\udfff"] if isinstance(text, str) else []
    if found:
        what = "a NUL character" if found[0] == "\0" else "half a character (a lone surrogate)"
        raise UserError(f"{key}: {_BRIEF.repr(text)} holds {what}; remove it")


def _show(value: object) -> str:
    """`'yes' (text)`."""
    if value is None:
        return "nothing"
    return f"{_BRIEF.repr(value)} ({_KINDS.get(type(value), type(value).__name__)})"


def _apply(given: dict[str, Any], override: str) -> None:
    """Puts `a.b=value` where it belongs; the value is read as YAML."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"{override!r} is no override; write key=value, as in training.learning_rate=1e-5")
    *parents, last = key.split(".")
    place = given
    for depth, parent in enumerate(parents, start=1):
        if place.get(parent) is None:
            place[parent] = {}
        place = place[parent]
        if not isinstance(place, dict):
            raise UserError(f"{key}: {'.'.join(parents[:depth])} is {_show(place)}, so nothing can be set below it")
    place[last] = _yaml(text, f"the value of {key}")


def _read(path: Path) -> dict[str, Any]:
    with looking_at("recipe"):
        is_file, is_there = path.is_file(), path.exists()
    if is_there and not is_file:
        kind = "a folder" if path.is_dir() else "no regular file (a pipe, a device?)"
        raise UserError(f"recipe: {path} is {kind}; give a YAML file")
    if not is_file:
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.y*ml")], n=1)
        remedy = f"did you mean {path.parent / near[0]}?" if near else "check the path"
        raise UserError(f"no recipe {path}; {remedy}")
    try:
        with looking_at("recipe"):
            text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text; a recipe is a YAML file") from error
    return _mapping(_yaml(text, str(path)), str(path))


def _yaml(text: str, where: str) -> Any:
    """YAML with true/false as the only booleans, 1e-5 as a number, and no key twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        """A class of its own, because resolvers belong to the class."""

        yaml_implicit_resolvers = {
            first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":float", ":timestamp"))]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise UserError(f"{where}: the key {key} stands twice{node.start_mark}; keep one of them")
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(true|True|TRUE|false|False|FALSE)$"), "tTfF")
    number = r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(number), "-+0123456789.")
    try:
        return yaml.load(text, Loader)  # noqa: S506 - a SafeLoader
    except UserError:
        raise
    except RecursionError:
        raise UserError(f"{where}: lists and sections nested too deep; write fewer of them into one another") from None
    except yaml.YAMLError as error:
        raise UserError(f"{where}: not valid YAML{_fault(error, text)}") from error
    except (ValueError, LookupError, AttributeError) as error:
        raise UserError(
            f"{where}: a value does not fit its tag (!!...) or has too many digits ({error}); write it plainly"
        ) from error


def _fault(error: Exception, text: str) -> str:
    """Where in the text, what, and the usual remedy, in lines that show it."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if problem is None or mark is None:
        return f": {' '.join(str(error).split())}"
    lines = text.splitlines() or [""]
    number = min(mark.line, len(lines) - 1)  # where the text ended too early: its last line
    column = mark.column if number == mark.line else len(lines[number])
    first = max(0, column - 80)
    shown = lines[number][first : column + 40].replace("\t", " ")
    if "<stream end>" in problem or "end of stream" in problem:
        remedy = "a bracket or a quote is opened and not closed"
    elif "'\\t'" in problem:
        remedy = "indent with spaces, not with tabs"
    else:
        remedy = "text that holds any of : ? # , [ ] { } & * ! | > @ ` % wants quotes, as in 'What is this?'"
    caret = " " * (column - first) + "^"
    return f", line {number + 1}, column {column + 1}: {problem}\n    {shown}\n    {caret}\n{remedy}"
