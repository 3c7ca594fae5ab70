"""The C kernel of the update: found or compiled, loaded with ctypes, one variant for each instruction set.

Where the library comes from: the wheel ships it beside `kernel.c`; where it is missing or older than the source, it is
compiled once into a folder of the user's (a few seconds, and it says so); where that fails, `load_kernel` returns None
and the caller uses the formula in PyTorch, with the same results.

Rule: ctypes only, and one call for a whole list of segments. The call holds no GIL and its threads live in C, so no
other thread of Python's waits for it; and nothing depends on PyTorch's own ABI.

What it gives up: the kernel checks nothing, and a wrong length writes somewhere else. So `Segment` checks first.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from megatrain.optim import compiler, rules
from megatrain.optim.segment import Segment

log = logging.getLogger(__name__)

VARIANTS = ("baseline", "avx2", "avx512")
_VARIANT_OF_CAPABILITY = {"AVX2": "avx2", "AVX512": "avx512"}
_load_lock = threading.Lock()


# The orders of the enums in kernel.c.
_RULES = (rules.ADAMW, rules.ADAM, rules.MOMENTUM, rules.SGD, rules.LION)
_FORMATS = ("fp32", "bf16", "8bit", "4bit")
_MASTER_FP32, _MASTER_SPLIT, _MASTER_BF16 = range(3)
_MAX_STATES = 2
_MAX_SCALARS = 9


class _State(ctypes.Structure):
    """`struct state` of kernel.c."""

    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("format", ctypes.c_int32),
        ("is_signed", ctypes.c_int32),
    ]


class _Range(ctypes.Structure):
    """`struct range` of kernel.c."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("low", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("ema", ctypes.c_void_p),
        ("states", _State * _MAX_STATES),
        ("n", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("key", ctypes.c_uint32 * 2),
        ("rule", ctypes.c_int32),
        ("num_states", ctypes.c_int32),
        ("master", ctypes.c_int32),
        ("grad_is_bf16", ctypes.c_int32),
        ("is_rounded", ctypes.c_int32),
        ("ema_decay", ctypes.c_float),
        ("ema_share", ctypes.c_float),
        ("scalars", ctypes.c_float * _MAX_SCALARS),
    ]


@dataclass(frozen=True)
class Kernel:
    """One variant of the update kernel."""

    variant: str
    """"baseline", "avx2" or "avx512"."""
    path: Path
    """The shared library that it came from."""
    _update: ctypes._CFuncPtr

    @staticmethod
    def knows(segment: Segment) -> bool:
        """Whether the kernel has the segment's rule and formats."""
        return segment.rule in _RULES and all(stored.format.name in _FORMATS for stored in segment.states)

    def update(
        self, segments: Sequence[Segment], num_threads: int, measure: bool = False
    ) -> list[tuple[float, float]] | None:
        """One step in place of segments that it `knows`, on at most num_threads threads, the calling one among them.

        Returns, with `measure`, for each segment (sum of squared weight changes, sum of squared weights before the
        step). Raises MemoryError, and has then updated nothing.
        """
        ranges = (_Range * len(segments))(*map(_pack, segments))
        sums = (ctypes.c_double * (2 * len(segments)))() if measure else None
        if self._update(ranges, len(segments), num_threads, sums):
            raise MemoryError("no memory to organise an update on the CPU")
        return None if sums is None else list(zip(sums[::2], sums[1::2], strict=True))


def _pack(segment: Segment) -> _Range:
    packed = _Range(
        weights=segment.weights.data_ptr(),
        low=None if segment.low is None else segment.low.data_ptr(),
        grad=segment.grad.data_ptr(),
        n=segment.numel,
        first=segment.first,
        key=segment.key,
        rule=_RULES.index(segment.rule),
        num_states=len(segment.states),
        master=_master(segment),
        grad_is_bf16=segment.grad.dtype == torch.bfloat16,
        is_rounded=segment.is_rounded,
        scalars=astuple(segment.scalars),
    )
    for i, (state, stored) in enumerate(zip(segment.rule.states, segment.states, strict=True)):
        scales = None if stored.scales is None else stored.scales.data_ptr()
        format_number = _FORMATS.index(stored.format.name)
        packed.states[i] = _State(stored.codes.data_ptr(), scales, format_number, state.is_signed)
    if segment.ema is not None:
        packed.ema = segment.ema.average.data_ptr()
        packed.ema_decay, packed.ema_share = segment.ema.decay, 1.0 - segment.ema.decay
    return packed


def _master(segment: Segment) -> int:
    if segment.low is not None:
        return _MASTER_SPLIT
    return _MASTER_FP32 if segment.weights.dtype == torch.float32 else _MASTER_BF16


def load_kernel(variant: str | None = None) -> Kernel | None:
    """The update kernel for this processor, or None where there is no library and none can be compiled.

    variant: one of VARIANTS, or None for the best that PyTorch itself would use here. Raises ValueError for an unknown
    one and for one that this processor does not run.
    """
    if variant is not None and variant not in VARIANTS:
        raise ValueError(f"CPU kernel: unknown variant {variant!r}; use one of {', '.join(VARIANTS)}")
    with _load_lock:
        found = _library()
    if found is None:
        return None
    library, path = found
    if variant is None:
        variant = _VARIANT_OF_CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), "baseline")
    if not _supports(library, variant):
        raise ValueError(f'CPU kernel: this processor does not run {variant!r}; use "baseline" or leave it out')
    function = getattr(library, f"update_on_{variant}")
    function.restype = ctypes.c_int
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    return Kernel(variant, path, function)


def supported_variants() -> tuple[str, ...]:
    """The variants that this processor runs; empty where there is no kernel at all."""
    with _load_lock:
        found = _library()
    return () if found is None else tuple(v for v in VARIANTS if _supports(found[0], v))


def _supports(library: ctypes.CDLL, variant: str) -> bool:
    """Whether the library has the variant (on ARM only "baseline") and this processor runs it."""
    return hasattr(library, f"supports_{variant}") and bool(getattr(library, f"supports_{variant}")())


@functools.cache
def _library() -> tuple[ctypes.CDLL, Path] | None:
    """The shared library and where it lies: shipped, from the user's cache, or compiled now. Once a process."""
    name = f"kernel-{_cache_key()}.so"
    cache = _cache_folder()
    candidates = [compiler.SOURCE.with_name(compiler.LIBRARY_NAME), *([cache / name] if cache else [])]
    for path in candidates:
        library = _open(path)
        if library is not None:
            return library, path
    try:
        if cache is not None:
            return _compile(cache / name)
        # A library stays usable after its file is gone, so nothing is left behind.
        with tempfile.TemporaryDirectory(prefix="megatrain-") as folder:
            return _compile(Path(folder) / name)
    except (compiler.CompileError, OSError) as error:
        log.warning(
            "The CPU update kernel is not available (%s). Updates run in PyTorch, 20 to 200 times slower, with the "
            "same results; to have the kernel, install gcc or clang.",
            error,
        )
        return None


def _compile(path: Path) -> tuple[ctypes.CDLL, Path]:
    """Compile into `path` and load it, having said so: the first use waits for it."""
    if compiler.find_compilers():
        log.warning("Compiling the CPU update kernel, once, a few seconds: %s", path)
    compiler.compile_kernel(path)
    return ctypes.CDLL(str(path)), path


def _open(path: Path) -> ctypes.CDLL | None:
    """The library at `path`, or None when it is missing, does not load here, or was compiled from another source."""
    if not path.exists():
        return None
    try:
        library = ctypes.CDLL(str(path))
        library.build_hash.restype = ctypes.c_char_p
        return library if library.build_hash() == compiler.build_hash().encode() else None
    except (OSError, AttributeError):
        return None


def _cache_folder() -> Path | None:
    """The folder of this user's compiled kernels, where the XDG convention puts it; None when it cannot be written."""
    try:
        base = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(base) if base else Path.home() / ".cache") / "megatrain"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.W_OK) else None


def _cache_key() -> str:
    """Changes with the source and the flags, and with the kind of machine."""
    parts = (compiler.build_hash(), platform.system(), platform.machine(), *platform.libc_ver())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
