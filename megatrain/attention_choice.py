"""Which attention kernel a run takes: the one it was told, or the fastest at its shape, measured before homes are made.

What was measured is kept beside the machine's profile, so that the next run of that shape takes the same kernel, with
the same bits, at once.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from megatrain.base.config import Config
from megatrain.base.errors import UserError
from megatrain.base.paths import attention_profile_path, write_whole
from megatrain.base.units import format_number
from megatrain.execute.attention import KERNELS, AttentionKernels
from megatrain.plan.outcome import Plan

if TYPE_CHECKING:
    from megatrain.probe.attention import AttentionShape

logger = logging.getLogger("megatrain")

RUN_SECONDS = 0.1
"""For each kernel, about."""


def choose_attention(config: Config, plan: Plan | None, implementation: str | None) -> AttentionKernels:
    """
    Args:
        plan: of a run on a GPU; None: nothing is known of its work, or it is on the CPU.
        implementation: of a model of transformers, its `attn_implementation`.

    Raises UserError where the kernel that was named cannot take the calls of the work.
    """
    name = config.attention
    if name == "torch":
        return AttentionKernels()
    shape = None if plan is None or implementation not in (None, "sdpa") else shape_of(plan)
    device = torch.device("cuda")
    if name is not None:
        if shape is not None:
            _check(name, shape, device)
        return AttentionKernels((name,), "as asked for")
    if shape is None or shape.dtype == torch.float32:
        return AttentionKernels()  # in fp32 with the bits of plain PyTorch, whose choice is that of few
    return fastest(shape, device)


def shape_of(plan: Plan) -> AttentionShape | None:
    """The call that most of the model's layers make. None for a model whose config does not tell of attention."""
    from megatrain.probe.attention import AttentionShape  # the room of probes is of no use to other runs

    of_layers = Counter(layer.attention for layer in plan.spec.layers if layer.attention is not None)
    if not of_layers:
        return None
    attention, length = of_layers.most_common(1)[0][0], plan.workload.length
    has_window = attention.window is not None and attention.window < length
    return AttentionShape(
        attention=attention,
        rows=plan.choice.rows,
        length=length,
        dtype=torch.bfloat16 if plan.spec.formats.precision == "bf16" else torch.float32,
        is_masked=plan.workload.masked or has_window,
    )


def fastest(shape: AttentionShape, device: torch.device) -> AttentionKernels:
    """Kernels by their rate, the best first."""
    from megatrain.probe.attention import measure_attention

    key = _key(shape, device)
    kept = _read()
    rates = kept.get(key)
    if rates is None:
        measured = measure_attention(device, shape, RUN_SECONDS)
        rates = {rate.key.rpartition(".")[2]: rate.value for rate in measured if rate.value}
        _keep({**kept, key: rates})
    if not rates:
        return AttentionKernels()
    order = sorted(rates, key=rates.__getitem__, reverse=True)
    return AttentionKernels(order, f"the fastest of {format_number(len(order), 'kernel')} at {shape}")


def _check(name: str, shape: AttentionShape, device: torch.device) -> None:
    from megatrain.probe.attention import check_kernel

    try:
        check_kernel(device, shape, name)
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"attention={name!r} cannot compute {shape} here ({reason}): name another kernel, or leave attention out, "
            "which takes the fastest that can"
        ) from error


def _key(shape: AttentionShape, device: torch.device) -> str:
    """Of the machine and what runs on it, too: another version has other kernels, and some are not deterministic."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    mode = ", deterministic" if torch.are_deterministic_algorithms_enabled() else ""
    return f"{name}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}{mode}: {shape}"


def _read() -> dict[str, dict[str, float]]:
    """By key: rates by kernel. What cannot be read, or is none of it, is measured again."""
    try:
        kept = json.loads(attention_profile_path().read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return {key: of for key, of in kept.items() if _are_rates(of)} if isinstance(kept, dict) else {}


def _are_rates(found: object) -> bool:
    return isinstance(found, Mapping) and all(
        name in KERNELS and isinstance(rate, (int, float)) for name, rate in found.items()
    )


def _keep(rates: Mapping[str, Mapping[str, float]]) -> None:
    file = attention_profile_path()
    try:
        write_whole(file, json.dumps(rates, indent=2) + "\n")
    except OSError as error:
        logger.warning("rates of attention kernels cannot be kept in %s (%s): each run measures anew", file, error)
