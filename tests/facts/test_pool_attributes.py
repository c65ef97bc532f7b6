"""Getting and setting the attributes of pools, the default pool among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.facts.support import COUNTERS, REUSE_POLICIES, UINT64_MAX, MiB, Rig, Stats, said, unreadable, value

SIZES = ("RELEASE_THRESHOLD", *COUNTERS)
NEWER = (
    "ALLOCATION_TYPE",
    "EXPORT_HANDLE_TYPES",
    "LOCATION_ID",
    "LOCATION_TYPE",
    "MAX_POOL_SIZE",
    "HW_DECOMPRESS_ENABLED",
)


@pytest.fixture
def default_pool(rig: Rig) -> Iterator[Any]:
    """The default pool of device 0, empty and with its peaks forgotten."""
    pool = value(rig.raw.cuDeviceGetDefaultMemPool(0))
    rig.synchronize()
    value(rig.raw.cuMemPoolTrimTo(pool, 0))
    for name in ("RESERVED_MEM_HIGH", "USED_MEM_HIGH"):
        value(rig.raw.cuMemPoolSetAttribute(pool, rig.pool_attribute(name), rig.raw.cuuint64_t(0)))
    yield pool


class TestDefaultPool:
    @pytest.mark.parametrize("name", REUSE_POLICIES)
    def test_reuses_by_every_policy(self, rig: Rig, default_pool: Any, name: str) -> None:
        assert rig.get(default_pool, name) == 1

    @pytest.mark.parametrize("name", SIZES)
    def test_sizes(self, rig: Rig, default_pool: Any, name: str) -> None:
        assert rig.get(default_pool, name) == 0

    def test_is_the_current_pool(self, rig: Rig, default_pool: Any) -> None:
        assert int(value(rig.raw.cuDeviceGetMemPool(0))) == int(default_pool)

    def test_cannot_be_destroyed(self, rig: Rig, default_pool: Any) -> None:
        assert said(rig.raw.cuMemPoolDestroy(default_pool)) == "INVALID_VALUE"

    def test_serves_allocations_that_name_no_pool(self, rig: Rig, default_pool: Any) -> None:
        rig.keep(rig.raw.cuMemAllocAsync(100, rig.stream()))
        assert rig.stats(default_pool) == (32 * MiB, 32 * MiB, 100, 100)


@pytest.mark.parametrize("name", NEWER)
def test_attribute_that_the_bindings_cannot_read(rig: Rig, name: str) -> None:
    member = unreadable(rig.raw.CUmemPool_attribute, f"CU_MEMPOOL_ATTR_{name}")
    with pytest.raises(TypeError, match=f"^Unsupported attribute: {member.name}$"):
        rig.raw.cuMemPoolGetAttribute(rig.pool(), member)


def test_kinds_of_values(rig: Rig) -> None:
    pool = rig.pool()
    policy = value(rig.raw.cuMemPoolGetAttribute(pool, rig.pool_attribute(REUSE_POLICIES[0])))
    threshold = value(rig.raw.cuMemPoolGetAttribute(pool, rig.pool_attribute("RELEASE_THRESHOLD")))
    assert type(policy) is int
    assert type(threshold) is rig.raw.cuuint64_t


@pytest.mark.parametrize("name", REUSE_POLICIES)
@pytest.mark.parametrize(("wanted", "read"), [(0, 0), (1, 1), (5, 1), (-1, 1)])
def test_policy(rig: Rig, name: str, wanted: int, read: int) -> None:
    pool, attribute = rig.pool(), rig.pool_attribute(name)
    assert said(rig.raw.cuMemPoolSetAttribute(pool, attribute, wanted)) == "SUCCESS"
    assert rig.get(pool, name) == read


def test_policy_as_a_64_bit_number(rig: Rig) -> None:
    pool, attribute = rig.pool(policies="000"), rig.pool_attribute(REUSE_POLICIES[0])
    assert said(rig.raw.cuMemPoolSetAttribute(pool, attribute, rig.raw.cuuint64_t(1))) == "SUCCESS"
    assert rig.get(pool, REUSE_POLICIES[0]) == 1


def test_policy_that_is_no_c_int(rig: Rig) -> None:
    pool, attribute = rig.pool(), rig.pool_attribute(REUSE_POLICIES[0])
    with pytest.raises(OverflowError, match=r"^value too large to convert to int$"):
        rig.raw.cuMemPoolSetAttribute(pool, attribute, 1 << 40)


@pytest.mark.parametrize("threshold", [0, 5, 7, UINT64_MAX])
def test_release_threshold(rig: Rig, threshold: int) -> None:
    pool = rig.pool()
    rig.set_threshold(pool, threshold)
    assert rig.get(pool, "RELEASE_THRESHOLD") == threshold


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("RELEASE_THRESHOLD", 0),
        ("RELEASE_THRESHOLD", -1),
        ("RELEASE_THRESHOLD", 1.5),
        ("RELEASE_THRESHOLD", 1 << 64),
        ("RESERVED_MEM_HIGH", 0),
        ("RESERVED_MEM_CURRENT", 0),
        ("USED_MEM_CURRENT", 0),
    ],
)
def test_sizes_are_set_from_the_bindings_own_number(rig: Rig, name: str, number: float) -> None:
    pool = rig.pool(UINT64_MAX)
    kind = type(number).__name__
    with pytest.raises(AttributeError, match=f"^'{kind}' object has no attribute 'getPtr'$"):
        rig.raw.cuMemPoolSetAttribute(pool, rig.pool_attribute(name), number)
    assert rig.get(pool, "RELEASE_THRESHOLD") == UINT64_MAX


@pytest.mark.parametrize(
    ("name", "number", "expected"),
    [
        ("RESERVED_MEM_HIGH", 0, "SUCCESS"),
        ("RESERVED_MEM_HIGH", 1, "INVALID_VALUE"),
        ("USED_MEM_HIGH", 0, "SUCCESS"),
        ("USED_MEM_HIGH", 1, "INVALID_VALUE"),
        ("RESERVED_MEM_CURRENT", 0, "INVALID_VALUE"),
    ],
)
def test_only_peaks_are_set_and_only_to_zero(rig: Rig, name: str, number: int, expected: str) -> None:
    attribute, size = rig.pool_attribute(name), rig.raw.cuuint64_t(number)
    assert said(rig.raw.cuMemPoolSetAttribute(rig.pool(), attribute, size)) == expected


def test_a_peak_starts_anew_from_what_is_there(rig: Rig) -> None:
    raw, pool, stream = rig.raw, rig.pool(UINT64_MAX), rig.stream()
    used_high, reserved_high = rig.pool_attribute("USED_MEM_HIGH"), rig.pool_attribute("RESERVED_MEM_HIGH")
    rig.free(rig.allocate(pool, 20 * MiB, stream), stream)
    assert rig.stats(pool) == Stats(32 * MiB, 32 * MiB, 0, 20 * MiB)
    value(raw.cuMemPoolSetAttribute(pool, used_high, raw.cuuint64_t(0)))
    assert rig.stats(pool) == Stats(32 * MiB, 32 * MiB, 0, 0)
    value(raw.cuStreamSynchronize(stream))
    value(raw.cuMemPoolTrimTo(pool, 0))
    assert rig.stats(pool) == Stats(0, 32 * MiB, 0, 0)
    value(raw.cuMemPoolSetAttribute(pool, reserved_high, raw.cuuint64_t(0)))
    assert rig.stats(pool) == Stats(0, 0, 0, 0)
