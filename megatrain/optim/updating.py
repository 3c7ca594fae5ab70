"""The half of HomeOptimizer that updates: makes the segments of a home, queues their update, runs it.

Rule: every number that an update needs is taken when `step` is called, and nothing is read from groups later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from megatrain.execute.engine import Engine
from megatrain.execute.parameters import HomeParameter
from megatrain.optim import average, checks, states
from megatrain.optim.commit import OpenStep, Update
from megatrain.optim.lossless_update import LosslessSegment
from megatrain.optim.marks import Marks
from megatrain.optim.rules import Rule, Scalars
from megatrain.optim.segment import Ema, Segment
from megatrain.optim.update import Measure
from megatrain.optim.updaters import Updaters
from megatrain.spec.layout import Field
from megatrain.store.codecs import Stored
from megatrain.store.home import Home
from megatrain.store.rounding import make_key

Group = dict[str, Any]
Work = Segment | LosslessSegment


class HomeUpdating:
    """What it works on is set by HomeOptimizer."""

    param_groups: list[Group]
    max_norm: float | None
    ema_decay: float | None
    seed: int
    _engine: Engine | None
    _open_step: OpenStep
    _states: dict[HomeParameter, states.State]
    _stored: dict[HomeParameter, tuple[Stored, ...]]
    """Moments as updates work on them, which view `_states`: made once, and again where those have moved."""
    _members: dict[Home, list[tuple[HomeParameter, int]]]
    _numbers: dict[Field, int]
    _updaters: Updaters

    def rule(self, group: Group) -> Rule:
        """The rule of a group."""
        raise NotImplementedError

    def scalars(self, group: Group, step: int, clip: float) -> Scalars:
        """The rule's scalars at step number `step`, as the group's numbers are now."""
        raise NotImplementedError

    @property
    def moments(self) -> str:
        """Name of the moments' format, as mt.init(optimizer_compression=...) chose it."""
        assert self._engine is not None
        return self._engine.config.moments

    def _queue_update(self, update: Update) -> None:
        """Queue the update of a home whose gradients are there, or none; what is left of it, if it failed."""
        engine, home = self._engine, update.home
        assert engine is not None
        if update.work is None:
            work, idle, measures = self._work(home, update.pairs), self._idle(home), engine.measure_updates
            if not (work or idle):
                update.finish()
                return
            update.counts = [(state["step"], int(state["step"]) + 1) for state in self._trained(home)]
            update.work = lambda marks: self._run(engine, home, work, idle, measures, marks)
        # First: after an interrupt nobody may take what a slot holds for the weights.
        home.version += bool(update.counts)
        update.queue(engine, update)

    def _consume(self, home: Home) -> None:
        """clip="layer": queue the update of a home whose gradients are on their way, which uses them up."""
        engine = self._engine
        assert engine is not None
        if home not in self._members:
            engine.transport.update(home, home.grads.give_back)
            return
        measures, update = engine.measure_updates, Update(home, self._snapshot(home), is_kept=False)
        pairs = update.pairs

        def make() -> list[Work]:
            norm = home.grads.arrived_norm
            clip = 1.0 if self.max_norm is None else min(1.0, self.max_norm / (norm + 1e-6))
            work = self._work(home, pairs, clip)
            states.count_step(self._trained(home))
            return work

        def work(marks: Marks) -> None:
            if math.isfinite(home.grads.arrived_norm):
                self._run(engine, home, marks.once("work", make), self._idle(home), measures, marks)

        def run() -> None:
            try:
                update()
            finally:
                home.grads.give_back()

        update.work = work
        self._open_step.add(update)
        home.version += 1
        update.queue(engine, run)
        if home.is_lent:
            home.wait()

    def _trained(self, home: Home) -> list[states.State]:
        """States of the parameters that have a gradient."""
        return [self._states[one] for one, _ in self._members[home] if one._field in home.grads.touched]

    def _idle(self, home: Home) -> list[HomeParameter]:
        """Parameters without a gradient, if they have averages."""
        if self.ema_decay is None:
            return []
        return [parameter for parameter, _ in self._members[home] if parameter._field not in home.grads.touched]

    def _snapshot(self, home: Home) -> list[tuple[HomeParameter, Group]]:
        """The home's parameters, each with its group's numbers as they are now."""
        numbers = checks.numbers_now(self.param_groups)
        return [(parameter, numbers[index]) for parameter, index in self._members[home]]

    def _work(self, home: Home, pairs: list[tuple[HomeParameter, Group]], factor: float = 1.0) -> list[Work]:
        """Segments of the parameters that have a gradient, which is multiplied by `factor` beside its own."""
        made: list[Work] = []
        known: dict[tuple[int, int, float], Scalars] = {}
        for parameter, group in pairs:
            gradient = home.grads.flat(parameter._field)
            if gradient is None:
                continue
            state = self._states[parameter]
            step, clip = int(state["step"]) + 1, factor * home.grads.factor(parameter._field)
            key = id(group), step, clip
            if key not in known:
                known[key] = self.scalars(group, step, clip)
            made.append(self._segment(home, parameter, self.rule(group), gradient, known[key], step))
        return made

    def _segment(
        self, home: Home, parameter: HomeParameter, rule: Rule, gradient: torch.Tensor, scalars: Scalars, step: int
    ) -> Work:
        field, state = parameter._field, self._states[parameter]
        weights, low = home.flat(field)
        ema = None
        if self.ema_decay is not None:
            ema = Ema(average=state[states.EMA].view(-1), decay=self.ema_decay)
        is_lossless = self.moments == states.LOSSLESS and rule.states
        flat: dict[str, Any] = {
            "rule": rule,
            "scalars": scalars,
            "weights": weights,
            "low": low,
            "grad": gradient,
            "ema": ema,
            "key": make_key(self.seed, step, self._numbers[field]),
        }
        if is_lossless:
            moments = tuple(state[f"{one.name}.{states.LOSSLESS}"] for one in rule.states)
            return LosslessSegment(moments=moments, **flat)
        if parameter not in self._stored:
            name = "fp32" if self.moments == states.LOSSLESS else self.moments
            self._stored[parameter] = states.stored(state, rule, name)
        return Segment(states=self._stored[parameter], **flat)

    def _run(
        self,
        engine: Engine,
        home: Home,
        work: Sequence[Work],
        idle: Sequence[HomeParameter],
        measures: bool,
        marks: Marks,
    ) -> None:
        """On the home's update lane: what is not marked."""
        results = self._apply(home, work, measures, marks.within("work of rules"))
        if idle and self.ema_decay is not None:
            average.move(home, idle, self._states, self.ema_decay, marks.within("averages"))
        if measures and work:
            change = sum(result.change_squares for result in results if result is not None)
            weight = sum(result.weight_squares for result in results if result is not None)
            engine.update_ratios[home.name] = (change / weight) ** 0.5 if weight else 0.0

    def _apply(self, home: Home, work: Sequence[Work], measure: bool, marks: Marks) -> Sequence[Measure | None]:
        """Run the updates of a home."""
        return self._updaters.run(home, work, measure, marks)
