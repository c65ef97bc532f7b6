"""What several test modules need besides the fixtures."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

import streamalloc as sa

MiB = 1 << 20
GROWTH = 32 * MiB  # the step in which a pool takes memory (facts/one-gpu-calls.txt)
KEEP = (1 << 64) - 1  # a release threshold that gives nothing back

Bytes = npt.NDArray[np.uint8]


def read(memory: sa.Memory) -> Bytes:
    """The bytes of some memory, once all that its stream has queued is done."""
    target = np.zeros(memory.nbytes, np.uint8)
    memory.copy_to(target)
    memory.stream.synchronize()
    return target


def holds(memory: sa.Memory, value: int) -> bool:
    """Whether every byte of some memory has this value."""
    return bool((read(memory) == value).all())


def executed(stream: sa.Stream, within: float = 10.0) -> bool:
    """Whether the stream's work is done within a time. Asking is no synchronisation, so frees stay unobserved."""
    end = time.monotonic() + within
    while not stream.query():
        if time.monotonic() > end:
            return False
        time.sleep(0.0005)
    return True


def pending(stream: sa.Stream) -> bool:
    """Whether the stream still has work after a moment in which it could have run it."""
    time.sleep(0.005)
    return not stream.query()


def names(driver: Any, *functions: str) -> list[str]:
    """The calls that a traced driver recorded, only those of the given functions if any are given."""
    return [call.name for call in driver.calls if not functions or call.name in functions]
