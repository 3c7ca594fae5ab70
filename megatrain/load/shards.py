"""Tensors in files of safetensors, read by ranges into memory of their own; and units of them, read ahead.

safetensors maps its files: pages of weights that have gone home would stay in memory as long as any tensor of that file
does, and are read a fault at a time. Here each tensor is read once, by several threads, and the page cache is left as
it was found: what had to come from the disk is given up again, because memory is what is short.
Format: https://github.com/huggingface/safetensors#format (u64 length, JSON header, data).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatrain.base.errors import UserError

NUM_THREADS = 4
"""That read at once."""

CHUNK_BYTES = 16 * 2**20
_MAPPED_BYTES = 2**20

_libc = ctypes.CDLL(None)

_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in a file."""

    path: str
    key: str
    shape: list[int]
    dtype: str
    start: int
    end: int
    is_cached: bool
    """The file was in the page cache when it was opened."""

    def read(self) -> torch.Tensor:
        """Raises UserError when the file cannot be read."""
        with reading(self.path):
            if self.dtype not in _DTYPES:
                with safe_open(self.path, framework="pt") as file:
                    return file.get_tensor(self.key)
            flat = _empty(self.end - self.start)
            with _descriptor(self.path) as descriptor:
                self._read_into(descriptor, memoryview(flat.numpy()))
            return flat.view(_DTYPES[self.dtype]).view(self.shape)

    def _read_into(self, descriptor: int, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            chunk = memory[done : done + CHUNK_BYTES]
            count = os.preadv(descriptor, [chunk], self.start + done)
            if count == 0:
                raise OSError(f"it ends at byte {self.start + done}, {len(memory) - done} too early")
            if not self.is_cached:
                os.posix_fadvise(descriptor, self.start + done, count, os.POSIX_FADV_DONTNEED)
            done += count


def read_headers(files: list[str]) -> dict[str, Stored]:
    """Key -> where it is. Raises UserError for a file that is lacking, damaged or cut short."""
    found: dict[str, Stored] = {}
    for path in files:
        with open_shard(path), reading(path), _descriptor(path) as descriptor:
            num_bytes = int.from_bytes(os.pread(descriptor, 8, 0), "little")
            header = json.loads(os.pread(descriptor, num_bytes, 8))
            header.pop("__metadata__", None)
            is_cached = _is_cached(descriptor)
        for key, entry in header.items():
            start, end = (8 + num_bytes + offset for offset in entry["data_offsets"])
            place = {"path": path, "key": key, "start": start, "end": end, "is_cached": is_cached}
            found[key] = Stored(shape=entry["shape"], dtype=entry["dtype"], **place)
    return found


class ReadAhead:
    """Reads units of tensors, each when it is asked for or, if it was announced, before."""

    def __init__(self, units: Mapping[str, Mapping[str, Stored]]) -> None:
        self._units = units
        self._started: dict[str, dict[str, Future[torch.Tensor]]] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="megatrain-load")

    def announce(self, unit: str) -> None:
        """Start to read a unit."""
        if unit not in self._started:
            tensors = self._units[unit]
            self._started[unit] = {key: self._threads.submit(one.read) for key, one in tensors.items()}

    def take(self, unit: str) -> dict[str, torch.Tensor]:
        """The tensors of a unit by key. Raises UserError when a file cannot be read."""
        if any(future.done() and future.exception() for future in self._started.get(unit, {}).values()):
            del self._started[unit]  # announced to somebody who gave up, long ago perhaps: its file may be whole by now
        self.announce(unit)
        return {key: future.result() for key, future in self._started.pop(unit).items()}


class Once:
    """A tensor that is given out once, so that its memory is free when its taker has converted it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensors = [tensor]
        self.shape = tensor.shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensors.pop()[index]


@contextlib.contextmanager
def open_shard(path: str) -> Iterator[Any]:
    """The file as safetensors opens it, which checks that its header fits it. Raises UserError."""
    with reading(path):
        file = safe_open(path, framework="pt")
    with file:
        yield file


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Errors of a file as UserError."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{path} is not there, but the checkpoint's index names it: get the checkpoint anew") from error
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is damaged or was cut short ({error}): get that file anew; nothing was loaded"
        ) from error


def _empty(num_bytes: int) -> torch.Tensor:
    """uint8. Large ones are mappings: malloc would keep them for the thread that made them when they are freed."""
    if num_bytes < _MAPPED_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8)
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=torch.uint8)


@contextlib.contextmanager
def _descriptor(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Blocks are large; what the kernel would read beyond them would stay in the page cache.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        yield descriptor
    finally:
        os.close(descriptor)


def _is_cached(descriptor: int) -> bool:
    """Whether most of a file can be read without the disk. Looking reads nothing of it.

    The kernel tells nobody but who may write the file; to others it is cached, and stays as reading leaves it.
    """
    size = os.fstat(descriptor).st_size
    num_pages = -(-size // mmap.PAGESIZE)
    # Private and so writable, as ctypes wants it; nothing is written.
    with mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapping:
        start = ctypes.c_char.from_buffer(mapping)
        resident = (ctypes.c_ubyte * num_pages)()
        code = _libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), resident)
        del start
    return code == 0 and 2 * sum(bytes(resident)) > num_pages
