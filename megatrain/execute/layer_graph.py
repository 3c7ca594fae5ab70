"""The graph of one layer: of its forward, where that is kept, or of its recomputation; and the gradients out of it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from megatrain.execute.insides import Insides
from megatrain.execute.layer import Views
from megatrain.spec.layout import Field

Gradients = list[tuple[Field, torch.Tensor]]


class LayerGraph:
    """
    Args:
        outputs: the layer's results, and behind them its shared inputs.
        insides: of a forward whose backward comes in a later visit; None: the weights are still in the slot.
    """

    def __init__(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        params: Views,
        insides: Insides | None = None,
    ) -> None:
        self.outputs, self.inputs, self.insides = outputs, inputs, insides
        self._params = params

    @property
    def is_sound(self) -> bool:
        return self.insides is None or self.insides.are_sound(self.outputs)

    def drop(self) -> None:
        """It is used up, or of no use."""
        if self.insides is not None:
            self.insides.drop()

    def gradients(
        self, params: Views, grads: Sequence[torch.Tensor | None], fields: list[Field], *, retain_graph: bool
    ) -> tuple[list[torch.Tensor | None], Gradients]:
        """Of the inputs (None where none flows), and of `fields`.

        Args:
            params: the weights, in the visit that is open.
            grads: one a tensor output.
        """
        inputs = [tensor for tensor in self.inputs if tensor.requires_grad]
        roots = [(o, g) for o, g in zip(self.outputs, grads, strict=True) if g is not None and o.requires_grad]
        wanted = [*inputs, *(self._params[field] for field in fields)]
        if not roots or not wanted:
            return [None] * len(self.inputs), []
        outputs, of_outputs = [o for o, _ in roots], [g for _, g in roots]
        with contextlib.nullcontext() if self.insides is None else self.insides.bound(params):
            found = torch.autograd.grad(outputs, wanted, of_outputs, allow_unused=True, retain_graph=retain_graph)
        of_inputs = iter(found[: len(inputs)])
        input_grads = [next(of_inputs) if tensor.requires_grad else None for tensor in self.inputs]
        pairs = zip(fields, found[len(inputs) :], strict=True)
        return input_grads, [(field, g) for field, g in pairs if g is not None]


def has_nan(found: tuple[list[torch.Tensor | None], Gradients]) -> bool:
    """Whether any of `LayerGraph.gradients` is not a number somewhere."""
    tensors = [grad for grad in found[0] if grad is not None] + [grad for _, grad in found[1]]
    return any(bool(tensor.isnan().any()) for tensor in tensors)
