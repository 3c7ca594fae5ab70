"""Bookkeeping of the stream: predictor, slots, lanes, fences. Pure parts by properties, lanes by faults."""

from __future__ import annotations

import functools
import sys
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.base.fence import Fence
from megatrain.plan.placement import RAM
from megatrain.spec.layout import Field, GradientLayout
from megatrain.store.home import Home
from megatrain.store.memory import HostMemory
from megatrain.transport.lane import Lane
from megatrain.transport.predictor import Predictor
from megatrain.transport.ring import Loan, SlabRing
from megatrain.transport.slots import Slot, SlotPool, State, slot_sizes

CPU = torch.device("cpu")


def make_home(name: str, numel: int, memory: HostMemory | None = None) -> Home:
    field = Field(
        name=name,
        shape=(numel,),
        dtype=torch.float32,
        saved_dtype=torch.float32,
        is_split=False,
        offset=0,
        wire_offset_bytes=0,
    )
    memory = memory or HostMemory(max_bytes=None, pin=False)
    return Home(name, [field], {RAM: memory}, torch.float32)


# Predictor


@given(st.lists(st.integers(0, 6), min_size=3, max_size=12))
def test_a_repeated_cycle_is_predicted_without_misses(cycle: list[int]) -> None:
    # An order that is told by its last two visits: the way up and down through layers is one.
    up_and_down = [*range(len(cycle)), *reversed(range(len(cycle)))]
    predictor: Predictor[int] = Predictor()
    for _ in range(2):
        for layer in up_and_down:
            predictor.observe(layer)
    hits, misses = predictor.num_hits, predictor.num_misses
    for layer in up_and_down:
        predictor.observe(layer)
    assert predictor.num_misses == misses
    # Two of the visits repeat their predecessor (the turns) and count once.
    assert predictor.num_hits - hits == len(up_and_down) - 2


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 5))
def test_predictions_are_distinct_and_never_the_present_layer(visits: list[int], depth: int) -> None:
    predictor: Predictor[int] = Predictor()
    for visit in visits:
        predictor.observe(visit)
        predicted = predictor.predict(depth)
        assert len(predicted) == len(set(predicted)) <= depth
        assert visit not in predicted


def test_a_miss_is_counted_and_corrected() -> None:
    predictor: Predictor[str] = Predictor()
    for visit in "abcabc":
        predictor.observe(visit)
    predictor.observe("x")
    assert predictor.num_misses == 1
    for visit in "abcx":
        predictor.observe(visit)
    assert predictor.predict(1) == ["a"]


# Slots


def test_slot_states_are_asserted() -> None:
    slot, home = Slot(torch.empty(64, dtype=torch.uint8)), make_home("a", 16)
    with pytest.raises(AssertionError):
        slot.use(1)
    slot.fill(home, Fence.done())
    with pytest.raises(AssertionError, match="filling, not free"):
        slot.fill(home, Fence.done())
    with pytest.raises(AssertionError):
        slot.use(1)
    slot.ready()
    assert slot.use(1).numel() == 64
    with pytest.raises(AssertionError):
        slot.free()
    slot.release(Fence.done())
    slot.free()
    assert slot.state is State.FREE


def test_a_fill_is_called_off_by_the_next() -> None:
    slot = Slot(torch.empty(64, dtype=torch.uint8))
    first = slot.claim()
    assert first()
    second = slot.claim()
    assert second() and not first()


def test_a_slot_with_old_weights_does_not_hold_the_home() -> None:
    slot, home = Slot(torch.empty(64, dtype=torch.uint8)), make_home("a", 16)
    slot.fill(home, Fence.done())
    assert slot.holds(home)
    home.version += 1
    assert not slot.holds(home)


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=40),
)
def test_candidates_fit_are_not_in_use_and_not_kept(num_slots: int, events: list[tuple[int, bool]]) -> None:
    sizes = [16, 16, 16, 16, 40]
    homes = [make_home(str(index), size) for index, size in enumerate(sizes)]
    pool = SlotPool(device=CPU, num_slots=num_slots, block_bytes=64, largest_bytes=160)
    for clock, (index, keep_first) in enumerate(events):
        home, keep = homes[index], [homes[0]] if keep_first else []
        slot = pool.find(home)
        if slot is None:
            slot = pool.candidate(home, keep)
            if slot is None:
                assert keep, "without anything to keep there is always a slot"
                continue
            assert slot.state is not State.IN_USE
            assert slot.buffer.numel() >= home.wire.numel()
            assert not any(slot.holds(kept) for kept in keep)
            if slot.home is not None:
                slot.free()
            slot.fill(home, Fence.done())
        slot.ready()
        slot.use(clock)
        slot.release(Fence.done())
        held = [slot.home for slot in pool.slots if slot.home is not None]
        assert len(held) == len(set(held)), "one home in two slots"


def test_blocks_leave_the_large_slot_to_large_homes() -> None:
    pool = SlotPool(device=CPU, num_slots=1, block_bytes=64, largest_bytes=160)
    first, second, large = make_home("a", 16), make_home("b", 16), make_home("e", 40)
    pool.candidate(large, []).fill(large, Fence.done())
    for block in (first, second):
        slot = pool.candidate(block, [])
        if slot.home is not None:
            slot.free()
        slot.fill(block, Fence.done())
    assert pool.find(large) is not None
    assert slot_sizes(num_slots=2, block_bytes=64, largest_bytes=64) == [64, 64]


# Lanes and fences


@pytest.mark.timeout(180)
def test_a_late_fence_holds_back_what_waits_for_it_alone() -> None:
    lane, order, gate = Lane("test", CPU), [], Fence()
    first = lane.submit(lambda: order.append(1), after=(gate,))
    dependent = lane.submit(lambda: order.append(3), after=(first,))
    lane.submit(lambda: order.append(2)).wait()
    assert order == [2] and not first.is_recorded
    gate.record()
    dependent.wait()
    assert order == [2, 1, 3]
    lane.close()


@pytest.mark.timeout(180)
@settings(max_examples=50)
@given(st.lists(st.sets(st.integers(0, 3)), max_size=12), st.permutations(range(4)))
def test_a_lane_takes_the_first_piece_that_is_ready(pieces: list[set[int]], opened: list[int]) -> None:
    lane, order, gates = Lane("test", CPU), [], [Fence() for _ in range(4)]
    fences = [
        lane.submit(functools.partial(order.append, number), after=[gates[gate] for gate in after])
        for number, after in enumerate(pieces)
    ]
    expected = []
    for step in range(len(gates) + 1):
        ready = [number for number, after in enumerate(pieces) if after <= set(opened[:step])]
        expected += [number for number in ready if number not in expected]
        for number in ready:
            fences[number].wait()
        assert order == expected
        if step < len(gates):
            gates[opened[step]].record()
    lane.close()


@pytest.mark.timeout(180)
def test_a_flush_waits_for_all_before_it_and_for_nothing_else() -> None:
    lane, order, gate, never = Lane("test", CPU), [], Fence(), Fence()
    lane.submit(lambda: order.append(1), after=(gate,))
    flushed = threading.Event()
    flushing = threading.Thread(target=lambda: (lane.flush(), flushed.set()))
    flushing.start()
    lane.submit(lambda: order.append(2)).wait()
    assert not flushed.is_set() and order == [2]
    late = lane.submit(lambda: order.append(3), after=(never,))
    gate.record()
    flushing.join()
    assert order == [2, 1] and not late.is_recorded
    never.record()
    lane.flush()
    assert order == [2, 1, 3]
    lane.close()


@pytest.mark.timeout(180)
def test_after_a_failure_nothing_is_waited_for() -> None:
    lane, never = Lane("test", CPU), Fence()
    waiting = lane.submit(lambda: None, after=(never,))

    def fail() -> None:
        raise OSError("the disk is gone")

    for fence in (lane.submit(fail), waiting):
        with pytest.raises(OSError, match="the disk is gone"):
            fence.wait()
    with pytest.raises(OSError, match="the disk is gone"):
        lane.flush()
    lane.close()


@pytest.mark.timeout(180)
def test_what_fails_in_a_lane_reaches_everyone_who_waits() -> None:
    lane = Lane("test", CPU)

    def fail() -> None:
        raise OSError("the disk is gone")

    failed = lane.submit(fail)
    with pytest.raises(OSError, match="the disk is gone"):
        failed.wait()
    with pytest.raises(OSError, match="the disk is gone"):
        lane.submit(lambda: None).wait()
    other = Lane("other", CPU)
    with pytest.raises(OSError, match="the disk is gone"):
        other.submit(lambda: None, after=(failed,)).wait()
    lane.close()
    other.close()


@pytest.mark.timeout(180)
def test_the_thread_of_a_dropped_lane_ends() -> None:
    lane = Lane("dropped", CPU)
    lane.submit(lambda: None).wait()
    waiting = lane.submit(lambda: None, after=(Fence(),))
    thread = lane._thread
    del lane
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="gone"):
        waiting.wait()


@pytest.mark.timeout(180)
def test_whoever_waits_for_a_fence_is_told_once() -> None:
    told: list[int] = []
    for number in range(2000):
        fence = Fence()
        fence.when_recorded(functools.partial(told.append, number))
        recorder = threading.Thread(target=fence.record)
        recorder.start()
        # While it is being recorded.
        fence.when_recorded(functools.partial(told.append, number))
        recorder.join()
        fence.when_recorded(functools.partial(told.append, number))
        assert told == [number] * 3
        told.clear()
    fence = Fence()
    fence.when_recorded(functools.partial(told.append, 1))
    fence.fail(OSError())
    assert told == [1]


# The ring


@given(st.integers(1, 4), st.lists(st.integers(0, 30), min_size=1, max_size=30))
def test_a_slab_is_lent_to_one_at_a_time_whatever_the_order_of_updates(num_slabs: int, choices: list[int]) -> None:
    slabs = [torch.full((1,), number, dtype=torch.uint8) for number in range(num_slabs)]
    ring = SlabRing(slabs)
    lent: list[tuple[Fence, int]] = []
    waiting: list[tuple[Loan, Fence]] = []
    for number, choice in enumerate(choices):
        home, updated = make_home(str(number), 1), Fence()
        loan = ring.lend(home)
        assert not ring.is_settled
        ring.take_back(home, updated)
        assert ring.is_settled
        waiting.append((loan, updated))
        # Turns come in order, as many as there are slabs.
        while waiting and waiting[0][0].turn.is_recorded:
            loan, updated = waiting.pop(0)
            lent.append((updated, int(ring.take(loan, None))))
        assert not any(loan.turn.is_recorded for loan, _ in waiting)
        assert len({slab for _, slab in lent}) == len(lent) == min(num_slabs, len(lent) + len(waiting))
        if choice % 2:
            lent.pop(choice % len(lent))[0].record()
    ring.reset()
    for number in range(num_slabs):
        assert ring.lend(make_home(str(number), 1)).turn.is_recorded


def test_a_gradient_that_was_never_used_up_is_forgotten_with_its_slab() -> None:
    """An interrupt came before its update: the next pass is the first again, and nothing of the slab is added to it."""
    home = make_home("a", 4)
    layout, (field,) = home.gradient_layout(), home.fields
    for value in (1.0, 2.0):
        home.grads.borrow(torch.zeros(layout.numel * 4, dtype=torch.uint8), layout)
        assert not home.grads.is_holding()
        home.grads.slab(layout).fill_(value)
        home.grads.receive(layout, {field: 2 * value})
    assert torch.equal(home.grads.flat(field), torch.full((4,), 2.0))


def test_a_slab_whose_update_failed_says_so_to_the_next() -> None:
    ring, home, updated = SlabRing([torch.zeros(1)]), make_home("a", 1), Fence()
    ring.take(ring.lend(home), None)
    ring.take_back(home, updated)
    loan = ring.lend(home)
    assert not loan.turn.is_recorded
    updated.fail(OSError("the disk is gone"))
    assert loan.turn.is_recorded
    with pytest.raises(OSError, match="the disk is gone"):
        ring.take(loan, None)


def test_a_fence_is_recorded_once() -> None:
    fence = Fence()
    fence.record()
    with pytest.raises(AssertionError):
        fence.record()
    with pytest.raises(AssertionError):
        fence.fail(RuntimeError())


# Layouts


@given(st.lists(st.lists(st.integers(1, 40), min_size=0, max_size=3), min_size=1, max_size=6))
def test_gradient_fields_do_not_overlap(shapes: list[list[int]]) -> None:
    fields = [
        Field(
            name=str(index),
            shape=tuple(shape),
            dtype=torch.float32,
            saved_dtype=torch.float32,
            is_split=False,
            offset=0,
            wire_offset_bytes=0,
        )
        for index, shape in enumerate(shapes)
    ]
    layout = GradientLayout.of(fields)
    flat = torch.zeros(layout.numel)
    for field in fields:
        layout.view(flat, field).add_(1)
    assert flat.sum() == sum(field.numel for field in fields)
    assert flat.max() == 1


def test_a_fence_is_recorded_wherever_its_waiter_was_interrupted() -> None:
    def interrupted_at(step: int) -> bool:
        fence, left = Fence(), step

        def trace(frame: object, event: str, argument: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            return trace

        recorder = threading.Thread(target=lambda: (time.sleep(0.01), fence.record()), daemon=True)
        recorder.start()
        sys.settrace(trace)
        try:
            fence.wait()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
            recorder.join(timeout=60)
            assert not recorder.is_alive(), f"recording hangs after an interrupt at step {step}"
        return False

    assert interrupted_at(1)
    assert not all(interrupted_at(step) for step in range(2, 200))
