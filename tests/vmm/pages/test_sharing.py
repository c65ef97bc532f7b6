"""Pages that share memory: fork and join of sequences, copies before writes."""

from __future__ import annotations

import pytest

import streamalloc as sa
from streamalloc import vmm
from streamalloc.testing import Gate
from tests.vmm.pages.conftest import PAGES
from tests.vmm.pages.support import fill, opening, page, settled, values
from tests.vmm.support import PAGE


class TestAlias:
    def test_both_pages_are_the_same_bytes(self, space: vmm.PageSpace, arena: vmm.PageArena) -> None:
        space.commit([0, 1])
        fill(space, [0, 1])
        space.alias([9, 5], space, [0, 1])
        assert values(space) == [1, 2, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
        page(space, 9).fill(7)
        assert values(space)[0] == 7
        assert arena.statistics().pages == 2
        assert space.shared([0, 1, 2, 9]).tolist() == [True, True, False, True]
        assert space.numbers[9] == space.numbers[0] and space.numbers[5] == space.numbers[1]

    def test_memory_returns_with_its_last_page(self, space: vmm.PageSpace, arena: vmm.PageArena) -> None:
        space.commit(range(3))
        fill(space, range(3))
        with arena.space(4 * PAGE, stream=space.stream) as other:
            other.alias(range(3), space, range(3))
            space.release(range(3))
            assert settled(arena) == (3, 0, 0)
            assert values(other) == [1, 2, 3, 0]
            space.alias(5, other, 1)
            other.release([0, 1])
            assert settled(arena) == (3, 0, 1)
        assert values(space)[5] == 2
        assert settled(arena) == (3, 2, 0)

    def test_is_idempotent(self, space: vmm.PageSpace, arena: vmm.PageArena) -> None:
        space.commit([0, 1])
        space.alias([4], space, [0])
        space.alias([4, 5], space, [0, 1])
        space.release([4, 5, 0, 1])
        assert settled(arena) == (2, 0, 2)

    def test_what_is_refused(self, space: vmm.PageSpace, arena: vmm.PageArena, device: sa.Device) -> None:
        space.commit([0, 1, 2])
        with pytest.raises(ValueError, match=r"page 3 .* is not committed"):
            space.alias([8, 9], space, [0, 3])
        with pytest.raises(ValueError, match=r"page 2 .* is committed"):
            space.alias([8, 2], space, [0, 1])
        with pytest.raises(ValueError, match="2 pages are to share 1"):
            space.alias([8, 9], space, [0])
        with pytest.raises(ValueError, match="each page once"):
            space.alias([8, 8], space, [0, 1])
        with vmm.PageArena(device) as another, another.space(PAGE) as other:
            other.commit(0)
            with pytest.raises(ValueError, match="another arena"):
                space.alias(8, other, 0)
        assert space.committed.tolist() == [0, 1, 2] and not space.shared(range(PAGES)).any()

    def test_pages_of_a_closed_space(self, space: vmm.PageSpace, arena: vmm.PageArena) -> None:
        other = arena.space(PAGE)
        other.commit(0)
        other.close()
        with pytest.raises(sa.ClosedError):
            space.alias(0, other, 0)


class TestCopies:
    def test_are_made_of_shared_pages_only(self, space: vmm.PageSpace, arena: vmm.PageArena) -> None:
        space.commit(range(3))
        fill(space, range(3))
        space.alias([8, 9], space, [0, 2])
        assert space.make_private([0, 1, 5, 9]) == 2
        assert values(space)[:3] == [1, 2, 3] and values(space)[8:10] == [1, 3]
        fill(space, [0, 9], 100)
        assert values(space)[:3] == [100, 2, 3] and values(space)[8:10] == [1, 109]
        assert settled(arena) == (5, 0, 0)
        assert not space.shared(range(PAGES)).any()
        assert space.make_private(range(PAGES)) == 0

    def test_are_made_after_the_work_of_the_stream(self, space: vmm.PageSpace, gate: Gate) -> None:
        space.commit(0)
        space.alias(1, space, 0)
        gate.hold(space.stream)
        page(space, 0).fill(5)
        with opening(gate):
            assert space.make_private(1) == 1
        page(space, 0).fill(6)
        assert values(space)[:2] == [6, 5]

    def test_fork_and_join(self, space: vmm.PageSpace, arena: vmm.PageArena) -> None:
        space.commit(range(4))
        fill(space, range(4))
        space.alias(range(8, 12), space, range(4))  # fork
        space.make_private(11)  # its last page goes on by itself
        page(space, 11).fill(50)
        assert arena.statistics().pages == 5
        space.release(range(4), after=())  # the parent ends
        assert settled(arena) == (5, 0, 1)
        assert values(space)[8:12] == [1, 2, 3, 50]
        space.alias(range(2), space, range(8, 10))  # join: another sequence with the same beginning
        assert values(space)[:2] == [1, 2] and settled(arena) == (5, 0, 1)

    def test_no_memory(self, device: sa.Device, stream: sa.Stream) -> None:
        with vmm.PageArena(device, limit=2 * PAGE) as arena, arena.space(PAGES * PAGE, stream=stream) as space:
            space.commit([0, 1])
            fill(space, [0, 1])
            space.alias([4, 5], space, [0, 1])
            with pytest.raises(sa.OutOfMemoryError):
                space.make_private([4, 5])
            assert values(space)[4:6] == [1, 2] and space.shared([0, 1, 4, 5]).all()
            space.release([1, 5])
            assert space.make_private([4]) == 1
            assert settled(arena) == (2, 0, 0)

    def test_not_in_a_capture(self, space: vmm.PageSpace) -> None:
        space.commit(0)
        space.alias(1, space, 0)
        with space.stream.capture() as graph, pytest.raises(sa.CaptureError):
            space.make_private(1)
        graph.close()
