"""Access to a pool's memory: grants, revocations, and host pools before and after a grant."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tests.facts.enums import DEVICE, HOST, HOST_NUMA, HOST_NUMA_CURRENT, NO_ACCESS, NOWHERE, READ, READWRITE
from tests.facts.support import MiB, Rig, Stats, said, value

HOST_POOLS = pytest.mark.parametrize("location", [HOST, HOST_NUMA], ids=["host", "host-numa"])


class TestDevicePool:
    @pytest.mark.parametrize(("kind", "flags"), [(DEVICE, READWRITE), (HOST, NO_ACCESS), (HOST_NUMA, NO_ACCESS)])
    def test_access_at_first(self, rig: Rig, kind: int, flags: int) -> None:
        assert rig.access_flags(rig.pool(), kind) == flags

    @pytest.mark.parametrize(("kind", "id"), [(DEVICE, 9), (HOST_NUMA_CURRENT, 0), (NOWHERE, 0)])
    def test_access_of_what_is_no_place(self, rig: Rig, kind: int, id: int) -> None:
        answer = rig.raw.cuMemPoolGetAccess(rig.pool(), rig.location(kind, id))
        assert said(answer) == "INVALID_VALUE"

    @pytest.mark.parametrize(
        ("wanted", "expected"),
        [
            ((DEVICE, 0, NO_ACCESS), "INVALID_DEVICE"),
            ((DEVICE, 0, READ), "NOT_SUPPORTED"),
            ((DEVICE, 0, READWRITE), "SUCCESS"),
            ((DEVICE, 9, READWRITE), "INVALID_DEVICE"),
            ((HOST, 0, READWRITE), "NOT_SUPPORTED"),
            ((HOST_NUMA, 0, READWRITE), "NOT_SUPPORTED"),
        ],
        ids=["revoke own", "own read only", "own", "device that is not there", "host", "host NUMA"],
    )
    def test_set_access(self, rig: Rig, wanted: tuple[int, int, int], expected: str) -> None:
        pool = rig.pool()
        assert rig.grant(pool, wanted) == expected
        assert rig.access_flags(pool, DEVICE) == READWRITE

    def test_set_access_of_nobody(self, rig: Rig) -> None:
        pool = rig.pool()
        assert said(rig.raw.cuMemPoolSetAccess(pool, [], 0)) == "INVALID_VALUE"
        assert said(rig.raw.cuMemPoolSetAccess(pool, None, 0)) == "INVALID_VALUE"

    @pytest.mark.parametrize("location", [DEVICE, HOST], ids=["device", "host"])
    def test_set_access_of_one_device_twice(self, rig: Rig, location: int) -> None:
        pool = rig.pool(location=location)
        assert rig.grant(pool, (DEVICE, 0, READWRITE), (DEVICE, 0, READWRITE)) == "SUCCESS"


@HOST_POOLS
class TestHostPool:
    @pytest.mark.parametrize(("kind", "flags"), [(DEVICE, NO_ACCESS), (HOST, READWRITE), (HOST_NUMA, READWRITE)])
    def test_access_at_first(self, rig: Rig, location: int, kind: int, flags: int) -> None:
        assert rig.access_flags(rig.pool(location=location), kind) == flags

    @pytest.mark.parametrize("kind", [HOST_NUMA_CURRENT, NOWHERE])
    def test_access_of_what_is_no_place(self, rig: Rig, location: int, kind: int) -> None:
        pool = rig.pool(location=location)
        assert said(rig.raw.cuMemPoolGetAccess(pool, rig.location(kind))) == "INVALID_VALUE"

    @pytest.mark.parametrize(
        ("wanted", "expected"),
        [
            ((DEVICE, 0, READWRITE), "SUCCESS"),
            ((DEVICE, 0, READ), "NOT_SUPPORTED"),
            ((HOST, 0, NO_ACCESS), "NOT_SUPPORTED"),
            ((HOST_NUMA, 0, NO_ACCESS), "NOT_SUPPORTED"),
            ((HOST, 0, READWRITE), "SUCCESS"),
        ],
        ids=["device", "device read only", "revoke host", "revoke host NUMA", "host"],
    )
    def test_set_access(self, rig: Rig, location: int, wanted: tuple[int, int, int], expected: str) -> None:
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

    def test_is_no_source_of_a_copy_on_the_device(self, rig: Rig, pointer: Any) -> None:
        answer = rig.raw.cuMemcpyDtoDAsync(rig.plain(4096), pointer, 64, rig.stream())
        assert said(answer) == "INVALID_VALUE"

    def test_copy_past_its_end(self, rig: Rig, pointer: Any) -> None:
        answer = rig.raw.cuMemcpyHtoDAsync(rig.plain(4096), int(pointer) + 4000, 200, rig.stream())
        assert said(answer) == "INVALID_VALUE"

    def test_is_no_word_to_wait_for(self, rig: Rig, pointer: Any) -> None:
        ctypes.memset(int(pointer), 0, 4)
        assert said(rig.raw.cuStreamWaitValue32(rig.stream(), int(pointer), 0, 1)) == "INVALID_VALUE"


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
