"""Arguments of unusual kinds: the answers of the bindings, before the driver is reached or by reaching it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from tests.facts.enums import DEVICE, PINNED, POSIX_FD
from tests.facts.support import UINT64_MAX, Rig, said, value


@pytest.mark.parametrize(
    ("size", "used"),
    [(4096.0, 4096), (4096.5, 4096), (True, 1), (np.int64(64), 64), (64, 64)],
    ids=["float", "fraction", "bool", "numpy", "int"],
)
def test_size(rig: Rig, size: Any, used: int) -> None:
    pool = rig.pool(UINT64_MAX)
    rig.allocate(pool, size, rig.stream())
    assert rig.used(pool) == used


def test_size_of_zero_as_a_float(rig: Rig) -> None:
    size: Any = 0.0
    assert int(rig.allocate(rig.pool(UINT64_MAX), size, rig.stream())) == 0


@pytest.mark.parametrize("size", [1 << 63, UINT64_MAX])
def test_size_beyond_any_memory(rig: Rig, size: int) -> None:
    assert said(rig.try_allocate(rig.pool(), size, rig.stream())) == "OUT_OF_MEMORY"


@pytest.mark.parametrize(
    ("size", "error", "message"),
    [
        (-1, OverflowError, "can't convert negative value to size_t"),
        (1 << 64, OverflowError, "Python int too large to convert to C unsigned long"),
        ("x", TypeError, "an integer is required"),
        (None, TypeError, "an integer is required"),
    ],
    ids=["negative", "too large", "str", "None"],
)
def test_size_that_is_refused(rig: Rig, size: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        rig.raw.cuMemAllocFromPoolAsync(size, rig.pool(), rig.stream())


@pytest.mark.parametrize("pool", [None, 0])
def test_no_pool(rig: Rig, pool: Any) -> None:
    assert said(rig.raw.cuMemAllocFromPoolAsync(64, pool, rig.stream())) == "INVALID_VALUE"


def test_stream_that_is_none(rig: Rig) -> None:
    with pytest.raises(TypeError, match=r"^an integer is required$"):
        rig.raw.cuMemAllocFromPoolAsync(64, rig.pool(), "x")


@pytest.mark.parametrize(
    ("byte", "message"),
    [(300, "value too large to convert to unsigned char"), (-1, "can't convert negative value to unsigned char")],
)
def test_byte_of_a_fill(rig: Rig, byte: int, message: str) -> None:
    with pytest.raises(OverflowError, match=f"^{message}$"):
        rig.raw.cuMemsetD8Async(rig.plain(64), byte, 4, rig.stream())


@pytest.mark.bindings("13.0")
class TestNumbersForEnums:
    """Some calls of the bindings take numbers in place of the members of enums."""

    def test_where_they_do(self, rig: Rig) -> None:
        raw = rig.raw
        assert said(raw.cuMemGetAllocationGranularity(rig.memory_props(), 0)) == "SUCCESS"
        assert said(raw.cuMemGetDefaultMemPool(rig.location(DEVICE), PINNED)) == "SUCCESS"
        with open("/dev/null") as nothing:
            assert said(raw.cuMemImportFromShareableHandle(nothing.fileno(), POSIX_FD)) == "UNKNOWN"
        assert said(raw.cuDeviceGetP2PAttribute(1, 0, 0)) == "INVALID_DEVICE"

    def test_where_they_do_not(self, rig: Rig) -> None:
        with pytest.raises(AttributeError, match="object has no attribute 'value'"):
            rig.raw.cuMemPoolGetAttribute(rig.pool(), 1)

    def test_nothing_at_all(self, rig: Rig) -> None:
        with pytest.raises(TypeError, match="must not be None"):
            rig.raw.cuMemGetAllocationGranularity(rig.memory_props(), None)


def test_no_word_is_the_word_zero(rig: Rig) -> None:
    stream, word = rig.stream(), rig.word()
    word.value = 7
    value(rig.raw.cuStreamWriteValue32(stream, ctypes.addressof(word), None, 0))
    value(rig.raw.cuStreamSynchronize(stream))
    assert word.value == 0
