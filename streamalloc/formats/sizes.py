"""Sizes as text."""

from __future__ import annotations


def size_text(nbytes: int) -> str:
    """A size as text: ``64 MiB`` for a whole number of a unit, else ``1,234,567 bytes``."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes and nbytes % scale == 0:
            return f"{nbytes // scale:,} {unit}"
    return f"{nbytes:,} byte{'' if nbytes == 1 else 's'}"
