"""A run that failed leaves nothing behind in its process: no threads, no engine, no disk space."""

from __future__ import annotations

import contextlib
import errno
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn
from update_training import batches, start, train

from megatrain.base.config import StreamOptions
from megatrain.base.errors import DiskError
from megatrain.base.fence import Fence, bare
from megatrain.execute.engine import Engine
from megatrain.optim.base import HomeOptimizer
from megatrain.store.disk_calls import DiskCalls


def live_engines() -> int:
    return sum(type(one) is Engine for one in gc.get_objects())


def settle(num_threads: int, num_engines: int) -> None:
    """Updates that were queued hold the engine until they are over; then it is a cycle for the collector."""
    for _ in range(600):
        gc.collect()
        if threading.active_count() <= num_threads and live_engines() <= num_engines:
            return
        time.sleep(0.1)


def by_accumulate(model: nn.Module, optimizer: HomeOptimizer) -> None:
    train(model, optimizer, batches(4))


def by_backward(model: nn.Module, optimizer: HomeOptimizer) -> None:
    for micro_batches in batches(4):
        for batch in micro_batches:
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def by_state_dict(model: nn.Module, optimizer: HomeOptimizer) -> None:
    train(model, optimizer, batches(1))
    optimizer.state_dict()


@pytest.mark.parametrize("fail_by", [by_accumulate, by_backward, by_state_dict])
def test_a_model_whose_disk_failed_goes_when_it_is_dropped(
    fail_by: Callable[[nn.Module, HomeOptimizer], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def run() -> None:
        model, optimizer = start(StreamOptions(places="disk"), offload_dir=tmp_path)
        train(model, optimizer, batches(1))
        optimizer.state_dict()
        with monkeypatch.context() as patch, pytest.raises(DiskError, match="could not write .* at offset"):
            patch.setattr(DiskCalls, "write", fail)
            fail_by(model, optimizer)

    gc.collect()
    before = threading.active_count(), live_engines()
    run()
    settle(*before)
    assert live_engines() <= before[1]
    assert threading.active_count() <= before[0]


def test_an_error_that_is_kept_holds_no_frames() -> None:
    fence = Fence()

    def worker() -> None:
        try:
            raise ValueError("in the worker")
        except ValueError as error:
            fence.fail(error)

    thread = threading.Thread(target=worker)
    thread.start()
    thread.join()
    for _ in range(2):
        with pytest.raises(ValueError, match="in the worker"):
            fence.wait()
    assert fence.error is not None and fence.error.__traceback__ is None
    if hasattr(fence.error, "__notes__"):
        (note,) = fence.error.__notes__
        assert "in worker" in note and "raise ValueError" in note


def test_an_error_that_cannot_be_copied_is_told_in_words() -> None:
    class Odd(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    with contextlib.suppress(Odd):
        raise Odd(1, 2)
    assert str(bare(Odd(1, 2))) == "Odd: 1 and 2"
