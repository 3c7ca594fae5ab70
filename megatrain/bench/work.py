"""What every row of a benchmark shares: a model's shape, the values of its weights, the tokens of a step.

Rule: a weight's values depend on its name alone, not on who makes it or when, so all rows begin with the same model
and the losses of their first steps must agree.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatrain.execute.moving import Initialize
from megatrain.plan.flops import ModelWork, counted_flops, published_flops
from megatrain.spec.model import text_config

Tell = Callable[[dict[str, Any]], None]
"""Is told how far a row is: `{"phase": ...}`, or `{"step": number, "seconds": ...}`."""

MAX_NORM = 1.0
"""To which gradients are clipped."""
NUMBERS: dict[str, Any] = {"lr": 1e-5, "weight_decay": 0.01}
"""Of AdamW."""
STD = 0.02
"""Of the matrices, as most architectures begin."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is measured and how. Goes to each row's process as JSON."""

    config_folder: str
    """Where the model's config.json is."""
    num_sequences: int
    length: int
    """Tokens of a sequence."""
    num_micro_batches: int | None
    """None: as the plan takes; without a plan one sequence each."""
    num_steps: int
    """Measured ones."""
    device: str | None = None
    """As `mt.init` takes it."""
    max_vram_gb: float | None = None
    """Of every row."""

    # What follows is this library's alone: what `mt.init`, the stream and the optimizer are told.
    max_ram_gb: float | None = None
    offload_dirs: tuple[str, ...] = ()
    compression: str | None = None
    master: str | None = None
    clip: str = "global"
    hbm_home_gb: float | None = None
    places: str | None = None
    moments_on_disk: int = 0
    """Of so many blocks, the last ones."""
    compile: bool = False
    exact: bool = False
    """No micro-batches are merged."""
    replan: bool = False
    attention: str | None = None
    verify_transfers: bool = False
    max_link_gb_s: float | None = None
    num_threads: int | None = None
    is_planned: bool = True
    """By the planner, where there is a GPU and no places are given."""
    trace_file: str | None = None
    """For a trace of two more steps."""

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.length

    @property
    def compute_device(self) -> torch.device:
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def read_config(work: Work) -> Any:
    """The model's transformers config."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(work.config_folder)


def empty_model(config: Any) -> nn.Module:
    """In bf16, in training mode, its parameters on the meta device and its buffers real."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    return model.train()


def random_values(device: torch.device) -> Initialize:
    """(name, shape, dtype) -> values on `device`: normal matrices, scales of one, and zeros."""

    def values(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        if len(shape) > 1:
            generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            return torch.empty(shape, dtype=dtype, device=device).normal_(0, STD, generator=generator)
        make = torch.ones if name.endswith("weight") else torch.zeros
        return make(shape, dtype=dtype, device=device)

    return values


def micro_batches(work: Work, num_micro_batches: int, model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """The step's tokens, drawn from the vocabulary, on the device: {input_ids, labels} of (rows, length)."""
    config: Any = text_config(model)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, config.vocab_size, (work.num_sequences, work.length), generator=generator)
    parts = ids.to(work.compute_device).split(work.num_sequences // num_micro_batches)
    return [{"input_ids": part, "labels": part} for part in parts]


def rates(work: Work, model_work: ModelWork, step_seconds: float) -> dict[str, float]:
    """What a step of so many seconds comes to."""
    lengths = [work.length] * work.num_sequences
    return {
        "tokens_per_second": work.num_tokens / step_seconds,
        "tflops_published": published_flops(model_work, work.num_tokens) / step_seconds / 1e12,
        "tflops_counted": counted_flops(model_work, lengths) / step_seconds / 1e12,
    }


def formulas(work: Work, model_work: ModelWork) -> dict[str, str]:
    """How TFLOPS are counted, with this model's and this step's numbers."""
    pairs = work.num_sequences * (work.length * (work.length + 1) // 2)
    return {
        "published": f"6 x {model_work.num_parameters:,} parameters x {work.num_tokens:,} tokens / step seconds / 1e12",
        "counted": (
            f"3 x (2 x {model_work.matrix_parameters:,} parameters of a token's matrix products x {work.num_tokens:,} "
            f"tokens + 2 x {model_work.attention_width:,} attention width x {pairs:,} causal pairs) / step seconds / "
            "1e12: active experts, no look-ups, no padding, no recomputation"
        ),
    }
