"""One differentiable call of a streamed layer: forward without a graph, backward by recomputation.

Between layers autograd holds one node a call, with the call's inputs and nothing of its weights or insides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from megatrain.base.errors import UserError
from megatrain.execute.capture import Recorded, fork_cache, recording
from megatrain.execute.context import CallContext
from megatrain.execute.layer import StreamedLayer
from megatrain.execute.passes import Use
from megatrain.spec.layout import Field

if TYPE_CHECKING:
    from megatrain.execute.engine import Engine

Gradients = list[tuple[Field, torch.Tensor]]


class KeptGraph:
    """The graph of a call whose backward comes while its weights are still in the slot."""

    def __init__(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], params: dict[Field, torch.Tensor]):
        self.outputs, self.inputs, self.params = outputs, inputs, params


class Call:
    """
    Args:
        recorded_keys: what the running forward records from inside the layer.
        keep_graph: keep the forward's graph in `kept`. The caller promises to run the backward before the slot is
            refilled, or to drop it.
    """

    def __init__(
        self,
        engine: Engine,
        layer: StreamedLayer,
        args: tuple,
        kwargs: dict[str, Any],
        *,
        recorded_keys: tuple[str, ...],
        keep_graph: bool,
    ) -> None:
        leaves, self._tree = pytree.tree_flatten((args, kwargs))
        self.engine = engine
        self.layer = layer
        self.recorded_keys = recorded_keys
        self.positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = [leaves[i] for i in self.positions]
        self._live_leaves = list(leaves)
        self._leaves = [None if isinstance(leaf, torch.Tensor) else fork_cache(leaf) for leaf in leaves]
        # A cache is addressed by the layer's index, which differs from layer to layer: no template fits.
        forks = zip(self._leaves, leaves, strict=True)
        self._has_cache = any(fork is not None and fork is not leaf for fork, leaf in forks)
        self.needs_grad = [tensor.requires_grad for tensor in self.tensors]
        self.context = CallContext(layer.modules, engine.device)
        self.use: Use = engine.passes.use(layer.home)
        self.keep_graph = keep_graph
        self.kept: KeptGraph | None = None
        self.collected: list[torch.Tensor | None] | None = None
        self._flat: list[Any] = []
        self._is_tensor: list[bool] = []
        self._output_tree: pytree.TreeSpec | None = None

    def forward(self, weights: torch.Tensor, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the layer on detached `tensors`; returns its tensor outputs, recorded ones behind the returned ones."""
        versions = [tensor._version for tensor in tensors]
        inputs = self._detached(tensors, requires_grad=self.keep_graph)
        params = self.layer.views(weights, requires_grad=self.keep_graph)
        # The layer gets the caller's own cache, once; the copies in `_leaves` are for recomputations.
        leaves, self._live_leaves = self._live_leaves, []
        with torch.set_grad_enabled(self.keep_graph):
            flat = self._run(leaves, inputs, params)
        self.context.forward_done()
        if [tensor._version for tensor in tensors] != versions:
            raise UserError(
                f"{self.layer.name} changes its input in place, so it cannot be recomputed: write x = x + y for x += y"
            )
        outputs = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        if self.keep_graph:
            self.kept = KeptGraph(outputs, inputs, params)
        self._flat = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in flat]
        return tuple(output.detach() for output in outputs)

    def result(self, outputs: Sequence[torch.Tensor]) -> tuple[Any, Recorded]:
        """What the layer returned, and what was recorded, with `outputs` in the places of its tensors."""
        flat, self._flat = self._flat, []
        tensors = iter(outputs)
        leaves = [next(tensors) if is_tensor else leaf for leaf, is_tensor in zip(flat, self._is_tensor, strict=True)]
        return pytree.tree_unflatten(leaves, self._output_tree)

    def backward(
        self, weights: torch.Tensor, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor | None], Gradients]:
        """Gradients of the inputs (None where none flows) and of the layer's trainable fields.

        Args:
            grads: one a tensor output, in the order of `forward`.
        """
        graph, self.kept = self.kept or self._recompute(weights, tensors), None
        inputs = [tensor for tensor in graph.inputs if tensor.requires_grad]
        params = [(field, graph.params[field]) for field in self.layer.trainable_fields()]
        roots = [(o, g) for o, g in zip(graph.outputs, grads, strict=True) if g is not None and o.requires_grad]
        wanted = [*inputs, *(param for _, param in params)]
        if not roots or not wanted:
            return [None] * len(graph.inputs), []
        found = list(
            torch.autograd.grad([o for o, _ in roots], wanted, [g for _, g in roots], allow_unused=True)
        )
        of_params = found[len(inputs) :]
        of_inputs = iter(found[: len(inputs)])
        input_grads = [next(of_inputs) if tensor.requires_grad else None for tensor in graph.inputs]
        param_grads = [(field, g) for (field, _), g in zip(params, of_params, strict=True) if g is not None]
        return input_grads, param_grads

    def collect(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Keep gradients of the outputs for later (see `runs`)."""
        if self.collected is None:
            self.collected = [None] * len(grads)
        for i, grad in enumerate(grads):
            if grad is not None:
                self.collected[i] = grad if self.collected[i] is None else self.collected[i] + grad

    def _recompute(self, weights: torch.Tensor, tensors: Sequence[torch.Tensor]) -> KeptGraph:
        inputs = self._detached(tensors, requires_grad=True)
        params = self.layer.views(weights, requires_grad=True)
        leaves = [fork_cache(leaf) for leaf in self._leaves]
        with self.context.restored(), torch.enable_grad():
            flat = self._run(leaves, inputs, params)
        return KeptGraph([leaf for leaf in flat if isinstance(leaf, torch.Tensor)], inputs, params)

    def _detached(self, tensors: Sequence[torch.Tensor], *, requires_grad: bool) -> list[torch.Tensor]:
        flags = zip(tensors, self.needs_grad, strict=True)
        return [tensor.detach().requires_grad_(requires_grad and needs) for tensor, needs in flags]

    def _run(self, leaves: list[Any], inputs: list[torch.Tensor], params: dict[Field, torch.Tensor]) -> list[Any]:
        for position, tensor in zip(self.positions, inputs, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        with self.layer.bound(params), recording(self.recorded_keys) as recorded:
            result = (self.layer.run if self._has_cache else self.layer.run_training)(args, kwargs)
        flat, self._output_tree = pytree.tree_flatten((result, recorded))
        return flat


class LayerFunction(torch.autograd.Function):
    """Inputs: the call, an anchor that requires grad (so that gradients of weights flow even where no input needs one),
    and the call's tensors. Outputs: its tensor outputs."""

    @staticmethod
    def forward(ctx: Any, call: Call, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with call.engine.visit(call.layer) as weights:
            outputs = call.forward(weights, tensors)
        ctx.call = call
        # An input that gets a gradient is a boundary activation, and may go to the host; masks and such are shared.
        # A call whose graph is kept has its backward at once.
        keep = call.engine.activations.keep
        may_go = [needs and not call.keep_graph for needs in call.needs_grad]
        ctx.boundaries = [keep(tensor) if may else None for tensor, may in zip(tensors, may_go, strict=True)]
        is_away = [boundary is not None and boundary.host is not None for boundary in ctx.boundaries]
        ctx.save_for_backward(*(None if away else t for t, away in zip(tensors, is_away, strict=True)))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(out for out in outputs if not out.is_floating_point()))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        if call.engine.is_collecting:
            call.collect(grads)
            return (None, None, *[None] * len(call.needs_grad))
        take = call.engine.activations.take
        pairs = zip(ctx.saved_tensors, ctx.boundaries, strict=True)
        tensors = [take(boundary) if saved is None else saved for saved, boundary in pairs]
        input_grads = call.engine.backward_call(call, tensors, grads)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            for boundary in ctx.boundaries:
                if boundary is not None:
                    boundary.release()
        return (None, None, *input_grads)
