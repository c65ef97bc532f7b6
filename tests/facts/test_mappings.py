"""Mappings: what may be mapped where, what unmaps it, and what lasts while something is mapped."""

from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

from tests.facts.enums import DEVICE, NO_ACCESS, READWRITE
from tests.facts.support import IN_CONTEXT, PAGE, UNRESERVED, Answer, Rig, said, value
from tests.support import in_threads

OWN = (DEVICE, 0, READWRITE)


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


class TestCapture:
    """None of the calls ends a capture, whatever its mode."""

    @pytest.mark.parametrize("mode", [0, 2], ids=["global", "relaxed"])
    @pytest.mark.parametrize("name", CAPTURED)
    def test_call(self, scene: Scene, name: str, mode: int) -> None:
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


def test_holes_between_mappings_do_not_matter_for_access(scene: Scene) -> None:
    assert scene.map(0, PAGE, scene.one) == "SUCCESS"
    assert scene.map(2, 2 * PAGE, scene.two) == "SUCCESS"
    assert scene.rig.set_access(scene.start, 4 * PAGE, OWN) == "SUCCESS"
    assert scene.rig.set_access(scene.start, 2 * PAGE, OWN) == "INVALID_VALUE"
