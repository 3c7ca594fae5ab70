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
        """Raise RefusedError in a process that must not write here."""

    def expose(self) -> None:
        """Somebody may change tensors of this tier who is no update."""


class OwnProcess:
    """Remembers the process that it was made in."""

    def __init__(self) -> None:
        self._process_id = os.getpid()

    def check(self) -> None:
        """Raise RefusedError in a forked process: what it writes, its parent reads."""
        if os.getpid() != self._process_id:
            raise RefusedError(
                "a forked process cannot change a streamed model, whose weights it shares with its parent: change it "
                "in the process that called mt.stream, or call mt.stream in this one"
            )


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
