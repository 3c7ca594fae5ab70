"""A machine's rates, corrected by what a run's lanes measured: so that the next prediction is right. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatrain.plan.machine import Machine
from megatrain.plan.outcome import Plan
from megatrain.plan.simulate import COMPUTE, CPU_LANE

MOST = 2.0
"""A rate further off than this factor says that something else went on: another program, a clock that was throttled."""
CLOSE_ENOUGH = 0.02
"""A smaller difference is the spread between steps."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds a step, over some steps after the first."""

    step: float
    stalls: float
    """In which the compute lane waited."""
    cpu_update: float
    """In which the CPU's update lane worked; 0 where it has nothing to do, or waits for a disk meanwhile."""


def calibrated(plan: Plan, measured: Measured) -> Machine:
    """The plan's machine with the rates of compute and of the CPU update as they were measured.

    A predicted compute lane takes then as long as the measured one: rates of matrices, attention and device memory,
    whose shares one run cannot tell apart, are corrected by one factor. A factor that is close to 1 is left out, one
    beyond MOST too.
    """
    machine, busy = plan.machine, plan.simulation.busy_seconds()
    compute = _factor(measured.step - measured.stalls, busy.get(COMPUTE, 0.0))
    update = _factor(measured.cpu_update, busy.get(CPU_LANE, 0.0))
    moments = plan.config.moments
    return dataclasses.replace(
        machine,
        matmul_flops_per_second=machine.matmul_flops_per_second / compute,
        fp32_flops_per_second=machine.fp32_flops_per_second / compute,
        hbm_bytes_per_second=machine.hbm_bytes_per_second / compute,
        attention_flops_per_second={
            length: rate / compute for length, rate in machine.attention_flops_per_second.items()
        },
        update_ns_per_parameter={
            **machine.update_ns_per_parameter,
            moments: update * machine.update_ns_per_parameter[moments],
        },
    )


def _factor(measured: float, predicted: float) -> float:
    if measured <= 0 or predicted <= 0:
        return 1.0
    factor = measured / predicted
    is_noise = abs(factor - 1) < CLOSE_ENOUGH or not 1 / MOST <= factor <= MOST
    return 1.0 if is_noise else factor
