"""What a plan decides. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatrain.plan.placement import Place
from megatrain.plan.workload import Workload
from megatrain.spec.model import ModelSpec


class Kept(NamedTuple):
    """So many blocks keep something of what they compute inside: the last ones all of it, those before them their
    products, those before these their input alone (`base/config.py:KEEPS`)."""

    all: int = 0
    products: int = 0
    input: int = 0


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a plan decides; everything else follows."""

    rows: int
    """Sequences of a micro-batch."""
    num_slots: int
    places: tuple[Place, ...]
    """Of each home of the spec."""
    activation_bytes: int
    """Boundary activations that stay on the device; the rest goes to host memory."""
    kept: Kept = Kept()
    group: int | None = None
    """Micro-batches that have their forward and backward together. None: all of the step."""

    def group_sizes(self, workload: Workload) -> list[int]:
        """Micro-batches of each group."""
        num_micro = -(-workload.num_sequences // self.rows)
        size = min(self.group or num_micro, num_micro)
        return [min(size, num_micro - start) for start in range(0, num_micro, size)]

    def group_tokens(self, workload: Workload) -> int:
        """Of the largest group."""
        return min(self.group_sizes(workload)[0] * self.rows, workload.num_sequences) * workload.length

    def kept_layers(self, spec: ModelSpec) -> dict[int, str]:
        """Layer -> what it keeps, in the order of the forward."""
        keeps = [name for name, count in reversed(self.kept._asdict().items()) for _ in range(count)]
        blocks = [index for index, layer in enumerate(spec.layers) if layer.kind == "block"]
        return dict(zip(blocks[len(blocks) - len(keeps) :], keeps, strict=True))
