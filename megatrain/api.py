"""The public functions: init, stream, accumulate, and what reads a streamed model."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatrain.base.config import Config, StreamOptions
from megatrain.base.errors import UserError
from megatrain.execute.engine import Engine, engine_of
from megatrain.execute.model import (
    Initialize,
    check_model,
    install,
    make_layers,
    move_home,
    named_home_parameters,
    replace_parameters,
)
from megatrain.execute.parameters import HomeParameter
from megatrain.losses import num_target_tokens, own_loss
from megatrain.plan.placement import DISK_TIER, HBM_TIER, RAM
from megatrain.plan.rows import (
    Placement,
    activation_bytes,
    check_device_memory,
    disk_bytes,
    host_bytes,
    plan_placement,
)
from megatrain.spec.discover import FoundLayer, check_weights, find_layers
from megatrain.spec.homes import Formats, HomePlan, plan_homes
from megatrain.store.disk_memory import DiskMemory
from megatrain.store.home import Home
from megatrain.store.memory import DeviceMemory, HostMemory
from megatrain.store.tier import Tier

_config = Config()


def init(
    offload_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    max_vram_gb: float | None = None,
    max_ram_gb: float | None = None,
    optimizer_compression: bool | str = False,
    precision: str | None = None,
    device: str | None = None,
    compile: bool = False,
    master: str | None = None,
    grad_dtype: str | None = None,
    clip: str = "global",
    hbm_home_gb: float | None = None,
    defer_loading: bool = True,
) -> None:
    """Settings for the models streamed from now on. Optional: what is not said is probed.

    From then on transformers' own `from_pretrained` leaves the weights of a large model in their files, until
    `mt.stream` or `mt.Trainer` takes them straight home, or something else asks for them.

    Args:
        offload_dir: a folder, or several on different disks, for what of the homes does not fit in memory. Its files
            vanish with the process.
        max_vram_gb: device memory to use at most, in GB (1e9 bytes).
        max_ram_gb: host memory for homes at most, in GB (1e9 bytes).
        optimizer_compression: format of the moments. False: exact fp32. "lossless": exact, entropy-coded. Lossy: True
            or "4bit" (about 1 byte a parameter instead of 8), "8bit", "bf16". See docs/compression.md.
        precision: "fp32" (fp32 throughout, TF32 off), "bf16" (bf16 compute, exact fp32 master), or None: bf16 when
            TrainingArguments.bf16 is set or the model was loaded in bf16, else fp32.
        device: "cuda", "cuda:1", "cpu"; None takes CUDA if there is one.
        compile: compile each kind of block with torch.compile (faster after a start-up; last bits may differ).
        master: form of the master weights: "fp32" with fp32 compute; "split" (exact fp32 in 16 + 16 bits, the default)
            or "bf16" (stochastic rounding) with bf16 compute.
        grad_dtype: of gradients on their way home, after their sum in fp32: "fp32", "bf16", or None: as the weights.
        clip: "global" (exact norm; gradients are kept until it is known) or "layer" (each layer by its own norm, in the
            backward; none is kept; `max_norm` goes to the optimizer).
        hbm_home_gb: device memory for layers that live and are updated there; None: a fifth of what is free.
        defer_loading: False: transformers' `from_pretrained` reads all weights at once, as without this library.

    Raises UserError for a setting that cannot work.
    """
    global _config
    _config = Config(
        offload_dir=offload_dir,
        max_vram_gb=max_vram_gb,
        max_ram_gb=max_ram_gb,
        optimizer_compression=optimizer_compression,
        precision=precision,
        device=device,
        compile=compile,
        master=master,
        grad_dtype=grad_dtype,
        clip=clip,
        hbm_home_gb=hbm_home_gb,
        defer_loading=defer_loading,
    )
    # Imports transformers, which this module does without.
    from megatrain.load.deferral import defer_loading as defer

    defer(_config.defer_loading)


def stream(
    model: nn.Module,
    initialize: Initialize | None = None,
    *,
    bf16: bool | None = None,
    options: StreamOptions | None = None,
) -> nn.Module:
    """Take the model's weights home and stream its layers through the device from now on. In place; returns it.

    Prints the run's first line: parameters, layers, device, and which of compute, masters and moments are exact.

    Args:
        model: any module with repeated blocks, on the CPU (or on the meta device, with `initialize`).
        initialize: (name, shape, dtype) -> values, for weights on the meta device: they go straight home.
        bf16: what TrainingArguments.bf16 says, if there are any.
        options: how the stream runs; no result depends on it.

    Raises UserError before any work: no repeated blocks, weights that cannot be taken home, too little memory.
    """
    if isinstance(model, nn.Module) and engine_of(model) is not None:
        return model
    if torch.is_inference_mode_enabled():
        raise UserError("mt.stream inside torch.inference_mode(): its tensors could never train; call it outside")
    check_model(model, initialize)
    if not isinstance(options, StreamOptions | None):
        raise UserError(f"options={options!r} must be StreamOptions (megatrain.base.config), or None")
    if not isinstance(bf16, bool | None):
        raise UserError(f"bf16={bf16!r} must be True, False, or None to follow the model")
    config, options = _config, options or StreamOptions()
    outline = _outline(model, config, options, bf16=bf16, may_be_meta=initialize is not None)
    device, placement, memory = outline.device, outline.placement, outline.memory
    plans = placement.plans
    if device.type == "cuda":
        _prepare_cuda(device, outline.formats.precision, config)

    tiers: dict[str, Tier] = {RAM: memory, HBM_TIER: DeviceMemory(device)}
    if memory.disk is not None:
        tiers[DISK_TIER] = memory.disk
    homes = [_make_home(plan, placement, tiers) for plan in plans]
    for plan, home in zip(plans, homes, strict=True):
        home.trainable.update((field, key in placement.trainable) for key, field in plan.parameters.items())
    layers = make_layers(outline.layers, plans, homes)
    # Takes its device memory now: where there is too little, the model is still as it was.
    engine = Engine(
        homes=homes,
        resident=next((home for plan, home in zip(plans, homes, strict=True) if not plan.layers), None),
        layers=layers,
        memory=memory,
        device=device,
        formats=outline.formats,
        placement=placement,
        activation_bytes=activation_bytes(placement, outline.device_bytes),
    )
    for plan, home in zip(plans, homes, strict=True):
        move_home(model, plan, home, initialize)
    replace_parameters(model, engine, plans, homes)
    install(model, engine)
    print(engine.summary(), flush=True)
    return model


def check_fits(model: nn.Module, *, bf16: bool | None = None) -> None:
    """Raise the UserError that `stream` would, for what needs no values: the model may be on the meta device."""
    _outline(model, _config, StreamOptions(), bf16=bf16, may_be_meta=True)


def accumulate(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    loss_fn: Callable[[Any, Mapping[str, Any]], torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Forward and backward of all micro-batches of a step, layer-major: each layer crosses the link twice a step.

    Args:
        batches: keyword arguments of the model's forward, one mapping a micro-batch.
        loss_fn: (outputs, batch) -> scalar. The step's loss is the sum of what it returns: divide it yourself. None
            takes the model's own loss: normalised by the target tokens of the whole step where it can be (causal and
            masked LMs of transformers with `labels`), else the mean over micro-batches.

    Returns the micro-batches' losses (detached), which sum to the step's loss. Gradients are added to what is there.
    """
    engine = _engine(model)
    batches = _check_batches(batches, loss_fn)
    num_items = num_target_tokens(model, batches) if loss_fn is None else None

    # A key-value cache is of no use in training and would hold every layer's keys and values.
    extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def run(batch: Mapping[str, Any]) -> torch.Tensor:
        batch = {**extra, **batch}
        if loss_fn is not None:
            return loss_fn(model(**batch), batch)
        if num_items is not None:
            return own_loss(model(**batch, num_items_in_batch=num_items))
        return own_loss(model(**batch)) / len(batches)

    return engine.accumulate([lambda batch=batch: run(batch) for batch in batches])


def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Exact global L2 norm of all gradients; the factor min(1, max_norm / (norm + 1e-6)) is applied in the next step.

    Returns the norm before clipping (fp32 scalar on the CPU), as torch.nn.utils.clip_grad_norm_ does.
    """
    engine = _engine(model)
    if engine.config.clip == "layer":
        raise UserError(
            'clip="layer" clips in the backward, by the norm of each layer: give max_norm to the optimizer, '
            'mt.optim.AdamW(model, max_norm=1.0), or say mt.init(clip="global")'
        )
    if not (isinstance(max_norm, (int, float)) and max_norm >= 0):
        raise UserError(f"max_norm={max_norm!r} must be a number and not negative")
    return engine.clip(max_norm)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(original name, copy of the exact master on the CPU), one by one. Waits for the updates it needs."""
    _engine(model)
    for name, parameter in named_home_parameters(model):
        yield name, parameter.master()


def named_gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(original name, gradient on the CPU), one by one, for parameters that have one. Views the gradient at home."""
    _engine(model)
    for name, parameter in named_home_parameters(model):
        gradient = parameter.grad
        if gradient is not None:
            yield name, gradient.cpu()


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all exact masters and persistent buffers by original name. For small models.

    Tied parameters are there under each of their names, as one tensor.
    """
    _engine(model)
    state = model.state_dict(keep_vars=True)
    copies = {id(value): _copy(value) for value in state.values()}
    return {name: copies[id(value)] for name, value in state.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, HomeParameter):
        return value.master()
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def stats(model: nn.Module) -> dict[str, Any]:
    """Visits a home, transfers, bytes, prediction hits and misses, and stalls since the model was streamed."""
    return _engine(model).stats()


def _check_batches(batches: Any, loss_fn: Any) -> list[Mapping[str, Any]]:
    """The micro-batches as a list."""
    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        what = "one micro-batch" if isinstance(batches, Mapping) else f"a {type(batches).__name__}"
        raise UserError(f"mt.accumulate takes a list of micro-batches, got {what}: write mt.accumulate(model, [batch])")
    batches = list(batches)
    if not batches:
        raise UserError("mt.accumulate got no micro-batches: give it at least one")
    for batch in batches:
        if not isinstance(batch, Mapping):
            raise UserError(
                f"a micro-batch must be a dict of the model's arguments, got a {type(batch).__name__}: "
                "give mt.accumulate a list of dicts"
            )
    if loss_fn is not None and not callable(loss_fn):
        raise UserError(f"loss_fn={loss_fn!r} must be a function of (outputs, batch), or None for the model's own loss")
    return batches


def _engine(model: nn.Module) -> Engine:
    engine = engine_of(model) if isinstance(model, nn.Module) else None
    if engine is None:
        raise UserError(f"this {type(model).__name__} is not streamed: call mt.stream(model) first")
    return engine


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Outline:
    """What a model becomes, as far as shapes tell. Nothing is allocated."""

    layers: list[FoundLayer]
    device: torch.device
    formats: Formats
    placement: Placement
    memory: HostMemory
    device_bytes: int | None


def _outline(
    model: nn.Module, config: Config, options: StreamOptions, *, bf16: bool | None, may_be_meta: bool
) -> _Outline:
    """Raises UserError: no repeated blocks, weights that cannot be taken home, too little memory."""
    check_weights(model, may_be_meta=may_be_meta)
    layers = find_layers(model)
    device = _device(config)
    precision = _precision(model, config, bf16)
    formats = Formats(precision=precision, master=config.master_for(precision), grad_dtype=config.grad_dtype)
    plans = plan_homes(model, layers, formats)
    options = check_device_memory(plans, config, options)
    disk = None if config.offload_dir is None else DiskMemory(config.offload_folders)
    memory = HostMemory(max_bytes=config.max_ram_bytes, disk=disk, pin=device.type == "cuda")
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    device_bytes = _device_bytes(device, config)
    ram_bytes = None if disk is None else memory.free_bytes()
    placement = plan_placement(plans, trainable, config, options, device_bytes, ram_bytes)
    if disk is None and placement.has_disk:
        raise UserError("places: parts of homes are to live on disk: say where, mt.init(offload_dir=...)")
    memory.require(host_bytes(placement), f"training {type(model).__name__}")
    if disk is not None:
        disk.require(disk_bytes(placement), f"training {type(model).__name__}")
    if config.moments == "lossless":
        memory.reserve(placement.part_bytes("moments", RAM))  # a moment maps its own memory
    return _Outline(
        layers=layers,
        device=device,
        formats=formats,
        placement=placement,
        memory=memory,
        device_bytes=device_bytes,
    )


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


def _make_home(plan: HomePlan, placement: Placement, tiers: Mapping[str, Tier]) -> Home:
    keeps_gradients = placement.config.clip == "global"
    place = placement.places[plan]
    return Home(plan.name, plan.fields, tiers, plan.grad_dtype, place, keeps_gradients=keeps_gradients)


def _prepare_cuda(device: torch.device, precision: str, config: Config) -> None:
    torch.cuda.set_device(device)
    if config.max_vram_bytes is not None:
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, config.max_vram_bytes / total_bytes), device)
    if precision == "fp32":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
