"""Backward of a micro-batch's loss as far as the streamed layers, and not a node further.

Autograd runs every node below a layer even where no gradient comes out of it, with None, which hooks on tensors between
layers do not expect. So it is asked for gradients by name, and runs nothing but what leads to them: for one layer after
the other, the latest first, because nothing that leads to a layer lies below it.

Rule: each node between the loss and the layers runs once. What comes to a layer's output has not passed the hooks on
it: they are called when all of its gradient is there.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.utils.checkpoint import CheckpointFunction

from megatrain.base.errors import UserError
from megatrain.execute.call import LayerFunction
from megatrain.execute.logits import LaterFunction
from megatrain.execute.passes import wanting_all

if TYPE_CHECKING:
    from megatrain.execute.engine import Engine

Roots = list[tuple[GradientEdge, torch.Tensor]]
TensorHooks = OrderedDict[int, Any]
"""Those on one tensor, where autograd reads them."""


def hooks_of(tensor: torch.Tensor) -> TensorHooks:
    """The hooks on `tensor`: those that are there, and those to come."""
    if tensor._backward_hooks is None:
        # As `Tensor.register_hook` does for the first one.
        tensor._backward_hooks = OrderedDict()
        tensor.grad_fn._register_hook_dict(tensor)
    return tensor._backward_hooks


def loss_backward(engine: Engine, loss: torch.Tensor, hooks: Sequence[TensorHooks]) -> Roots:
    """What comes from `loss` to the outputs of the engine's layers that it looks at; perhaps several gradients for one.

    Leaves and fetched weights that it looks at have got their gradients. The graph is kept.

    Args:
        hooks: those on outputs of layers. They are not called.
    """
    start = torch.autograd.graph.get_gradient_edge(loss)
    above = _Above(engine, start.node)
    ahead: Roots = [(start, torch.ones_like(loss))]
    roots: Roots = []
    with _suspended(hooks), wanting_all():
        for end in sorted(above.ends, key=lambda node: node._sequence_nr(), reverse=True):
            found = above.run_to(end, [pair for pair in ahead if above.leads(pair[0].node, end)])
            ahead = [pair for pair in ahead if not above.leads(pair[0].node, end)]
            ahead += [pair for pair in found if pair[0].node is not end]
            roots += [(_owned(edge, start), grad) for edge, grad in found if edge.node is end]
    if ahead:
        edges, grads = zip(*ahead, strict=True)
        torch.autograd.backward(edges, grads, retain_graph=True)
    return roots


def _owned(edge: GradientEdge, start: GradientEdge) -> GradientEdge:
    """With what keeps its part of the graph, from the loss at `start` down; whoever recorded a layer keeps its own.

    A node that is an object of Python does not keep it (see `torch.autograd.graph.get_gradient_edge`)."""
    return edge if _is_layer(edge.node) else edge._replace(ownership_token=start.ownership_token or start.node)


class _Stopped(Exception):
    """Autograd has come to a node that must not run."""


class _Above:
    """The graph of a loss down to its `ends`: nodes of the engine's layers, and reentrant checkpoints that lead to
    these (they refuse to run for gradients that are asked for by name)."""

    def __init__(self, engine: Engine, root: Node) -> None:
        self.ends: list[Node] = []
        self._engine = engine
        self._others: list[Node] = []
        """Layers of other models."""

        # To which ends each node leads: bits.
        self._reach: dict[Node, int] = {}
        path = [root]
        while path:
            below = [] if self._is_layer(path[-1]) else [edge.node for _, edge in _edges(path[-1])]
            new = [node for node in below if node not in self._reach]
            path += new
            if not new and (node := path.pop()) not in self._reach:
                self._reach[node] = self._reach_of(node, below)

    def leads(self, node: Node, end: Node) -> bool:
        return bool(self._reach[node] & self._reach[end])

    def run_to(self, end: Node, starts: Roots) -> Roots:
        """Run what leads to `end`. Returns what comes out of it: for `end`, and for what does not lead there."""
        found = [pair for pair in starts if pair[0].node is end]
        starts = [pair for pair in starts if pair[0].node is not end]
        if not starts:
            return found
        outs = self._between(starts, end)
        done: set[Node] = set()
        # Behind a node's own hooks, and before those on the tensors that it has computed the gradients of.
        handles = [node.register_hook(functools.partial(_note, found, done, node, out)) for node, out in outs.items()]
        # An edge that is wanted may lie below a layer.
        handles += [node.register_prehook(_stop) for node in (*self.ends, *self._others) if node not in outs]
        edges, grads = zip(*starts, strict=True)
        wanted = dict.fromkeys(edge for out in outs.values() for _, edge in out)
        try:
            torch.autograd.grad(edges, list(wanted), grads, retain_graph=True, allow_unused=True)
        except _Stopped:
            # The latest of all runs first, so that what leads to `end` is done. Another model's pass would be torn.
            if len(done) < len(outs) or any(map(_is_layer, outs)):
                raise UserError(
                    "the loss of a micro-batch mixes what layers return in a way that mt.accumulate cannot follow: "
                    "call loss.backward() for each micro-batch instead, or use no reentrant checkpoints in it"
                ) from None
        finally:
            # A node with a hook that holds it would never go.
            for handle in handles:
                handle.remove()
        return found

    def _between(self, starts: Roots, end: Node) -> dict[Node, list[tuple[int, GradientEdge]]]:
        """The nodes that lead from `starts` to `end`. Of each: the edges that leave these nodes, and their places."""
        outs: dict[Node, list[tuple[int, GradientEdge]]] = {}
        ahead = [edge.node for edge, _ in starts]
        while ahead:
            node = ahead.pop()
            if node in outs:
                continue
            inside = [edge.node for _, edge in _edges(node) if edge.node is not end and self.leads(edge.node, end)]
            outs[node] = [(index, edge) for index, edge in _edges(node) if edge.node not in inside]
            ahead += inside
        return outs

    def _reach_of(self, node: Node, below: list[Node]) -> int:
        reach = functools.reduce(int.__or__, (self._reach[child] for child in below), 0)
        is_layer = self._is_layer(node)
        if is_layer or (reach and isinstance(node, CheckpointFunction._backward_cls)):
            self.ends.append(node)
            return 1 << len(self.ends)
        self._others += [node] if _is_layer(node) else []
        return reach

    def _is_layer(self, node: Node) -> bool:
        return _is_layer(node) and node.call.engine is self._engine


def _is_layer(node: Node) -> bool:
    return isinstance(node, (LayerFunction._backward_cls, LaterFunction._backward_cls))


def _edges(node: Node) -> list[tuple[int, GradientEdge]]:
    """Where the gradients go that a node computes, and their places: the anchor of a layer gets none."""
    places = list(enumerate(node.next_functions))[_is_layer(node) :]
    return [(index, GradientEdge(*edge)) for index, edge in places if edge[0] is not None]


def _note(
    found: Roots,
    done: set[Node],
    node: Node,
    out: list[tuple[int, GradientEdge]],
    grads: Sequence[torch.Tensor | None],
    _: Any,
) -> None:
    """Hook behind a node. grads: what it has computed."""
    done.add(node)
    found += [(edge, grads[index]) for index, edge in out if grads[index] is not None]


def _stop(_: Any) -> NoReturn:
    raise _Stopped


@contextlib.contextmanager
def _suspended(hooks: Sequence[TensorHooks]) -> Iterator[None]:
    held = [dict(of_tensor) for of_tensor in hooks]
    for of_tensor in hooks:
        of_tensor.clear()
    try:
        yield
    finally:
        for of_tensor, was in zip(hooks, held, strict=True):
            of_tensor.update(was)
