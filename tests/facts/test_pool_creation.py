"""Properties that make a pool, and the pools that exist from the start."""

from __future__ import annotations

import pytest

from tests.facts.enums import (
    DEVICE,
    FABRIC,
    HOST,
    HOST_NUMA,
    HOST_NUMA_CURRENT,
    MANAGED,
    NOWHERE,
    POSIX_FD,
    WIN32,
    WIN32_KMT,
)
from tests.facts.support import COUNTERS, REUSE_POLICIES, MiB, Rig, said, value

PROPERTIES: dict[str, tuple[str, dict[str, int]]] = {
    "device": ("SUCCESS", {}),
    "device that is not there": ("INVALID_VALUE", {"id": 9}),
    "device -1": ("INVALID_VALUE", {"id": -1}),
    "nowhere": ("INVALID_VALUE", {"location": NOWHERE}),
    "host": ("SUCCESS", {"location": HOST}),
    "host, id 5": ("SUCCESS", {"location": HOST, "id": 5}),
    "host, max size": ("SUCCESS", {"location": HOST, "max_size": MiB}),
    "host, file descriptor": ("INVALID_VALUE", {"location": HOST, "handle_types": POSIX_FD}),
    "host, fabric": ("INVALID_VALUE", {"location": HOST, "handle_types": FABRIC}),
    "host NUMA 0": ("SUCCESS", {"location": HOST_NUMA}),
    "host NUMA 99": ("INVALID_VALUE", {"location": HOST_NUMA, "id": 99}),
    "host NUMA, max size": ("SUCCESS", {"location": HOST_NUMA, "max_size": MiB}),
    "host NUMA, file descriptor": ("SUCCESS", {"location": HOST_NUMA, "handle_types": POSIX_FD}),
    "host NUMA, fabric": ("SUCCESS", {"location": HOST_NUMA, "handle_types": FABRIC}),
    "current host NUMA": ("INVALID_VALUE", {"location": HOST_NUMA_CURRENT}),
    "file descriptor": ("SUCCESS", {"handle_types": POSIX_FD}),
    "Win32": ("INVALID_VALUE", {"handle_types": WIN32}),
    "Win32 KMT": ("INVALID_VALUE", {"handle_types": WIN32_KMT}),
    "fabric": ("SUCCESS", {"handle_types": FABRIC}),
    "file descriptor and fabric": ("SUCCESS", {"handle_types": POSIX_FD | FABRIC}),
    "allocation type 0": ("INVALID_VALUE", {"allocation_type": 0}),
    "usage 1": ("SUCCESS", {"usage": 1}),
    "usage 2": ("SUCCESS", {"usage": 2}),
    "usage 4": ("SUCCESS", {"usage": 4}),
    "max size 1": ("SUCCESS", {"max_size": 1}),
    "max size 1 MiB": ("SUCCESS", {"max_size": MiB}),
    "max size 256 GiB": ("SUCCESS", {"max_size": 1 << 38}),
    "max size 1 TiB": ("SUCCESS", {"max_size": 1 << 40}),
    "max size 4 TiB": ("SUCCESS", {"max_size": 1 << 42}),
}

# Empty pools only: nothing is allocated from them.
MANAGED_PROPERTIES: dict[str, tuple[str, dict[str, int]]] = {
    "nowhere": ("SUCCESS", {"location": NOWHERE}),
    "device": ("SUCCESS", {"location": DEVICE}),
    "host": ("SUCCESS", {"location": HOST}),
    "host NUMA": ("SUCCESS", {"location": HOST_NUMA}),
    "max size": ("INVALID_VALUE", {"location": NOWHERE, "max_size": MiB}),
    "file descriptor": ("INVALID_VALUE", {"location": NOWHERE, "handle_types": POSIX_FD}),
    "usage 2": ("INVALID_VALUE", {"location": NOWHERE, "usage": 2}),
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_pool(rig: Rig, name: str) -> None:
    expected, properties = PROPERTIES[name]
    answer = rig.create_pool(**properties)
    assert said(answer) == expected
    if expected == "SUCCESS":
        assert said(rig.raw.cuMemPoolDestroy(rig.disown(answer[1]))) == "SUCCESS"


@pytest.mark.bindings("13.0")
@pytest.mark.parametrize("name", MANAGED_PROPERTIES)
def test_managed_pool(rig: Rig, name: str) -> None:
    expected, properties = MANAGED_PROPERTIES[name]
    answer = rig.create_pool(allocation_type=MANAGED, **properties)
    assert said(answer) == expected
    if expected == "SUCCESS":
        assert said(rig.raw.cuMemPoolDestroy(rig.disown(answer[1]))) == "SUCCESS"


def test_a_pool_has_its_addresses_from_the_beginning(rig: Rig) -> None:
    stream, first, second = rig.stream(), rig.pool(), rig.pool()
    address = rig.allocate(first, MiB, stream)
    rig.free(address, stream)
    value(rig.raw.cuStreamSynchronize(stream))
    value(rig.raw.cuMemPoolDestroy(rig.disown(first)))
    assert rig.allocate(second, MiB, stream) != address


def test_a_new_pool_takes_no_device_memory(rig: Rig) -> None:
    stream, free = rig.stream(), rig.device_free()
    pool = rig.pool()
    assert rig.device_free() == free
    rig.allocate(pool, 1, stream)
    assert free - rig.device_free() == 32 * MiB


@pytest.mark.bindings("13.0")
def test_an_empty_managed_pool(rig: Rig) -> None:
    """Reading, setting and granting work as on any pool."""
    pool = value(rig.create_pool(allocation_type=MANAGED, location=NOWHERE))
    assert [rig.get(pool, name) for name in REUSE_POLICIES] == [1] * 3
    assert [rig.get(pool, name) for name in ("RELEASE_THRESHOLD", *COUNTERS)] == [0] * 5
    assert rig.access_flags(pool, DEVICE) == rig.access_flags(pool, HOST) == 0
    rig.set_threshold(pool, 5)
    assert rig.get(pool, "RELEASE_THRESHOLD") == 5
    assert rig.grant(pool, (DEVICE, 0, 3)) == "SUCCESS"
    assert said(rig.raw.cuMemPoolTrimTo(pool, 0)) == "SUCCESS"
