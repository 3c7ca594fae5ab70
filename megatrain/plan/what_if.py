"""The same step with one thing changed: formats, clipping, memory, disk, a smaller card. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatrain.base.config import Config
from megatrain.base.errors import UserError
from megatrain.plan.machine import Machine
from megatrain.plan.outcome import Plan
from megatrain.plan.remedies import plan
from megatrain.plan.workload import Workload
from megatrain.spec.homes import Formats
from megatrain.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """One change, and what comes of it."""

    change: str
    plan: Plan | None
    refusal: str = ""
    """Why there is no plan."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """All that a plan is made from. Raises what `Config` raises for settings that cannot be."""

    machine: Machine
    spec_of: Callable[[Formats], ModelSpec]
    precision: str
    workload: Workload
    config: Config

    def answer(self) -> Plan:
        """Raises UserError where nothing fits."""
        formats = Formats(
            precision=self.precision,
            master=self.config.master_for(self.precision),
            grad_dtype=self.config.grad_dtype,
        )
        return plan(self.machine, self.spec_of(formats), self.workload, self.config)


def what_if(
    question: Question, *, uses_disk: bool, tell: Callable[[str], None] = lambda change: None
) -> Iterator[WhatIf]:
    """The changes that are changes here, each with its plan.

    uses_disk: the plan without a change does. tell: gets each change before it is planned.
    """
    for change, changed in _changes(question, uses_disk):
        tell(change)
        try:
            yield WhatIf(change=change, plan=changed.answer())
        except UserError as error:
            yield WhatIf(change=change, plan=None, refusal=str(error))


def _changes(question: Question, uses_disk: bool) -> Iterator[tuple[str, Question]]:
    config, machine = question.config, question.machine

    def with_config(**changes: object) -> Question:
        return dataclasses.replace(question, config=dataclasses.replace(config, **changes))

    def with_ram(factor: float) -> Question:
        num_bytes = int(factor * (config.max_ram_bytes or machine.ram_bytes))
        other = dataclasses.replace(machine, ram_bytes=num_bytes)
        return dataclasses.replace(question, machine=other, config=dataclasses.replace(config, max_ram_gb=None))

    for moments in ("fp32", "8bit", "4bit"):
        if config.moments != moments:
            yield f"{moments} moments", with_config(optimizer_compression=moments)
    other = "layer" if config.clip == "global" else "global"
    yield f'clip="{other}"', with_config(clip=other)
    if question.precision == "bf16" and config.master != "bf16":
        yield "bf16 masters, 4bit moments", with_config(master="bf16", optimizer_compression="4bit")
    if not config.compile:
        yield "compile", with_config(compile=True)
    if question.workload.merges and question.workload.rows is not None:
        apart = dataclasses.replace(question.workload, merges=False)
        yield "exact (no micro-batches merged)", dataclasses.replace(question, workload=apart)
    yield "half the host memory", with_ram(0.5)
    yield "twice the host memory", with_ram(2)
    if uses_disk:
        yield "no disk", with_config(offload_dir=None)
    if machine.hbm_bytes > 30e9:
        yield "a 24 GB card's memory", with_config(max_vram_gb=24)
