"""Takes arguments and results of a layer apart into tensors and a pattern, and puts them together again.

Tensors may sit in any nesting of dicts, lists, tuples, dataclasses, UserDicts, key-value caches, and objects that hold
a tensor as an attribute. Rule: every filling of a pattern makes fresh containers. So a layer that changes a container
it was given (fills a cache, appends to a list) changes its own copy, once a run, and the caller decides what to do
with that.

What it gives up: a tensor deeper inside an object of another kind is not found.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections import OrderedDict, UserDict, UserList
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

_NEVER = (
    str, bytes, int, float, complex, type(None), type, enum.Enum, nn.Module, torch.dtype, torch.device, torch.Size,
    types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial,
)  # fmt: skip

Contents = list[tuple[bool, Any, Any]]
"""What a container holds: (is an item, key or attribute name, value) each."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Hole:
    """The place of a tensor."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Itself:
    """The place of a container that is not copied."""

    value: Any


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """The place of a container."""

    cls: type
    contents: Contents
    """Patterns of its contents."""

    factory: Any = None
    """Of a defaultdict."""


class Taker:
    """Takes values apart. The same tensor gets one place, however often it is met; so does the same container.

    Args:
        enters_caches: take key-value caches apart as well.
    """

    def __init__(self, *, enters_caches: bool = True) -> None:
        self.tensors: list[torch.Tensor] = []
        self.mutable: list[tuple[Node, Any]] = []
        """Every container that could be changed, behind its pattern."""

        # By id. The second of a pair keeps the object alive, so that its id is not used again.
        self._places: dict[int, tuple[Any, Any]] = {}
        self._enters_caches = enters_caches

    def take(self, value: Any) -> Any:
        """The pattern of `value`. Its tensors are added to `tensors`."""
        if not _may_hold_tensors(type(value)):
            return value
        if id(value) in self._places:
            return self._places[id(value)][0]
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            pattern: Any = _Hole(len(self.tensors) - 1)
        elif not _is_container(value) or (is_cache(type(value)) and not self._enters_caches):
            return value
        elif isinstance(value, tuple):
            taken = self.take_contents(value)
            is_constant = all(new is old for (_, _, new), old in zip(taken, value, strict=True))
            pattern = value if is_constant else Node(type(value), taken)
        else:
            pattern = Node(type(value), [], getattr(value, "default_factory", None))
            # Known before its contents are: a container may hold itself.
            self._places[id(value)] = (pattern, value)
            pattern.contents = self.take_contents(value)
            self.mutable.append((pattern, value))
        self._places[id(value)] = (pattern, value)
        return pattern

    def keep(self, value: Any, stand_in: Any) -> None:
        """Where `take` meets `value` from now on, a filling has `stand_in`. What has a place already keeps it."""
        self._places.setdefault(id(value), (_Itself(stand_in), value))

    def take_contents(self, container: Any) -> Contents:
        return [(is_item, key, self.take(value)) for is_item, key, value in contents(container)]


class Filling:
    """One filling of patterns with `tensors`: fresh containers, one for each pattern."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.made: dict[Node, Any] = {}
        self._tensors = tensors

    def fill(self, pattern: Any) -> Any:
        if isinstance(pattern, _Hole):
            return self._tensors[pattern.index]
        if isinstance(pattern, _Itself):
            return pattern.value
        if not isinstance(pattern, Node):
            return pattern
        if pattern not in self.made:
            self.made[pattern] = self._make(pattern)
        return self.made[pattern]

    def write(self, container: Any, patterns: Contents) -> None:
        """Replace the contents of `container`."""
        filled = [(is_item, key, self.fill(value)) for is_item, key, value in patterns]
        items = [(key, value) for is_item, key, value in filled if is_item]
        # The base classes' own methods: subclasses may do more than store.
        if isinstance(container, dict):
            base = OrderedDict if isinstance(container, OrderedDict) else dict
            base.clear(container)
            for key, value in items:
                base.__setitem__(container, key, value)
        elif isinstance(container, list):
            list.__setitem__(container, slice(None), [value for _, value in items])
        if hasattr(container, "__dict__"):
            vars(container).clear()
        for is_item, key, value in filled:
            if not is_item:
                object.__setattr__(container, key, value)

    def _make(self, pattern: Node) -> Any:
        if issubclass(pattern.cls, tuple):
            make = getattr(pattern.cls, "_make", pattern.cls)
            return make([self.fill(value) for _, _, value in pattern.contents])
        made = pattern.cls.__new__(pattern.cls)
        self.made[pattern] = made
        if pattern.factory is not None:
            made.default_factory = pattern.factory
        self.write(made, pattern.contents)
        return made


def contents(container: Any) -> Contents:
    """What a container holds now."""
    held: Contents = []
    if isinstance(container, dict):
        held = [(True, key, value) for key, value in dict.items(container)]
    elif isinstance(container, (list, tuple)):
        held = [(True, index, value) for index, value in enumerate(container)]
    if isinstance(container, tuple):
        return held
    if hasattr(container, "__dict__"):
        held += [(False, name, value) for name, value in vars(container).items()]
    elif dataclasses.is_dataclass(container):
        names = [field.name for field in dataclasses.fields(container)]
        held += [(False, name, getattr(container, name)) for name in names if hasattr(container, name)]
    return held


def is_same(before: Contents, now: Contents) -> bool:
    """True when both hold the very same objects in the same places."""
    return len(before) == len(now) and all(
        a[0] == b[0] and a[1] == b[1] and a[2] is b[2] for a, b in zip(before, now, strict=True)
    )


@functools.cache
def is_cache(cls: type) -> bool:
    """True for key-value caches of transformers and their parts."""
    return any(base.__module__ == "transformers.cache_utils" for base in cls.__mro__)


@functools.cache
def _may_hold_tensors(cls: type) -> bool:
    return issubclass(cls, torch.Tensor) or _is_container_class(cls) is not False


def _is_container(value: Any) -> bool:
    is_one = _is_container_class(type(value))
    if is_one is None:
        return any(isinstance(attribute, torch.Tensor) for attribute in vars(value).values())
    return is_one


@functools.cache
def _is_container_class(cls: type) -> bool | None:
    """None: it depends on what the instance holds."""
    if issubclass(cls, _NEVER):
        return False
    if is_cache(cls) or dataclasses.is_dataclass(cls) or issubclass(cls, (dict, list, tuple, UserDict, UserList)):
        return True
    return None if cls.__dictoffset__ else False
