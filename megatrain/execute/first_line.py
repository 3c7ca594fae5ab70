"""What a run's states are, in words: which are exact, which are lossy, and what would be exact instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.base.config import Config
from megatrain.base.units import GB, format_bytes, format_count, format_number
from megatrain.execute.templates import group_templates
from megatrain.plan.explain import describe_kept
from megatrain.plan.placement import DISK_TIER, PARTS, RAM
from megatrain.plan.rows import memory_rows
from megatrain.spec.homes import Formats

if TYPE_CHECKING:
    from megatrain.execute.engine import Engine

MASTERS = {
    "fp32": "fp32 throughout (TF32 off)",
    "split": "bf16 compute, exact fp32 master (split 16+16 bits)",
    "bf16": 'bf16 compute, LOSSY bf16 master (stochastic rounding; exact: master="split")',
}
_ALTERNATIVE = 'exact: optimizer_compression=False, or "lossless"'
MOMENTS = {
    "fp32": "exact fp32 moments",
    "lossless": "exact moments (fp32, losslessly coded)",
    "bf16": f"LOSSY bf16 moments (stochastic rounding; {_ALTERNATIVE})",
    "8bit": f"LOSSY 8-bit moments ({_ALTERNATIVE})",
    "4bit": f"LOSSY 4-bit moments ({_ALTERNATIVE})",
}


def describe_states(formats: Formats, config: Config) -> str:
    """For the run's first line."""
    parts = [MASTERS[formats.master], MOMENTS[config.moments]]
    if formats.gradient_dtype_name == "bf16":
        parts.append('gradients summed in fp32 and sent home in bf16 (exact: grad_dtype="fp32")')
    if config.clip == "layer":
        parts.append(
            'gradients clipped layer by layer and not kept (exact global norm: clip="global"), so an update that fails '
            "leaves the last checkpoint to go on from"
        )
    return ", ".join(parts)


def describe_run(engine: Engine) -> str:
    """The run's first line."""
    num_parameters = sum(home.num_parameters for home in engine.homes)
    templates = group_templates(engine.layers)
    num_blocks = sum(len(members) for members in templates.values())
    kinds = f" of {len(templates)} kinds" if len(templates) > 1 else ""
    num_on_device = sum(home.place.is_resident for home in engine.homes)
    living = f" ({format_number(num_on_device, 'home')} on it)" if num_on_device else ""
    on_disk = _describe_disk(engine)
    compiled = ", blocks compiled at their first call" if engine.config.compile else ""
    kept = f"; {describe_kept(engine.plan)}" if engine.plan is not None and any(engine.plan.choice.kept) else ""
    attention = f", {engine.attention.describe()}" if engine.attention.order else ""
    checked = ", transfers checked" if engine.transport.hops.verifies else ""
    throttle = engine.transport.hops.throttle
    link = "link" if engine.device.type == "cuda" else "copies, in place of a link,"
    held = "" if throttle is None else f", {link} held down to {throttle.bytes_per_second / GB:g} GB/s each way"
    merged = f", {engine.merging.describe()}" if engine.merging.describe() else ""
    return (
        f"megatrain: {format_count(num_parameters)} parameters, {num_blocks} blocks{kinds} and "
        f"{len(engine.layers) - num_blocks} other layers streamed through {engine.device}{living}; "
        f"{describe_states(engine.formats, engine.config)}{on_disk}{compiled}{attention}{checked}{held}{kept}{merged}"
    )


def _describe_disk(engine: Engine) -> str:
    rows = [row for row in memory_rows(engine.placement) if row.tier == DISK_TIER]
    if not rows:
        return ""
    total = format_bytes(sum(row.num_bytes for row in rows))
    names = ", ".join(row.name.split(",")[0].split(" (")[0] for row in rows)
    in_host = sum(engine.placement.part_bytes(part, RAM) for part in PARTS)
    slots = format_bytes(engine.placement.host_slot_bytes())
    homes = f"{format_bytes(in_host)} of homes and " if in_host else ""
    return f", {total} on disk ({names}), in host memory {homes}{slots} of slots for the disk"
