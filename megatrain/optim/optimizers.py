"""The optimizers whose rule is a formula on flat tensors. Each is a torch.optim.Optimizer with PyTorch's arguments."""

from __future__ import annotations

from typing import Any

from megatrain.base.errors import UserError
from megatrain.optim import checks, rules
from megatrain.optim.base import Group, HomeOptimizer
from megatrain.optim.formula import AdamScalars, AdamWScalars, LionScalars, MomentumScalars, SGDScalars
from megatrain.optim.rules import Rule


class AdamW(HomeOptimizer):
    """AdamW with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2).

    Each multiplication, addition, division and root is rounded once in fp32 (`optim/formula.py`), so results are the
    same bit for bit on every path. torch.optim.AdamW contracts some of them and differs in last bits.

    Args:
        params: a streamed model, its parameters, or param groups of them.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW; each may be set a group.
        options: of HomeOptimizer: max_norm, ema_decay, seed, max_skipped_steps, num_threads, kernel.
    """

    _rule, _scalars = rules.ADAMW, AdamWScalars

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **options)

    def rule(self, group: Group) -> Rule:
        return self._rule

    def scalars(self, group: Group, step: int, clip: float) -> AdamWScalars | AdamScalars:
        beta1, beta2 = group["betas"]
        return self._scalars.at(
            step,
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            clip=clip,
        )

    def check_group(self, group: Group) -> None:
        checks.check_numbers(group, ("lr", "eps", "weight_decay"))
        checks.check_betas(group)


class Adam(AdamW):
    """Adam (Kingma and Ba 2015, arXiv:1412.6980, algorithm 1), with torch.optim.Adam's arguments.

    Weight decay is added to the gradient (L2), as there; decoupled, it is AdamW. For the rest see AdamW.
    """

    _rule, _scalars = rules.ADAM, AdamScalars

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **options)


class SGD(HomeOptimizer):
    """Stochastic gradient descent with torch.optim.SGD's arguments: momentum, dampening, Nesterov's momentum.

    Weight decay is added to the gradient. Without momentum there is no state at all. For `params` and `options` see
    AdamW. Raises UserError for Nesterov's momentum without momentum or with dampening, as in PyTorch.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Any,
    ) -> None:
        numbers = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**numbers, "nesterov": nesterov}, **options)

    def rule(self, group: Group) -> Rule:
        return rules.MOMENTUM if group["momentum"] else rules.SGD

    def scalars(self, group: Group, step: int, clip: float) -> MomentumScalars | SGDScalars:
        lr, weight_decay = float(group["lr"]), group["weight_decay"]
        if not group["momentum"]:
            return SGDScalars.at(lr, weight_decay, clip)
        return MomentumScalars.at(
            step,
            lr=lr,
            momentum=group["momentum"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            weight_decay=weight_decay,
            clip=clip,
        )

    def check_group(self, group: Group) -> None:
        checks.check_numbers(group, ("lr", "momentum", "dampening", "weight_decay"))
        if group["nesterov"] and not (group["momentum"] > 0 and group["dampening"] == 0):
            raise UserError("nesterov=True needs momentum above 0 and dampening of 0")


class Lion(HomeOptimizer):
    """Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2): the sign of a momentum, one state. Its learning rate is 3
    to 10 times smaller than AdamW's, its weight decay as many times larger (section 5 there).

    For `params` and `options` see AdamW.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **options)

    def rule(self, group: Group) -> Rule:
        return rules.LION

    def scalars(self, group: Group, step: int, clip: float) -> LionScalars:
        beta1, beta2 = group["betas"]
        return LionScalars.at(float(group["lr"]), beta1, beta2, group["weight_decay"], clip)

    def check_group(self, group: Group) -> None:
        checks.check_numbers(group, ("lr", "weight_decay"))
        checks.check_betas(group)
