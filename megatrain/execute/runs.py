"""Layer-major accumulation: every micro-batch is a coroutine that pauses at each streamed layer.

The forward of each micro-batch is the model's own code on its own inputs. A paused micro-batch waits until all others
have come to the layer; then all run it in one visit. The order makes every sum that of plain accumulation:

- In a group, micro-batches run last to first. Autograd's backward goes by falling sequence number, so one backward over
  all of them is layer-major by itself, first micro-batch first, as in plain accumulation.
- The last layer (a head) runs first to last, and each micro-batch's loss and head have their backward at once, in the
  same visit: the logits of one micro-batch live at a time. What this loss sends to other layers (the auxiliary loss of
  a router, a hidden state) waits at their outputs: it is a root of the one backward that follows (see `above`).

Where the options say so, a few micro-batches at a time have their forward and backward (`micro_batches_a_visit`), and
the sums of their gradients stay on the device until the last of them: more visits, less that waits for a backward.

Rule: the order of sums does not depend on slots, lanes or timing. What it gives up: where one micro-batch visits a
parameter more than once (tied weights, a layer called twice), its parts are added in another order than in plain
accumulation: equal to rounding, not bit for bit. So is a step whose last layer is not the last of the step before.
What the loss and a later layer both look at, and is no layer's output (a norm's), has two backwards, each with a part
of its gradient, and so have the hooks on it. State that a block carries from one micro-batch to the next (running
means) meets them last to first.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import greenlet
import torch
from torch.autograd.graph import GradientEdge, Node

from megatrain.base.errors import UserError
from megatrain.execute.above import Roots, TensorHooks, hooks_of, loss_backward
from megatrain.execute.attention import AttentionState
from megatrain.execute.attributes import OwnAttributes
from megatrain.execute.context import AutocastState, Hooks, RngState, get_saved_tensor_hooks, set_saved_tensor_hooks

if TYPE_CHECKING:
    from megatrain.execute.call import Call
    from megatrain.execute.engine import Engine
    from megatrain.execute.layer import StreamedLayer
    from megatrain.spec.layout import Field


class _State(NamedTuple):
    is_grad_enabled: bool
    hooks: Hooks
    autocast: AutocastState
    attention: AttentionState
    rng: RngState | None


class _Kept(NamedTuple):
    """A call whose graph is kept, its node, and where gradients of its inputs go."""

    call: Call
    node: Node
    of_inputs: list[GradientEdge | None]


class Run(greenlet.greenlet):
    """One micro-batch's forward. Grad mode, hooks on saved tensors, autocast, kernels of attention, RNG, context
    variables and attributes are its own."""

    def __init__(self, engine: Engine, thunk: Callable[[], torch.Tensor], seed: int | None, number: int = 0) -> None:
        super().__init__(self._main)
        self.gr_context = contextvars.copy_context()
        self.aliases: dict[Field, torch.Tensor] = {}
        self.hooks: list[TensorHooks] = []
        """Those on outputs of layers."""
        self.owners: dict[Node, Node] = {}
        """Nodes of layers, which are objects of Python and do not keep their part of the graph; and what keeps it."""

        self.attributes = OwnAttributes()
        self.layer: StreamedLayer | None = None
        self.loss: torch.Tensor | None = None
        self.kept: list[_Kept] = []
        """Of the visit that is on: several where its logits are used more than once (`logits.py`)."""

        self.keeps_graph = False
        self.engine, self.number = engine, number
        self._device = engine.device
        self._thunk = thunk
        self._seed = seed
        # A single micro-batch (no seed) draws from the global generator and leaves its mark there.
        self._owns_rng = seed is not None
        self._seeded: RngState | None = None
        self._state = self._get_state()

    def resume(self) -> None:
        """Run on to the next streamed layer, or to the end (`dead`)."""
        self._go(self.switch)

    def abandon(self) -> None:
        """Leave nothing behind: no coroutine, no graph."""
        if not self.dead:
            self._go(functools.partial(self.throw, greenlet.GreenletExit))
            # What the coroutine ends with holds its frames, and they the states of layers.
            self.layer = None
        self.aliases.clear()
        self.hooks.clear()
        self.owners.clear()
        self.loss = None
        self.kept.clear()

    def _go(self, switch: Callable[[], StreamedLayer]) -> None:
        outside, told = self._get_state(), self._told(self.layer)
        try:
            with told():
                self._set_state(self._state)
                self.attributes.enter()
            self.layer = switch()
        finally:
            with told():
                self.attributes.leave()
                self._state = self._get_state()
                self._set_state(outside)

    def _told(self, layer: StreamedLayer | None) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Around what it takes to go on in this micro-batch, in a visit of `layer`: for a recorder, if there is one."""
        recorder = self.engine.transport.recorder
        if recorder is None or layer is None:
            return contextlib.nullcontext
        return functools.partial(recorder.on_host, "switch", layer.name, self.number)

    def arrive(self, layer: StreamedLayer) -> None:
        """Called from inside: pause at `layer` until it is this micro-batch's turn."""
        self.parent.switch(layer)

    def record(self, call: Call, outputs: Sequence[torch.Tensor]) -> None:
        """Called from inside: `call` is part of this micro-batch's graph."""
        differentiable = [output for output in outputs if output.requires_grad]
        self.hooks += map(hooks_of, differentiable)
        edge = torch.autograd.graph.get_gradient_edge
        if differentiable:
            self.own(differentiable[0])
        if call.keep_graph and call.kept is not None and differentiable:
            of_inputs = [edge(tensor) if tensor.requires_grad else None for tensor in call.tensors]
            self.kept.append(_Kept(call, differentiable[0].grad_fn, of_inputs))

    def own(self, output: torch.Tensor) -> None:
        """Called from inside: what the node of `output` leads to is kept until the backward of the loss."""
        start = torch.autograd.graph.get_gradient_edge(output)
        self.owners[start.node] = start.ownership_token

    @property
    def has_drawn(self) -> bool:
        """Its forward so far has used random numbers of its own."""
        rng = self._state.rng
        return self._seeded is None or rng is None or not rng.equals(self._seeded)

    def drop_kept(self) -> None:
        """A graph kept for a layer that was not the last after all would read a refilled slot. Recompute instead."""
        for kept in self.kept:
            kept.call.kept = None
        self.kept.clear()

    def _main(self) -> None:
        if self._seed is not None:
            torch.manual_seed(self._seed)
            self._seeded = RngState.get(self._device)
        self.loss = self._thunk()

    def _get_state(self) -> _State:
        rng = RngState.get(self._device) if self._owns_rng else None
        autocast, attention = AutocastState.get(self._device), AttentionState.get()
        return _State(torch.is_grad_enabled(), get_saved_tensor_hooks(), autocast, attention, rng)

    def _set_state(self, state: _State) -> None:
        torch.set_grad_enabled(state.is_grad_enabled)
        set_saved_tensor_hooks(state.hooks)
        state.autocast.set()
        state.attention.set()
        if state.rng is not None:
            state.rng.set(self._device)


def current_run(engine: Engine) -> Run | None:
    """The micro-batch of `engine` whose code is running, if it is one. Another model in a loss (a teacher) has none."""
    current = greenlet.getcurrent()
    return current if isinstance(current, Run) and current.engine is engine else None


def run_accumulated(
    engine: Engine, thunks: Sequence[Callable[[], torch.Tensor]], sizes: Sequence[int]
) -> list[torch.Tensor]:
    """See `Engine.accumulate`."""
    if isinstance(greenlet.getcurrent(), Run):
        raise UserError("accumulate was called from inside a micro-batch: call it once, around all of them")
    if not torch.is_grad_enabled():
        raise UserError("accumulate trains: call it outside of torch.no_grad()")
    if not thunks:
        return []
    # A single micro-batch draws from the global generator as plain training does; several get a seed each.
    before = torch.get_rng_state()
    seeds = [None] if len(thunks) == 1 else torch.randint(2**62, (len(thunks),)).tolist()
    after = torch.get_rng_state()
    pairs = zip(thunks, seeds, strict=True)
    runs = [Run(engine, thunk, seed, number) for number, (thunk, seed) in enumerate(pairs)]
    groups = _grouped(runs, sizes, engine.options.micro_batches_a_visit)
    losses: list[torch.Tensor] = []
    try:
        engine.passes.hold(expects_more=len(runs) > 1)
        for group in groups:
            roots, of_group = _forward(engine, group)
            losses += of_group
            if group is groups[-1]:
                engine.passes.release()
            _backward(engine, roots)
        engine.passes.end()
        runs[-1].attributes.enter()
        # Seeds that nobody used, and nothing else was drawn: as after plain training, for whoever draws next (an order
        # of data).
        if torch.equal(torch.get_rng_state(), after) and not any(run.has_drawn for run in runs):
            torch.set_rng_state(before)
    except BaseException:
        engine.is_collecting = False
        engine.passes.abandon()
        raise
    finally:
        for run in runs:
            run.abandon()
    return losses


def _grouped(runs: list[Run], sizes: Sequence[int], most: int | None) -> list[list[Run]]:
    """Those that have their forward and backward together: as long as their sizes come to no more than `most`."""
    groups: list[list[Run]] = []
    total = 0
    for run, size in zip(runs, sizes, strict=True):
        if not groups or (most is not None and total + size > most):
            groups.append([])
            total = 0
        groups[-1].append(run)
        total += size
    return groups


def _forward(engine: Engine, runs: list[Run]) -> tuple[Roots, list[torch.Tensor]]:
    """All forwards, and the backwards of losses and last layers. Returns where the one backward has to start."""
    losses: list[torch.Tensor] = []
    roots: Roots = []

    def settle() -> None:
        """Backward of the losses that are there, in the order of the micro-batches."""
        while len(losses) < len(runs) and runs[len(losses)].dead:
            loss, of_run = _loss_backward(engine, runs[len(losses)])
            losses.append(loss)
            roots.extend(of_run)

    for run in reversed(runs):
        run.resume()
    settle()
    while paused := [run for run in runs if not run.dead]:
        layer = min((run.layer for run in paused), key=lambda candidate: candidate.index)
        group = [run for run in paused if run.layer is layer]
        _run_layer(engine, layer, group, settle)
        engine.is_last[layer.name] = all(run.dead for run in group)
    return roots, losses


def _run_layer(engine: Engine, layer: StreamedLayer, group: list[Run], settle: Callable[[], None]) -> None:
    """One visit: every micro-batch of `group` runs on from `layer` to its next pause, or to its end."""
    with engine.visit(layer):
        for run in _in_order(engine, layer, group):
            run.resume()
            settle()
            if not run.dead:
                run.drop_kept()
        for run in group:
            run.drop_kept()


def _in_order(engine: Engine, layer: StreamedLayer, group: list[Run]) -> Iterator[Run]:
    """The order in which a group runs `layer`: last to first, or first to last and keeping graphs if it is the last.

    Whether it is the last is known from the step before. At first it is seen from the last micro-batch, which goes
    first: if it ends, it waits with its loss until the others had theirs.
    """
    is_last = engine.is_last.get(layer.name)
    first, rest = ([], group) if is_last else (group[-1:], group[:-1])
    for run in first:
        run.keeps_graph = is_last is None
        yield run
        is_last = run.dead
    for run in rest if is_last else reversed(rest):
        run.keeps_graph = is_last
        yield run


def _loss_backward(engine: Engine, run: Run) -> tuple[torch.Tensor, Roots]:
    """Backward of the loss as far as the streamed layers, and through the last one if its graph was kept."""
    loss, run.loss = run.loss, None
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise UserError(f"a micro-batch's loss must be a scalar tensor, got {_describe(loss)}")
    if not loss.requires_grad:
        raise UserError("a micro-batch's loss does not depend on any trainable parameter")
    engine.is_collecting = True
    try:
        # The graph above the layers is walked again by the one backward, so it is not freed; what belongs to this
        # loss alone (logits) goes with it.
        found = loss_backward(engine, loss, run.hooks)
    finally:
        engine.is_collecting = False
    roots: Roots = []
    for kept in run.kept:
        roots += _kept_backward(engine, kept, [pair for pair in found if pair[0].node is kept.node])
    nodes = {kept.node for kept in run.kept}
    run.drop_kept()
    for edge, grad in found:
        if edge.node not in nodes:
            owner = run.owners.get(edge.node, edge.ownership_token)
            roots.append((edge._replace(ownership_token=owner), grad))
    run.owners.clear()
    return loss.detach(), roots


def _kept_backward(engine: Engine, kept: _Kept, found: Roots) -> Roots:
    """Backward of a layer on the graph that its forward kept. found: gradients of its outputs."""
    if not found:
        return []
    edges, grads = zip(*found, strict=True)
    wanted = list(dict.fromkeys(edges))
    # Their sums, after the hooks on the outputs.
    sums = dict(zip((edge.output_nr for edge in wanted), torch.autograd.grad(edges, wanted, grads), strict=True))
    of_outputs = [sums.get(index) for index in range(len(kept.call.is_differentiable))]
    of_inputs = engine.backward_call(kept.call, kept.call.kept.inputs, of_outputs, wants_weights=True)
    pairs = zip(kept.of_inputs, of_inputs, strict=True)
    return [(edge, grad) for edge, grad in pairs if edge is not None and grad is not None]


def _backward(engine: Engine, roots: Roots) -> None:
    """Of what is left of a group's graph, down from its layers."""
    if not roots:
        return
    engine.is_collecting = True
    try:
        torch.autograd.backward([edge for edge, _ in roots], [grad for _, grad in roots])
    finally:
        engine.is_collecting = False


def _describe(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
