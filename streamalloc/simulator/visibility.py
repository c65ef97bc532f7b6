"""The devices selected by ``CUDA_VISIBLE_DEVICES``."""

from __future__ import annotations

import os
import re
import string
from collections.abc import Sequence

from streamalloc.simulator.errors import Result, check

VISIBLE = "CUDA_VISIBLE_DEVICES"
_IDS = ("GPU-", "MIG-")
_LARGEST = (1 << 63) - 1


def inherited() -> str | None:
    """Value with which this process began; None without one."""
    with open("/proc/self/environ", "rb") as file:
        pairs = (one.partition(b"=") for one in file.read().split(b"\0"))
    return next((os.fsdecode(value) for name, _, value in pairs if name == VISIBLE.encode()), None)


def chosen() -> str | None:
    """The value that applies: see :func:`streamalloc.testing.install`."""
    given, environ = os.environ.get(VISIBLE), os.environ
    if environ.get("STREAMALLOC_INSTALL"):
        return given
    in_place = environ.get("STREAMALLOC_DRIVER", "").startswith("simulated")
    return given if in_place and given != inherited() else None


def visible(text: str | None, uuids: Sequence[bytes]) -> list[int]:
    """The numbers of the selected devices, in order. None selects all.

    The first name without a device ends the list. A repeated device is an error. The first name decides whether all
    names are numbers or ids (observed on H200: test_visible_devices).
    """
    if text is None:
        return list(range(len(uuids)))
    number_of = _with_id if text.startswith(_IDS) else _with_number
    found: list[int] = []
    for name in text.split(","):
        number = number_of(name, uuids)
        if number is None:
            break
        check(number not in found, Result.CUDA_ERROR_INVALID_DEVICE)
        found.append(number)
    return found


def _with_number(name: str, uuids: Sequence[bytes]) -> int | None:
    """Parse a number like strtol, cut to 32 bits. Any characters may follow the digits."""
    read = re.match(r"\s*([+-]?)0*(\d*)", name, re.ASCII)
    if read is None or not read[0].strip("+-" + string.whitespace):
        return None
    number = min(int(read[2][:20] or "0"), _LARGEST) * (-1 if read[1] == "-" else 1) & 0xFFFF_FFFF
    return number if number < len(uuids) else None


def _with_id(name: str, uuids: Sequence[bytes]) -> int | None:
    """Find the only device whose id begins with these digits. Any characters may follow."""
    digits = re.match(r"[0-9a-f-]*", name[4:].lower())
    assert digits is not None
    wanted = digits[0].replace("-", "")[:32]
    fit = [number for number, one in enumerate(uuids) if wanted and one.hex().startswith(wanted)]
    return fit[0] if len(fit) == 1 and name.startswith(_IDS) else None
