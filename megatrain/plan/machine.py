"""A machine as the planner sees it: bytes a tier, bytes a second on each link, arithmetic, cost of the update. Pure.

`probe/` measures one; `plan/machines.py` lists some that one need not own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatrain.base.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Machine:
    """All rates are what was sustained, not what a data sheet says."""

    name: str
    source: str
    """Where the figures are from: "measured DATE", or "estimated from ..."."""

    hbm_bytes: int
    """Device memory that a process can use; 0 without a GPU."""
    ram_bytes: int
    """Host memory that a process can use: of the machine, or of its cgroup if that is less."""
    disk_bytes: int
    """Free in the offload folders."""
    num_cores: int

    matmul_flops_per_second: float
    """bf16 matrix products on the compute device."""
    fp32_flops_per_second: float
    """fp32 matrix products, TF32 off."""
    hbm_bytes_per_second: float
    """Device memory, read and written bytes together."""
    h2d_bytes_per_second: float
    """Page-locked host memory to the device; 0 without a GPU."""
    d2h_bytes_per_second: float
    pageable_h2d_bytes_per_second: float
    """From memory that could not be page-locked."""
    ram_bytes_per_second: float
    """Host memory with all cores, read and written bytes together."""
    disk_read_bytes_per_second: float
    disk_write_bytes_per_second: float
    update_ns_per_parameter: Mapping[str, float]
    """CPU update with all cores, split masters and bf16 gradients, by format of the moments."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """Raises UserError for what is no machine."""
        try:
            values: Any = json.loads(text)
            return cls(**values)
        except (ValueError, TypeError) as error:
            raise UserError(f"this is no profile of a machine ({error}): make one with `megatrain doctor`") from error
