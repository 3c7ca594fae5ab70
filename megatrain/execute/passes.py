"""Gradients of one backward pass: when a home's sums are open, and when they are complete and go home.

A home's gradients leave once a pass: when the last of its live uses has had its backward, or else when the pass ends.
Which of the two depends only on the model's own graph, never on buffer sizes or timing.

A backward may run others inside (a reentrant checkpoint): they add to the pass of the outermost.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatrain.spec.layout import Field
from megatrain.store.home import Home
from megatrain.transport.drain import GradientAccumulator, GradientPacket

_num_wanting_all = 0


@contextlib.contextmanager
def wanting_all() -> Iterator[None]:
    """A backward for the length of the block wants the gradients of all weights that it comes to, whatever it asks
    for by name."""
    global _num_wanting_all
    _num_wanting_all += 1
    try:
        yield
    finally:
        _num_wanting_all -= 1


def wants_gradient(ctx: Any) -> bool:
    """Whether the running backward asks for gradients of the weights behind a function whose first tensor is an anchor:
    `autograd.grad` and `backward(inputs=...)` do not."""
    anchor = ctx.next_functions[0][0]
    return anchor is not None and (_num_wanting_all > 0 or torch._C._will_engine_execute_node(anchor))


class Use:
    """One use of a home's weights that a backward may come back to. Settled by it, or when its graph is dropped."""

    __slots__ = ("_home", "_live", "_settled")

    def __init__(self, home: Home, live: Counter[Home]) -> None:
        self._settled = True  # until it counts: an interrupt may come first
        self._home, self._live = home, live
        live[home] += 1
        self._settled = False

    def settle(self) -> None:
        if not self._settled:
            self._settled = True
            self._live[self._home] -= 1

    def __del__(self) -> None:
        self.settle()


class _Task:
    """A running `backward()`. Autograd holds it until that is over, or torn by an exception."""

    __slots__ = ("__weakref__", "_finish", "_id")

    def __init__(self, task_id: int, finish: Callable[[int], None]) -> None:
        self._id, self._finish = task_id, finish

    def __call__(self) -> None:
        self._finish(self._id)


class Passes:
    """
    Args:
        send: takes a home's finished gradients (`LaneStream.drain`).
    """

    def __init__(self, device: torch.device, send: Callable[[Home, GradientPacket], None]) -> None:
        self._device = device
        self._send = send
        self._live: Counter[Home] = Counter()
        self._open: dict[Home, GradientAccumulator] = {}
        self._tasks: dict[int, weakref.ref[_Task]] = {}
        self.is_held = self._expects_more = False

    def use(self, home: Home) -> Use:
        return Use(home, self._live)

    def hold(self, *, expects_more: bool = True) -> None:
        """More uses of any home may still come in this pass: close nothing until `release`. expects_more: they will,
        of other micro-batches."""
        self.abandon()
        self.is_held, self._expects_more = True, expects_more

    def release(self) -> None:
        """All uses of the pass exist now. Homes that have had their last backward go home."""
        self.is_held = self._expects_more = False
        for home in list(self._open):
            self._close_if_complete(home)

    def add(self, home: Home, gradients: list[tuple[Field, torch.Tensor]]) -> None:
        """Add one use's gradients."""
        if not gradients:
            return
        if home not in self._open:
            is_only = self._live[home] == 1 and not self._expects_more
            self._open[home] = GradientAccumulator(home, self._device, is_only=is_only)
        self._open[home].add(gradients)

    def settle(self, home: Home, use: Use) -> None:
        """`use` has had its backward."""
        use.settle()
        if not self.is_held:
            self._close_if_complete(home)

    def end(self) -> None:
        """The pass is over: what is still open goes home."""
        self.is_held = self._expects_more = False
        self._tasks.clear()
        for home in list(self._open):
            self._close(home)

    def abandon(self) -> None:
        """The pass failed: its sums are worth nothing."""
        self._open.clear()
        self._tasks.clear()
        self.is_held = self._expects_more = False

    def join_autograd(self) -> None:
        """Called from inside a plain `backward()`: end the pass when autograd has finished the outermost one."""
        task_id = torch._C._current_graph_task_id()
        if self.is_held or self._is_running(task_id):
            return
        if self._tasks and not self._is_any_running():
            self.abandon()
        task = _Task(task_id, self._finish)
        self._tasks[task_id] = weakref.ref(task)
        torch.autograd.Variable._execution_engine.queue_callback(task)

    def is_torn(self) -> bool:
        """Between passes: an exception tore the last one, perhaps while it ended. Nobody will go on with its sums."""
        return bool(self._tasks or self._open) and not self._is_any_running()

    def _is_any_running(self) -> bool:
        return any(map(self._is_running, self._tasks))

    def _is_running(self, task_id: int) -> bool:
        reference = self._tasks.get(task_id)
        return reference is not None and reference() is not None

    def _finish(self, task_id: int) -> None:
        self._tasks.pop(task_id, None)
        if not self._is_any_running():
            self.end()

    def _close_if_complete(self, home: Home) -> None:
        if self._live[home] == 0:
            self._close(home)

    def _close(self, home: Home) -> None:
        accumulator = self._open.pop(home, None)
        if accumulator is not None:
            self._send(home, accumulator.pack())
