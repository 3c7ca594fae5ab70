"""Muon: hidden matrices step along their orthogonalised momentum, all other weights are AdamW's.

    momentum, direction         flat, by the rule MUON, where the home is updated
    direction -> orthogonal     matrix by matrix, in bf16, on the engine's device
    decay, step along it        flat, by the rule MUON_STEP, where the home is updated

Both flat halves are segments like those of other rules, so every format of masters and moments and every place is as
there.

Rule: a matrix is orthogonalised whole and alone, so no result depends on how anything else is cut.

An update that fails keeps its direction, so that it goes on from there; the next ones take memory for another.

What it gives up: a direction stands whole beside the homes, 6 bytes a number of the largest matrix (of the largest
stack of matrices with lossless moments); the CPU waits while the device works on it, which takes memory for about four
such matrices in bf16 there that the plan does not count.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatrain.base.errors import RefusedError, UserError
from megatrain.execute.engine import Engine
from megatrain.execute.parameters import HomeParameter
from megatrain.optim import checks, rules
from megatrain.optim.base import HomeOptimizer
from megatrain.optim.formula import AdamWScalars, MuonDirectionScalars, MuonStepScalars
from megatrain.optim.lossless_update import LosslessSegment
from megatrain.optim.marks import Marks
from megatrain.optim.orthogonal import NewtonSchulz, Workspace
from megatrain.optim.rules import Rule, Scalars
from megatrain.optim.segment import Segment
from megatrain.optim.update import Measure
from megatrain.optim.updating import Group, Work
from megatrain.plan.placement import HBM_TIER, RAM, Place
from megatrain.spec.formats import BLOCK
from megatrain.spec.layout import Field
from megatrain.store.home import Home

ADJUST_LR_FNS = (None, "original", "match_rms_adamw")
_LOOKED_UP_OR_SLID = (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)
"""Modules whose weights are no matrices that a hidden state is multiplied by."""


class Muon(HomeOptimizer):
    """Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks") for the matrices in the
    model's blocks, each matrix of fused experts (experts, rows, columns) by itself; AdamW for everything else:
    embeddings, heads, vectors, convolutions.

    Which is which: a param group says `use_muon`: True or False; one that does not, and a model, is split in two here.
    The learning rate and weight decay of a group that names them hold for both of its parts.

    Args:
        params: a streamed model, its parameters, or param groups of them.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in torch.optim.Muon. With
            "match_rms_adamw" (Liu et al. 2025, arXiv:2502.16982, section 2.2) learning rates are of AdamW's size.
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: of the parts that are AdamW's.
        options: of HomeOptimizer: max_norm, ema_decay, seed, max_skipped_steps, num_threads, kernel.

    torch.optim.Muon rounds the momentum and the step otherwise in fp32; the orthogonalisation is the same.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw_lr: float = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 1e-2,
        **options: Any,
    ) -> None:
        self._workspaces: dict[Place, Workspace] = {}
        self._adamw = {"lr": adamw_lr, "betas": adamw_betas, "eps": adamw_eps, "weight_decay": adamw_weight_decay}
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults, **options)

    def add_param_group(self, param_group: Group) -> None:
        """Adds two groups for one that does not say `use_muon`, if it has parameters of both kinds."""
        num_groups = len(self.param_groups)
        try:
            for group in _split(param_group):
                super().add_param_group(group if group["use_muon"] else {**self._adamw, **group})
        except (ValueError, RefusedError):  # UserError among them
            self._forget_groups(num_groups)
            raise
        for group in self.param_groups[num_groups:]:
            for parameter in group["params"] if group["use_muon"] else ():
                self._reserve(parameter, parameter._home.place)

    def prepare_move(self, home: Home, place: Place) -> Callable[[], None]:
        for parameter, index in self._members.get(home, ()):
            if self.param_groups[index]["use_muon"]:
                self._reserve(parameter, place)
        return super().prepare_move(home, place)

    def rule(self, group: Group) -> Rule:
        return rules.MUON if group["use_muon"] else rules.ADAMW

    def scalars(self, group: Group, step: int, clip: float) -> Scalars:
        lr, weight_decay = float(group["lr"]), group["weight_decay"]
        if group["use_muon"]:
            return _Numbers(
                direction=MuonDirectionScalars.at(group["momentum"], group["nesterov"], clip),
                lr=lr,
                weight_decay=weight_decay,
                adjust_lr_fn=group["adjust_lr_fn"],
                newton_schulz=(tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"]),
            )
        beta1, beta2 = group["betas"]
        return AdamWScalars.at(step, lr, beta1, beta2, group["eps"], weight_decay, clip)

    def check_group(self, group: Group) -> None:
        checks.check_numbers(group, ("lr", "eps", "weight_decay"))
        if group["use_muon"]:
            _check_muon_group(group)
        else:
            checks.check_betas(group)

    def _segment(
        self, home: Home, parameter: HomeParameter, rule: Rule, gradient: Tensor, scalars: Scalars, step: int
    ) -> Work | MatrixUpdate:
        if rule is not rules.MUON:
            return super()._segment(home, parameter, rule, gradient, scalars, step)
        flat = super()._segment(home, parameter, rule, gradient, scalars.direction, step)
        return MatrixUpdate(flat=flat, shape=parameter._field.shape, numbers=scalars)

    def _apply(
        self, home: Home, work: Sequence[Work | MatrixUpdate], measure: bool, marks: Marks
    ) -> Sequence[Measure | None]:
        plain = [one for one in work if not isinstance(one, MatrixUpdate)]
        measures = list(super()._apply(home, plain, measure, marks.within("plain")))
        for number, update in enumerate(work):
            if isinstance(update, MatrixUpdate):
                measures += self._update_matrices(home, update, measure, marks.within(number))
        return measures

    def _update_matrices(self, home: Home, update: MatrixUpdate, measure: bool, marks: Marks) -> list[Measure | None]:
        measures: list[Measure | None] = []
        for number, part in enumerate(update.parts()):
            of_part = functools.partial(self._update_part, home, part, measure, marks.within(f"halves of {number}"))
            measures += marks.once(number, of_part)
        return measures

    def _update_part(self, home: Home, part: MatrixUpdate, measure: bool, marks: Marks) -> Sequence[Measure | None]:
        """Where it raises, what was done and the direction stay, to go on with."""
        workspace, numel = self._workspaces[home.place], part.flat.numel
        held = marks.once("direction", workspace.take)
        direction = held[:numel]
        self._updaters.run(home, [part.momentum_half(direction)], False, marks.within("momentum"))
        orthogonal = workspace.orthogonalise(direction.view(-1, *part.shape[-2:]), part.numbers.newton_schulz)
        measures = self._updaters.run(home, [part.step_half(orthogonal)], measure, marks.within("step"))
        workspace.give_back(held)
        return measures

    def _reserve(self, parameter: HomeParameter, place: Place) -> None:
        """Memory for the parameter's directions. Each place has an update lane of its own, or shares it one by one."""
        home, shape = parameter._home, parameter._field.shape
        if place not in self._workspaces:
            tier = home.tiers[HBM_TIER if place.is_resident else RAM]
            self._workspaces[place] = Workspace(tier, parameter._engine.device, place.is_staged)
        self._workspaces[place].reserve(part_numel(shape, is_lossless=self.moments == "lossless"))


@dataclass(frozen=True, kw_only=True)
class _Numbers:
    """A Muon group's numbers, as they were when the step was called."""

    direction: MuonDirectionScalars
    lr: float
    weight_decay: float
    adjust_lr_fn: str | None
    newton_schulz: NewtonSchulz


@dataclass(frozen=True, kw_only=True)
class MatrixUpdate:
    """The update of one matrix, or of a stack of them."""

    flat: Segment | LosslessSegment
    """With the weights themselves; of rule MUON, which runs on a direction in their place."""
    shape: tuple[int, ...]
    """(rows, columns) or (matrices, rows, columns) of the parameter."""
    numbers: _Numbers

    def parts(self) -> Iterator[MatrixUpdate]:
        """As few matrices at a time as can be."""
        if isinstance(self.flat, LosslessSegment):
            yield self
            return
        numel = part_numel(self.shape, is_lossless=False)
        for start in range(0, self.flat.numel, numel):
            yield dataclasses.replace(self, flat=self.flat.part(start, min(start + numel, self.flat.numel)))

    def momentum_half(self, direction: Tensor) -> Segment | LosslessSegment:
        """Updates the momentum and writes `direction`: (n,) fp32, where the weights are."""
        return dataclasses.replace(self.flat, weights=direction, low=None, ema=None)

    def step_half(self, orthogonal: Tensor) -> Segment:
        """Changes the weights. orthogonal: (n,) bf16, where they are."""
        flat, numbers = self.flat, self.numbers
        adjusted_lr = adjust_lr(numbers.lr, numbers.adjust_lr_fn, *self.shape[-2:])
        return Segment(
            rule=rules.MUON_STEP,
            scalars=MuonStepScalars.at(numbers.lr, adjusted_lr, numbers.weight_decay),
            weights=flat.weights,
            low=flat.low,
            grad=orthogonal,
            ema=flat.ema,
            key=flat.key,
            first=0 if isinstance(flat, LosslessSegment) else flat.first,
        )


def adjust_lr(lr: float, adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """The learning rate of a matrix of this shape."""
    if adjust_lr_fn == "match_rms_adamw":
        return lr * 0.2 * math.sqrt(max(rows, columns))
    return lr * math.sqrt(max(1.0, rows / columns))


def part_numel(shape: Sequence[int], *, is_lossless: bool) -> int:
    """Numbers of as few whole matrices of a stack as end with a block of moments; all of it with lossless moments."""
    if is_lossless:
        return math.prod(shape)
    return min(math.prod(shape), math.lcm(math.prod(shape[-2:]), BLOCK))


def _split(group: Group) -> list[Group]:
    """The group in a part for Muon and one for AdamW, unless it says whose it is."""
    if "use_muon" in group:
        return [group]
    given = group["params"]
    given = [given] if isinstance(given, Tensor) else list(given)
    hidden: set[Field] = set()
    # torch takes pairs of a name and a parameter too.
    parameters = [one[1] if isinstance(one, tuple) else one for one in given]
    for engine in {one._engine for one in parameters if isinstance(one, HomeParameter)}:
        hidden |= _hidden_matrices(engine)
    is_hidden = [isinstance(one, HomeParameter) and one._field in hidden for one in parameters]
    parts = []
    for use_muon in (True, False):
        params = [one for one, of_muon in zip(given, is_hidden, strict=True) if of_muon == use_muon]
        parts.append({**group, "params": params, "use_muon": use_muon})
    return [part for part in parts if part["params"]] or parts[:1]


def _hidden_matrices(engine: Engine) -> set[Field]:
    """Matrices and stacks of them that belong to blocks alone."""
    hidden, others = set(), set()
    for layer in engine.layers:
        for owner in layer.modules:
            fields = {one._field for one in owner._parameters.values() if isinstance(one, HomeParameter)}
            is_matrix = layer.kind == "block" and not isinstance(owner, _LOOKED_UP_OR_SLID)
            matrices = {field for field in fields if is_matrix and _is_matrix(field.shape)}
            hidden |= matrices
            others |= fields - matrices
    return hidden - others


def _is_matrix(shape: tuple[int, ...]) -> bool:
    return len(shape) in (2, 3) and min(shape[-2:]) > 1 and shape[0] > 0


def _check_muon_group(group: Group) -> None:
    """Raises UserError for what Muon cannot take."""
    checks.check_share(group, "momentum")
    coefficients, num_steps = group["ns_coefficients"], group["ns_steps"]
    is_triple = isinstance(coefficients, (tuple, list)) and len(coefficients) == 3
    if not (is_triple and all(checks.is_number(one) and abs(one) <= 100 for one in coefficients)):
        raise UserError(f"ns_coefficients={coefficients!r} must be three numbers within 100 of 0")
    if not (isinstance(num_steps, int) and not isinstance(num_steps, bool) and 0 <= num_steps < 100):
        raise UserError(f"ns_steps={num_steps!r} must be a whole number from 0 to 99")
    if not group["eps"] > 0:
        raise UserError(f"eps={group['eps']!r} must be above 0: a matrix of zeros is divided by it")
    if group["adjust_lr_fn"] not in ADJUST_LR_FNS:
        raise UserError(f"adjust_lr_fn={group['adjust_lr_fn']!r} is not known: use one of {ADJUST_LR_FNS}")
    for parameter in group["params"]:
        shape = tuple(parameter.shape)
        if len(shape) not in (2, 3) or 0 in shape:
            raise UserError(
                f"{parameter._field.name} of shape {shape} is no matrix and no stack of them: put it in a param group "
                "with use_muon=False, which AdamW updates"
            )
