"""Access to a pool's memory: grants, revocations, and host pools before and after a grant."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tests.facts.enums import DEVICE, HOST, HOST_NUMA, HOST_NUMA_CURRENT, NO_ACCESS, NOWHERE, READ, READWRITE
from tests.facts.support import MiB, Rig, Stats, said, value

HOST_POOLS = pytest.mark.parametrize("location", [HOST, HOST_NUMA], ids=["host", "host-numa"])


class TestDevicePool:
    def test_access_at_first(self, rig: Rig) -> None:
        pool = rig.pool()
        assert [rig.access_flags(pool, kind) for kind in (DEVICE, HOST, HOST_NUMA)] == [READWRITE, NO_ACCESS, NO_ACCESS]
        for place in ((DEVICE, 9), (HOST_NUMA_CURRENT, 0), (NOWHERE, 0)):
            assert said(rig.raw.cuMemPoolGetAccess(pool, rig.location(*place))) == "INVALID_VALUE"

    def test_set_access(self, rig: Rig) -> None:
        pool = rig.pool()
        for wanted, expected in (
            ((DEVICE, 0, NO_ACCESS), "INVALID_DEVICE"),
            ((DEVICE, 0, READ), "NOT_SUPPORTED"),
            ((DEVICE, 0, READWRITE), "SUCCESS"),
            ((DEVICE, 9, READWRITE), "INVALID_DEVICE"),
            ((HOST, 0, READWRITE), "NOT_SUPPORTED"),
            ((HOST_NUMA, 0, READWRITE), "NOT_SUPPORTED"),
        ):
            assert rig.grant(pool, wanted) == expected
            assert rig.access_flags(pool, DEVICE) == READWRITE
        assert said(rig.raw.cuMemPoolSetAccess(pool, [], 0)) == "INVALID_VALUE"
        assert said(rig.raw.cuMemPoolSetAccess(pool, None, 0)) == "INVALID_VALUE"

    @pytest.mark.parametrize("location", [DEVICE, HOST], ids=["device", "host"])
    def test_set_access_of_one_device_twice(self, rig: Rig, location: int) -> None:
        pool = rig.pool(location=location)
        assert rig.grant(pool, (DEVICE, 0, READWRITE), (DEVICE, 0, READWRITE)) == "SUCCESS"


@HOST_POOLS
class TestHostPool:
    def test_access_at_first(self, rig: Rig, location: int) -> None:
        pool = rig.pool(location=location)
        found = [rig.access_flags(pool, kind) for kind in (DEVICE, HOST, HOST_NUMA)]
        assert found == [NO_ACCESS, READWRITE, READWRITE]
        for kind in (HOST_NUMA_CURRENT, NOWHERE):
            assert said(rig.raw.cuMemPoolGetAccess(pool, rig.location(kind))) == "INVALID_VALUE"

    def test_set_access(self, rig: Rig, location: int) -> None:
        for wanted, expected in (
            ((DEVICE, 0, READWRITE), "SUCCESS"),
            ((DEVICE, 0, READ), "NOT_SUPPORTED"),
            ((HOST, 0, NO_ACCESS), "NOT_SUPPORTED"),
            ((HOST_NUMA, 0, NO_ACCESS), "NOT_SUPPORTED"),
            ((HOST, 0, READWRITE), "SUCCESS"),
        ):
            assert rig.grant(rig.pool(location=location), wanted) == expected

    def test_grows_as_a_device_pool_does(self, rig: Rig, location: int) -> None:
        pool, stream = rig.pool(location=location), rig.stream()
        assert rig.get(pool, "RELEASE_THRESHOLD") == 0
        first = rig.allocate(pool, 1, stream)
        assert rig.stats(pool) == Stats(32 * MiB, 32 * MiB, 1, 1)
        second = rig.allocate(pool, 1, stream)
        assert int(second) - int(first) == 512
        third = rig.allocate(pool, 40 * MiB, stream)
        assert rig.stats(pool) == Stats(64 * MiB, 64 * MiB, 40 * MiB + 2, 40 * MiB + 2)
        free = rig.device_free()
        for pointer in (first, second, third):
            rig.free(pointer, stream)
        value(rig.raw.cuStreamSynchronize(stream))
        assert rig.stats(pool) == Stats(0, 64 * MiB, 0, 40 * MiB + 2)
        assert rig.device_free() == free

    def test_the_host_writes_to_its_memory(self, rig: Rig, location: int) -> None:
        stream = rig.stream()
        pointer = int(rig.allocate(rig.pool(location=location), 1, stream))
        value(rig.raw.cuStreamSynchronize(stream))
        ctypes.memset(pointer, 7, 1)
        assert ctypes.string_at(pointer, 1) == b"\7"

    def test_a_device_uses_its_memory_between_grant_and_revocation(self, rig: Rig, location: int) -> None:
        raw, pool, stream = rig.raw, rig.pool(location=location), rig.stream()
        pointer = rig.allocate(pool, 40 * MiB, stream)

        def fill(byte: int) -> str:
            result = said(raw.cuMemsetD8Async(pointer, byte, 100, stream))
            value(raw.cuStreamSynchronize(stream))
            return result

        assert fill(2) == "INVALID_VALUE"
        assert ctypes.string_at(int(pointer), 1) != b"\2"
        assert rig.grant(pool, (DEVICE, 0, READWRITE)) == "SUCCESS"
        assert rig.access_flags(pool, DEVICE) == READWRITE
        assert fill(3) == "SUCCESS"
        assert ctypes.string_at(int(pointer), 100) == b"\3" * 100
        assert rig.grant(pool, (DEVICE, 0, NO_ACCESS)) == "SUCCESS"
        assert rig.access_flags(pool, DEVICE) == NO_ACCESS
        assert fill(4) == "INVALID_VALUE"


class TestHostPoolWithAGrant:
    @pytest.fixture
    def pointer(self, rig: Rig) -> Any:
        pool, stream = rig.pool(location=HOST), rig.stream()
        assert rig.grant(pool, (DEVICE, 0, READWRITE)) == "SUCCESS"
        pointer = rig.allocate(pool, 4096, stream)
        value(rig.raw.cuStreamSynchronize(stream))
        return pointer

    def test_what_is_refused(self, rig: Rig, pointer: Any) -> None:
        raw, plain, stream, address = rig.raw, rig.plain(4096), rig.stream(), int(pointer)
        ctypes.memset(address, 0, 4)
        answers = [raw.cuMemcpyDtoDAsync(plain, address, 64, stream)]
        answers.append(raw.cuMemcpyHtoDAsync(plain, address + 4000, 200, stream))  # past its end
        answers.append(raw.cuStreamWaitValue32(stream, address, 0, 1))
        assert [said(one) for one in answers] == ["INVALID_VALUE"] * 3


@pytest.mark.parametrize(
    ("pool", "wanted", "expected"),
    [
        (DEVICE, [(DEVICE, 9, READ)], "NOT_SUPPORTED"),
        (DEVICE, [(DEVICE, 9, READWRITE)], "INVALID_DEVICE"),
        (DEVICE, [(NOWHERE, 0, NO_ACCESS)], "NOT_SUPPORTED"),
        (DEVICE, [(HOST_NUMA_CURRENT, 9, NO_ACCESS)], "NOT_SUPPORTED"),
        (DEVICE, [(DEVICE, 0, NO_ACCESS), (DEVICE, 0, READ)], "NOT_SUPPORTED"),
        (DEVICE, [(DEVICE, 9, NO_ACCESS), (DEVICE, 0, READ)], "INVALID_DEVICE"),
        (HOST, [(NOWHERE, 0, READWRITE)], "INVALID_VALUE"),
        (HOST, [(NOWHERE, 0, READ)], "NOT_SUPPORTED"),
        (HOST, [(HOST_NUMA_CURRENT, 0, READWRITE)], "INVALID_VALUE"),
    ],
)
def test_which_mistake_counts(rig: Rig, pool: int, wanted: list[tuple[int, int, int]], expected: str) -> None:
    assert rig.grant(rig.pool(location=pool), *wanted) == expected
