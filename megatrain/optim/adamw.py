"""AdamW on the homes of a streamed model: a torch.optim.Optimizer whose step returns before the updates are done.

`step` takes a snapshot of every number it needs (lr, betas, decay, step counts, clip factor) and queues one update a
home, in the order in which the next forward needs them. Each home's `updated` fence holds back whoever reads its
weights; nothing else waits.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from megatrain.base.errors import UserError
from megatrain.execute.engine import Engine, engine_of
from megatrain.execute.parameters import HomeParameter
from megatrain.optim.formula import AdamWScalars
from megatrain.optim.update import CpuUpdater, Segment
from megatrain.spec.layout import Field
from megatrain.store.home import Home

_TORCH_OPTIONS = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")


class AdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay (Loshchilov and Hutter 2019) and exact fp32 moments (8 bytes a parameter).

    Each multiplication, addition, division and root is rounded once in fp32 (`optim/formula.py`), so results are the
    same bit for bit on every path. torch.optim.AdamW contracts some of them and differs in last bits.

    Args:
        params: a streamed model, its parameters, or param groups of them.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW; each may be set a group.
        num_threads, kernel: of the CPU update (see `CpuUpdater`); no result depends on them.

    Raises UserError for parameters that are not streamed, or of two models, and for options of torch.optim.AdamW that
    choose another formula or kernel (`fused=True`, `amsgrad=True`, ...); left off they pass.
    """

    updates_homes = True
    """Any other optimizer is refused on streamed parameters (`execute/guard.py`)."""

    def __init__(
        self,
        params: nn.Module | Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        num_threads: int | None = None,
        kernel: str = "auto",
        **torch_options: Any,
    ) -> None:
        _refuse_torch_options(torch_options)
        self._engine: Engine | None = None
        self._lent: list[weakref.ref[torch.Tensor]] = []
        if isinstance(params, nn.Module):
            if engine_of(params) is None:
                raise UserError(f"this {type(params).__name__} is not streamed: call mt.stream(model) first")
            model, params = params, [parameter for parameter in params.parameters() if parameter.requires_grad]
            if not params:
                raise UserError(
                    f"{type(model).__name__} has no trainable parameters: unfreeze some with requires_grad_()"
                )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._updater = CpuUpdater(num_threads, kernel)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Also allocates the group's moments."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group)
            self._adopt(group["params"])
        except UserError:
            self.param_groups.pop()
            raise

    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:  # type: ignore[override]
        """Queue an update for every parameter that has a gradient. Parameters without one are left alone."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine = self._engine
        assert engine is not None
        engine.transport.flush()
        for home, segments in self._segments().items():
            self._queue(engine, home, segments)
        self._lent = [moment for moment in self._lent if moment() is not None]
        if self._lent:
            self._wait()
        engine.num_steps += 1
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this optimizer's parameters. `set_to_none=False` (gradients of zero) is refused."""
        if not set_to_none:
            raise UserError("zero_grad(set_to_none=False) is not supported: absent gradients cost no memory")
        assert self._engine is not None
        self._engine.transport.flush()
        fields: dict[Home, set[Field]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                fields.setdefault(parameter._home, set()).add(parameter._field)
        for home, of_home in fields.items():
            home.grads.drop_all(frozenset(of_home))

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's: `step`, `exp_avg`, `exp_avg_sq` a parameter, viewing the moments.

        As long as somebody holds one of the moments, `step` waits for its updates: they are never seen half done.
        """
        self._wait()
        packed = super().state_dict()
        packed["state"] = {
            index: {key: tensor.view_as(tensor) for key, tensor in state.items()}
            for index, state in packed["state"].items()
        }
        self._lent = [weakref.ref(state["exp_avg"]) for state in packed["state"].values()]
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over moments, step counts and group settings. Raises ValueError when groups do not match."""
        self._wait()
        saved_groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups]
        saved_sizes = [len(group["params"]) for group in saved_groups]
        if sizes != saved_sizes:
            raise ValueError(f"the saved optimizer has groups of {saved_sizes} parameters, this one of {sizes}")
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                state, own = state_dict["state"].get(index), self.state[parameter]
                for key, tensor in own.items():
                    tensor.zero_() if state is None else tensor.copy_(torch.as_tensor(state[key]))

    def close(self) -> None:
        """Wait for the updates and end the worker threads."""
        self._wait()
        self._updater.close()

    def _wait(self) -> None:
        assert self._engine is not None
        self._engine.wait()

    def _adopt(self, parameters: list[HomeParameter]) -> None:
        """Allocate zero moments (m | v, fp32, of exact size), one block a home."""
        by_home: dict[Home, list[HomeParameter]] = {}
        for parameter in parameters:
            if self._engine not in (None, parameter._engine):
                raise UserError("one optimizer cannot hold parameters of two streamed models: make one for each")
            self._engine = parameter._engine
            by_home.setdefault(parameter._home, []).append(parameter)
        for home, members in by_home.items():
            numel = sum(parameter.numel() for parameter in members)
            block = home.memory.empty(8 * numel).view(torch.float32)
            start = 0
            for parameter in members:
                stop = start + parameter.numel()
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": block[start:stop].view(parameter.shape),
                    "exp_avg_sq": block[numel + start : numel + stop].view(parameter.shape),
                }
                start = stop

    def _segments(self) -> dict[Home, list[Segment]]:
        """What each home's update needs, in the order of the next forward."""
        assert self._engine is not None
        # The resident weights are few, and a wait for them would be a wait for all that is queued before.
        resident = self._engine.fetcher.resident
        order = sorted(self._engine.homes, key=lambda home: home is not resident)
        segments: dict[Home, list[Segment]] = {home: [] for home in order}
        for group in self.param_groups:
            scalars: dict[tuple[int, float], AdamWScalars] = {}
            for parameter in group["params"]:
                home, field = parameter._home, parameter._field
                gradient = home.grads.view(field)
                if gradient is None:
                    continue
                state = self.state[parameter]
                state["step"] += 1
                key = int(state["step"]), home.grads.scale
                if key not in scalars:
                    scalars[key] = _scalars(group, *key)
                segments[home].append(
                    Segment(
                        weights=home.weights(field).view(-1),
                        low=home.low_half(field) if field.is_split else None,
                        grad=gradient.view(-1),
                        m=state["exp_avg"].view(-1),
                        v=state["exp_avg_sq"].view(-1),
                        scalars=scalars[key],
                    )
                )
        return {home: of_home for home, of_home in segments.items() if of_home}

    def _queue(self, engine: Engine, home: Home, segments: list[Segment]) -> None:
        measures = engine.measure_updates

        def update() -> None:
            results = self._updater.run(segments, measure=measures)
            if measures:
                change = sum(result.change_squares for result in results)
                weight = sum(result.weight_squares for result in results)
                engine.report_update(home, (change / weight) ** 0.5 if weight else 0.0)

        # A reader that comes between sees the old fence or the new one, never a home without either.
        home.updated = engine.transport.update(update)
        home.version += 1
        if home.is_lent:
            home.updated.wait()


def _scalars(group: dict[str, Any], step: int, clip: float) -> AdamWScalars:
    beta1, beta2 = group["betas"]
    return AdamWScalars.at(
        step,
        lr=float(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        clip=clip,
    )


def _refuse_torch_options(options: dict[str, Any]) -> None:
    """Options of torch.optim.AdamW that this one lacks pass as long as they are off."""
    for name, value in options.items():
        if name not in _TORCH_OPTIONS:
            raise TypeError(f"AdamW() got an unexpected keyword argument {name!r}")
        if value:
            raise UserError(
                f"AdamW({name}={value!r}) is refused: weights in their homes are updated by one exact formula and its "
                f"own kernels. Leave {name} out"
            )


def _check_group(group: dict[str, Any]) -> None:
    for parameter in group["params"]:
        if not isinstance(parameter, HomeParameter):
            raise UserError(
                f"got a {type(parameter).__name__} of shape {tuple(parameter.shape)} that is not streamed: call "
                "mt.stream(model) before making the optimizer, and use a torch.optim optimizer for other parameters"
            )
    for name in ("lr", "eps", "weight_decay"):
        if not (_is_number(group[name]) and 0.0 <= float(group[name]) < math.inf):
            raise UserError(f"{name}={group[name]!r} must be a number and not negative")
    betas = group["betas"]
    is_pair = isinstance(betas, (tuple, list)) and len(betas) == 2 and all(map(_is_number, betas))
    if not (is_pair and all(0.0 <= beta < 1.0 for beta in betas)):
        raise UserError(f"betas={betas!r} must be two numbers in [0, 1)")
    for name in ("amsgrad", "maximize"):
        if group.get(name):
            raise UserError(f"{name}={group[name]!r} is not supported: leave it out")


def _is_number(value: Any) -> bool:
    # Schedulers may keep the learning rate in a tensor.
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
