"""Names that are not known, with the known one that was probably meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from megatrain.base.errors import UserError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def refusing_unknown(what: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorator: keywords that the function does not have raise UserError. what: the function's name for users."""

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        known = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            for name in kwargs:
                if name not in known:
                    raise UserError(f"{what} has no setting {name!r}; {meant(name, known)}")
            return function(*args, **kwargs)

        return checked

    return decorate


def meant(name: str, known: list[str]) -> str:
    """The nearest of `known`, or all of them."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
