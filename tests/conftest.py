"""Every test starts from the same settings and random numbers, and leaves no lanes running.

Tests run in two processes at once (pytest-xdist): none may touch what another process sees, which is why there is no
profile of this machine here. The folder of compiled kernels is shared: a kernel is named by its source and put there
whole.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

# Tiny tensors: more threads only wait for each other, for the lanes, and for the other worker. Before torch is
# imported, and for all processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch
from comparing import close_streamed

import megatrain as mt

torch.set_num_threads(1)
hypothesis.settings.register_profile("untimed", deadline=None)  # how long an example takes is the machine's business
hypothesis.settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """Modules stay: many tests collect what was dropped, which takes a third of a second over all that was imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def no_profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this worker's own that is not there: no test has measured the machine."""
    return tmp_path_factory.mktemp("profile") / "none"


@pytest.fixture(autouse=True)
def fresh_defaults(monkeypatch: pytest.MonkeyPatch, no_profile: Path) -> Iterator[None]:
    """Settings of a CPU run; the random state and the profile of others are none of a test's business."""
    monkeypatch.setenv("MEGATRAIN_CACHE", str(no_profile))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(no_profile.parent))
    mt.init(device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        yield
    mt.init(device="cpu")
    close_streamed()
    assert not no_profile.exists(), "a test kept a profile of this machine, which later ones would plan with"
