"""A plan as data that can be printed: memory by row and tier beside conventional training, time by lane. Pure."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from megatrain.base.trace import Piece, chrome_trace
from megatrain.base.units import format_number
from megatrain.plan.cost import activation_bytes, tile_of, working_bytes
from megatrain.plan.outcome import Plan
from megatrain.plan.placement import TIERS
from megatrain.plan.simulate import COMPUTE, Simulation
from megatrain.plan.timeline import ROW_NAMES
from megatrain.spec.model import ModelSpec, with_whole_logits


def conventional_state_bytes(num_parameters: int) -> dict[str, int]:
    """Row -> bytes of plain PyTorch in fp32 with Adam: all of it in device memory."""
    return {"weights": 4 * num_parameters, "gradients": 4 * num_parameters, "moments": 8 * num_parameters}


def conventional_bytes(plan: Plan) -> dict[str, int]:
    """Row -> bytes that plain PyTorch would need on the device, with all activations of one sequence."""
    spec = with_whole_logits(plan.spec)
    one = dataclasses.replace(plan.workload, num_sequences=1, rows=1)
    blocks = [layer for layer in spec.layers if layer.kind == "block"]
    kept = sum(activation_bytes(spec, layer, one.length, compiled=False) for layer in blocks)
    head = max(
        (working_bytes(spec, layer, one, 1, compiled=False) for layer in spec.layers if layer.kind == "head"), default=0
    )
    return {**conventional_state_bytes(spec.num_parameters), "activations": int(kept * one.length) + head}


def memory_table(plan: Plan) -> dict[str, dict[str, int]]:
    """Row -> tier -> bytes, at the moment at which that tier is fullest. Each tier's rows add up to its peak."""
    found: dict[str, dict[str, int]] = {name: dict.fromkeys(TIERS, 0) for name in ROW_NAMES}
    for row in plan.timeline.rows():
        found[row.name][row.tier] += row.num_bytes
    return found


def bottleneck(simulation: Simulation) -> tuple[str, str]:
    """The lane that decides the step's length, and why: compute if it hardly waits, else the one for which it waits
    longest, and for what work of that lane."""
    stalls = simulation.stall_seconds()
    total = sum(stalls.values())
    if total < 0.05 * simulation.step_seconds:
        return COMPUTE, "it hardly waits"
    busy = simulation.busy_seconds()
    update_lane = "cpu" if busy.get("cpu", 0.0) >= busy.get("update", 0.0) else "update"
    waits: dict[str, float] = defaultdict(float)
    for cause, seconds in stalls.items():
        waits[_CAUSES.get(cause, update_lane)] += seconds
    lane = max(waits, key=lambda name: waits[name])
    cause = max((name for name in stalls if _CAUSES.get(name, update_lane) == lane), key=lambda name: stalls[name])
    return lane, f"compute waits {total / simulation.step_seconds:.0%} of the step, mostly for: {cause}"


_OF_UPDATES = ("update", "read states", "stage states", "unstage states", "write states")


def why_late(plan: Plan) -> str:
    """Why the compute lane waits for updates whose lane has time left: they begin behind the backward, where the norm
    of all gradients is known. Empty where that is not so."""
    simulation = plan.simulation
    stalls = simulation.stall_seconds()
    lane, _ = bottleneck(simulation)
    is_idle = simulation.busy_seconds().get(lane, 0.0) < 0.9 * simulation.step_seconds
    of_updates = lane != COMPUTE and max(stalls, key=lambda name: stalls[name]) in _OF_UPDATES
    if plan.config.clip != "global" or not (of_updates and is_idle):
        return ""
    return 'updates begin only behind the backward, where the exact norm is known (clip="layer" begins earlier)'


_CAUSES = {
    "fetch": "h2d",
    "bring input": "h2d",
    "stage states": "h2d",
    "drain": "d2h",
    "unstage states": "d2h",
    "read states": "disk",
    "read weights": "disk",
    "write states": "disk",
    "write gradients": "disk",
}


def has_experts(spec: ModelSpec) -> bool:
    """Whether a token goes through a part of the blocks alone: then 6 x parameters x tokens says nothing."""
    blocks = {layer.home for layer in spec.layers if layer.kind == "block"}
    held = sum(field.numel for index in blocks for field in spec.homes[index].fields)
    used = sum(layer.matrix_parameters for layer in spec.layers if layer.kind == "block")
    return used < held / 2


def describe(plan: Plan) -> str:
    """Where things live and how rows are split, in words."""
    choice, spec = plan.choice, plan.spec
    num_homes = sum(bool(home.layers) for home in spec.homes)
    num_micro = -(-plan.workload.num_sequences // choice.rows)
    together = f", {choice.group} at a time" if choice.group is not None and choice.group < num_micro else ""
    sentences = [f"{_micro_batches(plan)}{together}"]
    on_device = plan.num_on_device
    if on_device == num_homes:
        sentences.append("all layers live and are updated on the device")
    else:
        where = "through the device" if any(place.is_staged for place in choice.places) else "by the CPU"
        which = f"{num_homes - on_device} of {num_homes}" if on_device else f"all {num_homes}"
        slots = format_number(choice.num_slots, "slot")
        sentences.append(f"{which} layers stream through {slots}, updated {where}")
        if on_device:
            sentences.append(f"the first {on_device} live on the device")
    if tile := tile_tokens(plan):
        sentences.append(f"what blocks do for each token alone runs in tiles of {tile:,} tokens")
    sentences += filter(None, [describe_kept(plan)])
    if max(plan.timeline.moving["ram", "activations"]):
        sentences.append("layer inputs beyond the device's room go to host memory")
    for part, name in (
        ("moments", "moments"),
        ("low", "low halves"),
        ("weights", "weights"),
        ("gradients", "gradients"),
    ):
        # Of homes of layers, as they are counted above: what belongs to no layer has a home, too.
        homes = zip(spec.homes, choice.places, strict=True)
        count = sum(bool(home.layers) and place.tiers[part] == "disk" for home, place in homes)
        if count:
            sentences.append(f"{name} of {count} layers on disk")
    return "; ".join(sentences)


_KEPT = {
    "all": "what is computed inside",
    "products": "what matrix products and attention give",
    "input": "the input alone",
}


def describe_kept(plan: Plan) -> str:
    """What blocks keep that they compute inside; empty where none keeps anything."""
    kept, num_blocks = plan.choice.kept, plan.spec.num_blocks
    if not any(kept):
        return ""
    if kept.all == num_blocks:
        return "all blocks keep what they compute for the backward"
    parts: list[str] = []
    for name, count in kept._asdict().items():
        if parts:
            which = f"the {count} before"
        elif count == num_blocks:
            which = "all blocks keep"
        else:
            which = "the last block keeps" if count == 1 else f"the last {count} of {num_blocks} blocks keep"
        parts += [f"{which} {_KEPT[name]}"] if count else []
    others = "" if sum(kept) == num_blocks else ", the others compute it again"
    return f"{', '.join(parts)} for the backward{others}"


def _micro_batches(plan: Plan) -> str:
    workload = plan.workload

    def of(rows: int) -> str:
        number = -(-workload.num_sequences // rows)
        up_to = "up to " if workload.num_sequences % rows else ""
        return f"{number} micro-batch{'es' if number > 1 else ''} of {up_to}{rows} x {workload.length:,} tokens"

    if workload.rows is None or plan.num_merged == 1:
        return of(plan.choice.rows)
    return f"{of(workload.rows)}, merged into {of(plan.choice.rows)} (equal within rounding; exact=True: not)"


def tile_tokens(plan: Plan) -> int | None:
    """Tokens of a tile, in all rows of a micro-batch; None: no block runs in tiles."""
    rows, length = plan.choice.rows, plan.workload.length
    return next((rows * tile for layer in plan.spec.layers if (tile := tile_of(plan.spec, layer, rows, length))), None)


def as_data(plan: Plan) -> dict[str, Any]:
    """Everything that is printed, for programs. Bytes and seconds."""
    spec, workload, simulation = plan.spec, plan.workload, plan.simulation
    (lane, why), late = bottleneck(simulation), why_late(plan)
    return {
        "model": {
            "name": spec.name,
            "parameters": spec.num_parameters,
            "active_parameters": spec.active_parameters,
            "blocks": spec.num_blocks,
            "max_length": spec.max_length,
        },
        "machine": dataclasses.asdict(plan.machine),
        "workload": {"sequences": workload.num_sequences, "length": workload.length, "tokens": workload.num_tokens},
        "formats": {
            "precision": spec.formats.precision,
            "master": spec.formats.master,
            "moments": plan.config.moments,
            "clip": plan.config.clip,
        },
        "plan": {
            "rows": plan.choice.rows,
            "merged": plan.num_merged,
            "tile_tokens": tile_tokens(plan),
            "slots": plan.choice.num_slots,
            "homes_on_device": plan.num_on_device,
            "activation_bytes_on_device": plan.choice.activation_bytes,
            "blocks_that_keep": plan.choice.kept._asdict(),
            "kept_bytes": plan.kept_bytes,
            "places": {home.name: str(place) for home, place in zip(spec.homes, plan.choice.places, strict=True)},
            "words": describe(plan),
        },
        "memory": {
            "rows": memory_table(plan),
            "peak": {tier: plan.timeline.peak(tier) for tier in TIERS},
            "budget": dataclasses.asdict(plan.budgets),
            "conventional": conventional_bytes(plan),
        },
        "time": {
            "step_seconds": plan.step_seconds,
            "tokens_per_second": plan.tokens_per_second,
            "disk_written_bytes": plan.disk_written_bytes,
            "tflops_published": plan.published_tflops,
            "tflops_counted": plan.counted_tflops,
            "bottleneck": lane,
            "why": f"{why}; {late}" if late else why,
            "busy_seconds": simulation.busy_seconds(),
            "stall_seconds": simulation.stall_seconds(),
        },
    }


def simulated_trace(plan: Plan) -> Mapping[str, Any]:
    """The lanes of all steps that were simulated, as a Chrome trace with what was predicted under `otherData`."""
    simulation = plan.simulation
    pieces = [
        Piece(lane=task.lane, what=task.what, name=task.name, start=span.start, end=span.end, after=task.after)
        for task, span in zip(simulation.tasks, simulation.spans, strict=True)
    ]
    stalls = [
        Piece(lane=COMPUTE, what="stall", name=stall.cause, start=stall.start, end=stall.end, after=(stall.behind,))
        for stall in simulation.stalls()
    ]
    facts = {"machine": plan.machine.name, "step_seconds": plan.step_seconds, "is_predicted": True}
    return chrome_trace([*pieces, *stalls], facts)
