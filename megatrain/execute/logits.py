"""Logits that are not made until somebody needs them whole.

While a model trains, its head (a plain `nn.Linear` that nobody has put hooks on) returns `Logits`: a tensor with the
shape, dtype and device of the logits and none of their numbers. What models do to logits before their loss is noted:

- operations on the leading dimensions (a shift by one token, a view as rows) are done to the hidden states instead;
- element-wise operations with numbers (a cast, a scale, a soft-cap) are kept in a list, for each piece to run through.

`cross_entropy` of such logits becomes a layer call of its own, from hidden states to the loss, which makes the logits
of a piece of the tokens at a time (`loss_in_pieces.py`):

    lm_head(hidden) -> Logits -> .float() -> .view(-1, V) -> cross_entropy ─> Engine.call_now(head, hidden, targets)
                          └──> anything else ─> Engine.call_now(head, hidden): the logits whole

Rule: whatever is not known here makes the logits whole, by the call that the head would have been, and goes on with
them: the same graph and the same bits. Whole logits are computed when they are asked for, with the weights of the
head's call; where those are gone (an optimizer step lies between), asking is refused by name.

A function that takes tensors past `__torch_function__` (an `autograd.Function` is given the very object) has an object
that is part of the graph, and of which a gradient finds its way to head and hidden states. Code that reads numbers past
it finds NaN.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from megatrain.base.errors import UserError
from megatrain.execute.call import Arguments, Call
from megatrain.execute.compiled_loss import CompiledLossInPieces
from megatrain.execute.context import AutocastState
from megatrain.execute.loss_in_pieces import LossInPieces, LossRule
from megatrain.execute.passes import wants_gradient
from megatrain.execute.steps import Step, casts, is_element_wise, keeps_rows, keeps_vocabulary
from megatrain.plan.cost import tokens_at_once
from megatrain.spec.discover import is_plain_linear

if TYPE_CHECKING:
    from megatrain.execute.engine import Engine
    from megatrain.execute.layer import StreamedLayer
    from megatrain.execute.runs import Run

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_ATTRIBUTES = ("shape", "ndim", "dtype", "layout", "is_leaf", "grad_fn", "requires_grad", "device", "is_cuda", "is_cpu",
               "is_meta", "itemsize", "nbytes")  # fmt: skip
_METHODS = ("size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
            "__hash__", "__len__")  # fmt: skip
_METADATA = {
    *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES),
    *(getattr(torch.Tensor, name) for name in _METHODS),
    torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip
"""Answered without the numbers."""


def logits_later(
    engine: Engine, layer: StreamedLayer, args: tuple, kwargs: dict[str, Any], run: Run | None
) -> Logits | None:
    """What the head returns instead of its logits; None where it is to run as it is. run: whose call it is."""
    if layer.kind != "head" or engine.config.logits_in_pieces is False or not torch.is_grad_enabled():
        return None
    if kwargs or len(args) != 1 or type(args[0]) is not torch.Tensor:
        return None
    if not is_plain_linear(layer.module) or nn.modules.module._has_any_global_hook():
        return None
    hidden = args[0]
    weight = layer.field_of("weight")
    vocabulary, width = weight.shape
    autocast = AutocastState.get(engine.device)
    kinds = {kind: dtype for kind, is_on, dtype in autocast.states if is_on}
    dtype = kinds.get(engine.device.type, weight.dtype)
    is_as_expected = (
        hidden.dim() > 0
        and hidden.shape[-1] == width
        and hidden.device.type == engine.device.type
        and hidden.dtype in _FLOATS[:3]
        and (engine.device.type in kinds or hidden.dtype == dtype)
        and (hidden.requires_grad or layer.trainable_fields())
    )
    num_tokens = hidden.numel() // max(width, 1)
    least = 1 if engine.config.logits_in_pieces else 1 + tokens_at_once(vocabulary, compiled=False)
    if not is_as_expected or num_tokens < least:
        return None
    head = _Head(engine, layer, vocabulary, autocast, run)
    return head.later(hidden, (), dtype, lambda: head.call(hidden))


class Logits(torch.Tensor):
    """Logits that may never be made. Made by `logits_later`, and by what is done to them."""

    state: _Later

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if torch.is_grad_enabled() and args and isinstance(args[0], Logits):
            later = args[0].state.after(func, args[1:], kwargs)
            if later is not None:
                return later
        args, kwargs = pytree.tree_map_only(Logits, lambda logits: logits.state.whole(), (args, kwargs))
        return func(*args, **kwargs)


class _Head:
    """A call of the head that has not run."""

    def __init__(
        self, engine: Engine, layer: StreamedLayer, vocabulary: int, autocast: AutocastState, run: Run | None
    ) -> None:
        self.engine, self.layer, self.vocabulary, self._run = engine, layer, vocabulary, run
        self.states: weakref.WeakSet[_Later] = weakref.WeakSet()
        self._autocast = autocast
        self._version = layer.home.version

    def later(
        self, hidden: torch.Tensor, steps: tuple[Step, ...], dtype: torch.dtype, make: Callable[[], torch.Tensor]
    ) -> Logits:
        """The logits of `hidden` (any leading dimensions, width) after `steps`. make: makes them whole."""
        anchor = self.engine._anchor if self.layer.trainable_fields() else self.engine._anchor.detach()
        shape = (*hidden.shape[:-1], self.vocabulary)
        made = LaterFunction.apply(self, steps, dtype, shape, anchor, hidden)
        if self._run is not None and made.requires_grad:
            self._run.own(made)
        logits = made.as_subclass(Logits)
        logits.state = _Later(self, hidden, steps, dtype, shape, make)
        self.states.add(logits.state)
        return logits

    def call(self, *tensors: torch.Tensor, make: Callable[..., Call] = Call) -> Any:
        """A call of the layer, as if the head had just been called."""
        with self.as_called(), torch.inference_mode(False), torch.enable_grad():
            return self.engine.call_now(self.layer, tensors, {}, make)

    @contextlib.contextmanager
    def as_called(self) -> Iterator[None]:
        """Under the autocast of the head's call, and with its weights. Raises UserError where those are gone."""
        if self.layer.home.version != self._version:
            raise UserError(
                f"the logits of {self.layer.name} were not made while they were not needed, and the weights that make "
                "them have changed since (an optimizer step?): look at them before, or mt.init(logits_in_pieces=False)"
            )
        outside = AutocastState.get(self.engine.device)
        try:
            self._autocast.set()
            yield
        finally:
            outside.set()


class _Later:
    """What one `Logits` is."""

    def __init__(
        self,
        head: _Head,
        hidden: torch.Tensor,
        steps: tuple[Step, ...],
        dtype: torch.dtype,
        shape: tuple[int, ...],
        make: Callable[[], torch.Tensor],
    ) -> None:
        self.head, self.hidden, self.steps, self.dtype, self.shape = head, hidden, steps, dtype, shape
        self._make: Callable[[], torch.Tensor] | None = make
        self._value: torch.Tensor | None = None

    def whole(self) -> torch.Tensor:
        """The logits as a plain tensor with a graph. All that was derived from the same ones is made too: what comes
        next may change them in place, and what was derived before must not see it."""
        for state in list(self.head.states):
            state.value()
        return self.value()

    def value(self) -> torch.Tensor:
        if self._value is None:
            with torch.inference_mode(False), torch.enable_grad():
                self._value = self._make()
            self._make = None
        return self._value

    def after(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of func(these logits, *args, **kwargs) without them; None if it needs them whole."""
        if self._value is not None:
            return None
        if func is functional.cross_entropy:
            return self._loss(args, kwargs)
        make = functools.partial(self._apply, func, args, kwargs)
        if func is torch.Tensor.__getitem__ and keeps_vocabulary(args[0], len(self.shape)):
            return self.head.later(self.hidden[args[0]], self.steps, self.dtype, make)
        if func is torch.Tensor.contiguous and not args and not kwargs:
            return self.head.later(self.hidden, self.steps, self.dtype, make)
        if keeps_rows(func, args, kwargs):
            probe = func(torch.empty(self.shape, dtype=self.dtype, device="meta"), *args, **kwargs)
            if probe.dtype != self.dtype or probe.dim() == 0 or probe.shape[-1] != self.head.vocabulary:
                return None
            hidden = self.hidden.reshape(*probe.shape[:-1], self.hidden.shape[-1])
            return self.head.later(hidden, self.steps, self.dtype, make)
        step = casts(func, args, kwargs, self.head.engine.device)
        if step is None and is_element_wise(func, args, kwargs):
            step = Step(func, args, kwargs)
        if step is None:
            return None
        dtype = step(torch.empty((1,), dtype=self.dtype, device="meta")).dtype
        return self.head.later(self.hidden, (*self.steps, step), dtype, make) if dtype in _FLOATS else None

    def _apply(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        return func(self.value(), *args, **kwargs)

    def _loss(self, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
        given = _CROSS_ENTROPY.bind(None, *args, **kwargs)
        given.apply_defaults()
        _, targets, weights, averages, ignored, reduces, reduction, smoothing = given.arguments.values()
        is_known = (
            len(self.shape) == 2
            and type(targets) is torch.Tensor
            and targets.dtype == torch.int64
            and targets.shape == self.shape[:1]
            and targets.device == self.hidden.device
            and (weights is None or (type(weights) is torch.Tensor and not weights.requires_grad))
            and (weights is None or (weights.dtype == self.dtype and weights.shape == self.shape[1:]))
            and averages is None
            and reduces is None
            and reduction in ("mean", "sum", "none")
            and (self.hidden.requires_grad or self.head.layer.trainable_fields())
        )
        if not is_known:
            return None
        rule = LossRule(
            steps=self.steps,
            reduction=reduction,
            ignored=ignored,
            smoothing=smoothing,
            # As in plain PyTorch, where autocast computes losses in fp32.
            dtype=torch.float32 if torch.is_autocast_enabled(self.hidden.device.type) else self.dtype,
        )
        tensors = (self.hidden, targets) if weights is None else (self.hidden, targets, weights)
        make = CompiledLossInPieces if self.head.engine.config.compile else LossInPieces
        return self.head.call(*tensors, make=functools.partial(make, rule=rule))


_CROSS_ENTROPY = inspect.signature(functional.cross_entropy)


class LaterFunction(torch.autograd.Function):
    """A place in the graph for logits that are not there. Its gradient comes only where the very object was used."""

    @staticmethod
    def forward(
        ctx: Any,
        head: _Head,
        steps: tuple[Step, ...],
        dtype: torch.dtype,
        shape: tuple[int, ...],
        anchor: torch.Tensor,
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        ctx.call, ctx.steps = head, steps
        ctx.save_for_backward(hidden)
        ctx.set_materialize_grads(False)
        return torch.full((), math.nan, dtype=dtype, device=hidden.device).expand(shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        (hidden,), head = ctx.saved_tensors, ctx.call
        with head.as_called():
            call = _StepsCall(head, hidden, ctx.steps)
        wants_weights = wants_gradient(ctx)
        (of_hidden,) = head.engine.backward_call(call, [hidden], [grad], wants_weights=wants_weights)
        return (None,) * 5 + (of_hidden,)


class _StepsCall(Call):
    """A head's call and the steps behind it, of which only the backward runs."""

    def __init__(self, head: _Head, hidden: torch.Tensor, steps: tuple[Step, ...]) -> None:
        super().__init__(head.engine, head.layer, Arguments((hidden,), {}), recorded_keys=(), run=None)
        self._num_results = 1
        self._steps = steps

    def _run(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        (logits,) = super()._run(*args, **kwargs)
        for step in self._steps:
            logits = step(logits)
        return [logits]
