"""Helpers for the tests of virtual memory."""

from collections.abc import Callable

import numpy as np

import streamalloc as sa
from tests.support import Bytes, MiB, read

PAGE = 2 * MiB  # the granularity of everything (tests/facts/test_physical_memory.py)
NONE, READ, READWRITE = sa.MemAccess.NONE, sa.MemAccess.READ, sa.MemAccess.READWRITE
HOST = sa.MemLocation.host()


def write(memory: sa.Memory, data: Bytes) -> Bytes:
    """Put bytes into memory, and wait until they are there."""
    memory.copy_from(data)
    memory.stream.synchronize()
    return data


def same(memory: sa.Memory, data: Bytes) -> bool:
    return bool(np.array_equal(read(memory), data))


def each(*uses: Callable[..., object]) -> tuple[Callable[..., object], ...]:
    """Uses that have nothing in common but being calls."""
    return uses
