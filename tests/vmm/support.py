"""What the tests of virtual memory need besides the fixtures."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from tests.support import Bytes, MiB, read

PAGE = 2 * MiB  # the granularity of everything (facts: "granularity is the same for any properties")
NONE, READ, READWRITE = sa.MemAccess.NONE, sa.MemAccess.READ, sa.MemAccess.READWRITE
HOST = sa.MemLocation.host()


class Account:
    """A driver around another one that keeps account of what is made, and of what is mapped where."""

    def __init__(self, machine: Any, fault: int | None = None, result: str = "CUDA_ERROR_UNKNOWN") -> None:
        self.traced = sd.traced(machine)
        self.checked = sd.checked(self.traced)
        # A call that never comes: the wrapper then only counts.
        self.driver = sd.faulty(self.checked, 1 << 40 if fault is None else fault, result=result)

    @property
    def device(self) -> sa.Device:
        return sa.Device(0, driver=self.driver)

    @property
    def mapped(self) -> dict[int, int]:
        """The mappings that are live, by what the driver was told: address and size."""
        live: dict[int, int] = {}
        for call in self.traced.calls:
            if call.answer[0]:
                continue
            if call.name == "cuMemMap":
                live[int(call.args[0])] = int(call.args[1])
            elif call.name == "cuMemUnmap":
                start, size = int(call.args[0]), int(call.args[1])
                live = {at: nbytes for at, nbytes in live.items() if not start <= at < start + size}
        return live

    @property
    def left(self) -> dict[str, Any]:
        """Whatever was made and not given back."""
        left: dict[str, Any] = dict(self.checked.outstanding())
        if self.mapped:
            left["mappings"] = self.mapped
        return left

    def calls(self, *functions: str) -> list[str]:
        """The calls so far, only those of the given functions if any are given."""
        return [call.name for call in self.traced.calls if not functions or call.name in functions]


def pattern(nbytes: int, seed: int = 0) -> Bytes:
    """Bytes of which no 4 KiB are like any other, so that a page in the wrong place shows."""
    words = np.arange(seed * 7919, seed * 7919 + -(-nbytes // 4), dtype=np.uint32) * np.uint32(2654435761)
    data: Bytes = words.view(np.uint8)[:nbytes]
    return data


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


def assert_unique(thing: object) -> None:
    """It owns something, so there must not be two of it."""
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            duplicate(thing)
