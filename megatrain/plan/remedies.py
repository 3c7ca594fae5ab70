"""`plan`: the best plan, or a refusal with the smallest remedies in numbers. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from megatrain.base.config import Config
from megatrain.base.errors import PlanError
from megatrain.base.units import GB, MB, format_number
from megatrain.plan.choice import Choice
from megatrain.plan.cost import LONG_ROW_TOKENS, TILE_TOKENS
from megatrain.plan.machine import Machine
from megatrain.plan.outcome import Plan
from megatrain.plan.placement import CPU, DISK_TIER, HBM_TIER, RAM
from megatrain.plan.planner import Planner
from megatrain.plan.timeline import CONTEXT_BYTES
from megatrain.plan.workload import Workload
from megatrain.spec.model import ModelSpec, with_bf16_masters

SMALLER: tuple[dict[str, str], ...] = (
    {"optimizer_compression": "8bit"},
    {"optimizer_compression": "4bit"},
    {"clip": "layer"},
    {"optimizer_compression": "8bit", "clip": "layer"},
    {"optimizer_compression": "4bit", "clip": "layer"},
    {"optimizer_compression": "4bit", "master": "bf16"},
    {"optimizer_compression": "4bit", "clip": "layer", "master": "bf16"},
)
"""Settings that need less host memory, those that change least first."""
CLOSE_BYTES = GB // 20
"""So near to the least that is enough is a remedy named."""


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
    # The shortest rows in tiles take less than the longest that run whole.
    first = LONG_ROW_TOKENS // 256 + 1
    is_tiled = config.tile_tokens is None and fits(first)
    return 256 * (first - 1 + _most(lambda steps: fits(first - 1 + steps), 2**18) if is_tiled else _most(fits, 2**18))


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
    if not planner.changed(budgets=dataclasses.replace(planner.budgets, ram=2**62)).fits():
        # Nothing else takes device memory that need not be taken.
        return (
            f"{what}: hbm_home_gb={planner.config.hbm_home_gb:g} leaves too little of {_gb(planner.budgets.hbm)} of "
            "device memory for slots, gradients and the layer at work: give less, or leave it out"
        )
    return f"{what}: {_host_refusal(planner)}"


def _smallest_on_device(planner: Planner) -> Choice:
    """With as little device memory as can be: one slot, one row, all inputs on the host."""
    rows = min(planner.workload.row_choices())
    places = tuple(CPU for _ in planner.spec.homes)
    choice = Choice(rows=rows, num_slots=1, places=places, activation_bytes=0)
    grouped = [dataclasses.replace(choice, group=group) for group in planner.groups(rows)]
    return min(grouped, key=lambda one: planner.maker.timeline(one).peak(HBM_TIER))


def _device_refusal(planner: Planner, smallest: Choice, needed: int) -> str:
    spec, workload = planner.spec, planner.workload
    largest = max((home for home in spec.homes if home.layers), key=lambda home: home.numel)
    working = planner.maker.working_bytes(smallest.rows)
    returning, passed_on = planner.maker.returning_bytes(smallest), planner.maker.passed_on_bytes(smallest)
    passing = smallest.group_tokens(workload) // workload.length
    parts = {
        "the CUDA context": CONTEXT_BYTES,
        f"slot, gradient sums and drains of {largest.name!r}": needed - working - returning - passed_on - CONTEXT_BYTES,
        "inputs of layers on their way": returning,
        f"what a layer passes to the next, of {format_number(passing, 'sequence')}": passed_on,
        f"a micro-batch of {smallest.rows} x {workload.length} in one layer": working,
    }
    # Rounded first and added then, so that a reader's sum is the one that is written.
    unit, name = (MB, "MB") if needed < GB else (GB // 10, "GB")
    counts = {what: -(-num_bytes // unit) for what, num_bytes in parts.items() if num_bytes > 0}
    total, has = sum(counts.values()), planner.budgets.hbm // unit

    def shown(count: int) -> str:
        return f"{count:,} MB" if name == "MB" else f"{count / 10:,g} GB"

    and_more = _and_on_the_host(planner, max(needed, total * unit))
    remedies = [f"a device with {shown(total - has)} more{and_more}"]
    remedies += filter(None, [_tile_remedy(planner)])
    rows = _fewer_rows(planner)
    if rows:
        remedies.append(f"micro-batches of at most {format_number(rows, 'sequence')}")
    fewer = _fewer_sequences(planner)
    if fewer:
        remedies.append(_at_most(fewer, workload))
    context = largest_context(planner.machine, spec, planner.config, workload.num_sequences)
    if 0 < context < workload.length:
        remedies.append(f"sequences of at most {context:,} tokens")
    told = ", ".join(f"{shown(count)} for {what}" for what, count in counts.items())
    return (
        f"device memory is {shown(has)} and the least that a step needs is {shown(total)}: {told}. {_enough(remedies)}"
    )


def _tile_remedy(planner: Planner) -> str:
    """Smaller tiles of tokens, or tiles at all, with which a step fits; empty if none is enough."""
    config = planner.config
    now = config.tile_tokens if config.tile_tokens and not config.compile else planner.workload.num_tokens
    for tile in (TILE_TOKENS, TILE_TOKENS // 4):
        settings = dataclasses.replace(config, tile_tokens=tile, compile=False)
        other = Planner(planner.machine, planner.spec, planner.workload, settings, planner.budgets)
        if tile < now and other.fits():
            return f"mt.init(tile_tokens={tile}{', compile=False' if config.compile else ''})"
    return ""


def _and_on_the_host(planner: Planner, device_bytes: int) -> str:
    """What would still be missing on a device that is large enough: no remedy is named that is none."""
    larger = planner.changed(budgets=dataclasses.replace(planner.budgets, hbm=device_bytes))
    if larger.fits():
        return ""
    disk = _disk_remedy(larger)
    return f", and {_ram_remedy(planner, _least_ram(larger))}{f' (or {disk})' if disk else ''}"


def _ram_remedy(planner: Planner, needed: int) -> str:
    """A limit is raised where it is what lacks, memory added where the machine has too little."""
    limit, has = planner.config.max_ram_bytes, planner.machine.ram_bytes
    if limit is None or needed <= limit:
        return f"{_gb(needed - planner.budgets.ram)} more of host memory"
    raised = f"max_ram_gb={_gb(needed).removesuffix(' GB')}"
    return raised if needed <= has else f"{_gb(needed - has)} more of host memory with {raised}"


def _least_ram(planner: Planner) -> int:
    """The least host memory with which a step fits beside the disk that there is."""
    alone = planner.changed(budgets=dataclasses.replace(planner.budgets, ram=2**62, disk=0))
    high = min(alone.maker.timeline(choice).peak(RAM) for choice in alone.few_choices())
    low = planner.budgets.ram
    while planner.budgets.disk and high - low > CLOSE_BYTES:
        middle = (low + high) // 2
        fits = planner.changed(budgets=dataclasses.replace(planner.budgets, ram=middle)).fits()
        low, high = (low, middle) if fits else (middle, high)
    return high


def _disk_remedy(planner: Planner) -> str:
    """The least disk with which a step fits beside the host memory that there is; empty if none is enough."""
    larger = planner.changed(budgets=dataclasses.replace(planner.budgets, disk=2**62))
    needed = min((larger.maker.timeline(choice).peak(DISK_TIER) for choice in larger.few_choices()), default=0)
    if not needed:
        return ""
    more = f", {_gb(needed - planner.budgets.disk)} more than there is" if planner.budgets.disk else ""
    return f"offload_dir with {_gb(needed)} free{more}"


def _disk_and_fewer_sequences(planner: Planner) -> str:
    """Where inputs of layers, which cannot go to disk, are too many for any disk to help."""
    fewer = _fewer_sequences(planner.changed(budgets=dataclasses.replace(planner.budgets, disk=2**62)))
    if not fewer:
        return ""
    workload = _with_sequences(planner.workload, fewer)
    return f"{_disk_remedy(planner.changed(workload=workload))} and {_at_most(fewer, workload)}"


def _enough(remedies: list[str]) -> str:
    only = f"What is enough: {remedies[0]}"
    return only if len(remedies) == 1 else f"Any of these is enough: {'; '.join(remedies)}"


def _host_refusal(planner: Planner) -> str:
    needed = _least_ram(planner)
    fewer = _fewer_sequences(planner)
    remedies = [
        _ram_remedy(planner, needed),
        _format_remedy(planner, or_fewer_sequences=not fewer),
        _disk_remedy(planner) or ("" if fewer else _disk_and_fewer_sequences(planner)),
        _at_most(fewer, planner.workload) if fewer else "",
    ]
    beside = (
        f"what the device and {_gb(planner.budgets.disk)} of disk take"
        if planner.budgets.disk
        else ("what the device takes")
    )
    return (
        f"beside {beside}, host memory must hold {_gb(needed)} and may hold {_gb(planner.budgets.ram)}. "
        f"{_enough([remedy for remedy in remedies if remedy])}"
    )


def _format_remedy(planner: Planner, *, or_fewer_sequences: bool) -> str:
    """The formats that change least and are enough; else, where asked for, the smallest, and the sequences that fit."""
    tried = _smaller(planner)
    for settings in tried:
        other = _with(planner, settings)
        if other.fits():
            saved = _state_bytes(planner) - _state_bytes(other)
            return f"{_told(settings)} (saves {_gb(saved)})"
    fewer = _fewer_sequences(_with(planner, tried[-1])) if tried and or_fewer_sequences else 0
    return f"{_told(tried[-1])} and {_at_most(fewer, planner.workload)}" if fewer else ""


def _smaller(planner: Planner) -> list[dict[str, str]]:
    """Of `SMALLER` what changes something here, those that change least first."""
    formats, config = planner.spec.formats, planner.config
    now = {"optimizer_compression": config.moments, "clip": config.clip, "master": formats.master}
    found: list[dict[str, str]] = []
    for settings in SMALLER:
        changes = {name: value for name, value in settings.items() if now[name] != value}
        if formats.precision != "bf16":
            changes.pop("master", None)
        is_larger = config.moments == "4bit" and "optimizer_compression" in changes
        if changes and not is_larger and changes not in found:
            found.append(changes)
    return found


def _with(planner: Planner, settings: dict[str, str]) -> Planner:
    spec = with_bf16_masters(planner.spec) if "master" in settings else planner.spec
    config = dataclasses.replace(planner.config, **settings)
    return Planner(planner.machine, spec, planner.workload, config, planner.budgets)


def _told(settings: dict[str, str]) -> str:
    return " with ".join(f'{name}="{value}"' for name, value in settings.items())


def _at_most(num_sequences: int, workload: Workload) -> str:
    return f"at most {format_number(num_sequences, 'sequence')} of {workload.length:,} tokens a step"


def _fewer_rows(planner: Planner) -> int:
    """Most sequences of a micro-batch for which a step fits; 0 if none does, or where the plan may choose."""

    def fits(rows: int) -> bool:
        fewer = dataclasses.replace(planner.workload, rows=rows)
        return planner.changed(workload=fewer).fits()

    return 0 if planner.workload.rows is None else _most(fits, planner.workload.rows)


def _fewer_sequences(planner: Planner) -> int:
    """Most sequences of this length for which a step fits: the inputs of all of them wait for the backward."""
    workload = planner.workload

    def fits(number: int) -> bool:
        return planner.changed(workload=_with_sequences(workload, number)).fits()

    return _most(fits, workload.num_sequences)


def _with_sequences(workload: Workload, number: int) -> Workload:
    rows = None if workload.rows is None else min(workload.rows, number)
    return dataclasses.replace(workload, num_sequences=number, rows=rows)


def _state_bytes(planner: Planner) -> int:
    return sum(sum(sizes.values()) for sizes in planner.sizes)


def _gb(num_bytes: int) -> str:
    """Up to the next tenth of a GB, or GB above 10: too little would be no remedy."""
    step = GB // 10 if num_bytes < 10 * GB else GB
    return f"{-(-num_bytes // step) * step / GB:g} GB"
