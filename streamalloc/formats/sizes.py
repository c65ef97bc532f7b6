"""Conversion of sizes in bytes to text (:func:`size_text`) and back (:func:`size_in`), and of counts to text
(:func:`counted`).
"""

from __future__ import annotations

import re

_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_SIZE = r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt]?)(i?)b)?\s*"


def size_in(text: str) -> int:
    """Return the number of bytes that a text gives, such as ``"2GiB"``, ``"512 MiB"``, ``"1.5 GB"`` (1.5 * 10**9) or
    ``"4096"``.

    Raises ``ValueError`` for other texts, and if the number of bytes is not whole.
    """
    # These modules are imported here, because at module level they would take a twentieth of the package's import time.
    from fractions import Fraction

    found = re.fullmatch(_SIZE, text, re.ASCII | re.IGNORECASE)
    if found is None:
        raise ValueError(f"{text!r} is no size: allowed are bytes, and numbers with KB to TB or KiB to TiB")
    power = _UNITS[(found[2] or "").lower()]
    unit = 1 << power if found[3] else 1000 ** (power // 10)
    exact = Fraction(found[1]) * unit
    if exact.denominator != 1:
        raise ValueError(f"{text!r} is no whole number of bytes")
    return int(exact)


def counted(number: int, what: str) -> str:
    """Return a number with the noun ``what``, which gets an "s" unless the number is 1: ``1 page``, ``2,000 pages``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def size_text(nbytes: int) -> str:
    """Return a size as text, in the largest unit that divides it: ``64 MiB``, ``1,234,567 bytes``."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes and nbytes % scale == 0:
            return f"{nbytes // scale:,} {unit}"
    return counted(nbytes, "byte")
