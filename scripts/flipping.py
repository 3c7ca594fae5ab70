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


WAYS = (
    "no hop",
    "weights of model.layers.2 on their way to the device",
    "gradients of model.layers.2 on their way home",
    "an input of model.layers.2 on its way to host memory",
    "an input of model.layers.2 on its way back to the device",
    "states of model.layers.1 on their way to the device",
    "updated states of model.layers.1 on their way home",
)


def check_flips(train: Callable[[bool], dict[str, torch.Tensor]]) -> str:
    """What is wrong, if anything. train: gives all states of a run, with or without checks, that has all the ways."""
    truth = train(False)
    for what in WAYS:
        with flipping(what) as done:
            state = train(True)
        different = [name for name in truth if not torch.equal(truth[name], state[name])]
        if different or done != [what] * (what != "no hop"):
            return f"{what}: flipped {done}, {len(different)} weights and moments differ: {different[:3]}"
    return ""
