"""Pages that share memory: fork and join of sequences, copies before writes."""

from __future__ import annotations

import pytest

import streamalloc as sa
from streamalloc import vmm
from streamalloc.testing import Gate
from tests.vmm.pages.conftest import PAGES
from tests.vmm.pages.support import opening, page, values
from tests.vmm.support import PAGE


class TestAlias:
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
    def test_are_made_after_the_work_of_the_stream(self, space: vmm.PageSpace, gate: Gate) -> None:
        space.commit(0)
        space.alias(1, space, 0)
        gate.hold(space.stream)
        page(space, 0).fill(5)
        with opening(gate):
            assert space.make_private(1) == 1
        page(space, 0).fill(6)
        assert values(space)[:2] == [6, 5]

    def test_not_in_a_capture(self, space: vmm.PageSpace) -> None:
        space.commit(0)
        space.alias(1, space, 0)
        with space.stream.capture() as graph, pytest.raises(sa.CaptureError):
            space.make_private(1)
        graph.close()
