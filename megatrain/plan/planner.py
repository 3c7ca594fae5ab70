"""Chooses where everything lives and how rows are split, by simulated time, within what a machine has. Pure.

Tried are: rows of a micro-batch, the number of slots, how many of the first homes live on the device, and whether the
others are updated by the CPU or stream through the device. From these follow: layer inputs stay on the device as far
as there is room, and what host memory cannot take goes to disk, if there is one: moments first, then low halves, then
weights, then gradients, each in the order of `spill_order`. Clipping is never changed.

A candidate whose busiest lane alone takes longer than the best simulated step is not simulated; the search ends at
one that is within `CLOSE` of what is possible. So more memory never makes the predicted step longer, up to that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from megatrain.base.config import Config
from megatrain.base.errors import UserError
from megatrain.plan.cost import STEP_SECONDS, cpu_update_seconds
from megatrain.plan.flops import ModelWork, counted_flops, published_flops
from megatrain.plan.machine import Machine
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
from megatrain.plan.schedule import Choice, Schedule, visit_costs
from megatrain.plan.simulate import Simulation
from megatrain.plan.timeline import ROOM_SLACK, Timeline, TimelineMaker
from megatrain.plan.workload import Workload
from megatrain.spec.model import ModelSpec, with_whole_logits

CLOSE = 0.002
"""A step this near to the bound is taken at once."""
DEVICE_MARGIN, HOST_MARGIN = 0.01, 0.03
"""Of the memory, left free where no limit is given."""
DISK_PRICE = 1.1
"""A step this much longer is taken before one that reads and writes the disk: disks wear."""
ROOMY, ROOM_PRICE = 0.94, 1.02
"""A step this much longer is taken if it leaves the rest of the device's memory free: predictions are not exact."""
SLOTS = (3, 2, 1)
MAX_HOME_COUNTS = 40
SPILLED = ("moments", "low", "weights", "gradients")


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes that a run may use of each tier."""

    hbm: int
    ram: int
    disk: int

    @classmethod
    def of(cls, machine: Machine, config: Config) -> Budgets:
        """Limits of the config, within what the machine has. Disk counts where the config names an offload_dir."""
        return cls(
            hbm=min(machine.hbm_bytes, config.max_vram_bytes or int((1 - DEVICE_MARGIN) * machine.hbm_bytes)),
            ram=min(machine.ram_bytes, config.max_ram_bytes or int((1 - HOST_MARGIN) * machine.ram_bytes)),
            disk=machine.disk_bytes if config.offload_dir is not None else 0,
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A choice that fits, with its prediction."""

    machine: Machine
    spec: ModelSpec
    workload: Workload
    config: Config
    budgets: Budgets
    choice: Choice
    timeline: Timeline
    simulation: Simulation

    @property
    def step_seconds(self) -> float:
        return self.simulation.step_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.workload.num_tokens / self.step_seconds

    @property
    def published_tflops(self) -> float:
        """6 x parameters x tokens a second, as papers of the field count."""
        return published_flops(self._work, self.workload.num_tokens) / self.step_seconds / 1e12

    @property
    def counted_tflops(self) -> float:
        """What had to be computed, a second (`plan/flops.py`)."""
        lengths = [self.workload.length] * self.workload.num_sequences
        return counted_flops(self._work, lengths) / self.step_seconds / 1e12

    @property
    def num_on_device(self) -> int:
        """Homes that live on the device whole."""
        return sum(place == HBM for place in self.choice.places)

    @property
    def _work(self) -> ModelWork:
        return ModelWork(
            num_parameters=self.spec.num_parameters,
            matrix_parameters=self.spec.active_parameters,
            attention_width=self.spec.attention_width,
        )


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
        is_whole = config.logits_in_pieces is False or workload.reads_logits
        spec = with_whole_logits(spec) if is_whole else spec
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
        for bound, rows, num_homes in self._candidates():
            if best is not None and best[0] <= bound * (1 + CLOSE):
                break
            for choice in self._choices(rows, num_homes):
                if best is not None and self._lane_bound(choice, bound) >= best[0]:
                    continue
                simulation = self.simulate(choice)
                if best is None or simulation.step_seconds < best[0]:
                    best = simulation.step_seconds, choice, simulation
        return None if best is None else self.plan_of(best[1], best[2])

    def fits(self) -> bool:
        """Whether there is a plan at all, without looking for the best one."""
        if self.maker.input_bytes > self.budgets.hbm + self.budgets.ram:
            return False
        return any(True for _ in self.few_choices())

    def few_choices(self) -> Iterator[Choice]:
        """Choices that fit with the least memory for a step: smallest micro-batches, one slot."""
        rows = min(self.workload.row_choices())
        for num_homes in self.few_home_counts():
            choice = self.fitted(rows, num_homes, 1, CPU)
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

    def _candidates(self) -> list[tuple[float, int, int]]:
        """(bound of the step's seconds, rows, homes on the device), lowest bound first and most homes first."""
        found = []
        for rows in self.workload.row_choices():
            costs = visit_costs(self.machine, self.spec, self.workload, rows, compiled=self.config.compile)
            seconds = STEP_SECONDS + sum(cost.forward + cost.backward for cost in costs)
            found += [(seconds, rows, num_homes) for num_homes in self.home_counts()]
        return sorted(found, key=lambda of: (of[0], -of[2]))

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

    def _choices(self, rows: int, num_homes: int) -> Iterator[Choice]:
        """Those that fit, with every number of slots that may be of use."""
        for num_slots in SLOTS:
            choice = self.fitted(rows, num_homes, num_slots, CPU)
            if choice is not None:
                yield choice
                if self.config.moments != "lossless":
                    streamed = self.fitted(rows, num_homes, num_slots, STREAM)
                    yield from [] if streamed is None else [streamed]
            if choice is not None and choice.activation_bytes >= self.maker.input_bytes:
                return  # fewer slots would leave nothing more in place

    def fitted(self, rows: int, num_homes: int, num_slots: int, others: Place) -> Choice | None:
        """The choice with inputs and homes placed as there is room; None if there is none."""
        on_device = set(self._layered[:num_homes])
        if self._home_bytes(num_homes) > self.budgets.hbm:
            return None
        places = tuple(
            HBM if index in on_device else others if self.spec.homes[index].layers else CPU
            for index in range(len(self.spec.homes))
        )
        choice = Choice(rows=rows, num_slots=num_slots, places=places, activation_bytes=0)
        budget = self.maker.activation_budget(choice, self.budgets.hbm)
        if budget is None:
            return None
        if self.maker.input_bytes - budget > self.budgets.ram:
            return None  # inputs cannot go to disk
        choice = dataclasses.replace(choice, activation_bytes=budget)
        return self._spilled(choice) if others == CPU else self._if_ram_fits(choice)

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

    def _lane_bound(self, choice: Choice, compute_seconds: float) -> float:
        """Seconds of the busiest lane: no step is shorter."""
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
        return max(compute_seconds, cpu, link, disk)
