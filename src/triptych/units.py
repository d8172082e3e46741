"""SI inside, prefixes only in printing: seconds, bytes and FLOPs as text."""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3

DTYPE_BYTES: dict[str, float] = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
}


def format_bytes(count_bytes: float) -> str:
    """Bytes with a binary prefix: `1536` -> `1.50 KiB`."""
    for prefix, size in (("TiB", 1024 * GIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count_bytes) >= size:
            return f"{count_bytes / size:.2f} {prefix}"
    return f"{count_bytes:.0f} B"


def format_seconds(duration_s: float) -> str:
    """Seconds with the prefix that suits them: `0.0123` -> `12.3 ms`; `3723` -> `1:02:03`."""
    if duration_s >= 120:
        minutes, seconds = divmod(round(duration_s), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}"
    for prefix, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if duration_s >= size:
            return f"{duration_s / size:.3g} {prefix}"
    return f"{duration_s / 1e-9:.0f} ns" if duration_s >= 1e-9 else "0 s"


def format_count(count: float) -> str:
    """A count with a decimal prefix: `7_000_000_000` -> `7.00B`."""
    for prefix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g}{prefix}"
    return f"{count:.0f}"
