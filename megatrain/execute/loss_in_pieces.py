"""Cross entropy of a head's logits, a piece of the tokens at a time. The logits of one piece exist at once.

A layer call of its own: in go hidden states (N, width) and targets (N,), out comes the loss. So weights, random
numbers, autocast, accumulation and drains are what they are for every call (`call.py`).

- With the backward in the same visit (`keep_graph`, the last layer under mt.accumulate) the gradients of a piece are
  taken as soon as its loss is there: of the hidden states, and of the weights, summed in fp32 over the pieces. They are
  those of the sum of the losses; the backward multiplies them by what comes to the loss, which is one number. Each
  piece's logits are made once.
- Else, and where each token's loss has a gradient of its own (reduction="none"), the forward keeps nothing, and the
  backward makes each piece's logits again.

A piece is computed as PyTorch computes the whole: the linear layer in the compute dtype, the steps that the model puts
between logits and loss, cross entropy in fp32 at least. The losses are summed in fp32. So the result differs from the
loss of whole logits by the order of sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from megatrain.execute.attributes import OwnAttributes
from megatrain.execute.call import Call, Gradients
from megatrain.execute.context import without_saved_tensor_hooks
from megatrain.execute.layer import Views
from megatrain.execute.steps import Step
from megatrain.plan.cost import tokens_at_once
from megatrain.spec.layout import Field


@dataclass(frozen=True, kw_only=True, eq=False)
class LossRule:
    """Arguments of `torch.nn.functional.cross_entropy`, and what lies between the head and it."""

    steps: tuple[Step, ...]
    reduction: str
    ignored: int
    """The target that is none."""

    smoothing: float
    dtype: torch.dtype
    """Of the loss."""


@dataclass(kw_only=True, eq=False)
class PieceGradients:
    """Of the sum of the losses. Kept, they stand where other calls keep a graph."""

    inputs: list[torch.Tensor]
    """The call's tensors."""

    of_hidden: torch.Tensor | None
    of_fields: dict[Field, torch.Tensor] = dataclasses.field(default_factory=dict)
    """In fp32 at least."""

    def add(self, fields: list[Field], gradients: list[torch.Tensor]) -> None:
        for field, gradient in zip(fields, gradients, strict=True):
            if field in self.of_fields:
                self.of_fields[field].add_(gradient)
            else:
                self.of_fields[field] = gradient.float()

    def scaled(self, scale: torch.Tensor, fields: list[Field], *, in_place: bool) -> PieceGradients:
        """Those of the hidden states and of `fields`, times a scalar. in_place: these are not needed any more."""
        multiply = torch.Tensor.mul_ if in_place else torch.mul
        of_hidden = None if self.of_hidden is None else multiply(self.of_hidden, scale)
        of_fields = {field: multiply(self.of_fields[field], scale) for field in fields}
        return PieceGradients(inputs=self.inputs, of_hidden=of_hidden, of_fields=of_fields)


class LossInPieces(Call):
    """
    Args:
        rule: which loss.

    The call's tensors are hidden states (N, width), targets (N,) and, if there are any, weights of the classes (V,).
    """

    def __init__(self, *args: Any, rule: LossRule, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rule = rule
        self._fields = [self.layer.field_of(name) for name in ("weight", "bias")]

    def forward(self, params: Views) -> tuple[torch.Tensor, ...]:
        """The loss: a scalar, or (N,) for reduction="none"."""
        self._num_results, self.is_differentiable = 1, [True]
        with without_saved_tensor_hooks(), self.engine.in_model(self.layer):
            if self.keep_graph and self._rule.reduction != "none":
                losses, self.kept = self._gradients(params, self.tensors, self.trained, None)
            else:
                with torch.no_grad():
                    losses = self._losses(params)
        if torch.is_autocast_enabled(self.engine.device.type):
            torch.clear_autocast_cache()
        if self._rule.reduction == "none":
            return (torch.cat(losses).to(self._rule.dtype),)
        total = torch.stack(losses).sum()
        return ((total / self._divisor(self.tensors)).to(self._rule.dtype),)

    def publish(self, outputs: Sequence[torch.Tensor], own: OwnAttributes | None) -> torch.Tensor:
        self.tensors, self.edges, self._live = [], [], []
        return outputs[0]

    def backward(
        self,
        params: Views,
        tensors: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None],
        *,
        wants_weights: bool,
    ) -> tuple[list[torch.Tensor | None], Gradients]:
        self.check_version()
        fields = [field for field in self.trained if wants_weights and self.layer.home.trainable[field]]
        kept, (grad,) = self.kept, grads
        if wants_weights:
            self.kept = None
        is_target = tensors[1] != self._rule.ignored
        # Where every target is ignored the loss is not a number, and its gradient zero.
        divisor = self._divisor(tensors).where(is_target.any(), 1)
        scale = grad.to(divisor.dtype) / divisor
        if kept is None:
            with self.context.restored(), without_saved_tensor_hooks(), self.engine.in_model(self.layer):
                _, found = self._gradients(params, tensors, fields, scale)
        else:
            found = kept.scaled(scale, fields, in_place=wants_weights)
            if found.of_hidden is not None:
                found.of_hidden.masked_fill_(~is_target[:, None], 0)  # 0 times what is not a number would be none
        return [found.of_hidden, *[None] * (len(tensors) - 1)], list(found.of_fields.items())

    def _losses(self, params: Views) -> list[torch.Tensor]:
        """Of the pieces, without gradients."""
        return [self._loss(self._head(params), piece) for piece in self._pieces(self.tensors)]

    def _gradients(
        self, params: Views, tensors: Sequence[torch.Tensor], fields: list[Field], scale: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], PieceGradients]:
        """Losses of the pieces, and gradients of their sum, each loss times its `scale`: a scalar, or (N,), or None
        for 1."""
        hidden, needs_grad = tensors[0], self.needs_grad[0]
        found = PieceGradients(inputs=list(tensors), of_hidden=torch.empty_like(hidden) if needs_grad else None)
        own = {field: params[field].detach().requires_grad_(field in fields) for field in params}
        losses, start = [], 0
        for piece in self._pieces(tensors):
            end = start + len(piece[0])
            inputs = piece[0].detach().requires_grad_(needs_grad)
            with torch.enable_grad():
                loss = self._loss(self._head(own), [inputs, *piece[1:]])
            losses.append(loss.detach())
            wanted = [*[inputs] * needs_grad, *(own[field] for field in fields)]
            of_loss = scale[start:end] if scale is not None and scale.dim() else scale
            grads = list(torch.autograd.grad(loss, wanted, of_loss)) if wanted else []
            if needs_grad:
                found.of_hidden[start:end] = grads.pop(0)
            found.add(fields, grads)
            start = end
        return losses, found

    def _head(self, params: Mapping[Field, torch.Tensor]) -> list[torch.Tensor | None]:
        """Weight and bias."""
        return [None if field is None else params[field] for field in self._fields]

    def _loss(self, head: list[torch.Tensor | None], piece: Sequence[torch.Tensor]) -> torch.Tensor:
        """Losses of a piece's tokens, or their sum, in fp32 at least."""
        hidden, targets, *weights = piece
        logits = functional.linear(hidden, *head)
        for step in self._rule.steps:
            logits = step(logits)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return functional.cross_entropy(
            logits,
            targets,
            *(of_classes.to(logits.dtype) for of_classes in weights),
            ignore_index=self._rule.ignored,
            reduction="none" if self._rule.reduction == "none" else "sum",
            label_smoothing=self._rule.smoothing,
        )

    def _pieces(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Hidden states and targets of some tokens, and the weights of the classes. At least one piece, perhaps of no
        tokens; about equally long."""
        hidden, targets, *weights = tensors
        num_pieces = max(1, -(-len(hidden) // self._tokens_at_once()))
        for of_piece in zip(hidden.tensor_split(num_pieces), targets.tensor_split(num_pieces), strict=True):
            yield [*of_piece, *weights]

    def _tokens_at_once(self) -> int:
        return tokens_at_once(self._fields[0].shape[0], compiled=False)

    def _divisor(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the sum of the losses is divided by, a scalar: what the targets weigh, or not a number where that is 0.
        With smoothing the sum may be more than 0 there, and its quotient infinite; PyTorch's mean is not."""
        _, targets, *weights = tensors
        if self._rule.reduction != "mean":
            return torch.ones((), device=targets.device)
        is_target = targets != self._rule.ignored
        if weights:
            total = weights[0].float()[targets.where(is_target, 0)].where(is_target, 0).sum()
        else:
            total = is_target.sum().float()
        return total.where(total != 0, torch.nan)
