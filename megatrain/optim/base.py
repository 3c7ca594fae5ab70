"""HomeOptimizer: a torch.optim.Optimizer on the homes of a streamed model, whose step returns before updates are done.

`step` takes a snapshot of every number it needs (lr, betas, decay, step counts, clip factor) and queues one update a
home, in the order in which the next forward needs them. Each home's `updated` fence holds back whoever reads its
weights; nothing else waits. With clip="layer" the updates are queued in the backward already, as gradients come home.

A rule subclasses it and says which rule a group has and with which scalars (`optim/optimizers.py`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatrain.base.errors import UserError
from megatrain.execute.engine import Engine
from megatrain.execute.parameters import HomeParameter
from megatrain.optim import checks, states
from megatrain.optim.lossless_update import LosslessSegment
from megatrain.optim.rules import Rule, Scalars
from megatrain.optim.segment import Ema, Segment
from megatrain.optim.skipped import SkippedSteps
from megatrain.optim.update import Measure
from megatrain.optim.updaters import Updaters
from megatrain.spec.layout import Field
from megatrain.store.home import Home
from megatrain.store.rounding import make_key

logger = logging.getLogger("megatrain")

Group = dict[str, Any]
Work = Segment | LosslessSegment


class HomeOptimizer(torch.optim.Optimizer):
    """What all rules share.

    Args:
        params: a streamed model, its parameters, or param groups of them.
        defaults: the rule's numbers, which each group may set for itself.
        max_norm: with clip="layer", the norm by which each layer is clipped; None does not clip.
        ema_decay: keep an exponential moving average of the weights with this decay (fp32, 4 bytes a parameter more);
            see `ema_weights`. None keeps none.
        seed: of stochastic rounding (bf16 masters, moments in fewer than 32 bits).
        max_skipped_steps: steps in a row that may be skipped for gradients that are not finite; one more raises
            NonFiniteError.
        num_threads, kernel: of the CPU update (see `CpuUpdater`); no result depends on them.

    Raises UserError for parameters that are not streamed, or of two models, for numbers that cannot work, and for
    options of PyTorch's optimizers that choose another formula or kernel (`fused=True`, `amsgrad=True`, ...).
    """

    updates_homes = True
    """Any other optimizer is refused on streamed parameters (`execute/guard.py`)."""

    def __init__(
        self,
        params: nn.Module | Iterable[torch.Tensor] | Iterable[Group],
        defaults: Group,
        *,
        max_norm: float | None = None,
        ema_decay: float | None = None,
        seed: int = 0,
        max_skipped_steps: int = 10,
        num_threads: int | None = None,
        kernel: str = "auto",
        **torch_options: Any,
    ) -> None:
        checks.refuse_torch_options(type(self).__name__, torch_options)
        checks.check_options(max_norm, ema_decay, seed, max_skipped_steps)
        self.max_norm, self.ema_decay, self.seed = max_norm, ema_decay, seed
        self._skips = SkippedSteps(max_skipped_steps)
        self._engine: Engine | None = None
        self._members: dict[Home, list[tuple[HomeParameter, int]]] = {}
        self._rules: dict[HomeParameter, Rule] = {}
        self._order: dict[HomeParameter, int] = {}
        self._lent: list[weakref.ref[torch.Tensor]] = []
        super().__init__(checks.trainable(params), defaults)
        engine = self._engine
        if engine is None:
            raise UserError(f"{type(self).__name__} got no parameters: give it the streamed model")
        self._updaters = Updaters(engine.device, num_threads, kernel)
        if engine.config.clip == "layer":
            checks.check_single_consumer(engine)
            engine.consumer = weakref.WeakMethod(self._consume)
        elif max_norm is not None:
            raise UserError(
                'max_norm is for clip="layer"; with clip="global" call mt.clip_grad_norm_(model, max_norm) instead'
            )

    # What a rule says.

    def rule(self, group: Group) -> Rule:
        """The rule of a group."""
        raise NotImplementedError

    def scalars(self, group: Group, step: int, clip: float) -> Scalars:
        """The rule's scalars at step number `step`, as the group's numbers are now."""
        raise NotImplementedError

    def check_group(self, group: Group) -> None:
        """Raise UserError for numbers that cannot work."""
        raise NotImplementedError

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped for gradients that were not finite. Schedules should pause with it."""
        return self._skips.was_skipped

    @property
    def num_skipped_steps(self) -> int:
        """Steps that were skipped so far."""
        return self._skips.num_skipped

    # What a torch.optim.Optimizer does.

    def add_param_group(self, param_group: Group) -> None:
        """Also allocates the group's states."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            checks.check_parameters(group)
            self.check_group(group)
            self._adopt(group)
        except UserError:
            self.param_groups.pop()
            raise

    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:  # type: ignore[override]
        """Queue an update for every parameter that has a gradient. Parameters without one are left alone.

        If any gradient is infinite or NaN, nothing is updated and nothing counted: `step_was_skipped` is then True.
        Raises NonFiniteError when that has happened more than `max_skipped_steps` times in a row.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine = self._engine
        assert engine is not None
        checks.check_rules(self.param_groups, self.rule, self._rules)
        engine.transport.flush()
        if engine.config.clip == "layer":
            self._skips.judge(self._skips.noted(engine.num_steps - 1), "its update was left out")
        else:
            self._skips.judge(self._first_bad_layer(engine), "the step is skipped")
            if not self.step_was_skipped:
                for home in self._homes_in_order(engine):
                    self._update(engine, home)
        self._lent = [moment for moment in self._lent if moment() is not None]
        if self._lent:
            self._wait()
        engine.end_step()
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
        """As that of PyTorch's optimizer of the same rule: a parameter's `step` and moments, viewing the states, and
        `moments`, the name of their format (`optim/states.py` says how each lies).

        As long as somebody holds one of the states, `step` waits for its updates: they are never seen half done.
        """
        self._wait()
        packed = super().state_dict()
        packed["state"] = {index: states.saved_state(state) for index, state in packed["state"].items()}
        packed["moments"] = self.moments
        lent = (t for state in packed["state"].values() for name, t in state.items() if name != "step")
        self._lent = [weakref.ref(tensor) for tensor in lent]
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over moments, step counts and group settings; moments of another format are converted, and it says so.

        Raises ValueError when groups do not match, UserError when states or numbers do not fit.
        """
        self._wait()
        saved_groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups]
        saved_sizes = [len(group["params"]) for group in saved_groups]
        if sizes != saved_sizes:
            raise ValueError(f"the saved optimizer has groups of {saved_sizes} parameters, this one of {sizes}")
        settings = [{key: value for key, value in saved.items() if key != "params"} for saved in saved_groups]
        for group, setting in zip(self.param_groups, settings, strict=True):
            self.check_group({**group, **setting})
        converted = set()
        for group, setting, saved in zip(self.param_groups, settings, saved_groups, strict=True):
            group.update(setting)
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                converted |= self._load_state(parameter, self.rule(group), state_dict, index)
        for name in sorted(converted - {self.moments}):
            logger.warning("the saved moments are %s and were converted to %s", name, self.moments)

    def _load_state(self, parameter: HomeParameter, rule: Rule, state_dict: dict[str, Any], index: int) -> set[str]:
        """Returns the format that the state was saved in, if there is one."""
        saved, own = state_dict["state"].get(index), self.state[parameter]
        if saved is None:
            states.clear_state(own)
            return set()
        format_ = states.format_of(saved, rule, state_dict.get("moments", "fp32"))
        states.load_state(own, saved, rule, self.moments, format_, parameter._field)
        return {format_}

    def close(self) -> None:
        """Wait for the updates and end the worker threads."""
        self._wait()
        self._updaters.close()

    # The average of the weights.

    @contextlib.contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Within the block the model's weights are their moving average: to evaluate or to save. After it they are
        again what they were, bit for bit. Takes another copy of the weights meanwhile; do not train in it.

        Raises UserError without `ema_decay`.
        """
        if self.ema_decay is None:
            raise UserError(f"there is no average of the weights: make {type(self).__name__}(..., ema_decay=0.999)")
        self._wait()
        kept = {home: (home.wire.clone(), home.low.clone()) for home in self._members}
        try:
            for home, members in self._members.items():
                for parameter, _ in members:
                    home.write(parameter._field, self.state[parameter][states.EMA])
            yield
        finally:
            for home, (wire, low) in kept.items():
                home.wire.copy_(wire)
                home.low.copy_(low)
                home.version += 1

    @property
    def moments(self) -> str:
        """Name of the moments' format, as mt.init(optimizer_compression=...) chose it."""
        assert self._engine is not None
        return self._engine.config.moments

    def num_state_bytes(self) -> int:
        """Bytes of all moments and averages now, scales included."""
        return sum(map(states.num_state_bytes, self.state.values()))

    # An update.

    def _homes_in_order(self, engine: Engine) -> list[Home]:
        """The homes of the parameters, as the next forward needs them."""
        # The resident weights are few, and a wait for them would be a wait for all that is queued before.
        resident = engine.fetcher.resident
        order = sorted(engine.homes, key=lambda home: home is not resident)
        return [home for home in order if home in self._members]

    def _update(self, engine: Engine, home: Home) -> None:
        """Queue the update of a home whose gradients are there."""
        work = self._work(home, self._snapshot(home), home.grads.scale)
        if not work:
            return
        measures = engine.measure_updates
        self._queue(engine, home, lambda: self._run(engine, home, work, measures))

    def _consume(self, home: Home) -> None:
        """clip="layer": queue the update of a home whose gradients are on their way, which uses them up."""
        engine = self._engine
        assert engine is not None
        if home not in self._members:
            self._queue(engine, home, home.grads.give_back)
            return
        groups, step, measures = self._snapshot(home), engine.num_steps, engine.measure_updates

        def update() -> None:
            norms = home.grads.norms()
            norm = math.sqrt(sum(value * value for value in norms.values()))
            engine.report_norm(home, norm)
            try:
                if not math.isfinite(norm):
                    self._skips.note(step, home.name)
                    return
                clip = 1.0 if self.max_norm is None else min(1.0, self.max_norm / (norm + 1e-6))
                self._run(engine, home, self._work(home, groups, clip), measures)
            finally:
                home.grads.give_back()

        self._queue(engine, home, update)

    def _queue(self, engine: Engine, home: Home, update: Callable[[], None]) -> None:
        # A reader that comes between sees the old fence or the new one, never a home without either.
        home.updated = engine.transport.update(home, update)
        home.version += 1
        if home.is_lent:
            home.updated.wait()

    def _snapshot(self, home: Home) -> list[tuple[HomeParameter, Group]]:
        """The home's parameters, each with its group's numbers as they are now."""
        numbers = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return [(parameter, numbers[index]) for parameter, index in self._members[home]]

    def _work(self, home: Home, pairs: list[tuple[HomeParameter, Group]], clip: float) -> list[Work]:
        """Segments of the parameters that have a gradient. Counts their steps."""
        made: list[Work] = []
        known: dict[tuple[int, int], Scalars] = {}
        for parameter, group in pairs:
            gradient = home.grads.view(parameter._field)
            if gradient is None:
                continue
            state = self.state[parameter]
            state["step"] += 1
            step = int(state["step"])
            key = id(group), step
            if key not in known:
                known[key] = self.scalars(group, step, clip)
            made.append(self._segment(home, parameter, self.rule(group), gradient, known[key], step))
        return made

    def _segment(
        self, home: Home, parameter: HomeParameter, rule: Rule, gradient: torch.Tensor, scalars: Scalars, step: int
    ) -> Work:
        field, state = parameter._field, self.state[parameter]
        ema = None
        if self.ema_decay is not None:
            ema = Ema(average=state[states.EMA].view(-1), decay=self.ema_decay)
        is_lossless = self.moments == states.LOSSLESS and rule.states
        flat: dict[str, Any] = {
            "rule": rule,
            "scalars": scalars,
            "weights": home.weights(field).view(-1),
            "low": home.low_half(field) if field.is_split else None,
            "grad": gradient.view(-1),
            "ema": ema,
            "key": make_key(self.seed, step, self._order[parameter]),
        }
        if is_lossless:
            moments = tuple(state[f"{one.name}.{states.LOSSLESS}"] for one in rule.states)
            return LosslessSegment(moments=moments, **flat)
        name = "fp32" if self.moments == states.LOSSLESS else self.moments
        return Segment(states=states.stored(state, rule, name), **flat)

    def _run(self, engine: Engine, home: Home, work: Sequence[Work], measures: bool) -> None:
        """On the home's update lane."""
        results = self._apply(home, work, measures)
        if measures:
            change = sum(result.change_squares for result in results if result is not None)
            weight = sum(result.weight_squares for result in results if result is not None)
            engine.report_update(home, (change / weight) ** 0.5 if weight else 0.0)

    def _apply(self, home: Home, work: Sequence[Work], measure: bool) -> Sequence[Measure | None]:
        """Run the updates of a home."""
        return self._updaters.run(home.place, work, measure)

    # Gradients that are not finite.

    def _first_bad_layer(self, engine: Engine) -> str | None:
        """Name of the first home, in the order of the forward, with a gradient of this optimizer that is not finite."""
        for home in self._homes_in_order(engine):
            mine = {parameter._field for parameter, _ in self._members[home]}
            norms = home.grads.norms()
            if not all(math.isfinite(norm) for field, norm in norms.items() if field in mine):
                return home.name
        return None

    def _wait(self) -> None:
        assert self._engine is not None
        self._engine.wait()

    def _adopt(self, group: Group) -> None:
        """Allocate the states of a group's parameters, one block a home."""
        by_home: dict[Home, dict[HomeParameter, Rule]] = {}
        for parameter in group["params"]:
            if self._engine not in (None, parameter._engine):
                raise UserError("one optimizer cannot hold parameters of two streamed models: make one for each")
            self._engine = parameter._engine
            by_home.setdefault(parameter._home, {})[parameter] = self.rule(group)
        for home, rules in by_home.items():
            self.state.update(states.make_states(home, rules, self.moments, has_ema=self.ema_decay is not None))
            self._rules.update(rules)
            members = self._members.setdefault(home, [])
            members += [(parameter, len(self.param_groups) - 1) for parameter in rules]
        self._order.update((p, len(self._order) + i) for i, p in enumerate(group["params"]))
