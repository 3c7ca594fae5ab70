"""Host memory of a loaded model: it goes back as the weights go home, one by one, so it counts as free for the homes.

Whether somebody else holds the same tensors (an optimizer that was made before, a state dict, a copy that shares them)
cannot be known before. So they are counted, and what really became free is looked at after each home.
Rule: weights that lie in mapped files are not counted. Their pages are the page cache's, which counts as free already.
"""

from __future__ import annotations

import bisect
from pathlib import Path

from torch import nn

from megatrain.base.cgroup import free_host_bytes
from megatrain.base.errors import UserError
from megatrain.base.units import MIB, format_bytes
from megatrain.execute.deferred import DeferredParameter
from megatrain.store.home import Home
from megatrain.store.memory import HostMemory

SLACK_BYTES = 64 * MIB
"""Others take and give memory meanwhile."""

MAPS = Path("/proc/self/maps")


class LeavingWeights:
    """
    Args:
        needed_bytes: of host memory for `what`, in all.
    """

    def __init__(self, model: nn.Module, memory: HostMemory, needed_bytes: int, what: str) -> None:
        self._model, self._memory, self._what = model, memory, what
        self._needed_bytes = needed_bytes
        self._is_counted_on = False

    def require(self) -> None:
        """Raises UserError where memory does not hold what is needed, be it that all weights leave theirs."""
        memory, needed_bytes = self._memory, self._needed_bytes
        # A limit is of what is taken here, and a disk takes what is missing.
        if memory.max_bytes is None and memory.disk is None and needed_bytes > memory.free_bytes():
            leaving_bytes = loaded_bytes(self._model)
            self._is_counted_on = 0 < leaving_bytes and needed_bytes <= memory.free_bytes() + leaving_bytes
        if not self._is_counted_on:
            memory.require(needed_bytes, self._what)

    def check(self, home: Home) -> None:
        """After the weights of `home` were copied and theirs given up. Raises UserError where these did not go."""
        if not self._is_counted_on:
            return
        self._needed_bytes -= sum(part.numel() for part in (home.wire, home.low) if part.device.type == "cpu")
        there_bytes = free_host_bytes() + loaded_bytes(self._model)
        if self._needed_bytes > there_bytes + SLACK_BYTES:
            raise UserError(
                f"{self._what} needs {format_bytes(self._needed_bytes)} more of host memory and has "
                f"{format_bytes(there_bytes)}: it counted on the memory of the loaded weights, and something else "
                "holds them (an optimizer that was made before mt.stream, a state dict, another model?): give that up "
                "before, load with mt.from_pretrained, which never has both, or give mt.init an offload_dir"
            )


def loaded_bytes(model: nn.Module) -> int:
    """Host memory that goes when nobody else holds the parameters: without what lies in mapped files."""
    used: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for parameter in model.parameters():
        if isinstance(parameter, DeferredParameter) or parameter.device.type != "cpu":
            continue
        storage = parameter.untyped_storage()
        pointer = storage.data_ptr()
        used[pointer] = used.get(pointer, 0) + parameter.numel() * parameter.element_size()
        sizes[pointer] = storage.nbytes()
    in_files = _mapped_files()
    return sum(min(used[pointer], sizes[pointer]) for pointer in used if not in_files.has(pointer))


class _MappedFiles:
    """Address ranges (start, stop) that map files, in order."""

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        self._ranges = sorted(ranges)

    def has(self, address: int) -> bool:
        index = bisect.bisect_right(self._ranges, (address, 1 << 64)) - 1
        return index >= 0 and self._ranges[index][0] <= address < self._ranges[index][1]


def _mapped_files() -> _MappedFiles:
    """No range where the system does not tell."""
    try:
        lines = MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return _MappedFiles([])
    ranges = []
    for line in lines:
        # start-stop, rights, offset, device, inode, and the path of a file or a [name].
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and not fields[5].startswith("["):
            start, _, stop = fields[0].partition("-")
            ranges.append((int(start, 16), int(stop, 16)))
    return _MappedFiles(ranges)
