"""HomeOptimizer: a torch.optim.Optimizer on the homes of a streamed model, whose step returns before updates are done.

`step` takes a snapshot of every number it needs (lr, betas, decay, step counts, clip factor) and queues one update a
home, in the order in which the next forward needs them. Each home's `updated` fence holds back whoever reads its
weights; nothing else waits. With clip="layer" the updates are queued in the backward already, as gradients come home.
What a fault stops is taken up again (`optim/commit.py`).

A rule subclasses it and says which rule a group has and with which scalars (`optim/optimizers.py`).
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from megatrain.base.errors import RefusedError, UserError
from megatrain.execute.engine import Engine
from megatrain.execute.parameters import HomeParameter
from megatrain.optim import average, checks, states
from megatrain.optim import state_dict as state_dicts
from megatrain.optim.commit import OpenStep, Update, check_whole
from megatrain.optim.movable import Movable
from megatrain.optim.rules import Rule
from megatrain.optim.skipped import SkippedSteps, first_bad_layer
from megatrain.optim.updaters import Updaters, update_order
from megatrain.optim.updating import Group, HomeUpdating
from megatrain.spec.layout import Field
from megatrain.store.home import Home, expose_held
from megatrain.store.lending import Lending
from megatrain.transport.recorder import on_host


class HomeOptimizer(HomeUpdating, Movable, torch.optim.Optimizer):
    """What all rules share. A rule says `rule`, `scalars` and `check_group`.

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
        self._states: dict[HomeParameter, states.State] = {}
        self._stored = {}
        self._members: dict[Home, list[tuple[HomeParameter, int]]] = {}
        self._rules: dict[HomeParameter, Rule] = {}
        self._numbers: dict[Field, int] = {}
        self._lending = Lending()
        self._open_step = OpenStep()
        super().__init__(checks.trainable(params), defaults)
        engine = self._engine
        if engine is None:
            raise UserError(f"{type(self).__name__} got no parameters: give it the streamed model")
        checks.check_clipping(engine, max_norm)
        self._updaters = Updaters(engine.device, num_threads, kernel, engine.transport.window)
        engine.mover.keepers.add(self)
        if engine.config.clip == "layer":
            engine.consumer = weakref.WeakMethod(self._consume)

    def check_group(self, group: Group) -> None:
        """Raise UserError for numbers that cannot work."""
        raise NotImplementedError

    @property
    def state(self) -> Mapping[HomeParameter, states.State]:
        """A parameter's `step` and moments, once its updates are done. As long as somebody holds one of the tensors,
        `step` waits for its updates."""
        return states.LentStates(self._states, self._lending)

    @state.setter
    def state(self, _: Any) -> None:
        """torch.optim.Optimizer sets an empty one when it is made; states come with their groups."""
        states.check_not_replaced(self._states)

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
        except (UserError, RefusedError):
            self.param_groups.pop()
            raise

    def _forget_groups(self, num_kept: int) -> None:
        """Undo the groups after the first `num_kept`."""
        del self.param_groups[num_kept:]
        for home, members in self._members.items():
            for parameter, index in members:
                if index >= num_kept:
                    del self._states[parameter], self._rules[parameter]
                    self._stored.pop(parameter, None)
            self._members[home] = [member for member in members if member[1] < num_kept]

    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:  # type: ignore[override]
        """Queue an update for every parameter that has a gradient. Those without one are left alone; their averages
        (`ema_decay`) move on.

        If any gradient is infinite or NaN, nothing is updated and nothing counted: `step_was_skipped` is then True.
        After an interrupt in it, or an update that failed (UpdateError), it is that step that a further call makes
        whole, on the layers that have not made it, and waits for them.

        Raises NonFiniteError when a step was skipped more than `max_skipped_steps` times in a row.
        """
        engine = self._engine
        assert engine is not None
        if self._open_step.roll_forward(engine, self._queue_update):
            return None
        with torch.enable_grad():
            loss = None if closure is None else closure()
        engine.check_trainable()
        checks.check_rules(self.param_groups, self.rule, self._rules)
        engine.transport.flush()
        is_looked_at = expose_held(self._members, self._lending.is_any_out)
        if engine.config.clip == "layer":
            bad = [home.name for home in engine.consumed if not math.isfinite(home.grads.arrived_norm)]
            self._skips.judge(bad[0] if bad else None, is_whole_step=False)
            homes = [home for home in update_order(engine, self._members) if home not in engine.consumed]
        else:
            members = {home: self._members[home] for home in engine.homes if home in self._members}
            self._skips.judge(first_bad_layer(members, engine.homes), is_whole_step=True)
            homes = [] if self.step_was_skipped else update_order(engine, self._members)
        updates = [Update(home, self._snapshot(home)) for home in homes]
        self._open_step.begin(updates, engine.num_steps)
        with on_host(engine.transport.recorder, "queue updates", "of all layers"):
            for update in updates:
                self._queue_update(update)
        if is_looked_at or any(home.is_lent for home in homes):
            self._wait()
        engine.end_step()
        self._open_step.end()
        return loss

    def check_whole(self, what: str) -> None:
        """Waits for updates. Raises UpdateError or RefusedError while layers are not at the same step."""
        assert self._engine is not None
        check_whole(self._engine, what)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this optimizer's parameters. `set_to_none=False` (gradients of zero) is refused."""
        if not set_to_none:
            raise UserError("zero_grad(set_to_none=False) is not supported: absent gradients cost no memory")
        assert self._engine is not None
        self._open_step.give_up("its gradients are dropped")
        self._engine.transport.flush()
        self._engine.restart_step()
        for home, members in self._members.items():
            home.grads.drop_all(frozenset(parameter._field for parameter, _ in members))

    def state_dict(self) -> dict[str, Any]:
        """As that of PyTorch's optimizer of the same rule: a parameter's `step` and moments, viewing the states, and
        `moments`, the name of their format (`optim/states.py` says how each lies).

        As long as somebody holds one of the states, `step` waits for its updates: they are never seen half done.
        """
        self.check_whole("optimizer.state_dict")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        packed = {**state_dicts.pack(self.param_groups, self.state), "moments": self.moments}
        return state_dicts.through(self._optimizer_state_dict_post_hooks, self, packed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over moments, step counts and group settings; moments of another format are converted, and it says so.
        An average that was not saved starts as the weights are now, and it says so.

        Raises UserError when groups, states or numbers do not fit, or ask for another rule than states are made for;
        nothing has changed then.
        """
        self.prepared_load(state_dict)()

    def prepared_load(self, state_dict: dict[str, Any]) -> Callable[[], None]:
        """What does `load_state_dict`, of which all that can be refused has been: the errors there are raised here."""
        self._wait()
        assert self._engine is not None
        self._engine.set_aside.check("optimizer.load_state_dict")
        state_dict = state_dicts.through(self._optimizer_load_state_dict_pre_hooks, self, state_dict)
        wanted = state_dicts.with_saved_numbers(self.param_groups, state_dict)
        for group in wanted:
            self.check_group(group)
        checks.check_rules(wanted, self.rule, self._rules)
        loads = state_dicts.checked_loads(state_dict, self.param_groups, self._states, self._rules, self.moments)

        def load() -> None:
            self._wait()
            self._open_step.give_up("states are loaded")
            for group, now in zip(self.param_groups, wanted, strict=True):
                group.update(now)
            for one in loads:
                one.run()
            state_dicts.report(loads, self.moments)
            for after in self._optimizer_load_state_dict_post_hooks.values():
                after(self)

        return load

    def close(self) -> None:
        """Wait for the updates and end the worker threads."""
        try:
            self._wait()
        finally:
            self._updaters.close()

    def ema_weights(self) -> contextlib.AbstractContextManager[None]:
        """Within the block the model's weights are their moving average (rounded to bf16 where masters are): to
        evaluate or to save. After it they are again what they were, bit for bit. Takes a copy of the weights meanwhile.

        Raises UserError without `ema_decay`. Training and writing weights in the block is refused.
        """
        if self.ema_decay is None:
            raise UserError(f"there is no average of the weights: make {type(self).__name__}(..., ema_decay=0.999)")
        assert self._engine is not None
        return average.in_place_of_weights(self._engine, self._members, self._states)

    def num_state_bytes(self) -> int:
        """Bytes of all moments and averages now, scales included."""
        return sum(map(states.num_state_bytes, self._states.values()))

    def _wait(self) -> None:
        assert self._engine is not None
        self._engine.wait()

    def _adopt(self, group: Group) -> None:
        """Allocate the states of a group's parameters, one block a home."""
        if not group["params"]:
            return
        by_home: dict[Home, dict[HomeParameter, Rule]] = {}
        for parameter in group["params"]:
            if self._engine not in (None, parameter._engine):
                raise UserError("one optimizer cannot hold parameters of two streamed models: make one for each")
            self._engine = parameter._engine
            by_home.setdefault(parameter._home, {})[parameter] = self.rule(group)
        assert self._engine is not None
        if self.ema_decay is not None:
            self._engine.set_aside.check("making an optimizer with ema_decay")
            average.require(self._engine, [*self._states, *group["params"]])
        for home, rules in by_home.items():
            self._states.update(states.make_states(home, rules, self.moments, has_ema=self.ema_decay is not None))
            self._rules.update(rules)
            members = self._members.setdefault(home, [])
            members += [(parameter, len(self.param_groups) - 1) for parameter in rules]
        if not self._numbers:
            # Of the model, so that no grouping changes the random numbers of a parameter.
            fields = (field for home in self._engine.homes for field in home.fields)
            self._numbers = {field: number for number, field in enumerate(fields)}
