"""Does a value read from YAML fit a type annotation, and how is that type called in plain words?

Rule: only what YAML can hold is accepted (text, numbers, true/false, nothing, lists, sections); a whole number fits
where a number is wanted, and true/false never passes for a number.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import types
import typing
from typing import Any


class _NotInYaml:
    """Stands for a type that only code can hand over."""


def field_types(cls: type) -> dict[str, Any]:
    """Name to resolved annotation of each field that the dataclass's constructor takes."""
    # Names that the class's module imports for type checkers only.
    hints = typing.get_type_hints(cls, localns={"Dataset": _NotInYaml})
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def accepts(value: object, hint: Any) -> bool:
    """Whether `value`, as YAML gives it, fits `hint`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(accepts(value, argument) for argument in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin in (list, collections.abc.Sequence):
        return isinstance(value, list) and all(accepts(item, arguments[0]) for item in value)
    if (origin or hint) in (dict, collections.abc.Mapping):
        return isinstance(value, dict)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return value in [member.value for member in hint]
    return hint in (str, bool, type(None)) and isinstance(value, hint)


def describe(hint: Any) -> str:
    """`a whole number or nothing`: the type in the words of somebody who writes YAML."""
    words: list[str] = []
    for part in _alternatives(hint):
        word = _describe_one(part)
        if word and word not in words:
            words.append(word)
    return " or ".join(words)


def _alternatives(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [part for argument in typing.get_args(hint) for part in _alternatives(argument)]
    return [hint]


def _describe_one(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    plain = {str: "text", bool: "true or false", int: "a whole number", float: "a number", type(None): "nothing"}
    if hint in plain:
        return plain[hint]
    if origin is typing.Literal:
        return " or ".join(repr(argument) for argument in arguments)
    if origin in (list, collections.abc.Sequence):
        plurals = {str: "texts", float: "numbers", dict: "sections"}
        inner = [plurals[item] for item in _alternatives(arguments[0]) if item in plurals]
        return f"a list of {' or '.join(inner)}" if inner else "a list"
    if (origin or hint) in (dict, collections.abc.Mapping):
        return "a section"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "one of " + ", ".join(str(member.value) for member in hint)
    return ""  # a type that only code can hand over, such as os.PathLike
