"""Inputs of layers and kept gradients share one room: what it takes, who waits for it, that no result depends on it."""

from __future__ import annotations

import logging
import random
import threading
from typing import Any

import pytest
import torch
from comparing import assert_equal, stream, the_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupting import interrupted
from model_zoo import make_model, padded_batch

import megatrain as mt
from megatrain.base.fence import Fence
from megatrain.store.buffers import BufferPool
from megatrain.store.memory import HostMemory
from megatrain.store.tier import PAGE_BYTES
from megatrain.transport import activations

pytestmark = pytest.mark.timeout(180)

DELAY_SECONDS = 0.002
COUNTS = [(7, 12, 9), (5, 16), (3,)]


def make_pool(**options: Any) -> BufferPool:
    return BufferPool(HostMemory(max_bytes=None, pin=False), **options)


def train(num_steps: int = 4, **options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Steps whose inputs all wait in host memory; the losses, norms and weights."""
    mt.init(device="cpu", precision="fp32")
    _, model = stream(make_model("llama"), **options)
    optimizer = mt.optim.AdamW(model, lr=1e-2)
    found: dict[str, torch.Tensor] = {}
    for step in range(num_steps):
        batches = [padded_batch(n, seed=n + step) for n in COUNTS[step % len(COUNTS)]]
        found[f"{step} losses"] = torch.stack(mt.accumulate(model, batches))
        found[f"{step} norm"] = mt.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return found | dict(mt.named_parameters(model)), model


@pytest.fixture
def all_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of any size go to the host."""
    monkeypatch.setattr(activations, "MIN_BYTES", 1)


@pytest.mark.usefixtures("all_go")
@pytest.mark.parametrize("room_bytes", [None, 0, 1 << 20])
def test_no_result_depends_on_the_room(room_bytes: int | None) -> None:
    truth, _ = train(serial=True)
    found, model = train(
        activation_bytes=0, room_bytes=room_bytes, lane_delay_seconds=DELAY_SECONDS, poison=True, num_slots=2
    )
    assert_equal(truth, found)
    assert the_engine(model).activations.num_offloaded > 0


@pytest.mark.usefixtures("all_go")
@pytest.mark.parametrize("places", ["hbm", {"model.layers.0": "hbm", "model.layers.1": "stream"}])
@pytest.mark.parametrize("activation_bytes", [0, 1 << 13, 1 << 30])
@pytest.mark.parametrize("device_room_bytes", [1, 1 << 20])
def test_no_result_depends_on_the_room_on_the_device(
    device_room_bytes: int, activation_bytes: int, places: Any
) -> None:
    truth, _ = train(serial=True)
    found, model = train(
        places=places,
        activation_bytes=activation_bytes,
        room_bytes=1 << 20,
        device_room_bytes=device_room_bytes,
        lane_delay_seconds=DELAY_SECONDS,
        poison=True,
    )
    assert_equal(truth, found)
    room = the_engine(model).activations.device_buffers
    assert room is not None and room.peak_bytes > 0
    the_engine(model).wait()
    assert room.used_bytes == 0


@pytest.mark.usefixtures("all_go")
def test_what_holds_an_input_of_the_backward_sees_it_unchanged() -> None:
    mt.init(device="cpu", precision="fp32")
    model = make_model("llama")
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    block = type(model.model.layers[0])

    class Holding(block):
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            held.append((hidden_states.detach(), hidden_states.detach().clone()))
            return super().forward(hidden_states, *args, **kwargs)

    for layer in model.model.layers:
        layer.__class__ = Holding
    _, model = stream(model, places="hbm", room_bytes=1 << 20, device_room_bytes=1 << 20, poison=True)
    mt.accumulate(model, [padded_batch(9, seed=0)])
    the_engine(model).wait()
    assert the_engine(model).activations.device_buffers.used_bytes > 0  # and what was freed is poisoned
    assert len(held) > len(model.model.layers)
    assert all(torch.equal(now, then) for now, then in held)


@pytest.mark.usefixtures("all_go")
def test_inputs_and_gradients_take_less_than_both() -> None:
    mt.init(device="cpu", precision="fp32")
    _, model = stream(make_model("llama", num_hidden_layers=8), activation_bytes=0)
    optimizer = mt.optim.AdamW(model, lr=1e-2)
    pool = the_engine(model).activations.buffers
    for _ in range(3):
        mt.accumulate(model, [padded_batch(16, seed=seed) for seed in range(20)])
        optimizer.step()
        gradient_bytes = pool.used_bytes
        optimizer.zero_grad()
    most_bytes, input_bytes = pool.peak_bytes, the_engine(model).activations.offloaded_bytes // 3
    assert max(gradient_bytes, input_bytes) <= most_bytes
    assert most_bytes < 0.75 * (gradient_bytes + input_bytes), (gradient_bytes, input_bytes)
    the_engine(model).wait()
    assert pool.used_bytes == 0


@pytest.mark.usefixtures("all_go")
def test_a_gradient_that_somebody_holds_stays_what_it_is() -> None:
    mt.init(device="cpu", precision="fp32")
    _, model = stream(make_model("llama"), activation_bytes=0, poison=True)
    optimizer = mt.optim.AdamW(model, lr=1e-2)
    name = "model.layers.1.mlp.up_proj.weight"
    mt.accumulate(model, [padded_batch(9, seed=0)])
    held = model.get_parameter(name).grad
    copied = held.clone()
    optimizer.step()
    for step in range(3):
        optimizer.zero_grad()
        mt.accumulate(model, [padded_batch(9, seed=step)])
        optimizer.step()
        assert torch.equal(held, copied)
    optimizer.zero_grad()
    the_engine(model).wait()
    pool = the_engine(model).activations.buffers
    assert pool.used_bytes > 0
    del held
    assert pool.used_bytes == 0


def test_more_than_was_planned_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    pool = make_pool(first_bytes=2 * PAGE_BYTES, is_planned=True)
    with caplog.at_level(logging.WARNING, "megatrain"):
        held = [pool.take(PAGE_BYTES) for _ in range(2)]
        assert not caplog.records
        held += [pool.take(PAGE_BYTES) for _ in range(2)]
    assert len(caplog.records) == 1
    assert "call optimizer.zero_grad() between step() and the next forward" in caplog.text


SIZES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=12)


@settings(max_examples=60)
@given(SIZES, st.integers(0, 2**16))
def test_two_stacks_need_one_chunk_as_large_as_they_ever_are_together(layers: list[tuple[int, int]], seed: int) -> None:
    """layers: (pages of its inputs, pages of its gradients). A layer's inputs are freed in any order."""
    draws = random.Random(seed)
    inputs, gradients = [pages for pages, _ in layers], [pages for _, pages in layers]
    moments = [sum(inputs[: n + 1]) + sum(gradients[n + 1 :]) for n in range(len(layers))]
    moments += [sum(inputs[:n]) + sum(gradients[n:]) for n in range(len(layers))]
    most_bytes = max(moments) * PAGE_BYTES
    pool = make_pool(first_bytes=most_bytes)
    waiting: dict[int, torch.Tensor] = {}
    for _ in range(3):
        kept = []
        for number, pages in enumerate(inputs):
            if number in waiting:
                pool.give_back(waiting.pop(number))
            kept.append([pool.take(PAGE_BYTES) for _ in range(pages)])
        for number in reversed(range(len(layers))):
            buffers = kept.pop()
            draws.shuffle(buffers)
            for buffer in buffers:
                pool.give_back(buffer)
            waiting[number] = pool.take(gradients[number] * PAGE_BYTES, at_end=True)
    assert pool.total_bytes == most_bytes


def test_whoever_takes_waits_for_what_comes_back_before_there_is_more() -> None:
    pool = make_pool(first_bytes=2 * PAGE_BYTES)
    fence = Fence()
    pool.give_back(pool.take(2 * PAGE_BYTES), behind=fence)
    threading.Timer(0.05, fence.record).start()
    taken = pool.take(PAGE_BYTES)
    assert fence.is_recorded
    assert pool.total_bytes == 2 * PAGE_BYTES
    pool.give_back(taken)


def test_a_lane_does_not_wait_for_what_is_behind_it() -> None:
    """A gradient's drain takes its slab on the lane that sends inputs: it takes more memory instead."""
    pool = make_pool(first_bytes=PAGE_BYTES)
    sent = Fence()
    pool.give_back(pool.take(PAGE_BYTES), behind=sent, needs=sent)
    pool.take(PAGE_BYTES, at_end=True)
    assert pool.total_bytes == 2 * PAGE_BYTES
    sent.record()
    pool.take(PAGE_BYTES)
    assert pool.total_bytes == 2 * PAGE_BYTES


def test_room_comes_back_from_work_that_failed() -> None:
    pool = make_pool(first_bytes=PAGE_BYTES)
    fence = Fence()
    pool.give_back(pool.take(PAGE_BYTES), behind=fence)
    fence.fail(RuntimeError("broken link"))
    pool.take(PAGE_BYTES)
    assert pool.total_bytes == PAGE_BYTES


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_lose_no_room() -> None:
    """But for the one buffer that the interrupt kept from coming into somebody's hands, or back from them."""

    def some_turns(pool: BufferPool, held: list[torch.Tensor]) -> None:
        for pages in (2, 1, 3):
            held.append(pool.take(pages * PAGE_BYTES, at_end=pages == 1))
            held[-1].fill_(pages)
        while held:
            pool.give_back(held.pop())

    num_places = interrupted(lambda: some_turns(make_pool(first_bytes=8 * PAGE_BYTES), []), None)
    assert num_places > 50
    for at in range(1, num_places + 1):
        pool, held = make_pool(first_bytes=8 * PAGE_BYTES), []
        interrupted(lambda pool=pool, held=held: some_turns(pool, held), at)
        mine = [buffer.clone() for buffer in held]
        others = [pool.take(PAGE_BYTES) for _ in range(2)]
        for buffer in others:
            buffer.fill_(9)
        assert all(torch.equal(buffer, then) for buffer, then in zip(held, mine, strict=True)), at
        for buffer in others:
            pool.give_back(buffer)
        lost_bytes = pool.used_bytes - sum(buffer.numel() for buffer in held)
        assert 0 <= lost_bytes <= 3 * PAGE_BYTES, at
        free = sorted(span for chunk in pool._chunks for span in chunk.free)
        assert sum(stop - start for start, stop in free) == pool.total_bytes - pool.used_bytes


def test_threads_share_a_pool() -> None:
    """No two hold the same bytes at once."""
    pool, errors = make_pool(first_bytes=6 * PAGE_BYTES), []

    def work(number: int) -> None:
        draws = random.Random(number)
        for _ in range(300):
            buffer = pool.take(draws.randint(1, 3) * PAGE_BYTES, at_end=number % 2 == 1)
            buffer.fill_(number)
            if not (buffer == number).all():
                errors.append(number)
            pool.give_back(buffer)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert pool.used_bytes == 0
    assert pool.peak_bytes <= 12 * PAGE_BYTES
