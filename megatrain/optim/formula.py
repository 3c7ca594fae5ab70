"""The update rules, each once, as plain functions on flat tensors.

This file is the definition. Every other way to run an update (the C kernel, pieces of split masters, a device kernel)
does these operations in this order and gives the same bits.

Rule: every multiplication, addition, subtraction, division and square root is rounded once, in fp32. So no lerp,
addcmul, addcdiv or `alpha=`, which contract two roundings into one. Scalars are computed in fp64, then rounded to fp32.

A rule is a function `rule_(w, g, *states, scalars)` that changes `w` and the states in place, leaves `g` as it is, and
treats every element alone, so that any split of the tensors into pieces gives the same result. Its scalars are a frozen
dataclass, made by `at(...)` from the user's numbers when the step is called: later changes of the learning rate do not
reach an update that is still to run.

What it gives up: torch.optim.AdamW rounds otherwise on CPU, so the two agree within rounding only (tests/test_update.py
derives a tolerance). NaNs stay NaNs, with any sign and payload.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AdamWScalars:
    """What one AdamW step needs besides tensors. Every field is a float that fp32 holds exactly."""

    clip: float
    """Factor on the gradient, from clipping by the global norm; 1 when nothing is clipped."""
    decay: float
    """1 - lr * weight_decay: what is left of a weight before its step."""
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    bias2_sqrt: float
    """sqrt(1 - beta2^step)."""
    step_size: float
    """lr / (1 - beta1^step)."""

    @classmethod
    def at(
        cls,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        clip: float = 1.0,
    ) -> AdamWScalars:
        """The scalars of step number `step` (the first is 1), from Python floats.

        Raises ValueError when step < 1 or a beta is not in [0, 1): the bias corrections would divide by zero.
        """
        if step < 1:
            raise ValueError(f"AdamW: step must be 1 or more, got {step}")
        for name, beta in (("beta1", beta1), ("beta2", beta2)):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"AdamW: {name} must be in [0, 1), got {beta}")
        return cls(
            clip=_fp32(clip),
            decay=_fp32(1.0 - lr * weight_decay),
            beta1=_fp32(beta1),
            one_minus_beta1=_fp32(1.0 - beta1),
            beta2=_fp32(beta2),
            one_minus_beta2=_fp32(1.0 - beta2),
            eps=_fp32(eps),
            bias2_sqrt=_fp32(math.sqrt(1.0 - beta2**step)),
            step_size=_fp32(lr / (1.0 - beta1**step)),
        )


def adamw_(w: Tensor, g: Tensor, m: Tensor, v: Tensor, s: AdamWScalars) -> None:
    """One AdamW step with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2).

    w, g, m, v: (n,) fp32, on one device. w (weights), m (first moment) and v (second moment) change in place.
    """
    clipped = g.mul(s.clip)
    w.mul_(s.decay)
    m.mul_(s.beta1).add_(clipped.mul(s.one_minus_beta1))
    v.mul_(s.beta2).add_(clipped.mul_(clipped).mul_(s.one_minus_beta2))
    # A divisor on the device of v: by a Python float, CUDA would multiply with the rounded reciprocal.
    denominator = _sqrt(v).div_(v.new_full((), s.bias2_sqrt)).add_(s.eps)
    w.sub_(m.div(denominator).mul_(s.step_size))


def _sqrt(x: Tensor) -> Tensor:
    """The square root of fp32 x, rounded once.

    Not x.sqrt(): where PyTorch uses MKL (its x86 wheels) a sixth of its fp32 roots are off by one bit. The way
    through fp64 is exact even where the fp64 root is off by some units: the root of a 24-bit number is never nearer
    than 4 fp64 units to a point halfway between two fp32 numbers (m has 25 bits, so |x - m^2| >= 2^-48 and
    |sqrt(x) - m| >= 2^-50, for m in [1, 2)).
    """
    return x.double().sqrt_().float()


def _fp32(x: float) -> float:
    """x rounded to the nearest fp32, ties to even; infinite when it is too large."""
    return ctypes.c_float(x).value
