"""Chooses where everything lives and how rows are split, by simulated time, within what a machine has. Pure.

Tried are: rows of a micro-batch, how many micro-batches go together, the number of slots, how many of the first homes
live on the device, and whether the others are updated by the CPU or stream through the device. From these follow: the
last blocks keep what they compute inside and layer inputs stay on the device as far as there is room (the one or the
other first: both are tried), and what host memory cannot take goes to disk, if there is one: moments first, then low
halves, then weights, then gradients, each in the order of `spill_order`. Clipping is never changed.

A candidate whose busiest lane alone takes longer than the best simulated step is not simulated; the search ends at
one that is within `CLOSE` of what is possible. So more memory never makes the predicted step longer, up to that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatrain.base.config import Config
from megatrain.base.errors import UserError
from megatrain.plan.choice import Choice
from megatrain.plan.cost import STEP_SECONDS, VisitCost, cpu_update_seconds
from megatrain.plan.machine import Machine
from megatrain.plan.outcome import Budgets, Plan
from megatrain.plan.placement import (
    CPU,
    DISK_TIER,
    HBM,
    HBM_TIER,
    RAM,
    STREAM,
    Place,
    part_bytes,
    spill_order,
    with_part_on_disk,
)
from megatrain.plan.schedule import Schedule, visit_costs
from megatrain.plan.simulate import Simulation
from megatrain.plan.timeline import ROOM_SLACK, TimelineMaker
from megatrain.plan.workload import Workload
from megatrain.spec.model import ModelSpec, with_whole_logits

CLOSE = 0.002
"""A step this near to the bound is taken at once."""
DISK_PRICE = 1.1
"""A step this much longer is taken before one that reads and writes the disk: disks wear."""
ROOMY, ROOM_PRICE = 0.94, 1.02
"""A step this much longer is taken if it leaves the rest of the device's memory free: predictions are not exact."""
SLOTS = (3, 2, 1)
MAX_HOME_COUNTS = 40
GROUPS, MOST_GROUPS = (1, 2, 4, 8), 8
"""Micro-batches that go together, where it is not all of them; and groups of a step. More of them, with as many tokens
each, bring nothing that fewer and larger micro-batches do not."""
GROUPED_STRIDE = 4
"""Of the numbers of homes on the device, so many are passed by where there are groups, for a search of seconds."""
Split = tuple[int, int | None]
"""Rows of a micro-batch, micro-batches of a group."""
SPILLED = ("moments", "low", "weights", "gradients")


def _check_rates(machine: Machine, config: Config) -> None:
    """Raises UserError for a machine for which no time can be predicted."""
    if not machine.hbm_bytes:
        raise UserError(f"{machine.name} has no GPU: plan for a machine that has one, --machine NAME")
    rates = ("matmul", "fp32", "hbm", "h2d", "d2h")
    missing = [
        name for name in rates if not getattr(machine, f"{name}_{'flops' if name in rates[:2] else 'bytes'}_per_second")
    ]
    missing += [] if config.moments in machine.update_ns_per_parameter else [f"update with {config.moments} moments"]
    if config.offload_dir is not None and not (
        machine.disk_read_bytes_per_second and machine.disk_write_bytes_per_second
    ):
        missing.append("disk")
    if missing:
        raise UserError(
            f"the profile of {machine.name} has no rate for {', '.join(missing)}: run `megatrain doctor` again"
        )


def _preferred(first: Plan | None, second: Plan | None, price: float) -> Plan | None:
    """`first`, unless it is longer than `second` by more than the factor `price`."""
    if first is None or (second is not None and first.step_seconds > price * second.step_seconds):
        return second
    return first


class Planner:
    """The search for one machine, model, workload and config. `best` gives the plan."""

    def __init__(
        self,
        machine: Machine,
        spec: ModelSpec,
        workload: Workload,
        config: Config,
        budgets: Budgets | None = None,
        *,
        shares_device: bool = True,
        sizes: list[dict[str, int]] | None = None,
    ) -> None:
        """
        Args:
            shares_device: as a run that is planned does (see `TimelineMaker`).
            sizes: for each home its bytes by part, where they are known.
        """
        _check_rates(machine, config)
        machine = machine.with_link(config.max_link_bytes_per_second)
        is_whole = config.logits_in_pieces is False or workload.reads_logits
        spec = with_whole_logits(spec) if is_whole else spec
        spec = dataclasses.replace(spec, tile_tokens=False if config.compile else config.tile_tokens)
        self.machine, self.spec, self.workload, self.config = machine, spec, workload, config
        self.budgets = budgets or Budgets.of(machine, config)
        keeps = config.clip == "global"
        trainable = set(spec.trainable)
        self.sizes = sizes or [
            part_bytes(home, trainable, config.moments, keeps_gradients=keeps) for home in spec.homes
        ]
        self.maker = TimelineMaker(
            spec,
            workload,
            self.sizes,
            keeps_gradients=keeps,
            compiled=config.compile,
            shares_device=shares_device,
        )
        self._costs_by_rows: dict[int, list[VisitCost]] = {}
        self._layered = [index for index, home in enumerate(spec.homes) if home.layers]

    def changed(self, *, workload: Workload | None = None, budgets: Budgets | None = None) -> Planner:
        """The same search for another workload or other budgets."""
        return Planner(
            self.machine,
            self.spec,
            workload or self.workload,
            self.config,
            budgets or self.budgets,
            sizes=self.sizes,
        )

    def best(self) -> Plan | None:
        """The fastest candidate that fits, or None. One that leaves room on the device, or the disk alone, is taken
        where it costs little."""
        roomy = dataclasses.replace(self.budgets, hbm=int(self.budgets.hbm * ROOMY))
        best = None
        for disk in dict.fromkeys((0, self.budgets.disk)):
            full = self._within(dataclasses.replace(self.budgets, disk=disk))
            some = self._within(dataclasses.replace(roomy, disk=disk))
            found = _preferred(some, full, ROOM_PRICE)
            best = _preferred(best, found, DISK_PRICE)
        return best

    def _within(self, budgets: Budgets) -> Plan | None:
        found = self.changed(budgets=budgets)._search()
        return None if found is None else dataclasses.replace(found, budgets=self.budgets)

    def _search(self) -> Plan | None:
        best: tuple[float, Choice, Simulation] | None = None
        for bound, split, num_homes in self._candidates():
            if best is not None and best[0] <= bound * (1 + CLOSE):
                break
            for tried in self._choices(split, num_homes):
                if best is not None and self._lane_bound(tried) >= best[0]:
                    continue
                choice = self.fitted(tried)
                if choice is None or (best is not None and self._lane_bound(choice) >= best[0]):
                    continue
                simulation = self.simulate(choice)
                if best is None or simulation.step_seconds < best[0]:
                    best = simulation.step_seconds, choice, simulation
        return None if best is None else self.plan_of(best[1], best[2])

    def fits(self) -> bool:
        """Whether there is a plan at all, without looking for the best one."""
        return any(True for _ in self.few_choices())

    def few_choices(self) -> Iterator[Choice]:
        """Choices that fit with the least memory for a step: smallest micro-batches, one slot."""
        rows = min(self.workload.row_choices())
        for num_homes in self.few_home_counts():
            choice = self.fitted(self._choice((rows, None), num_homes, 1, CPU))
            if choice is not None:
                yield choice

    def few_home_counts(self) -> list[int]:
        """As `home_counts`, most first: more on the device leave more host memory."""
        return self.home_counts()[::-1]

    def plan_of(self, choice: Choice, simulation: Simulation | None = None) -> Plan:
        """The prediction for a given choice, whether it fits or not."""
        return Plan(
            machine=self.machine,
            spec=self.spec,
            workload=self.workload,
            config=self.config,
            budgets=self.budgets,
            choice=choice,
            timeline=self.maker.timeline(choice),
            simulation=simulation or self.simulate(choice),
        )

    def simulate(self, choice: Choice) -> Simulation:
        return Schedule(
            self.machine,
            self.spec,
            self.workload,
            choice,
            self.sizes,
            moments=self.config.moments,
            clips_layers=self.config.clip == "layer",
            compiled=self.config.compile,
        ).simulate()

    def _candidates(self) -> list[tuple[float, Split, int]]:
        """(bound of the step's seconds, split, homes on the device), lowest bound first and most homes first."""
        found = []
        for split, num_homes in self._splits():
            least = self._choice(split, num_homes, 1, CPU)
            if least is not None:
                kept = self.maker.most_kept(least, self.budgets.hbm)[0]
                found.append((self._compute_seconds(dataclasses.replace(least, kept=kept)), split, num_homes))
        return sorted(found, key=lambda of: (of[0], -of[2]))

    def _splits(self) -> Iterator[tuple[Split, int]]:
        """With each the numbers of homes that may live on the device."""
        counts = self.home_counts()
        for rows in self.workload.row_choices():
            for group in self.groups(rows):
                for num_homes in counts if group is None else sorted({*counts[::GROUPED_STRIDE], counts[-1]}):
                    yield (rows, group), num_homes

    def groups(self, rows: int) -> list[int | None]:
        """How many micro-batches may go together: all of them, or few, where sums of all gradients fit the device."""
        num_micro = -(-self.workload.num_sequences // rows)
        return [None, *(group for group in GROUPS if group < num_micro <= MOST_GROUPS * group)]

    def _compute_seconds(self, choice: Choice) -> float:
        kept = choice.kept_layers(self.spec)
        seconds = (cost.seconds(kept.get(layer)) for layer, cost in enumerate(self._costs(choice.rows)))
        return STEP_SECONDS + sum(forward + backward for forward, backward in seconds)

    def _costs(self, rows: int) -> list[VisitCost]:
        if rows not in self._costs_by_rows:
            compiled = self.config.compile
            self._costs_by_rows[rows] = visit_costs(self.machine, self.spec, self.workload, rows, compiled=compiled)
        return self._costs_by_rows[rows]

    def home_counts(self) -> list[int]:
        """How many homes may live on the device; the same for every machine."""
        if self.config.moments == "lossless" or self.config.hbm_home_gb == 0:
            return [0]
        stride = -(-len(self._layered) // MAX_HOME_COUNTS)
        counts = sorted({*range(0, len(self._layered), stride), len(self._layered)})
        if self.config.hbm_home_bytes is None:
            return counts
        # As the engine does: as many as the budget takes.
        return [max(n for n in range(len(self._layered) + 1) if self._home_bytes(n) <= self.config.hbm_home_bytes)]

    def _home_bytes(self, num_homes: int) -> int:
        return sum(sum(self.sizes[index].values()) for index in self._layered[:num_homes])

    def _choices(self, split: Split, num_homes: int) -> Iterator[Choice]:
        """With every number of slots that may be of use, and nothing placed yet (see `fitted`)."""
        num_blocks = sum(layer.kind == "block" for layer in self.spec.layers)
        for num_slots in SLOTS:
            is_whole = False
            for others in (CPU,) if self.config.moments == "lossless" else (CPU, STREAM):
                base = self._choice(split, num_homes, num_slots, others)
                # Inputs that make way for what layers compute inside go to host memory.
                possible = [] if base is None else self.maker.most_kept(base, self.budgets.hbm)
                yield from (dataclasses.replace(base, kept=kept) for kept in dict.fromkeys(possible))
                is_whole |= any(kept.all == num_blocks for kept in possible)
            if is_whole:
                return  # fewer slots would leave nothing more in place

    def _choice(self, split: Split, num_homes: int, num_slots: int, others: Place) -> Choice | None:
        """With no inputs on the device; None where so many homes do not fit there."""
        on_device = set(self._layered[:num_homes])
        if self._home_bytes(num_homes) > self.budgets.hbm:
            return None
        places = tuple(
            HBM if index in on_device else others if self.spec.homes[index].layers else CPU
            for index in range(len(self.spec.homes))
        )
        return Choice(rows=split[0], group=split[1], num_slots=num_slots, places=places, activation_bytes=0)

    def fitted(self, choice: Choice | None) -> Choice | None:
        """The choice with inputs and homes placed as there is room; None if there is none."""
        budget = None if choice is None else self.maker.activation_budget(choice, self.budgets.hbm)
        if choice is None or budget is None:
            return None
        if self.maker.input_bytes(choice) - budget > self.budgets.ram:
            return None  # inputs cannot go to disk
        choice = dataclasses.replace(choice, activation_bytes=budget)
        is_streamed = any(place == STREAM for place in choice.places)
        return self._if_ram_fits(choice) if is_streamed else self._spilled(choice)

    def _if_ram_fits(self, choice: Choice) -> Choice | None:
        return choice if self.maker.timeline(choice).peak(RAM) <= self.budgets.ram else None

    def _spilled(self, choice: Choice) -> Choice | None:
        """The choice with on disk what host memory cannot take; None where there is no room on disk either."""
        over = self.maker.timeline(choice).peak(RAM) - self.budgets.ram
        if over <= 0:
            return choice
        most = sum(self.sizes[index][part] for part, index in self._movable(choice)) if self.budgets.disk else 0
        if over > (1 + ROOM_SLACK) * most:
            return None
        choice = self.spill(choice, self.budgets.ram, over)
        timeline = self.maker.timeline(choice)
        fits = timeline.peak(RAM) <= self.budgets.ram and timeline.peak(DISK_TIER) <= self.budgets.disk
        return choice if fits else None

    def _movable(self, choice: Choice) -> list[tuple[str, int]]:
        """(part, home) in host memory that may go to disk, in the order in which they do."""
        return [
            (part, index)
            for part in SPILLED
            for index in spill_order(len(self.spec.homes), self.config.clip)
            if choice.places[index].tiers[part] == RAM and choice.places[index].update == "cpu"
            if self.sizes[index][part] and (self.spec.homes[index].layers or part == "moments")
        ]

    def spill(self, choice: Choice, ram_bytes: int, over: int | None = None) -> Choice:
        """With on disk what is over `ram_bytes`, as far as it can go there.

        over: by how many bytes the choice is over it, where that is known.
        """
        movable = self._movable(choice)[::-1]
        if over is None:
            over = self.maker.timeline(choice).peak(RAM) - ram_bytes
        # What goes to disk may need host slots there, so it is looked at again.
        while movable and over > 0:
            places = list(choice.places)
            while movable and over > 0:
                part, index = movable.pop()
                places[index] = with_part_on_disk(places[index], part)
                over -= self.sizes[index][part]
            choice = dataclasses.replace(choice, places=tuple(places))
            over = self.maker.timeline(choice).peak(RAM) - ram_bytes if movable else 0
        return choice

    def _lane_bound(self, choice: Choice) -> float:
        """No step is shorter: seconds of the busiest lane, or of updates and all that no update can be beside."""
        cpu = link = disk = 0.0
        for home, place, sizes in zip(self.spec.homes, choice.places, self.sizes, strict=True):
            if place.update == "cpu":
                cpu += cpu_update_seconds(self.machine, home, self.config.moments)
            if place.weights != HBM_TIER:
                link += sizes["weights"] / self.machine.h2d_bytes_per_second
            on_disk = sum(sizes[part] for part in SPILLED[:-1] if place.tiers[part] == DISK_TIER)
            if on_disk:
                disk += on_disk / self.machine.disk_read_bytes_per_second
                disk += on_disk / self.machine.disk_write_bytes_per_second
        compute = self._compute_seconds(choice)
        groups = choice.group_sizes(self.workload)
        if self.config.clip == "global":
            # Updates run between the norm and the last layer's first visit.
            forward = sum(cost.forward for cost in self._costs(choice.rows)) * groups[0] / sum(groups)
            cpu += max(0.0, compute - STEP_SECONDS - forward)
        return max(compute, cpu, len(groups) * link, disk)
