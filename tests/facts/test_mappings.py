"""Mappings: what may be mapped where, what unmaps it, what lasts while something is mapped, and access to it."""

import ctypes
import dataclasses
from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.facts.enums import (
    DEVICE,
    HOST,
    HOST_NUMA,
    HOST_NUMA_CURRENT,
    LEGACY,
    NO_ACCESS,
    NOWHERE,
    OWN,
    READ,
    READWRITE,
)
from tests.facts.support import IN_CONTEXT, PAGE, UNRESERVED, Answer, MiB, Rig, said, value
from tests.support import in_threads


class Scene:
    """A range of eight pages, and memory of one page and of two."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.raw, self.start = rig, rig.raw, rig.reserve(8 * PAGE)
        self.one, self.two = rig.memory(), rig.memory(2 * PAGE)

    def page(self, number: int) -> int:
        return self.start + number * PAGE

    def map(self, page: int, size: int, memory: Any, offset: int = 0) -> str:
        return said(self.raw.cuMemMap(self.page(page), size, offset, memory, 0))

    def unmap(self, page: int, pages: int) -> str:
        return said(self.raw.cuMemUnmap(self.page(page), pages * PAGE))

    def open(self, page: int, pages: int = 1) -> int:
        """Give the device access to what is mapped there."""
        assert self.rig.set_access(self.page(page), pages * PAGE, OWN) == "SUCCESS"
        return self.page(page)

    def mapped(self, *pages: int) -> list[bool]:
        """Whether something is mapped, page by page."""
        return [isinstance(self.rig.get_access(self.page(page)), int) for page in pages]


@pytest.fixture
def scene(rig: Rig) -> Scene:
    return Scene(rig)


# Where in the range, how many bytes, and from where in the memory, which has two pages.
REFUSED: dict[str, tuple[int, int, int, str]] = {
    "half of the memory": (0, PAGE, 0, "NOT_SUPPORTED"),
    "the other half": (0, PAGE, PAGE, "NOT_SUPPORTED"),
    "more than the memory": (0, 4 * PAGE, 0, "NOT_SUPPORTED"),
    "not all of the last page": (0, 2 * PAGE - 4096, 0, "NOT_SUPPORTED"),
    "past the end of the memory": (0, 2 * PAGE, PAGE, "NOT_SUPPORTED"),
    "from inside a page": (0, 2 * PAGE, 4096, "NOT_SUPPORTED"),
    "half of the memory, to inside a page": (4096, PAGE, 0, "NOT_SUPPORTED"),
    "no bytes": (0, 0, 0, "INVALID_VALUE"),
    "to 4 KiB inside a page": (4096, 2 * PAGE, 0, "INVALID_VALUE"),
    "to 64 KiB inside a page": (1 << 16, 2 * PAGE, 0, "INVALID_VALUE"),
    "to before the range": (-2 * PAGE, 2 * PAGE, 0, "INVALID_VALUE"),
    "over the begin of the range": (-PAGE, 2 * PAGE, 0, "INVALID_VALUE"),
}


class TestMap:
    def test_refused(self, scene: Scene) -> None:
        for name, (at, size, offset, expected) in REFUSED.items():
            assert said(scene.raw.cuMemMap(scene.start + at, size, offset, scene.two, 0)) == expected, name
        assert said(scene.raw.cuMemMap(scene.start, 2 * PAGE, 0, scene.two, 1)) == "INVALID_VALUE"
        assert said(scene.raw.cuMemMap(0, 2 * PAGE, 0, scene.two, 0)) == "INVALID_VALUE"
        assert [scene.map(0, 2 * PAGE, memory) for memory in (0, None)] == ["INVALID_VALUE"] * 2
        # what was refused changes nothing
        assert [scene.unmap(0, 1), scene.unmap(0, 2), scene.map(0, 2 * PAGE, scene.two)] == ["SUCCESS"] * 3

    def test_to_where_something_is(self, scene: Scene) -> None:
        assert scene.map(1, 2 * PAGE, scene.two) == "SUCCESS"
        assert scene.map(1, 2 * PAGE, scene.two) == "INVALID_VALUE"
        assert scene.map(2, PAGE, scene.one) == "INVALID_VALUE"
        # The size is looked at first.
        assert scene.map(2, 2 * PAGE, scene.one) == "NOT_SUPPORTED"

    def test_again_elsewhere_many_times(self, scene: Scene) -> None:
        read = []
        for turn in range(20):
            assert scene.map(turn % 8, PAGE, scene.one) == "SUCCESS"
            address = scene.open(turn % 8)
            if turn == 0:
                value(scene.raw.cuMemsetD8(address, 33, PAGE))
            read += scene.rig.read(address, 1)
            assert scene.unmap(turn % 8, 1) == "SUCCESS"
        assert read == [33] * 20


class TestAliases:
    def test_show_the_same_bytes(self, scene: Scene) -> None:
        aliases = [scene.rig.map(scene.page(page), scene.one) for page in (0, 1, 4)]
        scene.open(0)
        assert scene.rig.get_access(aliases[1]) == 0
        scene.open(1)
        scene.open(4)
        value(scene.raw.cuMemsetD8(aliases[0], 0x5A, PAGE))
        assert [scene.rig.read(alias, 4) for alias in aliases] == [[0x5A] * 4] * 3

    def test_outlast_one_another(self, scene: Scene) -> None:
        gone, left = (scene.rig.map(scene.page(page), scene.one) for page in (0, 1))
        scene.open(0, 2)
        value(scene.raw.cuMemsetD8(gone, 9, PAGE))
        scene.rig.synchronize()
        assert scene.unmap(0, 1) == "SUCCESS"
        assert scene.rig.read(left, 4) == [9] * 4
        assert said(scene.raw.cuMemsetD8(gone, 9, PAGE)) == "INVALID_VALUE"
        assert said(scene.raw.cuMemcpyDtoD(left, gone, PAGE)) == "INVALID_VALUE"
        assert said(scene.raw.cuMemcpyHtoD(gone, np.ones(8, np.uint8), 8)) == "INVALID_VALUE"


RDMA_STORIES = (
    # Memory is mapped (+) at a page and unmapped (-), and the device gets access (!) there or loses it (0). The last
    # step is UNKNOWN where a question mark follows.
    "A+ B+ A- B! C+ ?",
    "A+ B+ C+ A- C! B! ?",
    "A+ B+ C+ A- C! B- D+ ?",
    "A+ B+ C+ A- B! B- C! D+ ?",
    "A+ A! B+ B! A- B0 B! C+ ?",
    "A+ B+ A- C+ C- B! D+ ?",
    "A+ B+ A- A+ A- B! C+ ?",
    "A+ B+ B- A! C+",
    "A+ B+ B! A- C+",
    "A+ B+ A- C+ D+ C! D! B! E+",
    "A+ B+ C+ A- B! B0 D+ C! E+",
    "A+ B+ C+ A- B! B- D+ C! E+",
    "A+ A- A+ A! B+ B!",
)


@pytest.mark.parametrize("story", RDMA_STORIES)
def test_memory_for_rdma_goes_by_one_of_its_mappings(scene: Scene, story: str) -> None:
    memory = scene.rig.memory(rdma=1)
    *steps, last = story.removesuffix(" ?").split()

    def do(step: str) -> str:
        page, what = ord(step[0]) - ord("A"), step[1]
        if what in "+-":
            return scene.map(page, PAGE, memory) if what == "+" else scene.unmap(page, 1)
        return scene.rig.set_access(scene.page(page), PAGE, OWN if what == "!" else (DEVICE, 0, NO_ACCESS))

    assert [do(step) for step in steps] == ["SUCCESS"] * len(steps)
    assert do(last) == ("UNKNOWN" if story.endswith("?") else "SUCCESS")


class TestUnmap:
    @pytest.fixture(autouse=True)
    def three(self, scene: Scene) -> None:
        """One page, two pages and one page, side by side from the start of the range."""
        for page, size, memory in ((0, PAGE, scene.one), (1, 2 * PAGE, scene.two), (3, PAGE, scene.one)):
            assert scene.map(page, size, memory) == "SUCCESS"

    def test_refused(self, scene: Scene) -> None:
        for at, size in ((0, 2 * PAGE), (PAGE, PAGE), (4096, PAGE), (0, 0)):
            assert said(scene.raw.cuMemUnmap(scene.start + at, size)) == "INVALID_VALUE"
            assert scene.mapped(0, 1, 2, 3, 4) == [True] * 4 + [False]
            assert scene.rig.get_access(scene.start) == 0
        assert said(scene.raw.cuMemUnmap(UNRESERVED, PAGE)) == "INVALID_VALUE"

    def test_several_and_what_is_between(self, scene: Scene) -> None:
        assert scene.unmap(5, 1) == "SUCCESS"
        assert scene.map(6, PAGE, scene.one) == "SUCCESS"
        assert scene.unmap(0, 8) == "SUCCESS"
        assert scene.mapped(0, 1, 2, 3, 6) == [False] * 5
        assert scene.unmap(0, 4) == "SUCCESS"


class TestRetain:
    @pytest.fixture(autouse=True)
    def mapped(self, scene: Scene) -> None:
        assert scene.map(1, 2 * PAGE, scene.two) == "SUCCESS"

    def retain(self, scene: Scene, address: int) -> Answer:
        return scene.rig.keep_memory(scene.raw.cuMemRetainAllocationHandle(address))

    def test_gives_the_handle_that_is_mapped(self, scene: Scene) -> None:
        for at in (0, PAGE + 77):
            assert int(value(self.retain(scene, scene.page(1) + at))) == int(scene.two)
        assert said(self.retain(scene, scene.page(3))) == "INVALID_VALUE"

    def test_of_a_released_handle(self, scene: Scene) -> None:
        address = scene.open(1, 2)
        value(scene.raw.cuMemsetD8(address, 33, 2 * PAGE))
        number = int(scene.two)
        assert scene.rig.release(scene.two) == "SUCCESS"
        assert scene.rig.read(address, 4) == [33] * 4
        retained = value(self.retain(scene, address))
        assert int(retained) == number
        assert scene.map(4, 2 * PAGE, retained) == "SUCCESS"
        assert scene.rig.release(retained) == "SUCCESS"
        assert [scene.unmap(4, 2), scene.unmap(1, 2)] == ["SUCCESS"] * 2


class TestAdjacentRanges:
    @pytest.fixture
    def start(self, rig: Rig) -> int:
        """The start of two ranges, two pages each, of which the second begins where the first ends."""
        starts: set[int] = set()
        for _ in range(16):
            start = rig.reserve(2 * PAGE)
            for other in (start - 2 * PAGE, start):
                if {other, other + 2 * PAGE} <= starts | {start}:
                    # Before the ranges go: what lies in both of them is not unmapped in halves.
                    return int(rig.own(other, lambda both: rig.raw.cuMemUnmap(both, 4 * PAGE)))
            starts.add(start)
        pytest.skip("the driver gave no two ranges side by side")

    def test_one_mapping_in_both(self, rig: Rig, start: int) -> None:
        rig.map(start, rig.memory(4 * PAGE), 4 * PAGE)
        assert said(rig.raw.cuMemUnmap(start, 4 * PAGE)) == "SUCCESS"

    def test_a_mapping_in_each(self, rig: Rig, start: int) -> None:
        for address in (start, start + 2 * PAGE):
            rig.map(address, rig.memory(2 * PAGE), 2 * PAGE)
        assert rig.set_access(start, 4 * PAGE, OWN) == "SUCCESS"
        assert said(rig.raw.cuMemsetD8(start, 5, 4 * PAGE)) == "SUCCESS"
        rig.synchronize()
        assert said(rig.raw.cuMemUnmap(start, 4 * PAGE)) == "SUCCESS"
        assert rig.free_range(start, 4 * PAGE) == "INVALID_VALUE"


@pytest.mark.parametrize(
    ("first", "pages", "answer"),
    [(0, 1, "SUCCESS"), (1, 2, "SUCCESS"), (0, 3, "INVALID_VALUE"), (0, 2, "INVALID_VALUE")],
)
def test_a_copy_beyond_one_mapping_needs_a_current_context(scene: Scene, first: int, pages: int, answer: str) -> None:
    """A fill does not."""
    assert [scene.map(0, PAGE, scene.one), scene.map(1, 2 * PAGE, scene.two)] == ["SUCCESS"] * 2
    at, size = scene.open(0, 3) + first * PAGE, pages * PAGE
    host, stream = scene.rig.pinned(3 * PAGE), scene.rig.stream()
    raw = scene.raw
    calls: list[Callable[[], str]] = [
        lambda: said(raw.cuMemcpyAsync(at, host, size, stream)),
        lambda: said(raw.cuMemcpyAsync(host, at, size, stream)),
        lambda: said(raw.cuMemcpyHtoDAsync(at, host, size, stream)),
        lambda: said(raw.cuMemcpyDtoHAsync(host, at, size, stream)),
        lambda: said(raw.cuMemsetD8Async(at, 1, size, stream)),
    ]
    answers: list[str] = []
    in_threads(lambda: answers.extend(call() for call in calls))
    assert answers == [answer] * 4 + ["SUCCESS"]
    assert [call() for call in calls] == ["SUCCESS"] * 5
    assert said(raw.cuStreamSynchronize(stream)) == "SUCCESS"


class TestQueuedWork:
    def test_no_call_waits_for_it(self, scene: Scene) -> None:
        rig, stream, gate = scene.rig, scene.rig.stream(), scene.rig.gate()
        other = rig.memory()
        rig.map(scene.page(0), scene.one)
        scene.open(0)
        gate.hold(stream)
        rig.memory()
        rig.reserve(PAGE)
        rig.map(scene.page(1), other)
        scene.open(1)
        scene.open(0)
        assert scene.unmap(1, 1) == "SUCCESS"
        assert rig.release(other) == "SUCCESS"
        assert rig.query(stream) == "NOT_READY"

    def test_breaks_the_context_when_its_memory_is_unmapped(self, python: Callable[..., CompletedProcess[str]]) -> None:
        ended = python(UNMAPPED_TOO_EARLY)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert ended.stdout.split() == ["ILLEGAL_ADDRESS"] * 3


UNMAPPED_TOO_EARLY = (
    IN_CONTEXT
    + """
memory, address, stream, gate = rig.memory(), rig.reserve(PAGE), rig.stream(), rig.gate()
rig.map(address, memory)
assert rig.set_access(address, PAGE, (DEVICE, 0, READWRITE)) == "SUCCESS"
gate.hold(stream)
value(raw.cuMemsetD8Async(address, 9, PAGE, stream))
value(raw.cuMemUnmap(address, PAGE))
gate.open()
print(said(raw.cuStreamSynchronize(stream)), said(raw.cuCtxSynchronize()))
# Mapping needs no context; copying does.
rig.map(address, memory)
assert rig.set_access(address, PAGE, (DEVICE, 0, READWRITE)) == "SUCCESS"
print(said(raw.cuMemcpyDtoH(bytearray(4), address, 4)), flush=True)
# The broken context is nothing to take down call by call.
os._exit(0)
"""
)


def minimum(scene: Scene) -> Any:
    return scene.raw.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM


CAPTURED: dict[str, tuple[str, Callable[[Scene], Answer]]] = {
    "granularity": ("SUCCESS", lambda s: s.raw.cuMemGetAllocationGranularity(s.rig.memory_props(), minimum(s))),
    "create": ("SUCCESS", lambda s: s.rig.create_memory()),
    "reserve": ("SUCCESS", lambda s: s.rig.try_reserve(PAGE)),
    "map": ("SUCCESS", lambda s: s.raw.cuMemMap(s.page(4), PAGE, 0, s.one, 0)),
    "set access": ("SUCCESS", lambda s: s.raw.cuMemSetAccess(s.page(1), 2 * PAGE, [s.rig.access(*OWN)], 1)),
    "get access": ("SUCCESS", lambda s: s.raw.cuMemGetAccess(s.rig.location(DEVICE), s.page(1))),
    "retain": ("SUCCESS", lambda s: s.rig.keep_memory(s.raw.cuMemRetainAllocationHandle(s.page(1)))),
    "properties": ("SUCCESS", lambda s: s.raw.cuMemGetAllocationPropertiesFromHandle(s.one)),
    "unmap": ("SUCCESS", lambda s: s.raw.cuMemUnmap(s.page(1), 2 * PAGE)),
    "release": ("SUCCESS", lambda s: s.raw.cuMemRelease(s.rig.disown(s.one))),
    "free half a range": ("INVALID_VALUE", lambda s: s.raw.cuMemAddressFree(s.start, PAGE)),
}


@pytest.mark.parametrize("mode", [0, 2], ids=["global", "relaxed"])
@pytest.mark.parametrize("name", CAPTURED)
def test_calls_during_a_capture(scene: Scene, name: str, mode: int) -> None:
    """None of the calls ends a capture, whatever its mode."""
    expected, call = CAPTURED[name]
    assert scene.map(1, 2 * PAGE, scene.two) == "SUCCESS"
    plain, stream = scene.rig.plain(64), scene.rig.stream()
    scene.rig.begin_capture(stream, mode)
    value(scene.raw.cuMemsetD8Async(plain, 1, 64, stream))
    assert said(call(scene)) == expected
    assert said(scene.rig.end_capture(stream)) == "SUCCESS"


def test_memory_that_was_released_is_mapped_again_as_long_as_it_is_mapped(scene: Scene) -> None:
    one = scene.rig.disown(scene.one)
    assert scene.map(0, PAGE, one) == "SUCCESS"
    assert scene.rig.release(one) == "SUCCESS"
    assert scene.map(1, PAGE, one) == "SUCCESS"
    assert said(scene.raw.cuMemGetAllocationPropertiesFromHandle(one)) == "SUCCESS"
    there, again = scene.open(0), scene.open(1)
    value(scene.raw.cuMemsetD8(there, 5, 16))
    assert scene.rig.read(again, 16) == [5] * 16


def test_nothing_needs_to_be_aligned_to_be_unmapped(scene: Scene) -> None:
    assert scene.map(0, PAGE, scene.one) == "SUCCESS"
    assert said(scene.raw.cuMemUnmap(scene.page(2), PAGE - 4096)) == "SUCCESS"
    assert said(scene.raw.cuMemUnmap(scene.start, PAGE + 4096)) == "SUCCESS"
    assert scene.mapped(0) == [False]


# -- access to mapped memory: grants, what work checks of them, and what device and host may do with host memory ------


@pytest.fixture
def start(rig: Rig) -> int:
    """A range of eight pages with three mappings of one page at its begin, and access to none."""
    start = rig.reserve(8 * PAGE)
    for page in range(3):
        rig.map(start + page * PAGE, rig.memory())
    return start


@pytest.fixture
def open_start(rig: Rig, start: int) -> int:
    """The same with access, and full of sevens."""
    assert rig.set_access(start, 3 * PAGE, OWN) == "SUCCESS"
    value(rig.raw.cuMemsetD8(start, 7, 3 * PAGE))
    rig.synchronize()
    return start


class TestGetAccess:
    def test_of_one_mapping(self, rig: Rig, start: int) -> None:
        assert rig.set_access(start, PAGE, OWN) == "SUCCESS"
        assert [rig.get_access(start + at) for at in (0, 77, PAGE)] == [READWRITE, READWRITE, NO_ACCESS]
        assert rig.get_access(start, HOST_NUMA) == NO_ACCESS
        for flags in (NO_ACCESS, READ, READWRITE):
            assert rig.set_access(start, PAGE, (DEVICE, 0, flags)) == "SUCCESS"
            # Asked for the host, the call says what device 0 may do.
            assert [rig.get_access(start, kind) for kind in (DEVICE, HOST)] == [flags, flags]

    def test_of_what_is_none(self, rig: Rig, start: int) -> None:
        places = ((DEVICE, 9), (NOWHERE, 0), (HOST_NUMA_CURRENT, 0))
        assert [rig.get_access(start, kind, id) for kind, id in places] == ["INVALID_DEVICE"] * 3
        assert said(rig.raw.cuMemGetAccess(None, start)) == "INVALID_VALUE"
        assert rig.get_access(start + 5 * PAGE) == rig.get_access(UNRESERVED) == "INVALID_VALUE"


RANGES = {
    "all three": (0, 3 * PAGE, "SUCCESS"),
    "with what is not mapped": (0, 4 * PAGE, "INVALID_VALUE"),
    "what is not mapped": (4 * PAGE, PAGE, "INVALID_VALUE"),
    "half of one": (0, PAGE // 2, "INVALID_VALUE"),
    "64 KiB of one": (0, 1 << 16, "INVALID_VALUE"),
    "4 KiB behind the begin": (4096, PAGE, "INVALID_VALUE"),
    "4 KiB more than one": (0, PAGE + 4096, "INVALID_VALUE"),
    "halves of two": (PAGE // 2, PAGE, "INVALID_VALUE"),
    "no bytes": (0, 0, "INVALID_VALUE"),
}
PLACES = {
    "device that is not there": ((DEVICE, 9, READWRITE), "INVALID_VALUE"),
    "nowhere": ((NOWHERE, 0, READWRITE), "INVALID_VALUE"),
    "host": ((HOST, 0, READWRITE), "NOT_SUPPORTED"),
    "host, none": ((HOST, 0, NO_ACCESS), "SUCCESS"),
    "host NUMA": ((HOST_NUMA, 0, READWRITE), "NOT_SUPPORTED"),
    "current host NUMA": ((HOST_NUMA_CURRENT, 0, READWRITE), "INVALID_VALUE"),
}


class TestSetAccess:
    def test_ranges_and_places(self, rig: Rig, start: int) -> None:
        for name, (at, size, expected) in RANGES.items():
            assert rig.set_access(start + at, size, OWN) == expected, name
        for name, (wanted, expected) in PLACES.items():
            assert rig.set_access(start, PAGE, wanted) == expected, name
            assert rig.set_access(start, PAGE, (DEVICE, 0, READ), wanted) == expected, name
        assert said(rig.raw.cuMemSetAccess(start, PAGE, [], 0)) == "INVALID_VALUE"
        assert said(rig.raw.cuMemSetAccess(start, PAGE, None, 0)) == "INVALID_VALUE"

    def test_what_comes_before_a_refused_place_is_set(self, rig: Rig, start: int) -> None:
        """In the first mapping only."""
        assert rig.set_access(start, PAGE, (DEVICE, 0, READ)) == "SUCCESS"
        assert rig.set_access(start, 2 * PAGE, OWN, (HOST, 0, READWRITE)) == "NOT_SUPPORTED"
        assert [rig.get_access(start + page * PAGE) for page in range(2)] == [READWRITE, NO_ACCESS]

    def test_of_one_device_twice(self, rig: Rig, start: int) -> None:
        """The last one counts."""
        assert rig.set_access(start, PAGE, OWN, (DEVICE, 0, READ)) == "SUCCESS"
        assert rig.get_access(start) == READ


class TestWork:
    """Fills and copies are checked at the call."""

    def test_on_memory_to_read(self, rig: Rig, open_start: int) -> None:
        raw, stream = rig.raw, rig.stream()
        assert rig.set_access(open_start, PAGE, (DEVICE, 0, READ)) == "SUCCESS"
        assert rig.read(open_start, 4) == [7] * 4
        refused = (
            raw.cuMemsetD8(open_start, 8, PAGE),
            raw.cuMemcpyHtoD(open_start, np.ones(8, np.uint8), 8),
            raw.cuMemcpyAsync(open_start, int(rig.pinned(64)), 8, stream),
            raw.cuMemcpyDtoD(open_start, open_start + PAGE, 8),
        )
        assert [said(answer) for answer in refused] == ["INVALID_VALUE"] * 4
        assert rig.read(open_start, 8) == [7] * 8

    def test_on_memory_without_access(self, rig: Rig, open_start: int) -> None:
        raw = rig.raw
        host: npt.NDArray[np.uint8] = np.zeros(8, np.uint8)
        assert rig.set_access(open_start, PAGE, (DEVICE, 0, NO_ACCESS)) == "SUCCESS"
        refused = (
            raw.cuMemsetD8(open_start, 8, PAGE),
            raw.cuMemcpyDtoD(open_start + PAGE, open_start, 8),
            raw.cuMemcpyDtoH(host, open_start, 8),
        )
        assert [said(answer) for answer in refused] == ["INVALID_VALUE"] * 3
        assert rig.set_access(open_start, PAGE, OWN) == "SUCCESS"
        assert rig.read(open_start, 8) == [7] * 8

    def test_over_several_mappings(self, rig: Rig, open_start: int) -> None:
        half, last = PAGE // 2, open_start + 2 * PAGE
        assert said(rig.raw.cuMemsetD8(open_start, 3, 3 * PAGE)) == "SUCCESS"
        assert rig.read(last - 4, 8) == [3] * 8
        value(rig.raw.cuMemsetD8(last, 4, PAGE))
        assert said(rig.raw.cuMemcpyDtoD(open_start + half, open_start + 3 * half, PAGE)) == "SUCCESS"
        assert rig.read(open_start + PAGE - 4, 8) == [3] * 4 + [4] * 4

    def test_where_nothing_is_mapped(self, rig: Rig, open_start: int) -> None:
        raw, last = rig.raw, open_start + 2 * PAGE
        answers = [raw.cuMemsetD8(last, 3, 2 * PAGE), raw.cuMemsetD8(UNRESERVED, 1, 4)]
        answers.append(raw.cuMemcpyHtoD(last, np.ones(2 * PAGE, np.uint8), 2 * PAGE))
        value(raw.cuMemUnmap(open_start + PAGE, PAGE))
        answers.append(raw.cuMemsetD8Async(open_start + PAGE, 3, PAGE, LEGACY))
        assert [said(one) for one in answers] == ["INVALID_VALUE"] * 4
        rig.synchronize()

    def test_it_is_no_allocation(self, rig: Rig, open_start: int) -> None:
        raw = rig.raw
        answers = raw.cuMemFree(open_start), raw.cuMemFreeAsync(open_start, LEGACY), raw.cuIpcGetMemHandle(open_start)
        assert [said(one) for one in answers] == ["INVALID_VALUE"] * 3
        assert rig.read(open_start, 8) == [7] * 8


def test_over_a_hole_only_what_lies_before_it_gets_access(rig: Rig) -> None:
    start, memory = rig.reserve(8 * PAGE), rig.memory()
    for page in (0, 1, 3, 5):
        rig.map(start + page * PAGE, memory)
    assert rig.set_access(start, 6 * PAGE, OWN) == "SUCCESS"
    assert [rig.get_access(start + page * PAGE) for page in (0, 1, 3, 5)] == [*2 * [READWRITE], *2 * [NO_ACCESS]]


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
def test_effects_of_a_grant(rig: Rig, location: int, name: str) -> None:
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
