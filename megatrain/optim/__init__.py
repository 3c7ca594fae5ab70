"""Update rules for streamed models. Each is a torch.optim.Optimizer."""

from megatrain.optim.adamw import AdamW

__all__ = ["AdamW"]
