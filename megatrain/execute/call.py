"""One differentiable call of a streamed layer: forward without keeping a graph, backward by recomputation.

Between layers autograd holds one node a call, with the call's inputs and nothing of its weights or insides. What goes
into a layer or comes out of it by other ways than its arguments, parameters, result and attributes would lose its
gradient: that is refused by name, never silent.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from megatrain.base.errors import UserError
from megatrain.execute.apart import copied
from megatrain.execute.attributes import OwnAttributes, set_attributes, setting_attributes
from megatrain.execute.capture import publish, recording
from megatrain.execute.containers import Contents, Filling, Taker, contents, is_cache, is_same
from megatrain.execute.context import CallContext, without_saved_tensor_hooks
from megatrain.execute.insides import POISON, Insides
from megatrain.execute.layer import StreamedLayer, Views
from megatrain.execute.layer_graph import Gradients, LayerGraph, has_nan
from megatrain.execute.leaves import num_uses
from megatrain.execute.parameters import HomeParameter
from megatrain.execute.passes import Use, wants_gradient

if TYPE_CHECKING:
    from megatrain.execute.engine import Engine
    from megatrain.execute.runs import Run

# By tensor and not on it: a tensor with attributes is pickled with them.
_alias_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_kept_by: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Arguments:
    """What a layer is called with, taken apart."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        taker = Taker()
        self.pattern = taker.take((args, kwargs))
        self.nodes = [node for node, _ in taker.mutable]
        self.containers = [container for _, container in taker.mutable]
        """Those that the layer may change, one a node."""

        self.tensors = [t.fetch() if isinstance(t, HomeParameter) else t for t in taker.tensors]


class Call:
    """
    Args:
        recorded_keys: what the running forward records from inside the layer.
        run: the micro-batch that makes the call. If it keeps graphs, the forward's is in `kept`; whoever runs it
            promises to run the backward before the slot is refilled, or to drop it.
    """

    def __init__(
        self,
        engine: Engine,
        layer: StreamedLayer,
        arguments: Arguments,
        *,
        recorded_keys: tuple[str, ...],
        run: Run | None,
    ) -> None:
        self._arguments = arguments.pattern
        self._mutable, self._live = arguments.nodes, arguments.containers
        self.tensors = arguments.tensors
        """What the layer computes with."""

        self.edges = [_newest(tensor) for tensor in self.tensors]
        """What autograd sees in their places."""

        self.needs_grad = [tensor.requires_grad for tensor in self.tensors]
        self._shared: list[int] = []
        # A cache is addressed by the layer's index, which differs from layer to layer: no template fits.
        self._is_eager = layer.compiled is None or any(is_cache(type(container)) for container in self._live)
        self.engine = engine
        self.layer = layer
        self.recorded_keys = recorded_keys
        self.context = CallContext(layer.modules, engine.device)
        self.use: Use = engine.passes.use(layer.home)
        self.micro_batch = None if run is None else run.number
        self._version = layer.home.version
        # As in plain autograd, what was frozen in the forward gets no gradient.
        self.trained = layer.trainable_fields()
        self.keep_graph = run is not None and run.keeps_graph
        offer = engine.insides.offer
        self._insides = None if self.keep_graph else offer(layer, self.tensors, is_eager=self._is_eager)
        self.kept: LayerGraph | None = None
        self.is_differentiable: list[bool] = []
        self._num_results = 0
        self._changed: list[int] = []
        self._result: Any = None
        self._changes: list[tuple[Any, Contents]] = []

    def forward(self, params: Views) -> tuple[torch.Tensor, ...]:
        """Run the layer. Returns the tensors of its result, of what was recorded, of attributes and of containers that
        it changed, and behind these an alias without bytes for each shared input (see `publish`)."""
        versions = [tensor._version for tensor in self.tensors]
        insides, self._insides = self._insides, None
        has_graph = self.keep_graph or insides is not None or self._looks_at_graph()
        inputs = self._detached(self.tensors, requires_grad=has_graph)
        if has_graph:
            self._guard(inputs, params)
        with self._graph_mode(has_graph, None if insides is None else insides.saving(params)):
            results = self._run(inputs, params, insides, is_recomputation=False)
        if [tensor._version for tensor in self.tensors] != versions:
            raise UserError(_in_place(self.layer.name))
        self._num_results = len(results)
        self._shared = self._find_shared(results, inputs, params, has_graph=has_graph)
        shared = [inputs[index] for index in self._shared]
        self.is_differentiable = [r.requires_grad if has_graph else r.is_floating_point() for r in results]
        self.is_differentiable += [True] * len(shared)
        outputs = [copied(result) if params.hold(result) else result.detach() for result in results]
        if insides is not None or self.keep_graph:
            self.kept = LayerGraph([*results, *shared], inputs, params, insides)
        if insides is not None:
            insides.settle(self.kept.outputs)
            self._try_keeping(params, insides)
        return (*outputs, *(s.new_empty(()).expand(s.shape).detach() for s in shared))

    def publish(self, outputs: Sequence[torch.Tensor], own: OwnAttributes | None) -> Any:
        """Put `outputs` (by now differentiable) where `forward` took its tensors from; returns the layer's result.
        `own` are the attributes of the running micro-batch.

        A later call that is given one of the same tensors takes this call's alias of it for its graph. So gradients of
        a tensor that several layers use, each more than once (an encoder's states), are added one use after the other,
        as autograd would have met them, and come out with the same bits.
        """
        filling = Filling(outputs)
        result, recorded, attributes = filling.fill(self._result)
        if own is not None:
            own.add(attributes)
        set_attributes(attributes)
        publish(recorded)
        for live, changed in self._changes:
            filling.write(live, changed)
        aliases = outputs[self._num_results :]
        for index, alias in zip(self._shared, aliases, strict=True):
            _alias_of[self.tensors[index]] = weakref.ref(alias), self.tensors[index]._version
        for output in outputs[: self._num_results] if aliases else ():
            # An alias lives as long as a result does, which holds on to this call's node anyway.
            _kept_by[output] = aliases
        self._result, self._changes, self._live, self.tensors, self.edges = None, [], [], [], []
        return result

    def backward(
        self,
        params: Views,
        tensors: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None],
        *,
        wants_weights: bool,
    ) -> tuple[list[torch.Tensor | None], Gradients]:
        """Gradients of the inputs (None where none flows) and, if wanted, of the layer's trainable fields.

        Args:
            grads: one a tensor output, in the order of `forward`.
        """
        self.check_version()
        graph = self.kept if self.kept is not None and self.kept.is_sound else self._recompute(params, tensors)
        if wants_weights:
            self.drop_kept()
        # As in plain autograd, what was frozen since the forward gets none.
        fields = [field for field in self.trained if wants_weights and self.layer.home.trainable[field]]
        with self.engine.in_model(self.layer, "autograd"):
            return graph.gradients(params, grads, fields, retain_graph=self.kept is not None)

    def drop_kept(self) -> None:
        """The graph that the forward kept is used up, or of no use."""
        if self.kept is not None:
            self.kept.drop()
        self.kept = None

    def check_version(self) -> None:
        """Raises UserError where the weights are not those of the forward."""
        if self.layer.home.version != self._version:
            raise UserError(
                f"the weights of {self.layer.name} were changed between its forward and its backward (an optimizer "
                "step?): call backward first, or repeat the forward"
            )

    def passed_on(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None] | None:
        """Gradients of the inputs where none comes from the layer's own outputs, so that it need not run. Else None."""
        if any(grad is not None for grad in grads[: self._num_results]):
            return None
        of_shared = dict(zip(self._shared, grads[self._num_results :], strict=True))
        return [of_shared.get(index) for index in range(len(self.needs_grad))]

    def _recompute(self, params: Views, tensors: Sequence[torch.Tensor], insides: Insides | None = None) -> LayerGraph:
        """insides: for a backward on other weights than `params`."""
        inputs = self._detached(tensors, requires_grad=True)
        saving = contextlib.nullcontext() if insides is None else insides.saving(params)
        with self.context.restored(), torch.enable_grad(), saving:
            results = self._run(inputs, params, insides, is_recomputation=True)
        # Each time: a layer may come to use a foreign tensor later, and a GPU's or compiled forward shows no graph.
        num_uses(self.layer.name, results, inputs, list(params.values()))
        return LayerGraph([*results, *(inputs[index] for index in self._shared)], inputs, params, insides)

    def _try_keeping(self, params: Views, insides: Insides) -> None:
        """Behind a forward whose graph is kept: see whether that may be (`execute/insides.py`), if it is not known."""
        store = self.engine.insides
        if insides.kind.keeps != "all" and self.context.has_drawn():
            self.drop_kept()
        if self.kept is None or store.is_tried(insides.kind):
            return
        copy = self.layer.views(params.weights.clone())
        graph = self._recompute(copy, self.tensors, Insides(store, self.layer.name, insides.kind, self.tensors))
        copy.weights.fill_(POISON)
        grads = [torch.ones_like(output) if output.requires_grad else None for output in graph.outputs]
        is_fit = not has_nan(graph.gradients(params, grads, self.trained, retain_graph=False))
        if not is_fit:
            # Perhaps they are the model's own.
            truth = self._recompute(params, self.tensors)
            is_fit = has_nan(truth.gradients(params, grads, self.trained, retain_graph=False))
        store.judge(insides, is_fit=is_fit)
        if not is_fit:
            self.drop_kept()

    def _looks_at_graph(self) -> bool:
        """Whether the forward runs in grad mode though its graph is dropped.

        Always on the CPU: kernels there are picked by grad mode and differ in last bits. On a GPU once a layer, to see
        how it uses its inputs; it costs about a quarter of the time in which kernels are launched. Never compiled:
        compiled code saves for the backward inside its kernels.
        """
        is_known = len(self.tensors) in self.layer.num_uses
        return self._is_eager and (self.engine.device.type == "cpu" or not is_known)

    def _find_shared(
        self, results: list[torch.Tensor], inputs: list[torch.Tensor], params: Views, *, has_graph: bool
    ) -> list[int]:
        """Inputs that the layer uses more than once, and that others may use before it."""
        known = self.layer.num_uses
        if len(inputs) not in known and not has_graph:
            return []
        if len(inputs) not in known:
            known[len(inputs)] = num_uses(self.layer.name, results, inputs, list(params.values()))
        uses = zip(known[len(inputs)], self.tensors, self.needs_grad, strict=True)
        return [i for i, (count, tensor, needs) in enumerate(uses) if count > 1 and needs and not tensor.is_leaf]

    def _detached(self, tensors: Sequence[torch.Tensor], *, requires_grad: bool) -> list[torch.Tensor]:
        flags = zip(tensors, self.needs_grad, strict=True)
        return [tensor.detach().requires_grad_(requires_grad and needs) for tensor, needs in flags]

    def _run(
        self, inputs: list[torch.Tensor], params: Views, insides: Insides | None, *, is_recomputation: bool
    ) -> list[torch.Tensor]:
        """Run the layer; returns its tensor outputs. insides: where they are kept."""
        filling = Filling(inputs)
        args, kwargs = filling.fill(self._arguments)
        copies = [filling.made[node] for node in self._mutable]
        before = [] if is_recomputation else [contents(copy) for copy in copies]
        with (
            self.layer.bound(params),
            recording(self.recorded_keys) as recorded,
            setting_attributes(self.layer.own_modules) as attributes,
            self.engine.in_model(self.layer),
        ):
            keeps = "all" if insides is None else insides.kind.keeps
            result = self.layer.run(args, kwargs) if self._is_eager else self.layer.run_training(args, kwargs, keeps)
        taker = Taker()
        if is_recomputation:
            self._take(taker, (result, recorded, attributes), inputs, copies, inputs, copies)
        else:
            self.context.forward_done(attributes)
            self._changed = [i for i, old in enumerate(before) if not is_same(old, contents(copies[i]))]
            self._result, self._changes = self._take(
                taker, (result, recorded, attributes), inputs, copies, self.tensors, self._live
            )
        return taker.tensors

    def _take(
        self,
        taker: Taker,
        result: Any,
        inputs: list[torch.Tensor],
        copies: list[Any],
        given: Sequence[torch.Tensor],
        live: list[Any],
    ) -> tuple[Any, list[tuple[Any, Contents]]]:
        """Take the result apart, and the copies of containers that the layer has changed. `given` and `live` stand
        where the run had `inputs` and `copies`."""
        for copy, stand_in in zip(copies, live, strict=True):
            taker.keep(copy, stand_in)
        pattern = taker.take(result)
        # A changed container may hold what it held before; in the result it is an output of its own.
        for tensor, stand_in in zip(inputs, given, strict=True):
            taker.keep(tensor, stand_in)
        return pattern, [(live[i], taker.take_contents(copies[i])) for i in self._changed]

    def _guard(self, inputs: list[torch.Tensor], params: Views) -> None:
        """Let no backward but the layer's own reach its inputs and parameters."""
        refuse = functools.partial(_refuse_backward, self.layer.name)
        for leaf in inputs if params.is_guarded else [*inputs, *params.values()]:
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(refuse)
        params.is_guarded = True

    @contextlib.contextmanager
    def _graph_mode(
        self, has_graph: bool, saving: contextlib.AbstractContextManager[None] | None = None
    ) -> Iterator[None]:
        """Around a forward. It runs in grad mode, as it would in plain PyTorch (which picks kernels by it), but unless
        the graph is kept, what it saves for a backward is dropped at once.

        saving: what becomes of it where it is kept beyond the visit.
        """
        if not has_graph:
            with torch.no_grad():
                yield
            return
        with torch.enable_grad(), saving or self._dropping():
            try:
                yield
            except RuntimeError as error:
                if "leaf Variable" in str(error):
                    raise UserError(_in_place(self.layer.name)) from error
                raise
        if torch.is_autocast_enabled(self.engine.device.type):
            # It would keep a cast copy of every layer's weights.
            torch.clear_autocast_cache()

    def _dropping(self) -> contextlib.AbstractContextManager[None]:
        if self.keep_graph:
            # A checkpoint around the layer must not see what a kept graph saves: its own recomputation keeps none.
            return without_saved_tensor_hooks()
        refuse = functools.partial(_refuse_backward, self.layer.name)
        return torch.autograd.graph.saved_tensors_hooks(_drop, refuse)


class LayerFunction(torch.autograd.Function):
    """Inputs: the call, an anchor that requires grad (so that gradients of weights flow even where no input needs one),
    and what autograd sees of the call's tensors. Outputs: those of `Call.forward`."""

    @staticmethod
    def forward(ctx: Any, call: Call, anchor: torch.Tensor, *edges: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors = call.tensors
        with call.engine.visit(call.layer, "forward", call.micro_batch) as params:
            outputs = call.forward(params)
        ctx.call = call
        # An input that gets a gradient is a boundary activation, and is stored; masks and such are shared.
        # A call whose graph is kept has its backward at once, or holds its inputs itself.
        keep = functools.partial(call.engine.activations.keep, name=call.layer.name)
        may_go = [needs and call.kept is None for needs in call.needs_grad]
        ctx.boundaries = [keep(tensor) if may else None for tensor, may in zip(tensors, may_go, strict=True)]
        is_stored = [boundary is not None and boundary.is_stored for boundary in ctx.boundaries]
        ctx.save_for_backward(*(None if stored else t for t, stored in zip(tensors, is_stored, strict=True)))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o, flows in zip(outputs, call.is_differentiable, strict=True) if not flows))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        take = call.engine.activations.take
        pairs = zip(ctx.saved_tensors, ctx.boundaries, strict=True)
        tensors = [take(boundary) if saved is None else saved for saved, boundary in pairs]
        wants_weights = wants_gradient(ctx)
        input_grads = call.engine.backward_call(call, tensors, grads, wants_weights=wants_weights)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            for boundary in ctx.boundaries:
                if boundary is not None:
                    boundary.release()
        return (None, None, *input_grads)


def _newest(tensor: torch.Tensor) -> torch.Tensor:
    """The alias that the last call put in the place of `tensor`, or the tensor: changed in place, it is another."""
    reference, version = _alias_of.get(tensor, (None, None))
    alias = reference() if reference is not None and version == tensor._version else None
    return tensor if alias is None else alias


def _drop(_: torch.Tensor) -> None:
    """In place of what a forward would save for its backward."""


def _refuse_backward(name: str, _: object) -> NoReturn:
    raise UserError(
        f"a tensor made inside {name} reached the loss by another way than its result (a global, a list that is not an "
        "argument?): return it from the layer, or set it as an attribute of it"
    )


def _in_place(name: str) -> str:
    return f"{name} changes its input in place, so it cannot be recomputed: write x = x + y for x += y"
