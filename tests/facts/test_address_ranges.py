"""Address ranges: which sizes, alignments and hints are taken, and what gives a range back."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Callable

import pytest

from tests.facts.enums import HOST, HOST_NUMA
from tests.facts.support import PAGE, UINT64_MAX, UNRESERVED, MiB, Rig, said, value

SIZES: dict[str, tuple[int, ...]] = {
    "SUCCESS": (PAGE, 3 * PAGE, 1 << 30, 1 << 40, 1 << 45, 1 << 46),
    "INVALID_VALUE": (0, 1, 4096, 1 << 16, MiB, PAGE + 4096, PAGE + (1 << 16), UINT64_MAX),
    "OUT_OF_MEMORY": (*(1 << bits for bits in (47, 48, 49, 50, 56, 57, 62, 63)), UINT64_MAX + 1 - PAGE),
}
ALIGNMENTS: dict[str, tuple[int, ...]] = {
    "SUCCESS": (0, 1, 2, 512, 4096, 1 << 16, MiB, PAGE, 4 * MiB, 1 << 30, 1 << 40),
    "INVALID_VALUE": (3, 1 << 63),
    "OUT_OF_MEMORY": (1 << 46, 1 << 47, 1 << 48),
}
HINTS: dict[str, tuple[int, ...]] = {
    "SUCCESS": (0x7000000000, 0x100000000000, 0x200000000000, 0x7FFF00000000),
    "INVALID_VALUE": (1, 0x1000, 0x1000001000, 0x1000010000, 0x700000000001),
    "OUT_OF_MEMORY": (1 << 47, 1 << 48, 1 << 56),
}


def test_sizes(rig: Rig) -> None:
    for expected, sizes in SIZES.items():
        for size in sizes:
            answer = rig.try_reserve(size)
            assert said(answer) == expected, hex(size)
            if expected == "SUCCESS":
                assert int(answer[1]) % PAGE == 0
                assert rig.free_range(int(answer[1]), size) == "SUCCESS"
    assert said(rig.try_reserve(PAGE, flags=1)) == "INVALID_VALUE"


def test_addresses_run_out(rig: Rig) -> None:
    assert said(rig.try_reserve(1 << 46)) == "SUCCESS"
    assert said(rig.try_reserve(1 << 46)) == "OUT_OF_MEMORY"


def test_alignments(rig: Rig) -> None:
    for expected, alignments in ALIGNMENTS.items():
        for alignment in alignments:
            answer = rig.try_reserve(PAGE, alignment)
            assert said(answer) == expected, hex(alignment)
            assert expected != "SUCCESS" or int(answer[1]) % max(alignment, PAGE) == 0


def test_ranges_lie_apart(rig: Rig) -> None:
    starts = sorted(rig.reserve(PAGE) for _ in range(3))
    assert all(second - first >= PAGE for first, second in itertools.pairwise(starts))


class TestHint:
    """A hint is a wish: whether it is followed differs, and the answer is the same."""

    def test_addresses(self, rig: Rig) -> None:
        for expected, hints in HINTS.items():
            assert [said(rig.try_reserve(PAGE, hint=hint)) for hint in hints] == [expected] * len(hints)
        assert said(rig.try_reserve(PAGE, 1 << 30, hint=0x100000200000)) == "INVALID_VALUE"

    def test_into_what_is_taken(self, rig: Rig) -> None:
        taken, plain = rig.reserve(16 * PAGE), int(rig.plain(64 * MiB))
        for low, size, hint in ((taken, 16 * PAGE, 0), (taken, 16 * PAGE, 16 * PAGE), (plain, 64 * MiB, 0)):
            start = int(value(rig.try_reserve(PAGE, hint=low + hint)))
            assert not low <= start < low + size

    def test_into_memory_of_the_host(self, rig: Rig) -> None:
        with mmap.mmap(-1, 4 * PAGE) as memory:
            view = ctypes.c_char.from_buffer(memory)
            taken = (ctypes.addressof(view) + PAGE - 1) // PAGE * PAGE
            start = int(value(rig.try_reserve(PAGE, hint=taken)))
            assert start != taken
            del view


class TestFree:
    def test_of_what_is_no_range(self, rig: Rig) -> None:
        start = rig.reserve(16 * PAGE)
        for address, size in ((start, 8 * PAGE), (start + PAGE, PAGE), (start, 0), (0, PAGE), (UNRESERVED, PAGE)):
            assert rig.free_range(address, size) == "INVALID_VALUE"
        assert [rig.free_range(start, 16 * PAGE) for _ in range(2)] == ["SUCCESS", "INVALID_VALUE"]

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


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((16,), "OUT_OF_MEMORY"), ((30,), "SUCCESS"), ((16, 16), "SUCCESS")],
    ids=["one", "too large", "a second"],
)
def test_a_small_range_lies_high_while_it_fits_beside_the_memory_of_a_context(
    in_new_process: Callable[..., str], sizes: tuple[int, ...], expected: str
) -> None:
    assert in_new_process(_reserve_behind_the_last, sizes) == expected


def _reserve_behind_the_last(rig: Rig, sizes: tuple[int, ...]) -> str:
    start = 0
    for size in sizes:
        start = rig.reserve(size * MiB)
    return said(rig.try_reserve(1 << 40, hint=start))


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
