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

import torch
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


@dataclass(frozen=True, kw_only=True)
class AdamScalars:
    """What one Adam step needs. Every field is a float that fp32 holds exactly."""

    clip: float
    weight_decay: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    bias2_sqrt: float
    step_size: float

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
    ) -> AdamScalars:
        """As AdamWScalars.at."""
        same = dict(vars(AdamWScalars.at(step, lr, beta1, beta2, eps, weight_decay, clip)))
        del same["decay"]
        return cls(weight_decay=_fp32(weight_decay), **same)


@dataclass(frozen=True, kw_only=True)
class MomentumScalars:
    """What one step of SGD with momentum needs. Every field is a float that fp32 holds exactly."""

    clip: float
    weight_decay: float
    momentum: float
    gradient_share: float
    """1 - dampening; 1 in the first step."""
    nesterov: float
    """1 with Nesterov's momentum, which adds the gradient itself to the direction, else 0."""
    look_ahead: float
    """Factor of the momentum in the direction: `momentum` with Nesterov's, else 1."""
    lr: float

    @classmethod
    def at(
        cls,
        step: int,
        lr: float,
        momentum: float,
        dampening: float,
        nesterov: bool,
        weight_decay: float,
        clip: float = 1.0,
    ) -> MomentumScalars:
        """The scalars of step number `step` (the first is 1)."""
        return cls(
            clip=_fp32(clip),
            weight_decay=_fp32(weight_decay),
            momentum=_fp32(momentum),
            gradient_share=1.0 if step == 1 else _fp32(1.0 - dampening),
            nesterov=float(nesterov),
            look_ahead=_fp32(momentum) if nesterov else 1.0,
            lr=_fp32(lr),
        )


@dataclass(frozen=True, kw_only=True)
class SGDScalars:
    """What one step of SGD needs. Every field is a float that fp32 holds exactly."""

    clip: float
    weight_decay: float
    lr: float

    @classmethod
    def at(cls, lr: float, weight_decay: float, clip: float = 1.0) -> SGDScalars:
        """The scalars of any step."""
        return cls(clip=_fp32(clip), weight_decay=_fp32(weight_decay), lr=_fp32(lr))


@dataclass(frozen=True, kw_only=True)
class LionScalars:
    """What one Lion step needs. Every field is a float that fp32 holds exactly."""

    clip: float
    decay: float
    """1 - lr * weight_decay."""
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    lr: float

    @classmethod
    def at(cls, lr: float, beta1: float, beta2: float, weight_decay: float, clip: float = 1.0) -> LionScalars:
        """The scalars of any step."""
        return cls(
            clip=_fp32(clip),
            decay=_fp32(1.0 - lr * weight_decay),
            beta1=_fp32(beta1),
            one_minus_beta1=_fp32(1.0 - beta1),
            beta2=_fp32(beta2),
            one_minus_beta2=_fp32(1.0 - beta2),
            lr=_fp32(lr),
        )


@dataclass(frozen=True, kw_only=True)
class MuonDirectionScalars:
    """What Muon's momentum and direction need. Every field is a float that fp32 holds exactly."""

    clip: float
    momentum: float
    one_minus_momentum: float
    gradient_share: float
    """Of the gradient itself in the direction: 1 - momentum with Nesterov's, else 0."""
    look_ahead: float
    """Of the momentum in the direction: `momentum` with Nesterov's, else 1."""

    @classmethod
    def at(cls, momentum: float, nesterov: bool, clip: float = 1.0) -> MuonDirectionScalars:
        """The scalars of any step."""
        return cls(
            clip=_fp32(clip),
            momentum=_fp32(momentum),
            one_minus_momentum=_fp32(1.0 - momentum),
            gradient_share=_fp32(1.0 - momentum) if nesterov else 0.0,
            look_ahead=_fp32(momentum) if nesterov else 1.0,
        )


@dataclass(frozen=True, kw_only=True)
class MuonStepScalars:
    """What Muon's step along an orthogonal matrix needs. Every field is a float that fp32 holds exactly."""

    decay: float
    """1 - lr * weight_decay."""
    step_size: float
    """The learning rate, adjusted to the matrix's shape."""

    @classmethod
    def at(cls, lr: float, adjusted_lr: float, weight_decay: float) -> MuonStepScalars:
        """The scalars of any step."""
        return cls(decay=_fp32(1.0 - lr * weight_decay), step_size=_fp32(adjusted_lr))


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


def adam_(w: Tensor, g: Tensor, m: Tensor, v: Tensor, s: AdamScalars) -> None:
    """One Adam step (Kingma and Ba 2015, arXiv:1412.6980, algorithm 1); weight decay is added to the gradient, as L2.

    w, g, m, v: (n,) fp32, on one device. w, m and v change in place.
    """
    clipped = g.mul(s.clip).add_(w.mul(s.weight_decay))
    m.mul_(s.beta1).add_(clipped.mul(s.one_minus_beta1))
    v.mul_(s.beta2).add_(clipped.mul_(clipped).mul_(s.one_minus_beta2))
    denominator = _sqrt(v).div_(v.new_full((), s.bias2_sqrt)).add_(s.eps)
    w.sub_(m.div(denominator).mul_(s.step_size))


def momentum_(w: Tensor, g: Tensor, m: Tensor, s: MomentumScalars) -> None:
    """One step of SGD with momentum, plain or Nesterov's, in the form of torch.optim.SGD (Sutskever et al. 2013,
    section 2, with the learning rate outside of the momentum); weight decay is added to the gradient.

    w, g, m: (n,) fp32, on one device. w and m change in place.
    """
    clipped = g.mul(s.clip).add_(w.mul(s.weight_decay))
    m.mul_(s.momentum).add_(clipped.mul(s.gradient_share))
    # Plain momentum has a look-ahead of 1 and no gradient of its own.
    direction = clipped.mul_(s.nesterov).add_(m.mul(s.look_ahead))
    w.sub_(direction.mul_(s.lr))


def sgd_(w: Tensor, g: Tensor, s: SGDScalars) -> None:
    """One step of SGD without momentum; weight decay is added to the gradient.

    w, g: (n,) fp32, on one device. w changes in place.
    """
    w.sub_(g.mul(s.clip).add_(w.mul(s.weight_decay)).mul_(s.lr))


def lion_(w: Tensor, g: Tensor, m: Tensor, s: LionScalars) -> None:
    """One Lion step (Chen et al. 2023, arXiv:2302.06675, algorithm 2).

    w, g, m: (n,) fp32, on one device. w and m change in place. The sign of zero is zero, and of NaN it is NaN.
    """
    clipped = g.mul(s.clip)
    direction = m.mul(s.beta1).add_(clipped.mul(s.one_minus_beta1))
    w.mul_(s.decay).sub_(_sign(direction).mul_(s.lr))
    m.mul_(s.beta2).add_(clipped.mul_(s.one_minus_beta2))


def muon_direction_(direction: Tensor, g: Tensor, m: Tensor, s: MuonDirectionScalars) -> None:
    """The momentum of Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"), and the
    direction that is to be orthogonalised, both averages of gradients as in torch.optim.Muon.

    direction, g, m: (n,) fp32, on one device. m changes in place; direction is overwritten.
    """
    clipped = g.mul(s.clip)
    m.mul_(s.momentum).add_(clipped.mul(s.one_minus_momentum))
    direction.copy_(clipped.mul_(s.gradient_share).add_(m.mul(s.look_ahead)))


def muon_step_(w: Tensor, orthogonal: Tensor, s: MuonStepScalars) -> None:
    """The other half of a Muon step: weight decay, then a step along the orthogonalised direction.

    w, orthogonal: (n,) fp32, on one device. w changes in place.
    """
    w.mul_(s.decay).sub_(orthogonal.mul(s.step_size))


def ema_(average: Tensor, w: Tensor, decay: float) -> None:
    """A moving average of the weights after their step. average, w: (n,) fp32; average changes in place."""
    average.mul_(_fp32(decay)).add_(w.mul(_fp32(1.0 - decay)))


def _sign(x: Tensor) -> Tensor:
    return torch.where(x > 0, 1.0, torch.where(x < 0, -1.0, x * 0.0))


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
