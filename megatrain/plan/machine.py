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

LEAST_RATE, MOST_RATE = 1e-6, 1e21


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

    attention_flops_per_second: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Causal attention in bf16, forward and backward together, of the fastest kernel, by tokens of a sequence. Empty:
    not measured."""

    def with_link(self, max_bytes_per_second: float | None) -> Machine:
        """The same with a link that goes no faster, each way. None: the same."""
        if max_bytes_per_second is None:
            return self
        rates = ("h2d_bytes_per_second", "d2h_bytes_per_second", "pageable_h2d_bytes_per_second")
        return dataclasses.replace(self, **{name: min(getattr(self, name), max_bytes_per_second) for name in rates})

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str | bytes, what: str = "this") -> Machine:
        """what: the text's name for an error. Raises UserError for what is no machine."""
        try:
            values: Any = json.loads(text)
            _check_names(values, dataclasses.fields(cls))
            machine = cls(**values)
            machine._check()
        except (ValueError, RecursionError) as error:
            raise UserError(f"{what} is no profile of a machine ({error}): make one with `megatrain doctor`") from error
        return machine

    def _check(self) -> None:
        """Raise ValueError for a value that cannot be."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "source"):
                is_possible = isinstance(value, str)
            elif field.name == "attention_flops_per_second":
                is_possible = isinstance(value, dict) and all(
                    length.isdigit() and int(length) and _is_rate(rate) and rate > 0 for length, rate in value.items()
                )
            elif field.name == "update_ns_per_parameter":
                is_possible = isinstance(value, dict) and all(_is_rate(of) and of > 0 for of in value.values())
            else:
                is_count = field.name == "num_cores" or field.name.endswith("_bytes")
                is_possible = _is_rate(value) and (value > 0 or field.name not in ("ram_bytes", "num_cores"))
                is_possible = is_possible and (isinstance(value, int) or not is_count)
            if not is_possible:
                raise ValueError(f"{field.name} is {value!r}")


def _check_names(values: Any, fields: tuple[dataclasses.Field, ...]) -> None:
    """Raise ValueError for what is no object with these names. Those of newer versions may be left out."""
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    has_default = {field.name: field.default_factory is not dataclasses.MISSING for field in fields}
    lacking = [name for name in has_default if name not in values and not has_default[name]]
    unknown = [name for name in values if name not in has_default]
    if lacking or unknown:
        told = [f"it lacks {', '.join(lacking)}"] if lacking else []
        told += [f"it has the unknown {', '.join(unknown)}"] if unknown else []
        raise ValueError("; ".join(told))


def _is_rate(value: Any) -> bool:
    """A number that bytes, or work a second, can be; 0 stands for what is not there."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and (value == 0 or LEAST_RATE <= value <= MOST_RATE)
