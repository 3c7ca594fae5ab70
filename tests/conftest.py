"""Every test starts from the same settings and random numbers, and leaves no lanes running."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from comparing import close_streamed

import megatrain as mt

# Tiny tensors: more threads only wait for each other, and for the lanes.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_defaults() -> Iterator[None]:
    """Settings of a CPU run; the random state of other tests is none of a test's business."""
    mt.init(device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        yield
    mt.init(device="cpu")
    close_streamed()
