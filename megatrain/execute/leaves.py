"""Leaves of a layer's graph: how often it uses each input, and that it leads only to its inputs and parameters."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatrain.base.errors import UserError


def num_uses(name: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor], own: list[torch.Tensor]) -> list[int]:
    """How often a layer's graph uses each of `inputs`. Refuses a graph that leads to tensors that are not its own."""
    uses = {id(tensor): 0 for tensor in (*inputs, *own)}
    for leaf in _leaves({output.grad_fn for output in outputs if output.grad_fn is not None}):
        if id(leaf) not in uses:
            raise UserError(
                f"{name} uses a tensor of shape {tuple(leaf.shape)} that requires grad and is neither an argument nor "
                "a parameter of it: its gradient would be lost. Pass it as an argument"
            )
        uses[id(leaf)] += 1
    return [uses[id(tensor)] for tensor in inputs]


def _leaves(nodes: set[torch.autograd.graph.Node]) -> Iterator[torch.Tensor]:
    """The leaves below these nodes, once a use."""
    ahead, seen = list(nodes), set(nodes)
    while ahead:
        for node, _ in ahead.pop().next_functions:
            if node is None or node in seen:
                continue
            variable = getattr(node, "variable", None)
            if variable is not None:
                yield variable
            else:
                seen.add(node)
                ahead.append(node)
