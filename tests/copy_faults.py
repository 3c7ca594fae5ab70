"""Faults in copies between host and device."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatrain.transport import hops


class Faulty:
    """Copies of one hop that go wrong: the first `num_times` from its `number`-th on (-1: all).

    spoil: what happens instead of, or to, a copy; of (target, source).
    """

    def __init__(self, what: str, spoil: Callable[[torch.Tensor, torch.Tensor], None], num_times: int) -> None:
        self.what, self.num_times, self.number = what, num_times, 3
        self.num_copies = self.num_spoilt = 0
        self._spoil, self._now = spoil, threading.local()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        copy, retried = hops.copy_, hops.retried

        def named(work: Callable, what: str, *args: Any) -> Any:
            self._now.what = what
            return retried(work, what, *args)

        def spoilt(target: torch.Tensor, source: torch.Tensor) -> None:
            if self._is_due():
                self._spoil(target, source)
            else:
                copy(target, source)

        monkeypatch.setattr(hops, "retried", named)
        monkeypatch.setattr(hops, "copy_", spoilt)

    def _is_due(self) -> bool:
        if self._now.what != self.what:
            return False
        self.num_copies += 1
        is_due = self.num_copies >= self.number and self.num_spoilt != self.num_times
        self.num_spoilt += is_due
        return is_due


def flip(target: torch.Tensor, source: torch.Tensor) -> None:
    """One bit of the exponent of a number in the middle."""
    target.copy_(source)
    target.view(-1).view(torch.uint8)[target.nbytes // 8 * 4 + 3] ^= 0x40


def broken(error: Exception) -> Callable[[torch.Tensor, torch.Tensor], None]:
    def fail(*_: torch.Tensor) -> None:
        raise copy.copy(error)  # one that is raised again would hold the frames of every model

    return fail
