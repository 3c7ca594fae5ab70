"""Head and loss in pieces, where the engine compiles: the loss and its gradient are compiled code (`loss_code.py`), and
the matrix products around it are taken by hand, so that the gradient of the weights goes straight into its fp32 sum.

A piece has more tokens than without compilation (`plan/cost.py:tokens_at_once`): what is held of a logit is one number
in the compute dtype. Equal to `LossInPieces` to rounding: the gradient of the weights is not rounded to the compute
dtype between product and sum, where the device can do that (`products.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from megatrain.execute.layer import Views
from megatrain.execute.loss_code import LossCode, LossCodes
from megatrain.execute.loss_in_pieces import LossInPieces, PieceGradients
from megatrain.execute.products import add_product_
from megatrain.plan.cost import tokens_at_once
from megatrain.spec.layout import Field


class CompiledLossInPieces(LossInPieces):
    """As `LossInPieces`. Where there are too many kinds of losses to compile them all, it is that."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layer.loss_codes = self.layer.loss_codes or LossCodes(self.layer.name)
        device_type = self.engine.device.type
        is_cast = torch.is_autocast_enabled(device_type)
        self._dtype = torch.get_autocast_dtype(device_type) if is_cast else self.tensors[0].dtype
        self._code: LossCode | None = self.layer.loss_codes.find(self._rule, self._dtype)

    def _losses(self, params: Views) -> list[torch.Tensor]:
        if self._code is None:
            return super()._losses(params)
        self._check_targets(self.tensors[1])
        losses = []
        with self._by_hand():
            head = self._cast_head(params)
            for hidden, *others in self._pieces(self.tensors):
                logits = functional.linear(hidden.to(self._dtype), *head)
                losses.append(self._reduced(self._code.losses(logits, *others)))
        return losses

    def _gradients(
        self, params: Views, tensors: Sequence[torch.Tensor], fields: list[Field], scale: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], PieceGradients]:
        if self._code is None:
            return super()._gradients(params, tensors, fields, scale)
        hidden, targets, *_ = tensors
        self._check_targets(targets)
        of_fields = {field: _zeros_for(params[field]) for field in fields}
        of_hidden = torch.empty_like(hidden) if self.needs_grad[0] else None
        found = PieceGradients(inputs=list(tensors), of_hidden=of_hidden, of_fields=of_fields)
        scale = hidden.new_ones((), dtype=torch.float32) if scale is None else scale
        scale = scale.expand(len(hidden)).contiguous()
        losses, start = [], 0
        with self._by_hand():
            head = self._cast_head(params)
            for piece in self._pieces(tensors):
                tokens = slice(start, start + len(piece[0]))
                losses.append(self._add_piece(head, piece, scale[tokens], found, tokens))
                start = tokens.stop
        return losses, found

    def _add_piece(
        self,
        head: list[torch.Tensor | None],
        piece: Sequence[torch.Tensor],
        scale: torch.Tensor,
        found: PieceGradients,
        tokens: slice,
    ) -> torch.Tensor:
        """Its loss; its gradients are put or added to those found. tokens: of the micro-batch, which the piece is."""
        hidden, targets, *weights = piece
        hidden = hidden.to(self._dtype)
        logits = functional.linear(hidden, *head)
        losses = self._code.with_gradient_(logits, targets, scale, *weights)
        of_logits = logits
        if found.of_hidden is not None:
            found.of_hidden[tokens] = of_logits @ head[0]
        weight, bias = self._fields
        if weight in found.of_fields:
            add_product_(found.of_fields[weight], of_logits.T, hidden)
        if bias in found.of_fields:
            total = found.of_fields[bias]
            total.add_(of_logits.sum(0, dtype=total.dtype))
        return self._reduced(losses)

    @contextlib.contextmanager
    def _by_hand(self) -> Iterator[None]:
        """Gradients and casts are not left to autograd and autocast."""
        with torch.no_grad(), torch.autocast(self.engine.device.type, enabled=False):
            yield

    def _cast_head(self, params: Views) -> list[torch.Tensor | None]:
        """Weight and bias, in the dtype of the logits."""
        return [None if value is None else value.detach().to(self._dtype) for value in self._head(params)]

    def _reduced(self, losses: torch.Tensor) -> torch.Tensor:
        return losses if self._rule.reduction == "none" else losses.sum()

    def _check_targets(self, targets: torch.Tensor) -> None:
        """As `cross_entropy` does it: compiled code would not notice. A GPU tells later."""
        num_classes = self._fields[0].shape[0]
        is_known = ((targets >= 0) & (targets < num_classes)) | (targets == self._rule.ignored)
        torch._assert_async(is_known.all(), f"a target is not one of the {num_classes} classes")

    def _tokens_at_once(self) -> int:
        return tokens_at_once(self._fields[0].shape[0], compiled=self._code is not None)


def _zeros_for(value: torch.Tensor) -> torch.Tensor:
    """A sum of its gradients, in fp32 at least."""
    return torch.zeros(value.shape, dtype=torch.promote_types(value.dtype, torch.float32), device=value.device)
