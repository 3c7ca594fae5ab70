"""Takes weights home, one by one, each original freed as soon as it is copied; gives them back when that fails.

Rule: after a failure the model is as it was. What is still in a file leaves its place only when all are home; what was
in memory is read from the homes again, home by home, so that neither way holds more than a home beside the model.
What cannot come back (it was rounded at home, or the home cannot be read) is marked, and the next `mt.stream` says so.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator

import torch
from torch import nn

from megatrain.base.errors import UserError
from megatrain.execute.deferred import DeferredParameter, restart_deferred
from megatrain.spec.discover import parameter_uses
from megatrain.spec.homes import HomePlan
from megatrain.spec.layout import Field
from megatrain.store.home import Home

logger = logging.getLogger("megatrain")

_NUM_SHOWN = 3

Initialize = Callable[[str, torch.Size, torch.dtype], torch.Tensor]


def check_not_moved(model: nn.Module) -> None:
    """Raises UserError for a parameter that gave its values to a home and is not part of a streamed model."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, "went_home", False):
            raise UserError(
                f"{name} lost its values to an mt.stream before, which failed or was of another model that shares it: "
                "load the model anew"
            )


def move_homes(
    model: nn.Module,
    plans: list[HomePlan],
    homes: list[Home],
    initialize: Initialize | None,
    lock: Callable[..., None],
    take_over: Callable[[], None],
    check: Callable[[Home], None] = lambda _: None,
) -> None:
    """Copy all weights into `homes`, then let others take the places of the parameters.

    Args:
        lock: page-locks a home's buffers, once they are filled.
        take_over: puts something in every place that holds a parameter.
        check: called with a home that has its weights; may raise.

    Whatever is raised on the way, the model is as it was before it (see above for what cannot be).
    """
    filled: list[tuple[Home, list[tuple[nn.Parameter, Field]]]] = []
    places = list(parameter_uses(model))
    try:
        for plan, home in zip(plans, homes, strict=True):
            filled.append((home, []))
            for parameter, field in _parameters(model, plan):
                _move(parameter, field, home, initialize, filled[-1][1])
            home.version = 0
            lock(home.wire, home.low)
            check(home)
        take_over()
    except BaseException:
        for use in places:
            use.owner._parameters[use.attribute] = use.parameter
        restart_deferred(model)
        lost: dict[str, str] = {}
        while filled:
            lost |= _give_back(*filled.pop())
        if lost:
            shown = "; ".join(f"{name}: {why}" for name, why in sorted(lost.items())[:_NUM_SHOWN])
            logger.warning("what mt.stream had moved of this model is lost (%s): load the model anew", shown)
        raise
    for use in places:
        if isinstance(use.parameter, DeferredParameter) and not getattr(use.parameter, "went_home", False):
            use.parameter.leave()
            use.parameter.went_home = True


def _parameters(model: nn.Module, plan: HomePlan) -> Iterator[tuple[nn.Parameter, Field]]:
    """The plan's parameters, each once."""
    done = set()
    for use in parameter_uses(model):
        field = plan.parameters.get(id(use.parameter))
        if field is not None and field not in done:
            done.add(field)
            yield use.parameter, field


def _move(
    parameter: nn.Parameter,
    field: Field,
    home: Home,
    initialize: Initialize | None,
    emptied: list[tuple[nn.Parameter, Field]],
) -> None:
    if isinstance(parameter, DeferredParameter):
        parameter.copy_to(functools.partial(home.write, field))
        return
    if parameter.device.type == "meta":
        assert initialize is not None
        home.write(field, _initial_value(field, initialize))
        return
    home.write(field, parameter.data)
    # Before it is emptied: an interrupt between the two must not lose it.
    emptied.append((parameter, field))
    # An optimizer that was made before holds this one, and would update nothing.
    parameter.went_home = True
    parameter.data = torch.empty(0, dtype=field.saved_dtype, device=parameter.device)
    parameter.grad = None


def _initial_value(field: Field, initialize: Initialize) -> torch.Tensor:
    value = initialize(field.name, torch.Size(field.shape), field.saved_dtype)
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != field.shape:
        got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise UserError(f"initialize({field.name!r}, ...) returned {got}: it must return a tensor of {field.shape}")
    return value


def _give_back(home: Home, emptied: list[tuple[nn.Parameter, Field]]) -> dict[str, str]:
    """Names of what is lost, and why. The home's memory goes."""
    lost: dict[str, str] = {}
    for parameter, field in emptied:
        if parameter.numel() == field.numel:
            parameter.__dict__.pop("went_home", None)  # interrupted before it was emptied
            continue
        if not _is_exact(field):
            lost[field.name] = f"rounded to {field.dtype}"
            continue
        try:
            parameter.data = home.read(field).to(dtype=field.saved_dtype, device=parameter.device)
            del parameter.went_home
        except (OSError, RuntimeError, MemoryError, UserError) as error:
            lost[field.name] = str(error)
    home.hold(torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.int16))
    return lost


def _is_exact(field: Field) -> bool:
    """The home has every bit of the values that it was given."""
    return field.is_split or torch.promote_types(field.dtype, field.saved_dtype) == field.dtype
