"""Flips one bit of one copy between host and device, to see whether somebody finds it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatrain.transport import hops

NUMBER = 3
"""Of the copy that arrives changed, among those of its hop."""


@contextlib.contextmanager
def flipping(what: str) -> Iterator[list[str]]:
    """One copy of this hop, as messages name it, arrives with a flipped bit. Yields a list: empty, then of `what`."""
    copy, retried, now, seen, done = hops.copy_, hops.retried, threading.local(), [], []

    def named(work: Callable[[], Any], hop: str, counts: Any) -> Any:
        now.hop = hop
        return retried(work, hop, counts)

    def spoilt(target: torch.Tensor, source: torch.Tensor) -> None:
        copy(target, source)
        seen.extend([what] if now.hop == what else [])
        if len(seen) == NUMBER and not done:
            done.append(what)
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
            target.view(-1).view(torch.uint8)[target.nbytes // 2] ^= 0x40

    hops.retried, hops.copy_ = named, spoilt
    try:
        yield done
    finally:
        hops.retried, hops.copy_ = retried, copy
