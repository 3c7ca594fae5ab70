"""The plan of one run on this machine: made before anything is loaded, where the work of a step is known.

profile of the machine (doctor's, or the catalogue's) with what is free now -> planner -> options of the stream
"""

from __future__ import annotations

import dataclasses
import datetime
from collections import Counter

import psutil
import torch
from torch import nn

from megatrain.base.cgroup import free_host_bytes
from megatrain.base.config import Config, StreamOptions
from megatrain.base.errors import UserError
from megatrain.base.paths import existing_parent, machine_profile_path, user_path
from megatrain.execute.engine import Engine
from megatrain.plan.calibrate import Measured, calibrated
from megatrain.plan.choice import Choice, Kept
from megatrain.plan.explain import describe
from megatrain.plan.machine import Machine
from megatrain.plan.machines import nearest_machine
from megatrain.plan.outcome import DEVICE_MARGIN, Plan
from megatrain.plan.placement import HBM_TIER, RAM
from megatrain.plan.planner import Planner
from megatrain.plan.remedies import plan
from megatrain.plan.replan import WORTH_A_CHANGE, Change, Spare, better_choice
from megatrain.plan.rows import NUM_UPDATE_SLOTS, UPDATE_SLOT_BYTES
from megatrain.plan.timeline import CONTEXT_BYTES
from megatrain.plan.workload import Workload
from megatrain.spec.homes import Formats
from megatrain.spec.model import ModelSpec, model_spec

LEARNT = (
    "matmul_flops_per_second",
    "fp32_flops_per_second",
    "attention_flops_per_second",
    "hbm_bytes_per_second",
    "update_ns_per_parameter",
)
SPARE_SHARE = 0.8
"""Of the device memory that was free at the peak of the first steps, for homes and slots that are added: longer batches
and gaps of the allocator are still to come."""


def plan_run(model: nn.Module, formats: Formats, config: Config, workload: Workload, device: torch.device) -> Plan:
    """The fastest plan for this model and workload within what is free now.

    Raises UserError where nothing fits, with the smallest remedies.
    """
    return plan(machine_at_hand(config, device), spec_of(model, formats), workload, config)


def spec_of(model: nn.Module, formats: Formats) -> ModelSpec:
    return model_spec(model, formats, type(model).__name__)


def predict_run(engine: Engine, spec: ModelSpec, workload: Workload) -> Plan | None:
    """What the engine's own placement will take, whether planned or not. None for a machine without rates."""
    placement = engine.placement
    try:
        planner = Planner(
            machine_at_hand(engine.config, engine.device),
            spec,
            workload,
            engine.config,
            shares_device=placement.options.device_room_bytes is not None,
        )
    except UserError:
        return None
    choice = Choice(
        rows=workload.rows or workload.num_sequences,
        num_slots=placement.options.num_slots,
        places=tuple(placement.places[home] for home in placement.plans),
        activation_bytes=engine.activations.budget_bytes,
        kept=Kept(**Counter(placement.options.kept_layers.values())),
        group=placement.options.micro_batches_a_visit,
    )
    input_bytes = planner.maker.input_bytes(choice)
    return planner.plan_of(dataclasses.replace(choice, activation_bytes=min(choice.activation_bytes, input_bytes)))


def learn(plan: Plan, measured: Measured) -> str:
    """Keep the rates of a run that has been measured in the profile that doctor made, and say what they change.

    Without a profile nothing is kept: the other rates would be a guess.
    """
    machine = calibrated(plan, measured)
    planner = Planner(machine, plan.spec, plan.workload, plan.config, plan.budgets)
    now = planner.simulate(plan.choice).step_seconds
    best = planner.best()
    parts = [f"with the rates of these steps {now:.3g} s are predicted"]
    if best is not None and best.step_seconds < (1 - WORTH_A_CHANGE) * now:
        parts.append(f"{best.step_seconds:.3g} s if it began anew: {describe(best)}")
    profile = _profile()
    if profile is not None:
        from megatrain.probe.measure import save_machine  # the room of probes is of no use to other runs

        rates = {name: getattr(machine, name) for name in LEARNT}
        source = f"{profile.source.partition(';')[0]}; compute and update as in a run of {datetime.date.today()}"
        save_machine(dataclasses.replace(profile, source=source, **rates), machine_profile_path())
        parts.append("kept in the profile for the next plan")
    return f"megatrain: {', '.join(parts)}"


def propose_change(engine: Engine, plan: Plan, measured: Measured) -> Change | None:
    """What the run should change of itself now that rates and memory of its steps have been measured, if anything."""
    planner = Planner(calibrated(plan, measured), plan.spec, plan.workload, plan.config, plan.budgets)
    mover, options = engine.mover, engine.placement.options
    running = dataclasses.replace(plan.choice, places=mover.places, num_slots=options.num_slots)
    home_bytes = [mover.device_bytes(home) if mover.may_move(home) else None for home in engine.homes]
    spare = Spare(num_bytes=_spare_device_bytes(engine), home_bytes=home_bytes, slot_bytes=engine.transport.slot_bytes)
    return better_choice(planner, running, spare)


def _spare_device_bytes(engine: Engine) -> int:
    """What the steps so far have left of the device's memory at their peak, less a share for those to come."""
    peak_bytes = torch.cuda.max_memory_reserved(engine.device)
    if engine.config.clip == "layer":
        # Gradients that nobody keeps need slabs there (`LaneStream.prepare_move`), if there are none yet.
        peak_bytes += engine.placement.ring_bytes(engine.placement.plans)
    free_bytes, total_bytes = torch.cuda.mem_get_info(engine.device)
    left_bytes = free_bytes + torch.cuda.memory_reserved(engine.device) - peak_bytes
    if engine.config.max_vram_bytes is None:
        left_bytes -= int(DEVICE_MARGIN * total_bytes)
    else:
        left_bytes = min(left_bytes, engine.config.max_vram_bytes - CONTEXT_BYTES - peak_bytes)
    return max(0, int(SPARE_SHARE * left_bytes))


def machine_at_hand(config: Config, device: torch.device) -> Machine:
    """This machine: rates that doctor measured, else those of the catalogue's nearest; sizes are what is free."""
    machine = _profile() or nearest_machine(torch.cuda.get_device_name(device))
    hbm_bytes, _ = torch.cuda.mem_get_info(device)
    folders = [existing_parent(user_path(folder, "offload_dir")) for folder in config.offload_folders]
    free = [psutil.disk_usage(str(folder)).free for folder in folders]
    return dataclasses.replace(
        machine,
        hbm_bytes=hbm_bytes,
        ram_bytes=free_host_bytes(),
        # Extents are striped, so the smallest folder is the measure.
        disk_bytes=len(free) * min(free, default=0),
    )


def disk_write_rate() -> float | None:
    """Bytes a second, of the folder that doctor measured. None: it has measured none."""
    profile = _profile()
    return profile.disk_write_bytes_per_second if profile is not None else None


def options_of(plan: Plan, options: StreamOptions) -> StreamOptions:
    """The stream as it was planned. What `options` say outright holds."""
    names = (home.name for home in plan.spec.homes)
    spare_bytes = plan.budgets.ram - plan.timeline.peak(RAM)
    activation_bytes = plan.choice.activation_bytes if options.activation_bytes is None else options.activation_bytes
    return dataclasses.replace(
        options,
        places=dict(zip(names, plan.choice.places, strict=True)),
        num_slots=plan.choice.num_slots,
        activation_bytes=activation_bytes,
        kept_layers={plan.spec.layers[at].name: keeps for at, keeps in plan.choice.kept_layers(plan.spec).items()},
        kept_bytes=plan.kept_bytes,
        micro_batches_a_visit=plan.group_as_given,
        room_bytes=plan.timeline.rooms[RAM],
        device_room_bytes=plan.timeline.rooms.get(HBM_TIER),
        num_update_slots=NUM_UPDATE_SLOTS + max(0, spare_bytes) // UPDATE_SLOT_BYTES,
    )


def _profile() -> Machine | None:
    """What doctor kept. A profile without a GPU, or that cannot be read, is of no use."""
    path = machine_profile_path()
    try:
        machine = Machine.from_json(path.read_bytes())
    except (OSError, UserError):
        return None
    return machine if machine.hbm_bytes else None
