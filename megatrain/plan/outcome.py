"""What a search for a plan goes by, and what it finds: budgets of memory, and a choice with its prediction. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.base.config import Config
from megatrain.plan.choice import Choice
from megatrain.plan.cost import inside_bytes, tile_of
from megatrain.plan.flops import ModelWork, counted_flops, published_flops
from megatrain.plan.machine import Machine
from megatrain.plan.placement import DISK_TIER, HBM
from megatrain.plan.simulate import Simulation
from megatrain.plan.timeline import Timeline
from megatrain.plan.workload import Workload
from megatrain.spec.model import ModelSpec

DEVICE_MARGIN, HOST_MARGIN = 0.01, 0.03
"""Of the memory, left free where no limit is given."""


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes that a run may use of each tier."""

    hbm: int
    ram: int
    disk: int

    @classmethod
    def of(cls, machine: Machine, config: Config) -> Budgets:
        """Limits of the config, within what the machine has. Disk counts where the config names an offload_dir."""
        return cls(
            hbm=min(machine.hbm_bytes, config.max_vram_bytes or int((1 - DEVICE_MARGIN) * machine.hbm_bytes)),
            ram=min(machine.ram_bytes, config.max_ram_bytes or int((1 - HOST_MARGIN) * machine.ram_bytes)),
            disk=machine.disk_bytes if config.offload_dir is not None else 0,
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A choice that fits, with its prediction."""

    machine: Machine
    spec: ModelSpec
    workload: Workload
    config: Config
    budgets: Budgets
    choice: Choice
    timeline: Timeline
    simulation: Simulation

    @property
    def step_seconds(self) -> float:
        return self.simulation.step_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.workload.num_tokens / self.step_seconds

    @property
    def disk_written_bytes(self) -> int:
        """A step: all that lies on disk once."""
        return self.timeline.peak(DISK_TIER)

    @property
    def published_tflops(self) -> float:
        """6 x parameters x tokens a second, as papers of the field count."""
        return published_flops(self._work, self.workload.num_tokens) / self.step_seconds / 1e12

    @property
    def counted_tflops(self) -> float:
        """What had to be computed, a second (`plan/flops.py`)."""
        lengths = [self.workload.length] * self.workload.num_sequences
        return counted_flops(self._work, lengths) / self.step_seconds / 1e12

    @property
    def num_on_device(self) -> int:
        """Homes that live on the device whole."""
        return sum(place == HBM for place in self.choice.places)

    @property
    def num_merged(self) -> int:
        """Micro-batches as they are given in one of the plan's."""
        return self.workload.num_merged(self.choice.rows)

    @property
    def group_as_given(self) -> int | None:
        """Micro-batches, as they are given, that go together; None: all of a step."""
        return None if self.choice.group is None else self.choice.group * self.num_merged

    @property
    def kept_bytes(self) -> int:
        """Device memory of what layers keep that they compute inside, at most."""
        num_tokens = self.choice.group_tokens(self.workload)
        spec, rows, length = self.spec, self.choice.rows, self.workload.length
        return sum(
            inside_bytes(
                spec,
                spec.layers[index],
                keeps,
                num_tokens,
                length,
                compiled=self.config.compile,
                is_tiled=tile_of(spec, spec.layers[index], rows, length) is not None,
            )
            for index, keeps in self.choice.kept_layers(spec).items()
        )

    @property
    def _work(self) -> ModelWork:
        return ModelWork(
            num_parameters=self.spec.num_parameters,
            matrix_parameters=self.spec.active_parameters,
            attention_width=self.spec.attention_width,
        )
