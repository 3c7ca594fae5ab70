"""Boundary activations: beyond the budget they go to the host and come back as they were; buffers are used again."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import megatrain as mt
from megatrain.base.config import StreamOptions
from megatrain.base.fence import Fence
from megatrain.execute.engine import engine_of
from megatrain.store.buffers import MAX_GAP_SHARE, BufferPool
from megatrain.store.memory import HostMemory
from megatrain.store.tier import PAGE_BYTES, round_up
from megatrain.transport.activations import MIN_BYTES, ActivationStore
from megatrain.transport.lane import Lane
from megatrain.transport.serial import SerialStream

CPU = torch.device("cpu")
OFFLOAD = StreamOptions(activation_bytes=0)


def make_memory() -> HostMemory:
    return HostMemory(max_bytes=None, pin=False)


def make_store(budget_bytes: int) -> ActivationStore:
    stream = SerialStream(CPU)
    return ActivationStore(
        buffers=BufferPool(make_memory()), device=CPU, budget_bytes=budget_bytes, send=stream.send, bring=stream.bring
    )


BASE = torch.arange(2.0 * MIN_BYTES).view(64, 32, -1)
LAYOUTS = {
    "contiguous": BASE,
    "transposed": BASE.transpose(0, 1),
    "channels_last": BASE.unflatten(0, (8, 8)).contiguous(memory_format=torch.channels_last),
    "sliced": BASE[:, :, 3:],
    "every_other": BASE[:, ::2],
    "one_row": BASE.view(1, 64, -1).transpose(0, 2),
    "offset": BASE[1:],
    "bf16": BASE.bfloat16().transpose(1, 2),
    "complex": torch.complex(BASE, -BASE).transpose(0, 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_activation_comes_back_with_its_strides(name: str) -> None:
    tensor, store = LAYOUTS[name], make_store(0)
    boundary = store.keep(tensor)
    assert boundary is not None and boundary.is_stored
    back = store.take(boundary)
    assert (back.stride(), back.shape, back.dtype) == (tensor.stride(), tensor.shape, tensor.dtype)
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("tensor", [BASE[:1].expand(64, -1, -1), BASE.flatten().unfold(0, 8, 4)])
def test_elements_that_share_memory_stay_on_the_device(tensor: torch.Tensor) -> None:
    store = make_store(0)
    boundary = store.keep(tensor)
    assert boundary is not None and not boundary.is_stored
    assert store.kept_bytes == BASE.nbytes
    boundary.release()
    assert store.kept_bytes == 0


@pytest.mark.parametrize("budget_bytes", [0, BASE.nbytes])
def test_a_tensor_that_several_layers_take_is_counted_and_sent_once(budget_bytes: int) -> None:
    tensor, store = BASE.clone(), make_store(budget_bytes)
    boundaries = [store.keep(tensor) for _ in range(3)]
    assert (store.kept_bytes, store.num_offloaded) == ((BASE.nbytes, 0) if budget_bytes else (0, 1))
    for boundary in reversed(boundaries):
        assert boundary is not None
        if boundary.is_stored:
            assert torch.equal(store.take(boundary), tensor)
        boundary.release()
        boundary.release()
    assert store.kept_bytes == 0
    # Used up, it is another one.
    other = store.keep(tensor.add_(1))
    assert other is not None
    assert not other.is_stored or torch.equal(store.take(other), tensor)


def test_a_tensor_that_changed_between_two_layers_is_two() -> None:
    tensor, store = BASE.clone(), make_store(0)
    first = store.keep(tensor)
    tensor.add_(1)
    second = store.keep(tensor)
    assert first is not None and second is not None
    assert torch.equal(store.take(second), BASE + 1)
    with pytest.raises(mt.UserError, match="changes a layer's input in place"):
        store.take(first)


def test_a_tensor_that_changes_by_a_view_that_outlives_it() -> None:
    tensor, store = BASE.clone(), make_store(0)
    view, boundary = tensor[3], store.keep(tensor)
    del tensor
    view.zero_()
    assert boundary is not None
    with pytest.raises(mt.UserError, match="changes a layer's input in place"):
        store.take(boundary)


def make_gated_store(budget_bytes: int) -> tuple[ActivationStore, list[Fence]]:
    """A store whose copies to the host wait until the test lets them go."""
    lane, gates = Lane("copy", CPU), []

    def send(tensor: torch.Tensor, host: torch.Tensor, name: str) -> Fence:
        gates.append(Fence())
        return lane.submit(lambda: host.copy_(tensor), after=(gates[-1],))

    def bring(host: torch.Tensor, tensor: torch.Tensor, sent: Fence, name: str) -> Fence:
        return lane.submit(lambda: tensor.copy_(host), after=(sent,))

    pool = BufferPool(make_memory())
    return ActivationStore(buffers=pool, device=CPU, budget_bytes=budget_bytes, send=send, bring=bring), gates


@pytest.mark.timeout(180)
def test_activations_beyond_the_budget_go_and_come_back() -> None:
    tensors = [torch.randn(MIN_BYTES // 4) for _ in range(5)]
    store, gates = make_gated_store(2 * MIN_BYTES)
    boundaries = [store.keep(tensor) for tensor in tensors]
    assert [boundary.is_stored for boundary in boundaries] == [False, False, True, True, True]
    assert store.keep(torch.zeros(4)) is None
    threading.Timer(0.05, lambda: [gate.record() for gate in gates]).start()
    for tensor, boundary in list(zip(tensors, boundaries, strict=True))[:1:-1]:
        assert torch.equal(store.take(boundary), tensor)
        boundary.release()
    for boundary in boundaries:
        boundary.release()
    assert store.kept_bytes == 0
    assert store.offloaded_bytes == 3 * MIN_BYTES


def test_a_copy_that_failed_is_told_to_whoever_takes_it() -> None:
    store, gates = make_gated_store(0)
    boundary = store.keep(BASE)
    assert boundary is not None and boundary.is_stored
    gates[0].fail(RuntimeError("broken link"))
    with pytest.raises(RuntimeError, match="broken link"):
        store.take(boundary)
    boundary.release()


def test_buffers_of_dropped_graphs_are_used_again() -> None:
    store, gates = make_gated_store(0)
    memory = store.buffers.memory
    for _ in range(3):
        boundaries = [store.keep(torch.randn(MIN_BYTES // 4)) for _ in range(2)]
        for gate in gates:
            if not gate.is_recorded:
                gate.record()
        del boundaries
    assert memory.ram_bytes == 2 * MIN_BYTES


PASSES = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=6), min_size=1, max_size=8)


def run_pass(pool: BufferPool, pages: list[int]) -> None:
    """Take buffers of so many pages, each for itself alone, and give them back, the last first."""
    buffers = [pool.take(number * PAGE_BYTES - 1) for number in pages]
    for number, buffer in enumerate(buffers):
        assert buffer.numel() == pages[number] * PAGE_BYTES
        buffer.fill_(number)
    assert all((buffer == number).all() for number, buffer in enumerate(buffers))
    assert pool.used_bytes == sum(pages) * PAGE_BYTES
    while buffers:
        pool.give_back(buffers.pop())
    assert pool.used_bytes == 0


class CountingMemory(HostMemory):
    """How often it was asked for memory."""

    num_asked = 0

    def empty(self, num_bytes: int, *, pinned: bool = False, owner: str = "") -> torch.Tensor:
        self.num_asked += 1
        return super().empty(num_bytes, pinned=pinned, owner=owner)


@settings(max_examples=60)
@given(PASSES)
def test_the_pool_takes_nothing_more_once_it_knows_what_comes(passes: list[list[int]]) -> None:
    memory = CountingMemory(max_bytes=None, pin=False)
    pool = BufferPool(memory)
    most_pages = max(map(sum, passes))
    num_asked = -1
    # Each gap brings the one chunk nearer that has room for all.
    for _ in range(most_pages + 2):
        is_known, num_asked = memory.num_asked == num_asked, memory.num_asked
        for pages in passes:
            run_pass(pool, pages)
            assert memory.ram_bytes == pool.total_bytes <= 2 * most_pages * PAGE_BYTES
        if is_known:
            break
    assert is_known
    assert pool.peak_bytes == most_pages * PAGE_BYTES
    assert memory.ram_bytes <= (1 + MAX_GAP_SHARE) * pool.peak_bytes


def test_the_same_sizes_take_memory_once_and_no_more_than_they_need() -> None:
    memory = make_memory()
    pool = BufferPool(memory)
    for _ in range(5):
        run_pass(pool, [3, 3, 7, 1])
        assert memory.ram_bytes == 14 * PAGE_BYTES


class Spread(nn.Module):
    """A block whose arithmetic depends on the strides of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return x + (y if x.is_contiguous() else 2 * y)


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(Spread() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x).transpose(0, 1)
        for block in self.blocks:
            x = block(x).transpose(0, 1)
        return x.square().mean()


def test_recomputation_sees_the_strides_of_the_forward() -> None:
    plain = Turning()
    model = mt.stream(copy.deepcopy(plain), options=OFFLOAD)
    x = torch.randn(64, 32, 64)
    for each in (plain, model):
        each(x).backward()
    engine = engine_of(model)
    assert engine is not None and engine.activations.num_offloaded == 3
    for name, parameter in plain.named_parameters():
        assert torch.equal(dict(model.named_parameters())[name].grad, parameter.grad), name


def test_host_memory_does_not_grow_with_lengths() -> None:
    model = mt.stream(Turning(), options=OFFLOAD)
    engine = engine_of(model)
    assert engine is not None
    model(torch.randn(64, 40, 64)).backward()
    start_bytes = engine.memory.ram_bytes
    largest_bytes = engine.activations.buffers.peak_bytes
    for length in range(8, 40):
        model.zero_grad()
        model(torch.randn(64, length, 64)).backward()
    assert engine.activations.num_offloaded == 3 * 33
    # A layer's gradients come home while its input goes; whether before or after is a matter of timing.
    gradient_bytes = max(round_up(4 * home.gradient_layout().numel, PAGE_BYTES) for home in engine.homes)
    assert engine.activations.buffers.peak_bytes <= largest_bytes + gradient_bytes
    assert engine.memory.ram_bytes <= start_bytes + gradient_bytes
