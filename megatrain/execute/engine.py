"""The engine of one streamed model: every layer call and every backward goes through here.

    layer.forward -> Engine.call -> LayerFunction -> visit (weights in a slot) -> the module's own forward
    loss.backward -> LayerFunction.backward -> Engine.backward_call -> visit -> recompute, vjp -> passes -> drain

Rule: outside of `visit` no weights of a streamed layer are on the device.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from megatrain.base.errors import RefusedError, UserError
from megatrain.execute.apart import apart
from megatrain.execute.attention import AttentionKernels
from megatrain.execute.attributes import set_attributes, setting_attributes
from megatrain.execute.call import Arguments, Call, LayerFunction
from megatrain.execute.capture import recorded_so_far, recording_keys
from megatrain.execute.changes import StepChanges
from megatrain.execute.fetch import Fetcher
from megatrain.execute.first_line import describe_run
from megatrain.execute.insides import InsidesStore
from megatrain.execute.layer import StreamedLayer, Views
from megatrain.execute.logits import logits_later
from megatrain.execute.merging import Merging
from megatrain.execute.mover import HomeMover
from megatrain.execute.passes import Passes
from megatrain.execute.report import RunReport, run_stats
from megatrain.execute.retry import accumulate_with_room
from megatrain.execute.runs import Run, current_run
from megatrain.execute.templates import compile_templates, kept_kinds
from megatrain.execute.transports import make_transport
from megatrain.execute.visits import Visits, told_to_recorder
from megatrain.plan.outcome import Plan
from megatrain.plan.placement import HBM_TIER, RAM
from megatrain.plan.rows import Placement
from megatrain.spec.homes import Formats
from megatrain.spec.layout import Field
from megatrain.store.buffers import BufferPool
from megatrain.store.home import Home
from megatrain.store.memory import HostMemory
from megatrain.store.set_aside import SetAside
from megatrain.transport.activations import ActivationStore
from megatrain.transport.drain import GradientPacket
from megatrain.transport.recorder import computing, on_host

Result = TypeVar("Result")
Make = Callable[..., Call]

_engines: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()


def engine_of(model: nn.Module) -> Engine | None:
    """The engine of a streamed model, or None."""
    return _engines.get(model)


def _alone(method: Callable[..., Result]) -> Callable[..., Result]:
    """For methods of the engine that run a model's layers, perhaps one inside another. What an exception or an
    interrupt left undone before is cleared away first. Another thread is refused meanwhile, unless it is autograd's,
    which works for this one."""

    @functools.wraps(method)
    def run(self: Engine, *args: Any, **kwargs: Any) -> Result:
        self.memory.check_process()
        thread, depth, owner = threading.get_ident(), self._depth, self._thread
        is_backward = torch._C._current_graph_task_id() != -1
        if depth == 0 and not is_backward:
            self.recover()
            self.changes.at_boundary()
        elif owner != thread and not is_backward:
            raise RefusedError(
                "a streamed model was called from two threads at once, and its layers share the device one after the "
                "other: call it from one thread, or hold a lock around forward and backward"
            )
        is_grad_enabled = torch.is_grad_enabled()
        try:
            self._depth, self._thread = depth + 1, thread
            return method(self, *args, **kwargs)
        except (KeyboardInterrupt, SystemExit, GeneratorExit) as error:
            # Interrupted on its way out of a context, a generator would close whenever the traceback goes, and set
            # grad mode to what it was in there. Close it now.
            traceback.clear_frames(error.__traceback__)
            torch.set_grad_enabled(is_grad_enabled)
            raise
        finally:
            self._depth, self._thread = depth, owner

    return run


class Engine:
    """
    Args:
        homes: all homes; `resident` is the one of them whose weights stay on the device (None if there is none).
        layers: the streamed layers in order of definition.
        memory: of the host, for what is not a home.
        rooms: for inputs of layers and gradients, by tier.
        formats: how weights and gradients are held.
        placement: where homes live; what memory was counted from.
        activation_bytes: boundary activations that may stay on the device.
    """

    def __init__(
        self,
        *,
        homes: list[Home],
        resident: Home | None,
        layers: list[StreamedLayer],
        memory: HostMemory,
        rooms: Mapping[str, BufferPool],
        device: torch.device,
        formats: Formats,
        placement: Placement,
        activation_bytes: int,
    ) -> None:
        self.homes, self.layers, self.device = homes, layers, device
        self.formats, self.placement, self.memory = formats, placement, memory
        self.config, self.options = placement.config, placement.options
        self.transport = make_transport(homes, resident, layers, memory, device, placement)
        self.passes = Passes(device, self._send)
        self.activations = ActivationStore(
            device=device,
            budget_bytes=activation_bytes,
            buffers=rooms[RAM],
            device_buffers=rooms.get(HBM_TIER),
            send=self.transport.send,
            bring=self.transport.bring,
        )
        kinds = kept_kinds(layers, self.options.kept_layers, compiled=self.config.compile)
        self.insides = InsidesStore(kinds, self.options.kept_bytes, compiled=self.config.compile)
        self.fetcher = Fetcher(self, resident)
        self.attention, self.merging = AttentionKernels(), Merging(0)
        self.is_collecting = self.measure_updates = False
        self.set_aside = SetAside()
        self.consumer: weakref.WeakMethod[Callable[[Home], None]] | None = None
        """With clip="layer": queues the update of a home whose gradients were just sent home, which uses them up."""
        self.is_last: dict[str, bool] = {}
        self.num_steps = 0
        self._visits = Visits(self.transport)
        self._depth = self._thread = 0
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._consumed: set[Home] = set()
        self._looked_at: Home | None = None
        self.update_ratios: dict[str, float] = {}
        """Home name -> |dw| / |w| of its last update, if `measure_updates` was set before it."""
        self.plan: Plan | None = None
        """What memory and time were planned to be, where that was asked for."""
        self.report = RunReport(self)
        self.mover = HomeMover(self)
        self.changes = StepChanges(self)
        self._first_block = next((layer for layer in layers if layer.kind == "block"), None)
        if self.config.compile:
            compile_templates(layers)

    def register(self, model: nn.Module) -> None:
        _engines[model] = self

    @property
    def precision(self) -> str:
        """ "fp32" or "bf16": what layers compute in."""
        return self.formats.precision

    # The three hops: a layer's call, its visit, its backward.

    def call(self, layer: StreamedLayer, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The forward of a streamed layer."""
        if (run := current_run(self)) is not None:
            run.arrive(layer)
        later = logits_later(self, layer, args, kwargs, run)
        return self.call_now(layer, args, kwargs) if later is None else later

    def call_now(self, layer: StreamedLayer, args: tuple, kwargs: dict[str, Any], make: Make = Call) -> Any:
        """The same in the visit that is on, where there is one."""
        if (run := current_run(self)) is None:
            return self._call_alone(layer, args, kwargs, None, make)
        if not self._visits.is_open(layer):
            run.arrive(layer)
        return self._call(layer, args, kwargs, run, make)

    @told_to_recorder("call", lambda layer: layer)
    def _call(self, layer: StreamedLayer, args: tuple, kwargs: dict[str, Any], run: Run | None, make: Make) -> Any:
        if not torch.is_grad_enabled():
            return self._call_without_graph(layer, args, kwargs)
        arguments = Arguments(args, kwargs)
        if not (layer.trainable_fields() or any(tensor.requires_grad for tensor in arguments.tensors)):
            return self._call_without_graph(layer, args, kwargs)
        layer.check_inputs(arguments.tensors, self.device)
        if layer is self._first_block:
            self.report.see(arguments.tensors[0])
        call = make(self, layer, arguments, recorded_keys=recording_keys(), run=run)
        anchor = self._anchor if layer.trainable_fields() else self._anchor.detach()
        outputs = LayerFunction.apply(call, anchor, *call.edges)
        if run is not None:
            run.record(call, outputs)
        return call.publish(outputs, None if run is None else run.attributes)

    _call_alone = _alone(_call)

    def _call_without_graph(self, layer: StreamedLayer, args: tuple, kwargs: dict[str, Any]) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        layer.check_inputs([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], self.device)
        with self.visit(layer) as params:
            with layer.bound(params), setting_attributes(layer.own_modules) as attributes, self.in_model(layer):
                result = layer.run(args, kwargs)
            result, *_ = apart((result, attributes, args, kwargs, recorded_so_far()), params)
        set_attributes(attributes)
        return result

    def visit(
        self, layer: StreamedLayer, what: str = "forward", micro_batch: int | None = None
    ) -> contextlib.AbstractContextManager[Views]:
        """The layer's parameters on the device for the length of the block. Visits nest: all have the same views."""
        return self._visits.open(layer, what, micro_batch)

    @contextlib.contextmanager
    def in_model(self, layer: StreamedLayer, what: str = "model code") -> Iterator[None]:
        """Around code of the model's authors, or of PyTorch, that a layer's call runs."""
        with on_host(self.transport.recorder, what, layer.name), self.attention.preferred():
            yield

    @told_to_recorder("backward call", lambda call: call.layer)
    @_alone
    def backward_call(
        self,
        call: Call,
        tensors: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None],
        *,
        wants_weights: bool,
    ) -> list[torch.Tensor | None]:
        """Gradients of a call's inputs; those of its weights, if wanted, are added to the pass."""
        if wants_weights:
            self.join_autograd()
        input_grads, param_grads = call.passed_on(grads), []
        if input_grads is None:
            with self.visit(call.layer, "backward", call.micro_batch) as params:
                input_grads, param_grads = call.backward(params, tensors, grads, wants_weights=wants_weights)
        with computing(self.transport.recorder, "sum gradients", call.layer.name):
            self.passes.add(call.layer.home, param_grads)
            if wants_weights or not call.trained:
                self.passes.settle(call.layer.home, call.use)
        return input_grads

    def join_autograd(self) -> None:
        """A backward, perhaps autograd's own, is about to add gradients of weights."""
        self.check_trainable()
        is_autograd = torch._C._current_graph_task_id() != -1
        if self.passes.is_held and is_autograd and not self.is_collecting:
            raise UserError(
                "backward() was called inside a micro-batch of accumulate, which does it itself: return the loss "
                "(torch.autograd.grad with respect to inputs is fine)"
            )
        self.passes.join_autograd()

    @_alone
    def accumulate(self, thunks: Sequence[Callable[[], torch.Tensor]], sizes: Sequence[int] = ()) -> list[torch.Tensor]:
        """Forward and backward of all micro-batches of a step, layer-major.

        Args:
            thunks: each runs the model's own forward on one micro-batch and returns its scalar loss.
            sizes: how many of the user's micro-batches each stands for. Empty: one.

        Returns the detached losses in order. Gradients are at home, or on their way.
        """
        self.check_trainable()
        return accumulate_with_room(self, thunks, sizes or [1] * len(thunks))

    def _send(self, home: Home, packet: GradientPacket) -> None:
        """A pass's gradients of `home` are complete."""
        if self.config.clip == "global":
            self.transport.drain(home, packet)
            if home.grads.is_lent:
                # What is added now is their gradient as it is now, and not as they may change it afterwards.
                home.grads.arrived.wait()
            return
        consume = None if self.consumer is None else self.consumer()
        if consume is None:
            raise UserError(
                'clip="layer" updates in the backward: make the optimizer before it (mt.optim.AdamW(model))'
            )
        if home in self._consumed:
            raise UserError(
                'clip="layer" updates in the backward, and there was one in this step already: run all micro-batches '
                "of a step in one mt.accumulate, and call optimizer.step() after it"
            )
        self._consumed.add(home)
        self.transport.drain(home, packet)
        consume(home)

    def check_trainable(self) -> None:
        """Raises RefusedError while the weights are their moving average."""
        self.set_aside.check("training")

    def end_step(self) -> None:
        """The optimizer has made its step."""
        self.restart_step()
        self._visits.end_step()
        self.num_steps += 1
        self.transport.rest()
        self.report.end_step()

    def restart_step(self) -> None:
        """With clip="layer": another backward may use gradients up."""
        self._consumed.clear()

    def recover(self) -> None:
        """Clear away what an exception left undone."""
        is_clean = self.transport.is_idle and not (
            self._visits.is_any_open or self.is_collecting or self.passes.is_held
        )
        if is_clean and not self.passes.is_torn():
            return
        self.is_collecting = False
        self._consumed.clear()
        self._visits.clear()
        self.passes.abandon()
        for layer in self.layers:
            layer.recover()
        self.transport.recover()

    # What reads weights and gradients waits for what it needs.

    def wait(self) -> None:
        """Until every drain and every update is over."""
        self.transport.flush()
        for home in self.homes:
            home.wait()
        if self.memory.disk is not None:
            self.memory.disk.settle()
        for home in self.homes:
            home.check_sound()

    def gradient(self, home: Home, field: Field) -> torch.Tensor | None:
        """A parameter's gradient on the host, or None."""
        if self._looked_at is not None and self._looked_at is not home:
            # So that all gradients can be looked at in turn without a copy of each (see `lend`).
            self._looked_at.grads.let_go()
        self._looked_at = home
        home.wait()
        return home.grads.lend(field)

    def zero_grad(self) -> None:
        self.transport.flush()
        self.restart_step()
        for home in self.homes:
            home.grads.clear()

    def gradient_norms(self) -> dict[Home, dict[Field, float]]:
        """L2 norm of every gradient that is home, before clipping. Taken on the device during the drain where one pass
        made it."""
        self.transport.flush()
        return {home: home.grads.norms() for home in self.homes if home.grads.is_holding()}

    def clip(self, max_norm: float) -> torch.Tensor:
        """Global norm of all gradients, which become gradients times min(1, max_norm / (norm + 1e-6)). The factor is
        multiplied in by the update. A norm of NaN makes all of them NaN, as in plain PyTorch."""
        norms = self.gradient_norms()
        now = [norm * home.grads.factor(field) for home, of in norms.items() for field, norm in of.items()]
        total = sum(norm * norm for norm in now) ** 0.5
        factor = max_norm / (total + 1e-6)
        for home in norms if not factor >= 1.0 else ():
            home.grads.multiply(factor)
        return torch.tensor(total, dtype=torch.float32)

    # What happened.

    def summary(self) -> str:
        """The run's first line."""
        return describe_run(self)

    def stats(self) -> dict[str, Any]:
        """Counts since the model was streamed: visits a home, transfers, bytes, predictions, stalls, the disk."""
        return run_stats(self)

    @property
    def consumed(self) -> list[Home]:
        """Homes whose gradients of this step were used up in the backward, in the order of the forward."""
        return [home for home in self.homes if home in self._consumed]

    @property
    def consumed_norm(self) -> float:
        """Global norm of the gradients that were used up in the backward."""
        self.transport.flush()
        return math.sqrt(sum(home.grads.arrived_norm**2 for home in self.consumed))

    def close(self) -> None:
        """End the lanes. The model cannot be used afterwards."""
        self.transport.close()
