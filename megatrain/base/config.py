"""Settings of `mt.init`, checked once, before any work."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from megatrain.base.errors import UserError
from megatrain.base.units import GB

PRECISIONS = ("fp32", "bf16")
COMPRESSIONS = (False, True, "8bit", "4bit", "2bit", "lossless")


@dataclass(frozen=True, kw_only=True)
class Config:
    """What `mt.init` was told."""

    offload_dir: str | os.PathLike[str] | None = None
    """Folder for homes that do not fit in `max_ram_gb`. Their files vanish with the process."""

    max_vram_gb: float | None = None
    """Device memory that may be used, in GB (1e9 bytes). None: what is free."""

    max_ram_gb: float | None = None
    """Host memory for homes, in GB (1e9 bytes). None: what is free."""

    optimizer_compression: bool | str = False
    """Format of the moments. Compressed formats do not exist yet: the run says so and keeps exact fp32."""

    precision: str | None = None
    """"fp32", "bf16", or None: taken from the model's dtype and TrainingArguments.bf16."""

    device: str | None = None
    """Where layers run: "cuda", "cuda:1", "cpu". None: CUDA if there is one."""

    compile: bool = False
    """Compile each kind of block with torch.compile. Faster after a start-up of minutes; last bits may differ."""

    def __post_init__(self) -> None:
        if self.precision is not None and self.precision not in PRECISIONS:
            raise UserError(
                f"precision={self.precision!r} is not known: use one of {PRECISIONS}, or None to follow the model"
            )
        if self.optimizer_compression not in COMPRESSIONS:
            raise UserError(
                f"optimizer_compression={self.optimizer_compression!r} is not known: use one of {COMPRESSIONS}"
            )
        for name in ("max_vram_gb", "max_ram_gb"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value < math.inf):
                raise UserError(f"{name}={value!r} must be a positive number of GB (1e9 bytes), or None")
        if not isinstance(self.compile, bool):
            raise UserError(f"compile={self.compile!r} must be True or False")
        self._check_offload_dir()

    def _check_offload_dir(self) -> None:
        if self.offload_dir is None:
            return
        if not isinstance(self.offload_dir, (str, os.PathLike)) or not os.fspath(self.offload_dir):
            raise UserError(f"offload_dir={self.offload_dir!r} must be the path of a folder, or None")
        if os.path.exists(self.offload_dir) and not os.path.isdir(self.offload_dir):
            raise UserError(f"offload_dir={os.fspath(self.offload_dir)!r} is a file: give a folder")

    @property
    def max_vram_bytes(self) -> int | None:
        return None if self.max_vram_gb is None else int(self.max_vram_gb * GB)

    @property
    def max_ram_bytes(self) -> int | None:
        return None if self.max_ram_gb is None else int(self.max_ram_gb * GB)


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """How the stream runs. No result depends on any of these; tests vary them."""

    serial: bool = False
    """The serial twin: no lanes, no prefetch, one layer at a time. The truth for tests."""

    num_slots: int = 3
    """Slots for blocks. Two let one layer fill while another runs; the third hides the turn of direction."""

    max_drains: int = 2
    """Layers whose gradients may be on their way to the host before the compute lane has to wait."""

    activation_bytes: int | None = None
    """Boundary activations that may stay on the device. None: a share of the device memory that is left."""

    poison: bool = False
    """Fill a slot with NaN when it is freed, so that a stale read shows."""

    lane_delay_seconds: float = 0.0
    """Upper bound of a random pause before each piece of lane work, to provoke races."""

    def __post_init__(self) -> None:
        if self.num_slots < 1 or self.max_drains < 1:
            raise UserError("num_slots and max_drains must be at least 1")
