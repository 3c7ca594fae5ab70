"""What hbm, ram and disk have in common: the small protocol that homes, states and gradients are made by."""

from __future__ import annotations

import os
from typing import Protocol

import torch

from megatrain.base.errors import RefusedError

PAGE_BYTES = 4096


class Tier(Protocol):
    """Where parts of homes come from."""

    device: torch.device
    """Of its tensors."""

    def empty(self, num_bytes: int, *, pinned: bool = False, owner: str = "") -> torch.Tensor:
        """A zeroed uint8 tensor of exactly `num_bytes`, which keeps its memory alive. pinned: page-locked for the GPU,
        where tier and machine can. owner: what it is for, for messages. Raises UserError where there is no room."""

    def check_process(self) -> None:
        """Raise RefusedError in a process that must not use what is here."""

    def expose(self) -> None:
        """Somebody may change tensors of this tier who is no update."""


class OwnProcess:
    """Remembers the process that it was made in."""

    def __init__(self) -> None:
        self._process_id = os.getpid()

    @property
    def is_this(self) -> bool:
        return os.getpid() == self._process_id

    def check(self) -> None:
        """Raise RefusedError in a forked process: it has none of the threads, and what it writes, its parent reads."""
        if not self.is_this:
            raise RefusedError(
                "a forked process cannot use a streamed model, which lives in the process that streamed it: use it "
                "there, or start this process by spawn and call mt.stream in it"
            )


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
