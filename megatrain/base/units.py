"""Byte and time units, counts. GB is 1e9 bytes everywhere, GiB is 2**30."""

from __future__ import annotations

GB = 10**9
MB = 10**6
MIB = 2**20
GIB = 2**30


def format_bytes(num_bytes: float) -> str:
    """`1.5 GiB`, `12.0 MiB`, `512 B`: binary units, as tools that show memory use them."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """`2 h 05 min`, `3 min 20 s`, `12.3 s`: rounded to the last figure that is shown."""
    minutes, whole = round(seconds / 60), round(seconds)
    if whole >= 3600:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    if round(seconds, 1) >= 60:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{seconds:.1f} s"


def format_count(count: int) -> str:
    """`1.026T`, `7.616B`, `134.5M`, `225K`, `640`: parameters."""
    if count >= 999_999_500_000:
        return f"{count / 1e12:.3f}T"
    if count >= 999_950_000:
        return f"{count / 1e9:.3f}B"
    if count >= 999_500:
        return f"{count / 1e6:.1f}M"
    return f"{count / 1e3:.0f}K" if count >= 1000 else str(count)


def format_number(count: int, thing: str) -> str:
    """`1 row`, `1,200 rows`."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"
