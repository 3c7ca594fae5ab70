"""Update rules for streamed models. Each is a torch.optim.Optimizer."""

from megatrain.optim.muon import Muon
from megatrain.optim.optimizers import SGD, Adam, AdamW, Lion

__all__ = ["SGD", "Adam", "AdamW", "Lion", "Muon"]
