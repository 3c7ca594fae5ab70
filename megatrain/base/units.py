"""Byte and time units. GB is 1e9 bytes everywhere, GiB is 2**30."""

from __future__ import annotations

GB = 10**9
MIB = 2**20
GIB = 2**30


def format_bytes(num_bytes: float) -> str:
    """`1.5 GiB`, `12.0 MiB`, `512 B`: binary units, as tools that show memory use them."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """`2 h 05 min`, `3 min 20 s`, `12.3 s`."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{seconds:.1f} s"
