"""The rules against NumPy, operation by operation, and against torch.optim, within rounding; and the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from update_cases import (
    MASTERS,
    RULES,
    VARIANTS,
    by_the_definition,
    copy,
    make_segment,
    make_stored,
    moments,
    pattern,
    random_floats,
    scalars_at,
    value,
)

from megatrain.optim import formula, rules
from megatrain.optim.formula import AdamWScalars, MomentumScalars, _sqrt
from megatrain.optim.rules import Rule
from megatrain.optim.segment import Segment
from megatrain.optim.update import CpuUpdater
from megatrain.store import rounding

# --- the formulas again, in NumPy, which rounds each fp32 operation once ---

Arrays = tuple[np.ndarray, ...]


def adamw(s: SimpleNamespace, w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray) -> Arrays:
    g = g * s.clip
    m = m * s.beta1 + g * s.one_minus_beta1
    v = v * s.beta2 + (g * g) * s.one_minus_beta2
    return w * s.decay - (m / (np.sqrt(v) / s.bias2_sqrt + s.eps)) * s.step_size, m, v


def adam(s: SimpleNamespace, w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray) -> Arrays:
    g = g * s.clip + w * s.weight_decay
    m = m * s.beta1 + g * s.one_minus_beta1
    v = v * s.beta2 + (g * g) * s.one_minus_beta2
    return w - (m / (np.sqrt(v) / s.bias2_sqrt + s.eps)) * s.step_size, m, v


def momentum(s: SimpleNamespace, w: np.ndarray, g: np.ndarray, m: np.ndarray) -> Arrays:
    g = g * s.clip + w * s.weight_decay
    m = m * s.momentum + g * s.gradient_share
    return w - (g * s.nesterov + m * s.look_ahead) * s.lr, m


def sgd(s: SimpleNamespace, w: np.ndarray, g: np.ndarray) -> Arrays:
    return (w - (g * s.clip + w * s.weight_decay) * s.lr,)


def lion(s: SimpleNamespace, w: np.ndarray, g: np.ndarray, m: np.ndarray) -> Arrays:
    g = g * s.clip
    direction = np.sign(m * s.beta1 + g * s.one_minus_beta1)
    return w * s.decay - direction * s.lr, m * s.beta2 + g * s.one_minus_beta2


IN_NUMPY: dict[str, Callable[..., Arrays]] = {f.__name__: f for f in (adamw, adam, momentum, sgd, lion)}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(0, 200),
    step=st.integers(1, 5000),
    weight_decay=st.sampled_from([0.0, 0.01]),
)
@settings(max_examples=60)
def test_formula_rounds_every_operation_once(rule: Rule, seed: int, size: int, step: int, weight_decay: float) -> None:
    scalars = scalars_at(rule, step, weight_decay=weight_decay)
    rng = np.random.default_rng(seed)
    arrays = [random_floats(rng, size, scale) for scale in (1.0, 1e-2, 1e-3, 1e-4)[: 2 + len(rule.states)]]
    w, g, *states = (torch.from_numpy(array.copy()) for array in arrays)
    rule.step(w, g, *states, scalars)
    in_fp32 = SimpleNamespace(**{name: np.float32(number) for name, number in asdict(scalars).items()})
    with np.errstate(all="ignore"):
        expected = IN_NUMPY[rule.name](in_fp32, *arrays)
    for actual, array in zip((w, *states), expected, strict=True):
        np.testing.assert_array_equal(pattern(actual), pattern(torch.from_numpy(array)))
    np.testing.assert_array_equal(g.numpy().view(np.uint32), arrays[1].view(np.uint32))


def test_square_root_is_rounded_once_for_every_mantissa() -> None:
    """All of [1, 4): both parities of the exponent, every mantissa. (torch.sqrt itself fails this with MKL.)"""
    for start in range(0x3F800000, 0x40800000, 1 << 21):
        x = np.arange(start, start + (1 << 21), dtype=np.uint32).view(np.float32)
        assert np.array_equal(_sqrt(torch.from_numpy(x)).numpy(), np.sqrt(x))


def test_sign_of_zero_is_zero_and_of_nan_is_nan() -> None:
    x = torch.tensor([3.0, -1e-45, 0.0, -0.0, math.inf, -math.inf, math.nan])
    expected = torch.tensor([1.0, -1.0, 0.0, 0.0, 1.0, -1.0, math.nan])
    torch.testing.assert_close(formula._sign(x), expected, rtol=0, atol=0, equal_nan=True)


# --- scalars ---


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_scalars_are_fp32_and_as_many_as_the_kernel_takes(rule: Rule) -> None:
    numbers = asdict(scalars_at(rule, 7)).values()
    assert all(type(number) is float and number == float(np.float32(number)) for number in numbers)
    assert len(numbers) <= 9


def test_scalars_are_computed_in_fp64_and_rounded_once() -> None:
    numbers = {"lr": 1e-3, "weight_decay": 0.01, "clip": 0.3}
    s = scalars_at(rules.ADAMW, 7, **numbers)
    # Not 1 - fp32(0.999), which is 0.00100004673.
    assert s.one_minus_beta2 == float(np.float32(1 - 0.999))
    assert s.decay == float(np.float32(1 - 1e-3 * 0.01))
    assert s.step_size == float(np.float32(1e-3 / (1 - 0.9**7)))
    assert s.bias2_sqrt == float(np.float32(math.sqrt(1 - 0.999**7)))
    assert s.clip == float(np.float32(0.3))
    as_adam = asdict(scalars_at(rules.ADAM, 7, **numbers))
    assert as_adam.pop("weight_decay") == float(np.float32(0.01))
    assert as_adam == {name: number for name, number in asdict(s).items() if name != "decay"}
    assert scalars_at(rules.LION, **numbers).decay == s.decay


def test_the_first_momentum_is_the_gradient() -> None:
    """As in torch.optim.SGD: dampening begins with the second step."""
    numbers = {"lr": 0.1, "momentum": 0.9, "dampening": 0.25, "nesterov": False, "weight_decay": 0.0}
    assert MomentumScalars.at(1, **numbers).gradient_share == 1.0
    assert MomentumScalars.at(2, **numbers).gradient_share == 0.75


@pytest.mark.parametrize(
    ("step", "beta1", "beta2", "message"),
    [(0, 0.9, 0.999, "step must be 1"), (1, 1.0, 0.999, "beta1 must be in"), (1, 0.9, -0.1, "beta2 must be in")],
)
def test_scalars_refuse_what_would_divide_by_zero(step: int, beta1: float, beta2: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamWScalars.at(step, lr=1e-3, beta1=beta1, beta2=beta2, eps=1e-8, weight_decay=0.0)


# --- torch.optim ---

U = 2.0**-24
NUM_STEPS = 20
SIZE = 3001


def gradients(rng: np.random.Generator) -> torch.Tensor:
    """|g| in [0.5, 1]."""
    return torch.from_numpy((rng.uniform(0.5, 1, SIZE) * rng.choice([-1.0, 1.0], SIZE)).astype(np.float32))


def difference_after_twenty_steps(
    path: str, rule: Rule, theirs: Callable[[list], torch.optim.Optimizer], **numbers: object
) -> float:
    """The largest difference of a weight between ours and torch's, from weights in [-1, 1]."""
    rng = np.random.default_rng(5)
    start = torch.from_numpy(rng.uniform(-1, 1, SIZE).astype(np.float32))
    parameter = torch.nn.Parameter(start.clone())
    optimizer = theirs([parameter])
    ours, states = start.clone(), tuple(make_stored("fp32", SIZE) for _ in rule.states)
    with CpuUpdater(1, path) as updater:
        for step in range(1, NUM_STEPS + 1):
            parameter.grad = gradients(rng)
            optimizer.step()
            scalars = scalars_at(rule, step, clip=1.0, weight_decay=0.1, **numbers)
            updater.run([Segment(rule=rule, scalars=scalars, weights=ours, grad=parameter.grad, states=states)])
    assert (ours - start).abs().max() > 1e-3
    return (ours - parameter.detach()).abs().max().item()


@pytest.mark.parametrize("path", [*VARIANTS, "torch"])
def test_twenty_steps_agree_with_torch_adamw(path: str) -> None:
    """torch.optim.AdamW is the same rule with other roundings: lerp, addcmul and addcdiv, contracted or not.

    Tolerance, with u = 2^-24, |g| in [0.5, 1], |w| <= 1.1, betas (0.9, 0.999), 20 steps; first order in u:
    - m: ours rounds 3 times, by at most 2u in all (of terms of size <= 1); lerp by at most 1.4u. An error decays by 0.9
      a step, so the two differ by at most 3.4u / (1 - 0.9) = 34u. Corrected for bias (1 - 0.9^20 = 0.878): 39u.
      The denominator is at least 0.5, so m / denominator differs by at most 78u.
    - v: all terms are positive, at most 4 roundings a step on each side, so 20 x 8u = 160u relative, and 80u after the
      root. With root (theirs may be off by a whole unit), division, eps, the quotient and the step size on both sides
      (11u): 91u of |m / denominator|, which is at most 1.2 by Cauchy-Schwarz: 110u.
    - So one step differs by at most lr x 188u, and 20 steps by lr x 3760u = 3.8u at lr = 1e-3.
    - The weight itself is rounded at most 2 times a step by each side: 20 x 4u x 1.1 = 88u.
    Together 92u = 5.5e-6. Leaving out the decay would cost 20 x 1e-3 x 0.1 x |w| = 2e-3.
    """
    difference = difference_after_twenty_steps(
        path, rules.ADAMW, lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1), lr=1e-3
    )
    assert difference <= 92 * U


@pytest.mark.parametrize("path", [*VARIANTS, "torch"])
def test_twenty_steps_agree_with_torch_adam(path: str) -> None:
    """As for AdamW, with g' = g + 0.1 w in place of g: |g'| in [0.39, 1.11]. The weights are shown to differ by at most
    51u, given that they differ by at most 120u.

    - g': the weights' 0.1 x 120u, and two roundings on each side (4 x 1.11u / 2, the product being small): 14.5u.
    - m: 3.4u x 1.11 + 0.1 x 14.5u = 5.3u a step, so 53u, corrected 60u, over the denominator of 0.39: 154u.
    - v: 160u relative, and twice 14.5u / 0.39, so 234u; 117u after the root, 128u with the 11u: x 1.2 = 154u.
    - One step differs by lr x 308u, 20 steps by 6.2u at lr = 1e-3.
    - The weight is rounded once a step by each side: 20 x 2u x 1.1 = 44u.
    Leaving out the decay would turn m / sqrt(v), by some percent of each step of 1e-3.
    """
    difference = difference_after_twenty_steps(
        path, rules.ADAM, lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1), lr=1e-3
    )
    assert difference <= 51 * U


@pytest.mark.parametrize("path", [*VARIANTS, "torch"])
@pytest.mark.parametrize(("dampening", "nesterov"), [(0.0, False), (0.25, False), (0.0, True)])
def test_twenty_steps_agree_with_torch_momentum(path: str, dampening: float, nesterov: bool) -> None:
    """Tolerance as above, with lr = 1e-3, momentum 0.9: |g'| <= 1.12, |m| <= 1.12 (1 - 0.9^20) / 0.1 = 9.9, |w| <= 1.2.
    The weights are shown to differ by at most 60u, given that they do.

    - g': 0.1 x 60u, and 2.5u from two roundings on each side: 8.5u.
    - m: each side rounds a product (8.9u), a product (1.1u) and a sum (9.9u): 40u a step, with g' 48.5u. An error
      decays by 0.9 a step: at most 48.5u x 8.78 = 426u.
    - The direction: 0.9 x 426u + 8.5u, rounded as m was (40u): 433u; without Nesterov's it is m itself. With the
      product by lr (11u on each side): 455u x lr = 0.46u a step.
    - The weight is rounded once a step by each side: 2.4u.
    Together 20 x 2.9u = 58u. Without dampening, Nesterov's direction or the decay most weights would be off by 1e-4.
    """
    settings = {"momentum": 0.9, "dampening": dampening, "nesterov": nesterov, "lr": 1e-3}
    difference = difference_after_twenty_steps(
        path, rules.MOMENTUM, lambda p: torch.optim.SGD(p, weight_decay=0.1, **settings), **settings
    )
    assert difference <= 60 * U


@pytest.mark.parametrize("path", [*VARIANTS, "torch"])
def test_twenty_steps_agree_with_torch_sgd(path: str) -> None:
    """Tolerance as above, with lr = 1e-2: |w| <= 1.3, |g'| <= 1.13. On each side a step rounds g' twice and its product
    with lr (3.4u in all, x lr = 0.04u) and the weight (1.3u): 20 x 2 x 1.34u = 54u, of which the next gradients see
    0.1 lr, so 55u. Leaving out the decay would cost 20 x 1e-2 x 0.1 x |w| = 2e-2."""
    difference = difference_after_twenty_steps(
        path, rules.SGD, lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1), lr=1e-2
    )
    assert difference <= 55 * U


@pytest.mark.parametrize("path", [*VARIANTS, "torch"])
def test_twenty_steps_of_lion_are_those_of_the_paper(path: str) -> None:
    """Algorithm 2 of Chen et al. (2023), in fp64.

    Tolerance: given the same signs, ours rounds the weight twice a step (|w| <= 1.1: 2.2u), and the factors 1 - lr wd
    (u / 2) and lr (lr x u): 20 x 2.8u = 56u. No sign is in doubt where |c| is above ours' error: m, of at most 1, is
    rounded 3 times a step (2u), and so are the betas (2u in all); an error decays by 0.99 a step, so 20 x 4u, and c
    itself adds 4u: 84u = 5e-6.
    """
    rng = np.random.default_rng(6)
    lr, beta1, beta2, weight_decay = 1e-3, 0.9, 0.99, 0.1
    start = torch.from_numpy(rng.uniform(-1, 1, SIZE).astype(np.float32))
    w, m = start.double().numpy(), np.zeros(SIZE)
    is_sure = np.ones(SIZE, dtype=bool)
    ours, states = start.clone(), (make_stored("fp32", SIZE),)
    with CpuUpdater(1, path) as updater:
        for _ in range(NUM_STEPS):
            grad = gradients(rng)
            c = beta1 * m + (1 - beta1) * grad.numpy()
            is_sure &= np.abs(c) > 84 * U
            w = w - lr * (np.sign(c) + weight_decay * w)
            m = beta2 * m + (1 - beta2) * grad.numpy()
            scalars = rules.LION.scalars.at(lr, beta1, beta2, weight_decay)
            updater.run([Segment(rule=rules.LION, scalars=scalars, weights=ours, grad=grad, states=states)])
    assert is_sure.mean() > 0.99
    assert np.abs(ours.numpy() - w)[is_sure].max() <= 56 * U
    assert (ours - start).abs().max() > 1e-3


# --- the definition ---


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_definition_is_the_formula_between_two_conversions(rule: Rule, master: str) -> None:
    """With fp32 moments. The average is of the weights after their step, before they are rounded."""
    segment = make_segment(7, 300, master, rule=rule, has_ema=True)
    result = by_the_definition(segment)
    w, states = value(segment).clone(), [s.clone() for s in moments(segment)]
    rule.step(w, segment.grad.float(), *states, segment.scalars)
    assert segment.ema is not None and result.ema is not None
    average = segment.ema.average.numpy() * np.float32(0.999) + w.numpy() * np.float32(1 - 0.999)
    np.testing.assert_array_equal(result.ema.average.numpy(), average)
    for actual, expected in zip(moments(result), states, strict=True):
        assert torch.equal(actual, expected)
    if master == "bf16":
        bits = rounding.random_bits(segment.key, 0, 300, w.device)
        w = rounding.round_to_bf16(w, rounding.stream(bits, rounding.MASTER_STREAM)).float()
    assert torch.equal(value(result), w)


@pytest.mark.parametrize("format_name", ["8bit", "4bit", "2bit"])
@pytest.mark.parametrize("rule", [rules.ADAMW, rules.ADAM, rules.MOMENTUM, rules.LION], ids=lambda rule: rule.name)
def test_the_definition_works_on_decoded_moments(rule: Rule, format_name: str) -> None:
    """The weights take the exact step from the moments that are stored; what is stored then is the only loss."""
    segment = make_segment(8, 300, "fp32", torch.float32, format_name, rule)
    result = by_the_definition(segment)
    exact = [replace(make_stored("fp32", 300), codes=moment.clone()) for moment in moments(segment)]
    assert torch.equal(by_the_definition(replace(copy(segment), states=tuple(exact))).weights, result.weights)
