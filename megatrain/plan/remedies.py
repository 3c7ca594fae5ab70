"""`plan`: the best plan, or a refusal with the smallest remedies in numbers. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from megatrain.base.config import Config
from megatrain.base.errors import PlanError
from megatrain.base.units import GB, format_number
from megatrain.plan.machine import Machine
from megatrain.plan.placement import CPU, DISK_TIER, HBM_TIER, RAM
from megatrain.plan.planner import Plan, Planner
from megatrain.plan.schedule import Choice
from megatrain.plan.workload import Workload
from megatrain.spec.model import ModelSpec

SMALLER = (
    {"optimizer_compression": "8bit"},
    {"optimizer_compression": "4bit"},
    {"clip": "layer"},
    {"optimizer_compression": "8bit", "clip": "layer"},
    {"optimizer_compression": "4bit", "clip": "layer"},
)
"""Settings that need less host memory, those that change least first."""


def plan(machine: Machine, spec: ModelSpec, workload: Workload, config: Config) -> Plan:
    """The fastest plan that fits.

    Raises PlanError where none does, with what is short and each remedy that is enough alone.
    """
    planner = Planner(machine, spec, workload, config)
    best = planner.best()
    if best is None:
        raise PlanError(_refusal(planner))
    return best


def largest_context(machine: Machine, spec: ModelSpec, config: Config, num_sequences: int = 1) -> int:
    """Most tokens of a sequence for which a step fits, one in a micro-batch, to a multiple of 256; 0 if none does."""

    def fits(steps: int) -> bool:
        workload = Workload(num_sequences=num_sequences, length=256 * steps, rows=1)
        return planner.changed(workload=workload).fits()

    planner = Planner(machine, spec, Workload(num_sequences=num_sequences, length=256, rows=1), config)
    return 256 * _most(fits, 2**18)


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to about `limit` that fits, if all smaller ones do; 0 if none does."""
    low, high = 0, 1
    while high < limit and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _refusal(planner: Planner) -> str:
    spec, workload = planner.spec, planner.workload
    what = (
        f"{spec.name}, {workload.num_sequences} x {workload.length} tokens a step, does not fit {planner.machine.name}"
    )
    smallest = _smallest_on_device(planner)
    needed = planner.maker.timeline(smallest).peak(HBM_TIER)
    if needed > planner.budgets.hbm:
        return f"{what}: {_device_refusal(planner, smallest, needed)}"
    return f"{what}: {_host_refusal(planner)}"


def _smallest_on_device(planner: Planner) -> Choice:
    """With as little device memory as can be: one slot, one row, all inputs on the host."""
    rows = min(planner.workload.row_choices())
    places = tuple(CPU for _ in planner.spec.homes)
    return Choice(rows=rows, num_slots=1, places=places, activation_bytes=0)


def _device_refusal(planner: Planner, smallest: Choice, needed: int) -> str:
    spec, workload = planner.spec, planner.workload
    largest = max((home for home in spec.homes if home.layers), key=lambda home: sum(f.numel for f in home.fields))
    working = planner.maker.working_bytes(smallest.rows)
    remedies = [f"a device with {_gb(needed - planner.budgets.hbm)} more{_and_on_the_host(planner, needed)}"]
    rows = _fewer_rows(planner)
    if rows:
        remedies.append(f"micro-batches of at most {format_number(rows, 'sequence')}")
    context = largest_context(planner.machine, spec, planner.config, workload.num_sequences)
    if 0 < context < workload.length:
        remedies.append(f"sequences of at most {context:,} tokens")
    return (
        f"device memory is {_gb(planner.budgets.hbm)} and the least that a step needs is {_gb(needed)}: slot, gradient "
        f"sums and drains of {largest.name!r} {_gb(needed - working)}, and {_gb(working)} for a micro-batch of "
        f"{smallest.rows} x {workload.length} in one layer. {_enough(remedies)}"
    )


def _and_on_the_host(planner: Planner, device_bytes: int) -> str:
    """What would still be missing on a device that is large enough: no remedy is named that is none."""
    larger = Planner(
        planner.machine,
        planner.spec,
        planner.workload,
        planner.config,
        dataclasses.replace(planner.budgets, hbm=device_bytes),
    )
    if larger.fits():
        return ""
    needed, _ = _least_on_host(larger)
    return f", and {_gb(needed - planner.budgets.ram)} more of host memory (or a disk for it)"


def _least_on_host(planner: Planner) -> tuple[int, Choice]:
    """Host memory of the choice that needs least of it, without a disk."""
    rooms = dataclasses.replace(planner.budgets, ram=2**62, disk=0)
    short = Planner(planner.machine, planner.spec, planner.workload, planner.config, rooms)
    choices = {short.maker.timeline(choice).peak(RAM): choice for choice in short.few_choices()}
    needed = min(choices)
    return needed, choices[needed]


def _enough(remedies: list[str]) -> str:
    only = f"What is enough: {remedies[0]}"
    return only if len(remedies) == 1 else f"Any of these is enough: {'; '.join(remedies)}"


def _host_refusal(planner: Planner) -> str:
    needed, choice = _least_on_host(planner)
    lacking = needed - planner.budgets.ram
    remedies = [f"{_gb(lacking)} more of host memory"]
    for settings in SMALLER:
        if any(getattr(planner.config, name) == value for name, value in settings.items()):
            continue
        other = Planner(
            planner.machine, planner.spec, planner.workload, dataclasses.replace(planner.config, **settings)
        )
        if other.fits():
            words = " with ".join(f'{name}="{value}"' for name, value in settings.items())
            saved = _state_bytes(planner) - _state_bytes(other)
            remedies.append(f"{words} (saves {_gb(saved)})")
            break
    spilled = planner.maker.timeline(planner.spill(choice, planner.budgets.ram))
    if spilled.peak(RAM) <= planner.budgets.ram:
        on_disk = spilled.peak(DISK_TIER)
        has = f", {_gb(on_disk - planner.budgets.disk)} more than there is" if planner.budgets.disk else ""
        remedies.append(f"offload_dir with {_gb(on_disk)} free{has}")
    fewer = _fewer_sequences(planner)
    if fewer:
        remedies.append(f"at most {fewer:,} sequences of {planner.workload.length:,} tokens a step")
    return (
        f"beside what the device takes, host memory must hold {_gb(needed)} and may hold {_gb(planner.budgets.ram)}. "
        f"{_enough(remedies)}"
    )


def _fewer_rows(planner: Planner) -> int:
    """Most sequences of a micro-batch for which a step fits; 0 if none does, or where the plan may choose."""

    def fits(rows: int) -> bool:
        fewer = dataclasses.replace(planner.workload, rows=rows)
        return Planner(planner.machine, planner.spec, fewer, planner.config).fits()

    return 0 if planner.workload.rows is None else _most(fits, planner.workload.rows)


def _fewer_sequences(planner: Planner) -> int:
    """Most sequences of this length for which a step fits: the inputs of all of them wait for the backward."""
    workload = planner.workload

    def fits(number: int) -> bool:
        rows = None if workload.rows is None else min(workload.rows, number)
        fewer = Workload(num_sequences=number, length=workload.length, rows=rows)
        return Planner(planner.machine, planner.spec, fewer, planner.config).fits()

    return _most(fits, workload.num_sequences)


def _state_bytes(planner: Planner) -> int:
    return sum(sum(sizes.values()) for sizes in planner.sizes)


def _gb(num_bytes: int) -> str:
    """Up to the next tenth of a GB, or GB above 10: too little would be no remedy."""
    step = GB // 10 if num_bytes < 10 * GB else GB
    return f"{-(-num_bytes // step) * step / GB:g} GB"
