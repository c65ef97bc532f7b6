"""Helpers for the tests of pages."""

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc import vmm
from tests.support import eventually, names, read
from tests.vmm.support import PAGE


def page(space: vmm.PageSpace, index: int) -> sa.Memory:
    """The bytes of a page."""
    return space[index * PAGE : (index + 1) * PAGE]


SAMPLES = [(0, 4096), (PAGE // 2 - 512, 1024), (PAGE - 4096, 4096)]
"""Offsets and sizes of what is read of a page: both ends and the middle."""


def fill(space: vmm.PageSpace, indices: Iterable[int], add: int = 1) -> None:
    """Fill each page with its index and a number."""
    for index in indices:
        page(space, index).fill(index + add)


def commit_filled(space: vmm.PageSpace, indices: Collection[int]) -> None:
    """Commit pages, and fill each with its index and one."""
    space.commit(indices)
    fill(space, indices)


def values(space: vmm.PageSpace, parked: Collection[int] = ()) -> list[int]:
    """The value of the samples of each page, whose bytes are all the same; 0 for pages that are being cleared."""
    found: list[int] = []
    for index in range(space.nbytes // PAGE):
        if index in parked:
            found.append(0)
            continue
        seen = np.concatenate([read(page(space, index)[at : at + nbytes]) for at, nbytes in SAMPLES])
        assert (seen == seen[0]).all()
        found.append(int(seen[0]))
    return found


def settled(arena: vmm.PageArena) -> tuple[int, int, int]:
    """Numbers of pages that exist, that no space uses, and that are kept, once released ones are cleared."""
    assert eventually(lambda: not arena.statistics().parked)
    pages, spare, _, kept = arena.statistics()
    return pages, spare, kept


def mapping(traced: Any) -> list[str]:
    """The calls that change mappings, in order."""
    return [name for name in names(traced) if name in ("cuMemMap", "cuMemUnmap", "cuMemSetAccess")]
