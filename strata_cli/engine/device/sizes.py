"""How byte counts are written in messages."""

from __future__ import annotations


def gib(nbytes: int) -> str:
    """Byte count for a reader: GiB, or MiB and bytes where GiB would round to nothing."""
    if abs(nbytes) >= 100 << 20:
        return f"{nbytes / (1 << 30):.2f} GiB"
    if abs(nbytes) >= 1 << 20:
        return f"{nbytes / (1 << 20):.1f} MiB"
    return f"{nbytes} bytes"
