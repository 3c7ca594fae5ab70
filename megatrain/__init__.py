"""MegaTrain: full-parameter training of models bigger than the GPU, on one GPU.

Public names are resolved lazily: importing this package touches no GPU and no network, and prints nothing.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_PUBLIC = {
    "init": "megatrain.api",
    "stream": "megatrain.api",
    "from_pretrained": "megatrain.loading",
    "from_config": "megatrain.loading",
    "accumulate": "megatrain.api",
    "clip_grad_norm_": "megatrain.api",
    "named_parameters": "megatrain.api",
    "named_gradients": "megatrain.api",
    "full_state_dict": "megatrain.api",
    "stats": "megatrain.api",
    "trace": "megatrain.tracing",
    "Workload": "megatrain.plan.workload",
    "Trainer": "megatrain.trainer",
    "UserError": "megatrain.base.errors",
    "RefusedError": "megatrain.base.errors",
    "NonFiniteError": "megatrain.base.errors",
    "UpdateError": "megatrain.base.errors",
}

__all__ = [*_PUBLIC, "optim"]


def __getattr__(name: str) -> object:
    if name == "optim":
        return importlib.import_module("megatrain.optim")
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'megatrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
