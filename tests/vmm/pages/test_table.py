"""Page tables in device memory, in stream order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import vmm
from streamalloc.testing import Gate
from tests.support import pending
from tests.vmm.pages.conftest import PAGES


def shown(table: vmm.PageTable) -> list[int]:
    """The entries, once the work of the stream has completed."""
    found = np.zeros(table.space.page_count, table.entries.dtype)
    table.entries.copy_to(found)
    table.stream.synchronize()
    numbers: list[int] = found.tolist()
    return numbers


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_shows_the_pages(space: vmm.PageSpace, dtype: Any) -> None:
    space.commit([2, 5])
    with vmm.PageTable(space, dtype) as table:
        assert table.entries.dtype == dtype and shown(table) == space.numbers.tolist()
        space.commit(7)
        space.alias(3, space, 5)
        space.release(2, after=())
        before = shown(table)
        assert before[2] >= 0 and before[7] == -1
        assert table.update() == 3 and table.update() == 0
        assert shown(table) == space.numbers.tolist()
        assert shown(table)[3] == shown(table)[5] >= 0
    assert table.closed
    with pytest.raises(sa.ClosedError):
        table.update()
    table.close()


def test_changes_in_stream_order(space: vmm.PageSpace, gate: Gate) -> None:
    """Work that was queued before the update has the table of before."""
    space.commit([2, 5])
    before, after = np.zeros(PAGES, np.int64), np.zeros(PAGES, np.int64)
    with vmm.PageTable(space) as table, sa.allocate(2 * PAGES * 8, space.stream) as copies:
        both = copies.view_as(np.int64, (2, PAGES))
        old = space.numbers
        space.stream.synchronize()
        gate.hold(space.stream)
        both[0].copy_from(table.entries)
        space.release(2, after=space.stream)
        table.update()
        both[1].copy_from(table.entries)
        assert pending(space.stream) and space.parked == 1
        gate.open()
        both[0].copy_to(before)
        both[1].copy_to(after)
        space.stream.synchronize()
    assert before.tolist() == old.tolist() and after[2] == -1 and after[5] == old[5]


def test_what_is_refused(space: vmm.PageSpace, arena: vmm.PageArena) -> None:
    with pytest.raises(TypeError, match="int32 and int64"):
        vmm.PageTable(space, np.uint8)
    with pytest.raises(TypeError, match="space must be"):
        vmm.PageTable(arena)  # type: ignore[arg-type]
