"""Address ranges: which sizes, alignments and hints are taken, and what gives a range back."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Callable

import pytest

from tests.facts.enums import HOST, HOST_NUMA
from tests.facts.support import PAGE, UINT64_MAX, UNRESERVED, MiB, Rig, said, value


def in_hex(given: int | str) -> str:
    return hex(given) if isinstance(given, int) else given


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "INVALID_VALUE"),
        (1, "INVALID_VALUE"),
        (4096, "INVALID_VALUE"),
        (1 << 16, "INVALID_VALUE"),
        (MiB, "INVALID_VALUE"),
        (PAGE, "SUCCESS"),
        (PAGE + 4096, "INVALID_VALUE"),
        (PAGE + (1 << 16), "INVALID_VALUE"),
        (3 * PAGE, "SUCCESS"),
        (1 << 30, "SUCCESS"),
        (1 << 40, "SUCCESS"),
        (1 << 45, "SUCCESS"),
        (1 << 46, "SUCCESS"),
        *((1 << bits, "OUT_OF_MEMORY") for bits in (47, 48, 49, 50, 56, 57, 62, 63)),
        (UINT64_MAX + 1 - PAGE, "OUT_OF_MEMORY"),
        (UINT64_MAX, "INVALID_VALUE"),
    ],
    ids=in_hex,
)
def test_size(rig: Rig, size: int, expected: str) -> None:
    answer = rig.try_reserve(size)
    assert said(answer) == expected
    if expected == "SUCCESS":
        assert int(answer[1]) % PAGE == 0
        assert rig.free_range(int(answer[1]), size) == "SUCCESS"


def test_addresses_run_out(rig: Rig) -> None:
    assert said(rig.try_reserve(1 << 46)) == "SUCCESS"
    assert said(rig.try_reserve(1 << 46)) == "OUT_OF_MEMORY"


@pytest.mark.parametrize(
    ("alignment", "expected"),
    [
        (0, "SUCCESS"),
        (1, "SUCCESS"),
        (2, "SUCCESS"),
        (3, "INVALID_VALUE"),
        (512, "SUCCESS"),
        (4096, "SUCCESS"),
        (1 << 16, "SUCCESS"),
        (MiB, "SUCCESS"),
        (PAGE, "SUCCESS"),
        (4 * MiB, "SUCCESS"),
        (1 << 30, "SUCCESS"),
        (1 << 40, "SUCCESS"),
        (1 << 46, "OUT_OF_MEMORY"),
        (1 << 47, "OUT_OF_MEMORY"),
        (1 << 48, "OUT_OF_MEMORY"),
        (1 << 63, "INVALID_VALUE"),
    ],
    ids=in_hex,
)
def test_alignment(rig: Rig, alignment: int, expected: str) -> None:
    answer = rig.try_reserve(PAGE, alignment)
    assert said(answer) == expected
    if expected == "SUCCESS":
        assert int(answer[1]) % max(alignment, PAGE) == 0


def test_flags(rig: Rig) -> None:
    assert said(rig.try_reserve(PAGE, flags=1)) == "INVALID_VALUE"


def test_ranges_lie_apart(rig: Rig) -> None:
    starts = sorted(rig.reserve(PAGE) for _ in range(3))
    assert all(second - first >= PAGE for first, second in itertools.pairwise(starts))


class TestHint:
    """A hint is a wish: whether it is followed differs, and the answer is the same."""

    @pytest.mark.parametrize(
        ("hint", "expected"),
        [
            (0x7000000000, "SUCCESS"),
            (0x100000000000, "SUCCESS"),
            (0x200000000000, "SUCCESS"),
            (0x7FFF00000000, "SUCCESS"),
            (1, "INVALID_VALUE"),
            (0x1000, "INVALID_VALUE"),
            (0x1000001000, "INVALID_VALUE"),
            (0x1000010000, "INVALID_VALUE"),
            (0x700000000001, "INVALID_VALUE"),
            (1 << 47, "OUT_OF_MEMORY"),
            (1 << 48, "OUT_OF_MEMORY"),
            (1 << 56, "OUT_OF_MEMORY"),
        ],
        ids=in_hex,
    )
    def test_address(self, rig: Rig, hint: int, expected: str) -> None:
        assert said(rig.try_reserve(PAGE, hint=hint)) == expected

    def test_that_is_not_as_aligned_as_wished(self, rig: Rig) -> None:
        assert said(rig.try_reserve(PAGE, 1 << 30, hint=0x100000200000)) == "INVALID_VALUE"

    def test_into_another_range(self, rig: Rig) -> None:
        taken = rig.reserve(16 * PAGE)
        start = int(value(rig.try_reserve(PAGE, hint=taken)))
        assert not taken <= start < taken + 16 * PAGE

    def test_behind_another_range(self, rig: Rig) -> None:
        taken = rig.reserve(16 * PAGE)
        start = int(value(rig.try_reserve(PAGE, hint=taken + 16 * PAGE)))
        assert not taken <= start < taken + 16 * PAGE

    def test_into_plain_memory(self, rig: Rig) -> None:
        taken = int(rig.plain(64 * MiB))
        start = int(value(rig.try_reserve(PAGE, hint=taken)))
        assert not taken <= start < taken + 64 * MiB

    def test_into_memory_of_the_host(self, rig: Rig) -> None:
        with mmap.mmap(-1, 4 * PAGE) as memory:
            view = ctypes.c_char.from_buffer(memory)
            taken = (ctypes.addressof(view) + PAGE - 1) // PAGE * PAGE
            start = int(value(rig.try_reserve(PAGE, hint=taken)))
            assert start != taken
            del view


class TestFree:
    @pytest.mark.parametrize(
        ("at", "size"),
        [(0, 8), (1, 1), (0, 0)],
        ids=["half", "inside", "no bytes"],
    )
    def test_other_than_what_was_reserved(self, rig: Rig, at: int, size: int) -> None:
        start = rig.reserve(16 * PAGE)
        assert rig.free_range(start + at * PAGE, size * PAGE) == "INVALID_VALUE"
        assert rig.free_range(start, 16 * PAGE) == "SUCCESS"

    @pytest.mark.parametrize("address", [0, UNRESERVED], ids=["nothing", "unreserved"])
    def test_of_nothing(self, rig: Rig, address: int) -> None:
        assert rig.free_range(address, PAGE) == "INVALID_VALUE"

    def test_twice(self, rig: Rig) -> None:
        start = rig.reserve(PAGE)
        assert rig.free_range(start, PAGE) == "SUCCESS"
        assert rig.free_range(start, PAGE) == "INVALID_VALUE"

    def test_while_something_is_mapped(self, rig: Rig) -> None:
        start = rig.reserve(2 * PAGE)
        rig.map(start, rig.memory())
        assert rig.free_range(start, 2 * PAGE) == "INVALID_VALUE"
        value(rig.raw.cuMemUnmap(start, PAGE))
        assert rig.free_range(start, 2 * PAGE) == "SUCCESS"


def test_so_large_a_range_only_where_there_is_room_behind_the_hint(rig: Rig) -> None:
    taken = rig.reserve(4 * PAGE)
    assert said(rig.try_reserve(1 << 40, hint=taken)) == "OUT_OF_MEMORY"
    assert said(rig.try_reserve(1 << 30, hint=taken)) == "SUCCESS"
    assert said(rig.try_reserve(1 << 40)) == "SUCCESS"


@pytest.mark.parametrize(("size", "alignment"), [(16 * PAGE, 0), (PAGE, 64 * MiB)], ids=["large", "aligned"])
def test_what_is_large_or_aligned_lies_low(in_new_process: Callable[..., str], size: int, alignment: int) -> None:
    assert in_new_process(_reserve_behind, size, alignment) == "SUCCESS"


def _reserve_behind(rig: Rig, size: int, alignment: int) -> str:
    return said(rig.try_reserve(1 << 40, hint=rig.reserve(size, alignment)))


@pytest.mark.parametrize("place", [HOST, HOST_NUMA], ids=["host", "NUMA node"])
def test_a_pool_lies_low_too(in_new_process: Callable[..., tuple[int, int, int]], place: int) -> None:
    """At the lowest place where twice of what it may hold is free."""
    freed, of_the_pool, later = in_new_process(_places, place)
    assert freed == of_the_pool < later


def _places(rig: Rig, place: int) -> tuple[int, int, int]:
    freed = rig.reserve(64 * MiB)
    assert rig.free_range(freed, 64 * MiB) == "SUCCESS"
    of_the_pool = rig.allocate(rig.pool(location=place, max_size=32 * MiB), 512, rig.stream())
    return freed, of_the_pool, rig.reserve(64 * MiB)
