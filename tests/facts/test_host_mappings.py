"""Host memory made with cuMemCreate: what device and host may do with it, each as it was granted."""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import pytest

from tests.facts.enums import DEVICE, HOST, HOST_NUMA, HOST_NUMA_CURRENT, NO_ACCESS, READ, READWRITE
from tests.facts.support import PAGE, MiB, Rig, said, value

OWN = (DEVICE, 0, READWRITE)
locations = pytest.mark.parametrize("location", [HOST, HOST_NUMA], ids=["host", "host-numa"])


@dataclasses.dataclass(frozen=True)
class Case:
    """The grants of one call, and their effects."""

    wanted: tuple[tuple[int, int, int], ...]
    flags: list[int]  # that cuMemGetAccess reads for the device, the host and its memory node
    fill: str  # what cuMemsetD8 says
    host: bool  # whether the host's own loads and stores work


CASES = {
    "device": Case((OWN,), [3, 3, 0], "SUCCESS", False),
    "host": Case(((HOST, 0, READWRITE),), [0, 3, 3], "INVALID_VALUE", True),
    "host NUMA": Case(((HOST_NUMA, 0, READWRITE),), [0, 3, 3], "INVALID_VALUE", True),
    "both": Case((OWN, (HOST, 0, READWRITE)), [3, 3, 3], "SUCCESS", True),
    "device reads": Case(((DEVICE, 0, READ), (HOST, 0, READWRITE)), [1, 3, 3], "INVALID_VALUE", True),
    "host reads": Case(((HOST, 0, READ), OWN), [3, 3, 1], "SUCCESS", True),
}
cases = pytest.mark.parametrize("name", CASES)


@locations
@cases
class TestGrant:
    def test_effects(self, rig: Rig, location: int, name: str) -> None:
        case = CASES[name]
        address = rig.mapping(PAGE, *case.wanted, location=location)
        assert [rig.get_access(address, kind) for kind in (DEVICE, HOST, HOST_NUMA)] == case.flags
        expected: dict[str, int | str] = {
            "MEMORY_TYPE": 1,
            "DEVICE_POINTER": address if case.flags[0] else "INVALID_VALUE",
            "HOST_POINTER": address if case.host else "INVALID_VALUE",
            "DEVICE_ORDINAL": 0,
            "RANGE_SIZE": PAGE,
            "MAPPED": 1,
            "ACCESS_FLAGS": case.flags[0],
        }
        assert rig.pointer_attributes(address, expected) == expected
        assert said(rig.raw.cuMemsetD8(address, 5, PAGE)) == case.fill
        rig.synchronize()
        if case.host:
            byte = 5 if case.fill == "SUCCESS" else 0
            assert ctypes.string_at(address, PAGE) == bytes([byte]) * PAGE


@locations
@pytest.mark.parametrize("name", ["host", "host NUMA", "both"])
def test_host_and_copies_see_the_same_bytes(rig: Rig, location: int, name: str) -> None:
    address = rig.mapping(PAGE, *CASES[name].wanted, location=location)
    ctypes.memset(address + 1, 77, 1)
    assert rig.read(address, 4) == [0, 77, 0, 0]
    assert said(rig.raw.cuMemcpyHtoD(address, np.full(8, 3, np.uint8), 8)) == "SUCCESS"
    rig.synchronize()
    assert ctypes.string_at(address, 8) == b"\3" * 8


class TestOneAfterTheOther:
    """Grants made by separate calls, to memory that the device already has access to."""

    @pytest.fixture
    def address(self, rig: Rig) -> int:
        return rig.mapping(PAGE, OWN, location=HOST)

    def flags(self, rig: Rig, address: int) -> list[int | str]:
        return [rig.get_access(address, kind) for kind in (DEVICE, HOST, HOST_NUMA)]

    def test_host_too(self, rig: Rig, address: int) -> None:
        value(rig.raw.cuMemsetD8(address, 5, PAGE))
        rig.synchronize()
        assert rig.set_access(address, PAGE, (HOST, 0, READWRITE)) == "SUCCESS"
        assert self.flags(rig, address) == [READWRITE] * 3
        assert ctypes.string_at(address, 4) == b"\5" * 4
        ctypes.memset(address + 1, 77, 1)
        assert rig.read(address, 4) == [5, 77, 5, 5]

    def test_host_flags(self, rig: Rig, address: int) -> None:
        """They are what was granted last; with the host's taken away, they are not none."""
        for wanted, result, host in (
            ((HOST, 0, READWRITE), "SUCCESS", READWRITE),
            ((HOST, 0, READ), "SUCCESS", READ),
            ((HOST_NUMA, 0, READWRITE), "SUCCESS", READWRITE),
            ((HOST_NUMA, 9, READWRITE), "SUCCESS", None),
            ((HOST_NUMA_CURRENT, 0, READWRITE), "INVALID_VALUE", None),
            ((HOST, 0, NO_ACCESS), "SUCCESS", READWRITE),
        ):
            assert rig.set_access(address, PAGE, wanted) == result
            if host is not None:
                assert rig.get_access(address, HOST) == host

    def test_device_reads_only(self, rig: Rig, address: int) -> None:
        assert rig.set_access(address, PAGE, (DEVICE, 0, READ)) == "SUCCESS"
        assert rig.get_access(address) == READ
        assert rig.set_access(address, PAGE, (DEVICE, 0, NO_ACCESS)) == "SUCCESS"


def test_copies_that_the_device_does_need_no_access_of_the_host(rig: Rig) -> None:
    address, target = rig.mapping(PAGE, OWN, location=HOST), rig.plain(2 * MiB)
    value(rig.raw.cuMemsetD8(address, 5, PAGE))
    rig.synchronize()
    assert rig.read(address, 4) == [5] * 4
    assert said(rig.raw.cuMemcpyDtoD(target, address, PAGE)) == "SUCCESS"
    assert rig.read(target, 4) == [5] * 4
    assert said(rig.raw.cuMemcpyAsync(target, address, PAGE, 0)) == "SUCCESS"
    rig.synchronize()


def test_beside_device_memory(rig: Rig) -> None:
    raw, start = rig.raw, rig.reserve(2 * PAGE)
    rig.map(start, rig.memory())
    rig.map(start + PAGE, rig.memory(location=HOST))
    assert rig.set_access(start, 2 * PAGE, OWN) == "SUCCESS"
    assert said(raw.cuMemsetD8(start, 3, 2 * PAGE)) == "SUCCESS"
    rig.synchronize()
    assert rig.set_access(start, 2 * PAGE, (HOST, 0, READWRITE)) == "NOT_SUPPORTED"
    assert rig.set_access(start + PAGE, PAGE, (HOST, 0, READWRITE)) == "SUCCESS"
    assert said(raw.cuMemcpyDtoD(start, start + PAGE, PAGE)) == "SUCCESS"
    assert rig.read(start, 4) == [3] * 4


def test_before_device_memory_it_gets_access_that_this_refuses(rig: Rig) -> None:
    start = rig.reserve(2 * PAGE)
    rig.map(start, rig.memory(location=HOST))
    rig.map(start + PAGE, rig.memory())
    assert rig.set_access(start, 2 * PAGE, OWN, (HOST, 0, READ)) == "NOT_SUPPORTED"
    assert [rig.get_access(start, HOST_NUMA), rig.get_access(start + PAGE)] == [READ, READWRITE]


def test_where_a_range_begins_is_missing(rig: Rig) -> None:
    address = rig.mapping(PAGE, location=HOST_NUMA)
    assert said(rig.raw.cuMemGetAddressRange(address)) == "NOT_FOUND"
    assert rig.set_access(address, PAGE, (DEVICE, 0, READWRITE)) == "SUCCESS"
    base, size = value(rig.raw.cuMemGetAddressRange(address))
    assert (int(base), size) == (0, PAGE)
