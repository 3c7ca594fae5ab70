"""Commit marks: what of an update is done, so that an update which a fault stopped goes on and does nothing twice.

Rule: what runs under a mark leaves everything as it was when it raises, or raises HalfWrittenError. The C kernel and
the Triton kernel are one call that either runs or does not; whatever can fail half way takes an undo copy of what it
writes (`undone_on_fault`), and works on pieces, so that the copy is small.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor

Result = TypeVar("Result")


class HalfWrittenError(RuntimeError):
    """A piece is neither what it was nor what it should be, and there is no way back: its cause says why."""


class Marks:
    """Several threads may set marks of different pieces."""

    def __init__(self) -> None:
        self._done: dict[Hashable, Any] = {}

    def once(self, piece: Hashable, run: Callable[[], Result]) -> Result:
        """What `run` returned for this piece, now or when it was marked."""
        if piece not in self._done:
            self._done[piece] = run()
        return self._done[piece]

    def within(self, part: Hashable) -> Marks:
        """The marks of a part, whose pieces have names of their own."""
        return self._done.setdefault(part, Marks())


@contextlib.contextmanager
def undone_on_fault(tensors: Iterable[Tensor | None]) -> Iterator[None]:
    """Where the block raises, the tensors are again what they were."""
    copies = [(tensor, tensor.clone()) for tensor in tensors if tensor is not None]
    try:
        yield
    except BaseException:
        for tensor, before in copies:
            tensor.copy_(before)
        raise
