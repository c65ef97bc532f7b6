"""The devices that ``CUDA_VISIBLE_DEVICES`` names."""

from __future__ import annotations

import os
from collections.abc import Sequence

from .errors import not_modelled

VISIBLE = "CUDA_VISIBLE_DEVICES"


def inherited() -> str | None:
    """Value with which this process began; None where it had none."""
    with open("/proc/self/environ", "rb") as file:
        pairs = (one.partition(b"=") for one in file.read().split(b"\0"))
    return next((os.fsdecode(value) for name, _, value in pairs if name == VISIBLE.encode()), None)


def chosen() -> str | None:
    """The value that counts: see :func:`streamalloc.testing.install`."""
    given, environ = os.environ.get(VISIBLE), os.environ
    if environ.get("STREAMALLOC_INSTALL"):
        return given
    in_place = environ.get("STREAMALLOC_DRIVER", "").startswith("simulated")
    return given if in_place and given != inherited() else None


def visible(text: str | None, uuids: Sequence[bytes]) -> list[int]:
    """The numbers of the devices that a value names, in its order. None names all."""
    if text is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for name in text.split(","):
        number = _number(name.strip(), uuids)
        if number is None:
            break
        not_modelled(number in found, f"{VISIBLE}={text}, which names a device twice")
        found.append(number)
    return found


def _number(name: str, uuids: Sequence[bytes]) -> int | None:
    if name.isdecimal():
        return int(name) if int(name) < len(uuids) else None
    texts = [
        f"GPU-{one[:4].hex()}-{one[4:6].hex()}-{one[6:8].hex()}-{one[8:10].hex()}-{one[10:].hex()}" for one in uuids
    ]
    fit = [number for number, text in enumerate(texts) if name and text.startswith(name)]
    return fit[0] if len(fit) == 1 else None
