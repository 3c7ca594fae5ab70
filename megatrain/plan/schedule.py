"""The work of a step as the engine hands it to its lanes: layer-major, streamed, updated beside the next forward. Pure.

    forward      fetch -> visit (all micro-batches); inputs beyond the device's budget go to the host
    head         forward and backward of each micro-batch in one visit
    backward     the visits in reverse, recomputing; a home's gradients leave after its last one
    norm         when every gradient is home
    update       a home at a time in the order of the next forward, whose visit waits for its own update and no other

Slots are kept as `transport/slots.py` keeps them; drains in flight are bounded as there.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatrain.plan.choice import Choice
from megatrain.plan.cost import (
    STEP_SECONDS,
    VisitCost,
    compute_bytes,
    cpu_update_seconds,
    device_update_seconds,
    visit_cost,
)
from megatrain.plan.machine import Machine
from megatrain.plan.placement import DISK_TIER, HBM_TIER, RAM
from megatrain.plan.simulate import (
    COMPUTE,
    CPU_LANE,
    D2H,
    DISK,
    H2D,
    UPDATE,
    Simulation,
    Task,
    run,
)
from megatrain.plan.workload import Workload
from megatrain.spec.model import ModelSpec

SETTLING_STEPS = 3
"""After as many, each step is like the one before."""
HOST_SLOTS = 2
"""Homes whose states may be on their way from disk or through the device at once."""
MAX_DRAINS = 2


class _Visit(NamedTuple):
    layer: int
    is_backward: bool
    group: int


@dataclass(eq=False)
class _Slot:
    num_bytes: int
    content: tuple[int, int] | None = None
    """(home, step) of the weights in it."""
    filled: int | None = None
    used: int | None = None
    last_use: int = -1


class Schedule:
    """
    Args:
        sizes: for each home its bytes by part (`plan.placement.part_bytes`).
        moments: their format.
        clips_layers: clip="layer": each home is updated in the backward.
    """

    def __init__(
        self,
        machine: Machine,
        spec: ModelSpec,
        workload: Workload,
        choice: Choice,
        sizes: list[dict[str, int]],
        *,
        moments: str,
        clips_layers: bool,
        compiled: bool,
    ) -> None:
        self._machine, self._spec, self._choice, self._sizes = machine, spec, choice, sizes
        self._moments, self._clips_layers = moments, clips_layers
        self._costs = visit_costs(machine, spec, workload, choice.rows, compiled=compiled)
        sizes_of_groups = choice.group_sizes(workload)
        self._shares = [size / sum(sizes_of_groups) for size in sizes_of_groups]
        self._boundary_bytes = choice.group_tokens(workload) * spec.hidden_size * compute_bytes(spec)
        self._kept = choice.kept_layers(spec)
        blocks = [i for i, layer in enumerate(spec.layers) if layer.kind == "block" and i not in self._kept]
        on_device = int(choice.activation_bytes // self._boundary_bytes)
        self._offloaded = set(blocks[on_device:])
        self._visits = self._order()
        homes = [spec.layers[visit.layer].home for visit in self._visits]
        self._streamed_at = [at for at, home in enumerate(homes) if choice.places[home].weights != HBM_TIER]
        self._slots = _make_slots(spec, choice, sizes)
        self._tasks: list[Task] = []
        self._updated: dict[int, int] = {}
        self._written: dict[int, int] = {}
        self._landed: dict[int, int] = {}
        self._sent: dict[int, int] = {}
        self._brought: dict[int, int] = {}
        self._states: deque[int] = deque()
        self._ring: deque[int] = deque()
        self._weight_reads: deque[int] = deque()
        self._last_compute: int | None = None
        self._blocked: tuple[int, ...] = ()
        self._clock = 0

    def simulate(self) -> Simulation:
        bounds = [self._step(step) for step in range(SETTLING_STEPS + 1)]
        spans = run(self._tasks)
        return Simulation(
            tasks=self._tasks,
            spans=spans,
            step_start=spans[bounds[-2]].end,
            step_end=spans[bounds[-1]].end,
        )

    # The order of visits.

    def _order(self) -> list[_Visit]:
        """Of one step, group by group. A head has its backward in its forward's visit."""
        layers = range(len(self._spec.layers))
        down = [index for index in reversed(layers) if self._spec.layers[index].kind != "head"]
        return [
            _Visit(index, is_backward, group)
            for group in range(len(self._shares))
            for indices, is_backward in ((layers, False), (down, True))
            for index in indices
        ]

    def _step(self, step: int) -> int:
        """Hands over the work of a step. Returns the index of the task that ends it."""
        last_visit = {self._spec.layers[visit.layer].home: at for at, visit in enumerate(self._visits)}
        drains: deque[int] = deque()
        for at, visit in enumerate(self._visits):
            layer, is_backward = visit.layer, visit.is_backward
            home = self._spec.layers[layer].home
            ready = self._acquire(at, home, step)
            compute = self._compute(visit, ready)
            self._used(home, compute, step)
            is_over = last_visit[home] == at and (is_backward or self._spec.layers[layer].kind == "head")
            if is_over:
                self._drain(home, compute, drains)
            if is_over and self._clips_layers:
                self._update(home, ())
        norm = self._add(COMPUTE, "norm", "end of step", STEP_SECONDS, self._landed.values())
        self._last_compute = norm
        if not self._clips_layers:
            for home in self._homes_in_order():
                self._update(home, (norm,))
        return norm

    def _homes_in_order(self) -> Iterator[int]:
        yield from dict.fromkeys(layer.home for layer in self._spec.layers)
        yield from (index for index, home in enumerate(self._spec.homes) if not home.layers)

    # Weights.

    def _acquire(self, at: int, home: int, step: int) -> list[int]:
        """What a visit waits for; fetches it and the visits after it."""
        place = self._choice.places[home]
        if place.weights == HBM_TIER:
            return [self._updated[home]] if home in self._updated else []
        self._clock += 1
        slot = self._find(home, step) or self._fetch(home, step, keep=[])
        assert slot is not None and slot.filled is not None, "there is always a slot for one layer"
        slot.last_use = self._clock
        ahead = self._ahead(at, home)
        for index, other in enumerate(ahead):
            if self._find(other, step) is None:
                self._fetch(other, step, keep=[home, *ahead[:index]])
        return [slot.filled]

    def _ahead(self, at: int, home: int) -> list[int]:
        """Distinct streamed homes of the next visits of this step, as many as slots allow."""
        found: list[int] = []
        for number in range(bisect.bisect_right(self._streamed_at, at), len(self._streamed_at)):
            if len(found) == len(self._slots) - 1:
                break
            other = self._spec.layers[self._visits[self._streamed_at[number]].layer].home
            if other != home and other not in found:
                found.append(other)
        return found

    def _find(self, home: int, step: int) -> _Slot | None:
        content = (home, step)
        for slot in self._slots:
            if slot.content == content:
                return slot
        return None

    def _fetch(self, home: int, step: int, keep: list[int]) -> _Slot | None:
        num_bytes = self._sizes[home]["weights"]
        kept = {(other, step) for other in keep}
        possible = [slot for slot in self._slots if slot.num_bytes >= num_bytes and slot.content not in kept]
        if not possible:
            return None
        slot = min(possible, key=lambda slot: (slot.num_bytes, slot.content is not None, slot.last_use))
        waits = [index for index in (self._updated.get(home), slot.used) if index is not None]
        if self._choice.places[home].weights == DISK_TIER:
            waits.append(self._read_weights(home))
        seconds = num_bytes / self._machine.h2d_bytes_per_second
        slot.filled = self._add(H2D, "fetch", self._spec.homes[home].name, seconds, waits)
        if self._choice.places[home].weights == DISK_TIER:
            self._weight_reads.append(slot.filled)
        slot.content = (home, step)
        return slot

    def _read_weights(self, home: int) -> int:
        waits = [self._written[home]] if home in self._written else []
        if len(self._weight_reads) >= HOST_SLOTS:
            waits.append(self._weight_reads.popleft())
        seconds = self._sizes[home]["weights"] / self._machine.disk_read_bytes_per_second
        return self._add(DISK, "read weights", self._spec.homes[home].name, seconds, waits)

    def _used(self, home: int, compute: int, step: int) -> None:
        slot = self._find(home, step)
        if slot is not None:
            slot.used = compute

    # Compute, and the inputs that it keeps.

    def _compute(self, visit: _Visit, ready: list[int]) -> int:
        layer, is_backward, group = visit
        name, seconds = self._spec.layers[layer].name, self._shares[group] * self._seconds(layer, is_backward)
        waits = [*ready, *self._blocked]
        self._blocked = ()
        if is_backward:
            waits += self._bring(layer)
            # The one after comes beside this one's work.
            self._bring(layer - 1)
        what = "backward" if is_backward else "forward"
        before = self._last_compute
        compute = self._add(COMPUTE, what, name, seconds, waits)
        self._last_compute = compute
        if not is_backward and layer in self._offloaded:
            seconds = self._boundary_bytes / self._machine.d2h_bytes_per_second
            after = () if before is None else (before,)
            self._sent[layer] = self._add(D2H, "send input", name, seconds, after)
        return compute

    def _seconds(self, layer: int, is_backward: bool) -> float:
        """Of the compute lane, for all micro-batches."""
        return self._costs[layer].seconds(self._kept.get(layer))[is_backward]

    def _bring(self, layer: int) -> list[int]:
        if layer not in self._offloaded:
            return []
        if layer not in self._brought:
            waits = [self._sent[layer], *([] if self._last_compute is None else [self._last_compute])]
            seconds = self._boundary_bytes / self._machine.h2d_bytes_per_second
            name = self._spec.layers[layer].name
            self._brought[layer] = self._add(H2D, "bring input", name, seconds, waits)
            return [self._brought[layer]]
        return [self._brought.pop(layer)]

    # Gradients and updates.

    def _drain(self, home: int, compute: int, drains: deque[int]) -> None:
        place, name = self._choice.places[home], self._spec.homes[home].name
        if place.gradients == HBM_TIER:
            self._landed[home] = compute
            return
        if len(drains) >= MAX_DRAINS:
            self._blocked = (drains.popleft(),)
        num_bytes = self._gradient_bytes(home)
        waits = [compute, *([self._updated[home]] if home in self._updated else [])]
        if self._clips_layers:
            # Its slab is free when the update of the home that had it before is over.
            if len(self._ring) == MAX_DRAINS + 1:
                before = self._ring.popleft()
                waits += [self._updated[before]] if before in self._updated else []
            self._ring.append(home)
        landed = self._add(D2H, "drain", name, num_bytes / self._machine.d2h_bytes_per_second, waits)
        drains.append(landed)
        if place.gradients == DISK_TIER:
            seconds = num_bytes / self._machine.disk_write_bytes_per_second
            landed = self._add(DISK, "write gradients", name, seconds, (landed,))
        self._landed[home] = landed

    def _gradient_bytes(self, home: int) -> int:
        """That cross the link, kept or not."""
        plan = self._spec.homes[home]
        return plan.grad_dtype.itemsize * plan.numel

    def _update(self, home: int, after: tuple[int, ...]) -> None:
        place, plan, sizes = self._choice.places[home], self._spec.homes[home], self._sizes[home]
        waits = [*after, *([self._landed[home]] if home in self._landed else [])]
        staged = (
            sum(sizes[part] for part, tier in place.tiers.items() if tier == RAM) if place.update == "device" else 0
        )
        on_disk = sum(sizes[part] for part, tier in place.tiers.items() if tier == DISK_TIER)
        if on_disk or staged:
            # States come through a few buffers, ahead of their update as far as those are free.
            if len(self._states) >= HOST_SLOTS:
                free = (self._states.popleft(),)
            else:
                free = ()
            # Gradients of this step are among them.
            reads_late = place.gradients == DISK_TIER or staged
            reading = (*free, *(waits if reads_late else ()))
            if on_disk:
                seconds = on_disk / self._machine.disk_read_bytes_per_second
                waits.append(self._add(DISK, "read states", plan.name, seconds, reading))
            if staged:
                seconds = staged / self._machine.h2d_bytes_per_second
                waits.append(self._add(H2D, "stage states", plan.name, seconds, reading))
        if place.update == "cpu":
            seconds = cpu_update_seconds(self._machine, plan, self._moments)
            done = self._add(CPU_LANE, "update", plan.name, seconds, waits)
        else:
            done = self._add(UPDATE, "update", plan.name, device_update_seconds(self._machine, sizes), waits)
        self._updated[home] = self._write_back(home, done, on_disk, staged)

    def _write_back(self, home: int, done: int, on_disk: int, staged: int) -> int:
        """Returns the task behind which the weights can be read."""
        place, plan, sizes = self._choice.places[home], self._spec.homes[home], self._sizes[home]
        if staged:
            gradients = sizes["gradients"] if place.gradients == RAM else 0
            seconds = (staged - gradients) / self._machine.d2h_bytes_per_second
            done = self._add(D2H, "unstage states", plan.name, seconds, (done,))
            self._states.append(done)
        if on_disk:
            gradients = sizes["gradients"] if place.gradients == DISK_TIER else 0
            seconds = (on_disk - gradients) / self._machine.disk_write_bytes_per_second
            self._written[home] = self._add(DISK, "write states", plan.name, seconds, (done,))
            self._states.append(self._written[home])
        return done

    def _add(self, lane: str, what: str, name: str, seconds: float, after: object) -> int:
        self._tasks.append(Task(lane, what, name, seconds, tuple(after)))
        return len(self._tasks) - 1


def visit_costs(machine: Machine, spec: ModelSpec, workload: Workload, rows: int, *, compiled: bool) -> list[VisitCost]:
    """Of each layer; equal blocks are worked out once."""
    known: dict[object, VisitCost] = {}
    costs = []
    for layer in spec.layers:
        numel = spec.homes[layer.home].numel
        kind = layer.kind, layer.has_dropout, layer.may_tile, layer.kept
        key = (kind, layer.matrix_parameters, layer.output_width, layer.attention, numel)
        if key not in known:
            known[key] = visit_cost(machine, spec, layer, workload, rows, compiled=compiled)
        costs.append(known[key])
    return costs


def _make_slots(spec: ModelSpec, choice: Choice, sizes: list[dict[str, int]]) -> list[_Slot]:
    """As many for blocks as chosen, and one for the largest home if that is larger (`plan/rows.py` counts the same)."""
    streamed = [index for index, place in enumerate(choice.places) if place.weights != HBM_TIER]
    blocks = {layer.home for layer in spec.layers if layer.kind == "block"}
    block_bytes = max((sizes[index]["weights"] for index in streamed if index in blocks), default=0)
    largest = max((sizes[index]["weights"] for index in streamed if spec.homes[index].layers), default=0)
    slots = [_Slot(block_bytes) for _ in range(choice.num_slots if block_bytes else 0)]
    return [*slots, *([_Slot(largest)] if largest > block_bytes else [])]
