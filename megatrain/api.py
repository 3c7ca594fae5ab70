"""The public functions: init, stream, accumulate, and what reads a streamed model."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatrain.attention_choice import choose_attention
from megatrain.base.config import Config, StreamOptions
from megatrain.base.errors import UserError
from megatrain.base.names import refusing_unknown
from megatrain.batch_rows import num_tokens
from megatrain.execute.engine import Engine, engine_of
from megatrain.execute.model import (
    check_model,
    install,
    make_layers,
    named_home_parameters,
    replace_parameters,
)
from megatrain.execute.moving import Initialize, move_homes
from megatrain.execute.parameters import HomeParameter
from megatrain.execute.retry import StepTooLargeError
from megatrain.losses import num_target_tokens, own_loss
from megatrain.micro_batches import MicroBatches, explained
from megatrain.outline import attention_of, outline_model, prepare_cuda
from megatrain.plan.placement import DISK_TIER, HBM_TIER, RAM
from megatrain.plan.rows import (
    Placement,
    activation_bytes,
)
from megatrain.plan.workload import Workload
from megatrain.run_plan import learn, predict_run, propose_change, spec_of
from megatrain.save.card import write_model_card
from megatrain.store.buffers import BufferPool
from megatrain.store.home import Home
from megatrain.store.memory import DeviceMemory, HostMemory
from megatrain.store.tier import Tier

_config = Config()
_workload: Workload | None = None


@refusing_unknown("mt.init")
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
    workload: Workload | None = None,
    defer_loading: bool = True,
    replan: bool = True,
    save_in_background: bool = True,
    on_save_error: str = "warn",
    verify_transfers: bool = False,
    max_link_gb_s: float | None = None,
    logits_in_pieces: bool | None = None,
    attention: str | None = None,
    exact: bool | None = None,
    tile_tokens: int | bool | None = None,
) -> None:
    """Settings for the models streamed from now on. Optional: what is not said is probed.

    Args:
        offload_dir: a folder, or several on different disks, for what does not fit in memory, until the process ends.
        max_vram_gb: device memory to use at most, in GB (1e9 bytes).
        max_ram_gb: host memory to use at most, in GB (1e9 bytes): with a GPU of the whole process, else for homes.
        optimizer_compression: format of the moments. False: exact fp32. "lossless": exact, entropy-coded. Lossy: True
            or "4bit" (about 1 byte a parameter instead of 8), "8bit", "bf16". See docs/compression.md.
        precision: "fp32" (TF32 off), "bf16" (exact fp32 master); None: bf16 if TrainingArguments or the model say so.
        device: "cuda", "cuda:1", "cpu"; None takes CUDA if there is one.
        compile: each kind of block with torch.compile (faster after a start-up; last bits may differ).
        master: "fp32" with fp32 compute; with bf16 "split" (exact, 16 + 16 bits, the default) or "bf16" (stochastic).
        grad_dtype: of gradients on their way home, after their sum in fp32: "fp32", "bf16", or None: as the weights.
        clip: "global" (exact norm; gradients are kept) or "layer" (by its own norm, in the backward; none is kept).
        hbm_home_gb: device memory for layers that live there; None: as the plan says, or a fifth of what is free.
        workload: what a step trains on, an `mt.Workload`, for which memory is planned. `mt.Trainer` may find it out.
        defer_loading: transformers' own `from_pretrained` leaves weights in their files until they are asked for.
        replan: False: on a GPU a run does not change after its first steps where homes live and how many slots it has.
        save_in_background: `mt.Trainer` writes checkpoints beside the training. False: training waits for them.
        on_save_error: when a checkpoint cannot be written: "warn" and go on, or "stop".
        verify_transfers: check sums of what is moved: what arrives changed is sent again (docs/reliability.md).
        max_link_gb_s: most GB (1e9 bytes) a second between host and device, each way: to try a slower link.
        logits_in_pieces: head and loss in pieces of the tokens (to rounding). None: where there are several.
        tile_tokens: of MLPs and norms at a time (to rounding). None: 4096, in rows of over 32,768. False: all tokens.
        attention: kernel to prefer: "flash", "cudnn", "efficient", "math"; None: the fastest; "torch": its own choice.
        exact: True: merge no micro-batches. False: those of one length, if harmless (to rounding). None: True in fp32.

    Raises UserError for a setting that cannot work.
    """
    settings = locals()  # the arguments by name, and nothing else yet
    _check_workload(settings.pop("workload"))
    global _config, _workload
    _config, _workload = Config(**settings).fixed(), workload
    from megatrain.load.deferral import defer_loading as defer  # imports transformers, which this module does without

    defer(_config.defer_loading)


def stream(
    model: nn.Module,
    initialize: Initialize | None = None,
    *,
    bf16: bool | None = None,
    options: StreamOptions | None = None,
    workload: Workload | None = None,
) -> nn.Module:
    """Take the model's weights home and stream its layers through the device from now on. In place; returns it.

    Prints the run's first line: parameters, layers, device, and which of compute, masters and moments are exact.

    Args:
        model: any module with repeated blocks, on the CPU (or on the meta device, with `initialize`).
        initialize: (name, shape, dtype) -> values, for weights on the meta device: they go straight home.
        bf16: what TrainingArguments.bf16 says, if there are any.
        options: how the stream runs; no result depends on it.
        workload: what a step will train on: homes, slots and what stays on the device are then planned for it. None:
            what `mt.init` was told, or a placement that leaves room for any.

    Raises UserError before any work: no repeated blocks, weights that cannot be taken home, too little memory. Whatever
    fails while weights go home, an interrupt too, leaves the model as it was, without gradients.
    """
    if isinstance(model, nn.Module) and engine_of(model) is not None:
        return model
    workload = workload or _workload
    _check_stream(model, initialize, bf16, options, workload)
    config, options = _config, options or StreamOptions()
    outline = outline_model(model, config, options, bf16=bf16, may_be_meta=initialize is not None, workload=workload)
    device, placement, memory = outline.device, outline.placement, outline.memory
    plans = placement.plans
    if device.type == "cuda":
        prepare_cuda(device, outline.formats.precision, config)
    attention = choose_attention(config, outline.plan, attention_of(model))

    rooms = _make_rooms(placement, memory, device)
    homes = _make_homes(placement, memory, device, rooms)
    layers = make_layers(outline.layers, plans, homes)
    # Takes its device memory now: where there is too little, the model is still as it was.
    engine = Engine(
        homes=homes,
        resident=next((home for plan, home in zip(plans, homes, strict=True) if not plan.layers), None),
        layers=layers,
        memory=memory,
        rooms=rooms,
        device=device,
        formats=outline.formats,
        placement=placement,
        activation_bytes=activation_bytes(placement, outline.device_bytes),
    )
    engine.plan, engine.attention, engine.merging = outline.plan, attention, outline.merging
    if device.type == "cuda":
        _learn(engine, model, may_change=config.replan and (outline.plan is not None or options.places is None))
    with _closed_on_failure(engine):
        take_over = functools.partial(replace_parameters, model, engine, plans, homes)
        move_homes(model, plans, homes, initialize, memory.lock, take_over, outline.leaving.check)
    install(model, engine, write_model_card)
    print(engine.summary(), flush=True)
    return model


def _learn(engine: Engine, model: nn.Module, *, may_change: bool) -> None:
    """Let the engine compare what was predicted with what it measures. may_change: and change itself."""
    engine.report.learn = learn
    engine.report.predict = functools.partial(predict_run, engine, spec_of(model, engine.formats))
    if may_change and not engine.options.serial:
        engine.changes.propose = functools.partial(propose_change, engine)


@contextlib.contextmanager
def _closed_on_failure(engine: Engine) -> Iterator[None]:
    """Its lanes end at once, and not when the last holder of the error, and of its frames, is gone."""
    try:
        yield
    except BaseException:
        engine.close()
        raise


def told_workload() -> Workload | None:
    """What `mt.init` was told."""
    return _workload


def _check_workload(workload: Any) -> None:
    if not isinstance(workload, Workload | None):
        raise UserError(f"workload={workload!r} must be an mt.Workload, or None")


def _check_stream(model: Any, initialize: Any, bf16: Any, options: Any, workload: Any) -> None:
    """Raises UserError for arguments of `stream` that are none, and for a place where it cannot work."""
    if torch.is_inference_mode_enabled():
        raise UserError("mt.stream inside torch.inference_mode(): its tensors could never train; call it outside")
    check_model(model, initialize)
    if not isinstance(options, StreamOptions | None):
        raise UserError(f"options={options!r} must be StreamOptions (megatrain.base.config), or None")
    if not isinstance(bf16, bool | None):
        raise UserError(f"bf16={bf16!r} must be True, False, or None to follow the model")
    _check_workload(workload)


def check_fits(model: nn.Module, *, bf16: bool | None = None) -> None:
    """Raise the UserError that `stream` would, for what needs no values: the model may be on the meta device."""
    outline_model(model, _config, StreamOptions(), bf16=bf16, may_be_meta=True)


def accumulate(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    loss_fn: Callable[[Any, Mapping[str, Any]], torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Forward and backward of all micro-batches of a step, layer-major: each layer crosses the link twice a step.

    Args:
        batches: keyword arguments of the model's forward, one mapping a micro-batch.
        loss_fn: called as loss_fn(outputs, batch), returns a scalar. The step's loss is the sum of what it returns:
            divide it yourself. None takes the model's own loss: normalised by the target tokens of the whole step
            where it can be (causal and masked LMs of transformers with `labels`), else the mean over micro-batches.

    Returns the micro-batches' losses (detached), which sum to the step's loss. Of micro-batches that were merged
    (`mt.init(exact=)`, never with a loss_fn) each has its share, by target tokens, of their loss. Gradients are added
    to what is there.
    Raises torch.OutOfMemoryError where the device's memory does not hold them, with no input of a layer kept there.
    """
    engine = engine_for(model)
    batches = _check_batches(batches, loss_fn)
    num_items = num_target_tokens(model, batches) if loss_fn is None else None

    # A key-value cache is of no use in training and would hold every layer's keys and values.
    extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def loss_of(batch: Mapping[str, Any], num_items: torch.Tensor | int | None) -> torch.Tensor:
        batch = {**extra, **batch}
        if loss_fn is not None:
            return loss_fn(model(**batch), batch)
        if num_items is not None:
            return own_loss(model(**batch, num_items_in_batch=num_items))
        return own_loss(model(**batch)) / len(batches)

    def obstacle() -> str:
        return "" if loss_fn is None else "loss_fn is a function of your own, which may couple rows"

    try:
        return MicroBatches(model, engine, loss_of, obstacle, cuts=False).run(batches, num_items)
    except StepTooLargeError as error:
        if not error.is_undone:
            raise
        reason = "mt.accumulate cuts no micro-batch into fewer rows"
        raise explained(error, max(batches, key=num_tokens), reason) from error.__cause__


def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Exact global L2 norm of all gradients; the factor min(1, max_norm / (norm + 1e-6)) is applied in the next step.

    Returns the norm before clipping (fp32 scalar on the CPU), as torch.nn.utils.clip_grad_norm_ does.
    """
    engine = engine_for(model)
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
    engine_for(model)
    for name, parameter in named_home_parameters(model):
        yield name, parameter.master()


def named_gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(original name, gradient on the CPU), one by one, for parameters that have one. Views the gradient at home."""
    engine_for(model)
    for name, parameter in named_home_parameters(model):
        gradient = parameter.grad
        if gradient is not None:
            yield name, gradient.cpu()


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all exact masters and persistent buffers by original name. For small models.

    Tied parameters are there under each of their names, as one tensor.
    """
    engine_for(model)
    state = model.state_dict(keep_vars=True)
    copies = {id(value): _copy(value) for value in state.values()}
    return {name: copies[id(value)] for name, value in state.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, HomeParameter):
        return value.master()
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def stats(model: nn.Module) -> dict[str, Any]:
    """Visits a home, transfers, bytes, prediction hits and misses, and stalls since the model was streamed."""
    return engine_for(model).stats()


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
    if loss_fn is not None and not _takes_two(loss_fn):
        raise UserError(
            f"loss_fn is called as loss_fn(outputs, batch), and {getattr(loss_fn, '__name__', loss_fn)}"
            f"{inspect.signature(loss_fn)} does not take these two: give it these parameters"
        )
    return batches


def _takes_two(function: Callable[..., Any]) -> bool:
    """Whether it can be called with two positional arguments; so it is taken to be where nobody can tell."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(None, None)
    except TypeError:
        return False
    return True


def engine_for(model: nn.Module) -> Engine:
    """The engine of a streamed model. Raises UserError for one that is not streamed."""
    engine = engine_of(model) if isinstance(model, nn.Module) else None
    if engine is None:
        raise UserError(f"this {type(model).__name__} is not streamed: call mt.stream(model) first")
    return engine


def _make_rooms(placement: Placement, memory: HostMemory, device: torch.device) -> dict[str, BufferPool]:
    """For inputs of layers and gradients, by tier. That of the device takes its memory now."""
    options = placement.options
    is_planned = options.room_bytes is not None
    host = BufferPool(memory, first_bytes=placement.room_bytes, is_planned=is_planned, poison=options.poison)
    if options.device_room_bytes is None:
        return {RAM: host}
    first_bytes = options.device_room_bytes
    on_device = BufferPool(DeviceMemory(device), first_bytes=first_bytes, is_planned=True, poison=options.poison)
    on_device.reserve()
    return {RAM: host, HBM_TIER: on_device}


def _make_homes(
    placement: Placement, memory: HostMemory, device: torch.device, rooms: Mapping[str, BufferPool]
) -> list[Home]:
    """One a plan, in their order; what trains is marked. They take no page-locked memory yet (`memory.lock`)."""
    tiers: dict[str, Tier] = {RAM: memory, HBM_TIER: DeviceMemory(device)}
    if memory.disk is not None:
        tiers[DISK_TIER] = memory.disk
    homes = []
    keeps_gradients = placement.config.clip == "global"
    for plan in placement.plans:
        place = placement.places[plan]
        # Locked pages are taken at once: all homes beside a model that is in memory already would be the model twice.
        with memory.locking_later():
            home = Home(
                plan.name, plan.fields, tiers, plan.grad_dtype, place, keeps_gradients=keeps_gradients, rooms=rooms
            )
        home.trainable.update((field, key in placement.trainable) for key, field in plan.parameters.items())
        homes.append(home)
    return homes
