"""Getting and setting the attributes of pools, the default pool among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.facts.support import COUNTERS, REUSE_POLICIES, UINT64_MAX, MiB, Rig, Stats, said, unreadable, value

SIZES = ("RELEASE_THRESHOLD", *COUNTERS)
NEWER = [
    "ALLOCATION_TYPE",
    "EXPORT_HANDLE_TYPES",
    "LOCATION_ID",
    "LOCATION_TYPE",
    "MAX_POOL_SIZE",
    "HW_DECOMPRESS_ENABLED",
]


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
    def test_at_first(self, rig: Rig, default_pool: Any) -> None:
        assert [rig.get(default_pool, name) for name in REUSE_POLICIES] == [1] * 3
        assert [rig.get(default_pool, name) for name in SIZES] == [0] * 5
        assert int(value(rig.raw.cuDeviceGetMemPool(0))) == int(default_pool)
        assert said(rig.raw.cuMemPoolDestroy(default_pool)) == "INVALID_VALUE"

    def test_serves_allocations_that_name_no_pool(self, rig: Rig, default_pool: Any) -> None:
        rig.keep(rig.raw.cuMemAllocAsync(100, rig.stream()))
        assert rig.stats(default_pool) == (32 * MiB, 32 * MiB, 100, 100)


@pytest.mark.parametrize("name", [*NEWER, "HW_DECOMPRESS_ENABLED"])
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
def test_policy(rig: Rig, name: str) -> None:
    pool, attribute = rig.pool(), rig.pool_attribute(name)
    for wanted, read in ((0, 0), (1, 1), (0, 0), (5, 1), (0, 0), (-1, 1), (0, 0), (rig.raw.cuuint64_t(1), 1)):
        assert said(rig.raw.cuMemPoolSetAttribute(pool, attribute, wanted)) == "SUCCESS"
        assert rig.get(pool, name) == read
    with pytest.raises(OverflowError, match=r"^value too large to convert to int$"):
        rig.raw.cuMemPoolSetAttribute(pool, attribute, 1 << 40)


def test_sizes_are_set_from_the_bindings_own_number(rig: Rig) -> None:
    pool = rig.pool()
    for threshold in (0, 5, 7, UINT64_MAX):
        rig.set_threshold(pool, threshold)
        assert rig.get(pool, "RELEASE_THRESHOLD") == threshold
    wrong: dict[str, list[float]] = {
        name: [0] for name in ("RESERVED_MEM_HIGH", "RESERVED_MEM_CURRENT", "USED_MEM_CURRENT")
    }
    for name, numbers in {**wrong, "RELEASE_THRESHOLD": [0, -1, 1.5, 1 << 64]}.items():
        for number in numbers:
            kind = type(number).__name__
            with pytest.raises(AttributeError, match=f"^'{kind}' object has no attribute 'getPtr'$"):
                rig.raw.cuMemPoolSetAttribute(pool, rig.pool_attribute(name), number)
    assert rig.get(pool, "RELEASE_THRESHOLD") == UINT64_MAX


def test_only_peaks_are_set_and_only_to_zero(rig: Rig) -> None:
    pool = rig.pool()
    for name, answers in {"RESERVED_MEM_HIGH": GOOD, "USED_MEM_HIGH": GOOD, "RESERVED_MEM_CURRENT": BAD}.items():
        sizes = [rig.raw.cuuint64_t(number) for number in (0, 1)]
        found = [said(rig.raw.cuMemPoolSetAttribute(pool, rig.pool_attribute(name), size)) for size in sizes]
        assert found == answers, name


GOOD, BAD = ["SUCCESS", "INVALID_VALUE"], ["INVALID_VALUE"] * 2


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
