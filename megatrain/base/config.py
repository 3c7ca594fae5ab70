"""Settings of `mt.init`, checked once, before any work."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.base.errors import UserError
from megatrain.base.paths import dead_link, fixed_path, user_path
from megatrain.base.units import GB

PRECISIONS = ("fp32", "bf16")
MASTERS = {"fp32": ("fp32",), "bf16": ("split", "bf16")}
"""By precision; the first is the default."""
COMPRESSIONS = {
    **{False: "fp32", None: "fp32", "fp32": "fp32", "lossless": "lossless"},
    **{True: "4bit", "4bit": "4bit", "8bit": "8bit", "bf16": "bf16"},
}
"""optimizer_compression -> format of the moments (`store/codecs.py`, `store/lossless.py`)."""
CLIPS = ("global", "layer")
MOST_GB = 10**9
"""An exabyte: more is a slip of the pen."""
LEAST_LINK_GB_S = 0.001
"""Below it a step's end would not be lived to see."""
GRADIENTS = ("fp32", "bf16")
ON_SAVE_ERROR = ("warn", "stop")
ATTENTION = ("torch", "flash", "cudnn", "efficient", "math")
KEEPS = {"all": 1.0, "products": 0.7, "input": 0.0}
"""What a layer keeps for its backward -> PyTorch's name for it, an activation_memory_budget (docs/decisions.md says why
these): all that a fast backward wants; what matrix products and attention give, the rest being computed again; or its
input alone."""


TWO_BITS = (
    "it fails the quality test, 0.089 above exact moments in held-out loss where seeds spread over 0.023 "
    "(docs/compression.md)"
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """What `mt.init` was told."""

    offload_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    """Folder, or folders on several disks, for what of the homes does not fit in `max_ram_gb`. Files there vanish with
    the process."""

    max_vram_gb: float | None = None
    """Device memory that may be used, in GB (1e9 bytes). Left out: what is free."""

    max_ram_gb: float | None = None
    """Host memory that may be used, in GB (1e9 bytes): with a GPU of the whole process, else for homes alone. Left out:
    what is free."""

    optimizer_compression: bool | str | None = False
    """Format of the moments. Left out: exact fp32. "lossless": exact, entropy-coded. Lossy: true or "4bit", "8bit",
    "bf16"."""

    precision: str | None = None
    """"fp32" or "bf16". Left out: taken from the model's dtype and TrainingArguments.bf16."""

    master: str | None = None
    """Form of the master weights: "fp32" with fp32 compute; "split" (exact fp32 in 16 + 16 bits) or "bf16" (stochastic
    rounding) with bf16 compute. Left out: the exact one."""

    grad_dtype: str | None = None
    """Of gradients on their way home, after their sum in fp32: "fp32" or "bf16". Left out: as the compute weights."""

    clip: str = "global"
    """What the gradient is clipped by: the exact "global" norm, for which all gradients are kept until it is known, or
    the norm of each "layer", for which none is kept."""

    hbm_home_gb: float | None = None
    """Device memory, in GB (1e9 bytes), for layers that live there whole and are updated there: the first ones of the
    model, whose update has the least time. Left out: a fifth of what is free beside the stream. 0: none."""

    device: str | None = None
    """Where layers run: "cuda", "cuda:1", "cpu". Left out: CUDA if there is one."""

    compile: bool = False
    """Compile each kind of block with torch.compile, and the loss of logits in pieces. Faster after a start-up of a
    minute or more; last bits may differ."""

    attention: str | None = None
    """Kernel that scaled_dot_product_attention takes inside layers where it can: "flash", "cudnn", "efficient" or
    "math". Left out: on a GPU, in bf16, the fastest one, measured at the shape of the work where that is known; else
    PyTorch's own choice. "torch": always that. Results differ by rounding."""

    logits_in_pieces: bool | None = None
    """Compute head and cross entropy together, the logits of a piece of the tokens at a time. Equal to whole logits to
    rounding. Left out: where a micro-batch has more than 2048 tokens and 2^26 logits. False: never."""

    exact: bool | None = None
    """True: micro-batches run as they are given. False: those of one length are merged where nothing couples their rows
    (no router's loss, batch norm, limited experts, dropout): fewer and larger kernels, equal within rounding. Left out:
    true with fp32 compute, false with bf16."""
    tile_tokens: int | bool | None = None
    """Run MLPs, norms and whatever else in a block does each token alone on so many tokens of a micro-batch at a time.
    Equal to whole modules to rounding. Left out: 4096 in rows of more than 32,768 tokens, without `compile`. False:
    never. A number: wherever a micro-batch has more tokens."""

    verify_transfers: bool = False
    """Check sums of weights, gradients, inputs of layers and states on every way between device, host and disk: what
    arrives changed is sent again. Costs reads of host memory."""

    max_link_gb_s: float | None = None
    """What a step copies between host and device goes no faster than so many GB (1e9 bytes) a second, each way: to try
    a machine with a slower link. Plans take the rate as the link's. Left out: as fast as the link goes."""

    defer_loading: bool = True
    """Leave the weights of large models in their files in transformers' own from_pretrained, until `mt.stream` takes
    them home or somebody asks for them."""

    replan: bool = True
    """On a GPU, let a run change once, at a step boundary after its first steps, where homes live and how many slots
    there are, if the planner predicts with measured rates that it pays. False: everything stays. No result depends on
    it."""

    save_in_background: bool = True
    """Write checkpoints beside the training that goes on, each layer before its next update. False: training waits."""

    on_save_error: str = "warn"
    """When a checkpoint cannot be written (a full disk): "warn", and go on from the ones before; or "stop"."""

    def __post_init__(self) -> None:
        if self.precision is not None and self.precision not in PRECISIONS:
            raise UserError(
                f"precision={self.precision!r} is not known: use one of {PRECISIONS}, or None to follow the model"
            )
        self._check_formats()
        for name in ("max_vram_gb", "max_ram_gb", "hbm_home_gb"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            is_allowed = is_number and 0 <= value <= MOST_GB and (value > 0 or name == "hbm_home_gb")
            if value is not None and not is_allowed:
                raise UserError(f"{name}={value!r} must be a positive number of GB (1e9 bytes), or None")
        rate = self.max_link_gb_s
        is_rate = isinstance(rate, (int, float)) and not isinstance(rate, bool) and LEAST_LINK_GB_S <= rate <= MOST_GB
        if rate is not None and not is_rate:
            least = f"{LEAST_LINK_GB_S} at least"
            raise UserError(f"max_link_gb_s={rate!r} must be a number of GB (1e9 bytes) a second, {least}, or None")
        for name in ("compile", "verify_transfers", "defer_loading", "replan", "save_in_background"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}={getattr(self, name)!r} must be True or False")
        for name in ("logits_in_pieces", "exact"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}={getattr(self, name)!r} must be True, False or None")
        self._check_tiles()
        # A torch.device is known by its name: this module does without torch.
        is_device = isinstance(self.device, (str, int)) or type(self.device).__module__ == "torch"
        if self.device is not None and (not is_device or isinstance(self.device, bool)):
            raise UserError(f"device={self.device!r} is not known: use 'cuda', 'cuda:0' or 'cpu'")
        self._check_offload_dir()

    def _check_tiles(self) -> None:
        tile = self.tile_tokens
        if tile is None or tile is False:
            return
        if isinstance(tile, bool) or not isinstance(tile, int) or tile < 1:
            raise UserError(f"tile_tokens={tile!r} must be a number of tokens, at least 1, False or None")
        if self.compile:
            raise UserError(
                f"tile_tokens={tile} does not go with compile=True, whose blocks are compiled in one piece: leave one "
                "of the two out"
            )

    def _check_formats(self) -> None:
        if self.optimizer_compression == "2bit":
            raise UserError(f'optimizer_compression="2bit" is refused: {TWO_BITS}; use "4bit" or "8bit"')
        is_text = self.optimizer_compression is None or isinstance(self.optimizer_compression, (bool, str))
        is_known = is_text and self.optimizer_compression in COMPRESSIONS
        if not is_known:
            known = ", ".join(map(repr, COMPRESSIONS))
            raise UserError(f"optimizer_compression={self.optimizer_compression!r} is not known: use one of {known}")
        masters = [master for of in MASTERS.values() for master in of]
        choices = {"master": (None, *masters), "grad_dtype": (None, *GRADIENTS), "clip": CLIPS}
        choices["attention"] = (None, *ATTENTION)
        for name, known in {**choices, "on_save_error": ON_SAVE_ERROR}.items():
            if getattr(self, name) not in known:
                raise UserError(f"{name}={getattr(self, name)!r} is not known: use one of {known}")
        if self.precision is not None:
            self.master_for(self.precision)

    def master_for(self, precision: str) -> str:
        """Form of the master weights. Raises UserError for one that does not go with the precision."""
        master = self.master or MASTERS[precision][0]
        if master not in MASTERS[precision]:
            raise UserError(
                f"master={master!r} does not go with precision={precision!r}: use one of {MASTERS[precision]}"
            )
        return master

    def is_exact(self, precision: str) -> bool:
        """Micro-batches run as they are given."""
        return precision == "fp32" if self.exact is None else self.exact

    @property
    def moments(self) -> str:
        """Format of the moments."""
        return COMPRESSIONS[self.optimizer_compression]

    @property
    def offload_folders(self) -> list[str | os.PathLike[str]]:
        """As a list."""
        if self.offload_dir is None:
            return []
        return [self.offload_dir] if isinstance(self.offload_dir, (str, os.PathLike)) else list(self.offload_dir)

    def _check_offload_dir(self) -> None:
        is_list = isinstance(self.offload_dir, (list, tuple)) and len(self.offload_dir) > 0
        if not (self.offload_dir is None or is_list or isinstance(self.offload_dir, (str, os.PathLike))):
            raise UserError(f"offload_dir={self.offload_dir!r} must be the path of a folder, a list of them, or None")
        for folder in self.offload_folders:
            path = os.fspath(folder) if isinstance(folder, (str, os.PathLike)) else None
            if not isinstance(path, str) or not path or "\0" in path:
                raise UserError(f"offload_dir={folder!r} must be the path of a folder, or None")
            if os.path.exists(path) and not os.path.isdir(path):
                raise UserError(f"offload_dir={path!r} is a file: give a folder")
            if link := dead_link(user_path(path, "offload_dir")):
                raise UserError(f"offload_dir={path!r}: {link}; give a folder, or make what it names")

    def fixed(self) -> Config:
        """The same, with whole paths: the folders are those of now, wherever the process goes."""
        folders = [str(fixed_path(folder, "offload_dir")) for folder in self.offload_folders]
        return dataclasses.replace(self, offload_dir=folders or None)

    @property
    def max_vram_bytes(self) -> int | None:
        return None if self.max_vram_gb is None else int(self.max_vram_gb * GB)

    @property
    def max_ram_bytes(self) -> int | None:
        return None if self.max_ram_gb is None else int(self.max_ram_gb * GB)

    @property
    def max_link_bytes_per_second(self) -> float | None:
        return None if self.max_link_gb_s is None else self.max_link_gb_s * GB

    @property
    def hbm_home_bytes(self) -> int | None:
        return None if self.hbm_home_gb is None else int(self.hbm_home_gb * GB)


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """How the stream runs. No result depends on any of these; tests vary them."""

    serial: bool = False
    """The serial twin: no lanes, no prefetch, one layer at a time. The truth for tests."""

    num_slots: int = 3
    """Slots for blocks. Two let one layer fill while another runs; the third hides the turn of direction."""

    num_update_slots: int | None = None
    """Host slots for states of homes on disk, no more than are of use. None: as spare host memory allows."""

    max_drains: int = 2
    """Layers whose gradients may be on their way to the host before the compute lane has to wait."""

    activation_bytes: int | None = None
    """Boundary activations that may stay on the device. None: a share of the device memory that is left."""

    kept_layers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Layers that keep something of what they compute inside on the device, from their forward to their backward, in
    place of computing it again; by name, with what (`KEEPS`). Less than "all" is for compiled layers."""

    kept_bytes: int | None = None
    """What all that may take. None: no bound."""

    micro_batches_a_visit: int | None = None
    """So many micro-batches, as they were given, have their forward and backward together, in two visits of each layer.
    None: all of a step."""

    room_bytes: int | None = None
    """Host memory for inputs of layers and kept gradients together, taken at once. None: as much as the gradients, and
    more as it is needed."""

    device_room_bytes: int | None = None
    """The same of the device, for homes whose gradients live there: inputs that stay on the device are copied into it.
    None: they stay where they are, and each home keeps memory for its gradients."""

    poison: bool = False
    """Fill slots and host buffers with NaN when they are freed, so that a stale read shows."""

    lane_delay_seconds: float = 0.0
    """Upper bound of a random pause before each piece of lane work, to provoke races."""

    places: Mapping[str, Any] | Any = None
    """Where homes live and are updated: a `Place`, or "cpu", "stream", "hbm" or "disk" (`plan/placement.py`), by name
    of the home, or one for all. Homes that are not named are "cpu". None: the plan chooses."""

    def __post_init__(self) -> None:
        for name in ("serial", "poison"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}={getattr(self, name)!r} must be True or False")
        leasts = dict.fromkeys(("num_slots", "max_drains", "num_update_slots", "device_room_bytes"), 1)
        leasts |= {"micro_batches_a_visit": 1} | dict.fromkeys(("activation_bytes", "kept_bytes", "room_bytes"), 0)
        for name, least in leasts.items():
            value = getattr(self, name)
            is_left_out = value is None and name not in ("num_slots", "max_drains")
            is_count = isinstance(value, int) and not isinstance(value, bool)
            if not (is_left_out or (is_count and value >= least)):
                raise UserError(f"{name}={value!r} must be a whole number and at least {least}")
        if not isinstance(self.kept_layers, Mapping):
            raise UserError(
                f"kept_layers={self.kept_layers!r} must be a mapping from names of layers to what they keep"
            )
        for name, keeps in self.kept_layers.items():
            if not (isinstance(keeps, str) and keeps in KEEPS):
                raise UserError(f"kept_layers: {name!r} cannot keep {keeps!r}: use one of {tuple(KEEPS)}")
        delay = self.lane_delay_seconds
        if not isinstance(delay, (int, float)) or isinstance(delay, bool) or not 0 <= delay < math.inf:
            raise UserError(f"lane_delay_seconds={delay!r} must be a finite number of seconds and not negative")
        if isinstance(self.places, (list, tuple, set, int)):
            raise UserError(f"places={self.places!r} must be a place, a mapping from homes to places, or None")
