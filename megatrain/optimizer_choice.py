"""Which optimizer a run gets, and with which numbers: by TrainingArguments.optim, or by a recipe's section `optimizer`.

Rule: importing this loads neither torch nor transformers. A number that the optimizer would not read is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from megatrain.base.errors import UserError
from megatrain.plan.threads import divide_cores

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from megatrain.execute.engine import Engine
    from megatrain.optim.base import HomeOptimizer

    Choice = tuple[type[HomeOptimizer], dict[str, Any]]
    """A class of megatrain.optim and its keyword arguments."""

OPTIM_NAMES = ("adamw_torch", "adamw_torch_fused", "sgd", "lion_32bit")
"""Those of transformers that mean a rule of megatrain.optim."""

_OF_ADAM = ("betas", "eps")
_OF_MUON = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn")
NUMBERS: dict[str, tuple[str, ...]] = {
    "adamw": _OF_ADAM,
    "adam": _OF_ADAM,
    "sgd": ("momentum", "dampening", "nesterov"),
    "lion": ("betas",),
    "muon": (*_OF_MUON, "adamw_lr", "adamw_betas", "adamw_eps"),
}
"""Names of a recipe's optimizers, and the numbers that each reads."""

ADJUST_LR_FNS = ("original", "match_rms_adamw")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update rule and the numbers that are its own. Learning rate and weight decay are `training.learning_rate`
    and `training.weight_decay`."""

    name: str | None = None
    """`adamw`, `adam`, `sgd`, `lion` or `muon` (for the matrices in the blocks; the rest is AdamW's). Left out: what
    `training.optim` says, which is AdamW unless it is set."""

    betas: Sequence[float] | None = None
    """Of adamw, adam and lion. Left out: `training.adam_beta1` and `training.adam_beta2`; of lion 0.9 and 0.99."""

    eps: float | None = None
    """Of adamw and adam. Left out: `training.adam_epsilon`. Of muon: the least norm of a matrix, 1e-7."""

    momentum: float | None = None
    """Of sgd (left out: 0) and muon (0.95)."""

    dampening: float | None = None
    """Of sgd. Left out: 0."""

    nesterov: bool | None = None
    """Nesterov's momentum, of sgd (left out: false) and muon (true)."""

    ns_coefficients: Sequence[float] | None = None
    """Of muon: the three coefficients of the Newton-Schulz iteration. Left out: 3.4445, -4.775, 2.0315."""

    ns_steps: int | None = None
    """Of muon: Newton-Schulz iterations. Left out: 5."""

    adjust_lr_fn: str | None = None
    """Of muon: `match_rms_adamw` (the same learning rates as AdamW) or `original`. Left out: `match_rms_adamw`."""

    adamw_lr: float | None = None
    """Of muon: learning rate of the weights that are AdamW's. Left out: `training.learning_rate`."""

    adamw_betas: Sequence[float] | None = None
    """Of muon's AdamW. Left out: `training.adam_beta1` and `training.adam_beta2`."""

    adamw_eps: float | None = None
    """Of muon's AdamW. Left out: `training.adam_epsilon`."""

    ema_decay: float | None = None
    """Keep an exponential moving average of the weights with this decay (4 bytes a parameter more), and save it beside
    the model, in `ema`. Left out: none is kept."""

    max_skipped_steps: int = 10
    """Steps in a row that may be skipped because a gradient is not finite; one more ends the run."""

    def __post_init__(self) -> None:
        if self.name is not None and self.name not in NUMBERS:
            raise UserError(f"optimizer.name is {self.name!r}; use one of {', '.join(NUMBERS)}")
        for number in self._given():
            if self.name is None:
                raise UserError(f"optimizer.{number} needs optimizer.name, which says whose number it is")
            if number not in (*NUMBERS[self.name], "ema_decay"):
                known = ", ".join(NUMBERS[self.name])
                raise UserError(f"optimizer.{number} is no number of {self.name}, which reads {known}; leave it out")
        self._check_ranges()

    def choice(self, args: TrainingArguments) -> Choice | None:
        """What the Trainer takes as `optimizer_cls_and_kwargs`. None: what `args` say.

        Raises UserError when `args` name another optimizer.
        """
        if self.name is None:
            return None
        if _name_of(args) not in ("adamw_torch", "adamw_torch_fused") or args.optim_args:
            raise UserError(
                f"training.optim is {_name_of(args)!r} and optimizer.name is {self.name!r}; keep optimizer.name alone"
            )
        from megatrain import optim

        classes = {"adamw": optim.AdamW, "adam": optim.Adam, "sgd": optim.SGD, "lion": optim.Lion, "muon": optim.Muon}
        numbers = {**self._defaults(args), **self._given(), "max_skipped_steps": self.max_skipped_steps}
        return classes[self.name], {"lr": args.learning_rate, **numbers}

    def _defaults(self, args: TrainingArguments) -> dict[str, Any]:
        """Those that are not the optimizer's own."""
        betas = (args.adam_beta1, args.adam_beta2)
        if self.name == "muon":
            adamw = {"adamw_lr": args.learning_rate, "adamw_betas": betas, "adamw_eps": args.adam_epsilon}
            return {"adjust_lr_fn": "match_rms_adamw", **adamw}
        return {"betas": betas, "eps": args.adam_epsilon} if self.name in ("adamw", "adam") else {}

    def _given(self) -> dict[str, Any]:
        """The numbers that the recipe names."""
        names = [field.name for field in fields(self) if field.name not in ("name", "max_skipped_steps")]
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}

    def _check_ranges(self) -> None:
        for number, value in self._given().items():
            if number.endswith("betas") and not (len(value) == 2 and all(0 <= beta < 1 for beta in value)):
                raise UserError(f"optimizer.{number} is {list(value)}; use two numbers from 0 to below 1")
            if number in ("momentum", "dampening", "ema_decay") and not 0 <= value < 1:
                raise UserError(f"optimizer.{number} is {value}; use a number from 0 to below 1")
            if number == "eps" and self.name == "muon" and not value > 0:
                raise UserError(f"optimizer.eps is {value}; use more than 0: muon divides by it")
            if number in ("eps", "adamw_eps", "adamw_lr") and not 0 <= value < float("inf"):
                raise UserError(f"optimizer.{number} is {value}; use 0 or more")
        if self.adjust_lr_fn is not None and self.adjust_lr_fn not in ADJUST_LR_FNS:
            raise UserError(f"optimizer.adjust_lr_fn is {self.adjust_lr_fn!r}; use one of {', '.join(ADJUST_LR_FNS)}")
        if self.ns_coefficients is not None:
            are_three = len(self.ns_coefficients) == 3 and all(abs(number) <= 100 for number in self.ns_coefficients)
            if not are_three:
                raise UserError(f"optimizer.ns_coefficients is {list(self.ns_coefficients)}; use three within 100 of 0")
        if self.nesterov and self.name == "sgd" and (not self.momentum or self.dampening):
            raise UserError("optimizer.nesterov needs optimizer.momentum above 0 and no optimizer.dampening")
        if self.ns_steps is not None and not 0 <= self.ns_steps < 100:
            raise UserError(f"optimizer.ns_steps is {self.ns_steps}; use 0 to 99")
        if self.max_skipped_steps < 0:
            raise UserError(f"optimizer.max_skipped_steps is {self.max_skipped_steps}; use 0 or more")
        if self.name is None and self.max_skipped_steps != 10:
            raise UserError("optimizer.max_skipped_steps needs optimizer.name: adamw is what a run gets without it")


def choice_of(args: TrainingArguments) -> Choice:
    """The optimizer that `args` name. They have passed `check_arguments`."""
    from megatrain import optim

    betas, name = (args.adam_beta1, args.adam_beta2), _name_of(args)
    if name == "sgd":
        return optim.SGD, {"lr": args.learning_rate, **read_optim_args(args.optim_args)}
    if name == "lion_32bit":
        return optim.Lion, {"lr": args.learning_rate, "betas": betas}
    return optim.AdamW, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}


def update_threads(engine: Engine, args: TrainingArguments) -> int:
    """Of the CPU update, beside the processes that load data."""
    from megatrain.base.cgroup import usable_cores

    has_disk = engine.transport.window is not None
    return divide_cores(usable_cores(), has_disk=has_disk, num_loading=args.dataloader_num_workers).update


def read_optim_args(text: str | None) -> Mapping[str, float | bool]:
    """`momentum=0.9,nesterov=True` as numbers. Raises ValueError for what SGD does not take."""
    numbers: dict[str, float | bool] = {}
    for mapping in text.replace(" ", "").split(",") if text else ():
        key, equals, value = mapping.partition("=")
        if not equals or key not in NUMBERS["sgd"]:
            raise ValueError(mapping)
        if key == "nesterov":
            numbers[key] = value.lower() in ("true", "1", "yes")
            continue
        numbers[key] = float(value)
        if not 0 <= numbers[key] < 1:
            raise ValueError(mapping)
    if numbers.get("nesterov") and not (numbers.get("momentum") and not numbers.get("dampening")):
        raise ValueError("nesterov without momentum, or with dampening")
    return numbers


def bad_optim_args(args: TrainingArguments) -> Iterator[str]:
    """A complaint about `optim_args` that the optimizer would not read."""
    if not args.optim_args:
        return
    if _name_of(args) != "sgd":
        yield (
            f"optim_args={args.optim_args!r} is refused: optim={_name_of(args)!r} takes none. Instead: use adam_beta1, "
            "adam_beta2, adam_epsilon and weight_decay."
        )
        return
    try:
        read_optim_args(args.optim_args)
    except ValueError as error:
        yield (
            f"optim_args={args.optim_args!r} is refused: SGD does not take {str(error)!r}. Instead: write it as "
            "'momentum=0.9,nesterov=True', of momentum, dampening and nesterov; weight_decay is an argument of its own."
        )


def _name_of(args: TrainingArguments) -> str:
    return str(getattr(args.optim, "value", args.optim))
