"""Which rule an optimizer is of, as its param groups tell: so that states of another rule are refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatrain.base.errors import UserError

SIGNATURES = (
    ("Muon", {"ns_coefficients"}),
    ("AdamW or Adam", {"betas", "eps"}),
    ("Lion", {"betas"}),
    ("SGD", {"momentum", "nesterov"}),
)
"""Numbers that a group of a rule has, of this library and of PyTorch. The first that fits."""


def rule_name(groups: Sequence[Mapping[str, Any]]) -> str | None:
    """None where it is not known."""
    keys = set().union(*groups)
    return next((name for name, needed in SIGNATURES if needed <= keys), None)


def check_rule(own: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Param groups. Raises UserError that names both rules where they differ."""
    here, there = rule_name(own), rule_name(saved)
    if here is None or there is None or here == there:
        return
    name = there.split()[0]
    raise UserError(
        f"the saved optimizer is of another rule: {there} was saved, and this one is {here}. Go on with {name} "
        f"(mt.optim.{name}; of a Trainer optimizer_cls_and_kwargs=(mt.optim.{name}, {{...}})), or start a new run with "
        f"{here} from the saved weights"
    )
