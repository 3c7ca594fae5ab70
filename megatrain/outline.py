"""What a model becomes when it is streamed, as far as shapes tell: layers, formats, device, where everything will live.

Nothing of the model's size is allocated here, and whatever cannot be is refused.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from megatrain.base.cgroup import free_host_bytes
from megatrain.base.config import Config, StreamOptions
from megatrain.base.errors import UserError
from megatrain.batch_rows import grouped
from megatrain.execute.attention import check_attention
from megatrain.execute.dropped import collect_dropped
from megatrain.execute.merging import Merging
from megatrain.leaving import LeavingWeights
from megatrain.plan.cost import mergeable_tokens
from megatrain.plan.outcome import Plan
from megatrain.plan.placement import RAM
from megatrain.plan.rows import (
    Placement,
    check_device_memory,
    disk_bytes,
    host_bytes,
    plan_placement,
    working_room_bytes,
)
from megatrain.plan.timeline import PROCESS_BYTES
from megatrain.plan.workload import Workload
from megatrain.row_loss import why_not_merged
from megatrain.run_plan import options_of, plan_run, spec_of
from megatrain.spec.discover import FoundLayer, check_weights, find_layers
from megatrain.spec.homes import Formats, plan_homes
from megatrain.spec.model import with_whole_logits
from megatrain.store.disk_memory import DiskMemory
from megatrain.store.memory import HostMemory

HOST_SHARE = 0.25
"""Of the host memory that is free beside the homes, for one layer at work on merged micro-batches where the host is the
device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outline:
    """What a model becomes, as far as shapes tell. Nothing is allocated."""

    layers: list[FoundLayer]
    device: torch.device
    formats: Formats
    placement: Placement
    memory: HostMemory
    device_bytes: int | None
    leaving: LeavingWeights
    plan: Plan | None
    """Where there is a workload and a GPU."""
    merging: Merging


def outline_model(
    model: nn.Module,
    config: Config,
    options: StreamOptions,
    *,
    bf16: bool | None,
    may_be_meta: bool,
    workload: Workload | None = None,
) -> Outline:
    """Raises UserError: no repeated blocks, weights that cannot be taken home, too little memory."""
    check_weights(model, may_be_meta=may_be_meta)
    layers = find_layers(model)
    device = _device(config)
    if device.type == "cuda" or config.offload_dir is not None:
        collect_dropped()  # what is free decides what lives where
    check_attention(config, attention_of(model), device)
    precision = _precision(model, config, bf16)
    formats = Formats(precision=precision, master=config.master_for(precision), grad_dtype=config.grad_dtype)
    plans = plan_homes(model, layers, formats)
    plan = None
    reason = why_unmerged(model, config, precision, workload)
    if workload is not None and device.type == "cuda" and options.places is None:
        merges = not (reason or workload.varied)
        plan = plan_run(model, formats, config, dataclasses.replace(workload, merges=merges), device)
        options = options_of(plan, options)
    options = check_device_memory(plans, config, options)
    disk = None if config.offload_dir is None else DiskMemory(config.offload_folders)
    memory = HostMemory(max_bytes=config.max_ram_bytes, disk=disk, pin=device.type == "cuda")
    if device.type == "cuda" and config.max_ram_bytes is not None:
        memory.reserve(PROCESS_BYTES)  # the limit is for all of the process
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    device_bytes = _device_bytes(device, config)
    ram_bytes = None if disk is None else memory.free_bytes()
    placement = plan_placement(plans, trainable, config, options, device_bytes, ram_bytes)
    if disk is None and placement.has_disk:
        raise UserError("places: parts of homes are to live on disk: say where, mt.init(offload_dir=...)")
    leaving = LeavingWeights(model, memory, host_bytes(placement), f"training {type(model).__name__}")
    try:
        leaving.require()
    except UserError:
        collect_dropped()
        leaving.require()
    if disk is not None:
        disk.require(disk_bytes(placement), f"training {type(model).__name__}", memory.raisable_bytes())
    if config.moments == "lossless":
        memory.reserve(placement.part_bytes("moments", RAM))  # a moment maps its own memory
    merging = _merging(model, formats, placement, device_bytes, plan, reason)
    merging.example = _example(workload, merging.most_tokens)
    return Outline(
        layers=layers,
        device=device,
        formats=formats,
        placement=placement,
        memory=memory,
        device_bytes=device_bytes,
        leaving=leaving,
        plan=plan,
        merging=merging,
    )


def attention_of(model: nn.Module) -> str | None:
    """`attn_implementation` of a model of transformers."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None)


def why_unmerged(model: nn.Module, config: Config, precision: str, workload: Workload | None) -> str:
    """Why micro-batches are run as they are, as far as settings and shapes tell; empty where they may be merged."""
    if config.is_exact(precision):
        return "exact=True" if config.exact else "with fp32 compute they are only with mt.init(exact=False)"
    if workload is not None and workload.reads_logits:
        return "the loss is one of your own, which may couple rows"
    return why_not_merged(model)


def _merging(
    model: nn.Module, formats: Formats, placement: Placement, device_bytes: int | None, plan: Plan | None, reason: str
) -> Merging:
    """As the plan says, or up to as many tokens as the memory that is left has room for.

    Args:
        device_bytes: device memory that may be used in all; None: the host is the device.
        reason: why none are, or nothing.
    """
    if reason:
        return Merging(0, reason)
    if plan is not None:
        return Merging(plan.choice.rows * plan.workload.length)
    if device_bytes is None:
        room_bytes = int(HOST_SHARE * max(0, free_host_bytes() - host_bytes(placement)))
    else:
        room_bytes = working_room_bytes(placement, device_bytes)
    config, spec = placement.config, spec_of(model, formats)
    spec = with_whole_logits(spec) if config.logits_in_pieces is False else spec
    most_tokens = mergeable_tokens(spec, room_bytes, compiled=config.compile)
    return Merging(most_tokens, "" if most_tokens else "memory has no room for merged ones")


def _example(workload: Workload | None, most_tokens: int) -> str:
    """What becomes of a step's micro-batches, where they are known, and of one length."""
    if workload is None or workload.rows is None or workload.varied:
        return ""
    number = -(-workload.num_sequences // workload.rows)
    groups = grouped([0] * number, [workload.rows * workload.length] * number, most_tokens)
    of = f"{number:,} of {workload.rows} x {workload.length:,}"
    return f"{of} into {len(groups):,}" if len(groups) < number else ""


def _device(config: Config) -> torch.device:
    if config.device is None:
        config = dataclasses.replace(config, device="cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise UserError(f"device={config.device!r} is not known: use 'cuda', 'cuda:0' or 'cpu'") from error
    if device.type not in ("cuda", "cpu"):
        raise UserError(f"device={config.device!r} is not supported: use 'cuda' or 'cpu'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={config.device!r}: PyTorch sees no CUDA device; use device='cpu' or None")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device={config.device!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    # Streams and memory limits belong to one device: name it.
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def _precision(model: nn.Module, config: Config, bf16: bool | None) -> str:
    if config.precision is not None:
        return config.precision
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if torch.float16 in dtypes:
        raise UserError("the model is in float16: load it in float32 or bfloat16, or say mt.init(precision=...)")
    return "bf16" if bf16 or torch.bfloat16 in dtypes else "fp32"


def _device_bytes(device: torch.device, config: Config) -> int | None:
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return min(free_bytes, config.max_vram_bytes or free_bytes)
    return None


def prepare_cuda(device: torch.device, precision: str, config: Config) -> None:
    torch.cuda.set_device(device)
    if config.max_vram_bytes is not None:
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, config.max_vram_bytes / total_bytes), device)
    if precision == "fp32":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
