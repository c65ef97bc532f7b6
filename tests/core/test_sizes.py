"""Sizes as numbers and as text: every call that takes one takes both."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import ipc, multicast, vmm
from tests.support import MiB, each_raises


def _of_pools(opened: contextlib.ExitStack, pool: sa.MemoryPool, stream: sa.Stream, size: Any) -> Iterator[int]:
    device, enter = stream.device, opened.enter_context
    cache, expandable = sa.CachingAllocator(pool, limit=size), vmm.ExpandableCache(pool, limit=size)
    yield from (cache.limit, cache.trim(size), expandable.limit, expandable.trim(size))
    expandable.limit = pool.attributes.release_threshold = size
    yield from (expandable.limit, pool.attributes.release_threshold)
    observer = enter(sa.observe(device, limit=size))
    yield observer.limit
    observer.limit = 0
    observer.limit = size
    yield from (observer.limit, enter(observer.phase("load", limit=size)).limit)
    observer.stop()
    yield enter(pool.allocate(64, stream)).copy(nbytes=size).nbytes
    yield sa.GraphBuffer.add_to(enter(sa.Graph.create(device)), size, stream).nbytes
    shareable = enter(sa.MemoryPool(device, handle_types=sa.MemHandleType.POSIX_FILE_DESCRIPTOR))
    yield enter(ipc.Ring.producer(shareable, size, 2, stream=stream)).slot_bytes
    store = enter(ipc.Store.serve(f"sizes-{os.getpid()}", limit=size, driver=device.driver))
    yield len(store.name)


def _of_mappings(opened: contextlib.ExitStack, device: sa.Device, size: Any) -> Iterator[int]:
    enter = opened.enter_context
    yield enter(vmm.PhysicalMemory(device, size)).nbytes
    yield enter(vmm.AddressRange(size, driver=device.driver)).nbytes
    growable = enter(vmm.GrowableBuffer(device, size, size, chunk=size))
    growable.resize(0)
    growable.resize(size)
    growable.resize(0)
    growable.grow(size)
    yield from (growable.capacity, growable.nbytes)
    yield enter(vmm.stripe([device], size)).nbytes
    group = enter(vmm.SleepGroup(device))
    yield from (enter(group.allocate(size)).nbytes, enter(group.tagged("tag").allocate(size)).nbytes)
    arena = enter(vmm.PageArena(device, size, size))
    yield from (arena.page_size, arena.limit or 0, enter(arena.space(size)).nbytes)
    tier = enter(vmm.HostTier(device, limit=size))
    yield tier.prepare(size).result()
    tier.trim()
    tier.reserve(1, size)
    yield tier.reserved
    with enter(multicast.SymmetricMemory.local([device], size, signal_pad_bytes=size)) as symmetric:
        yield symmetric.nbytes


@pytest.mark.parametrize("size", [2 * MiB, "2MiB"])
def test_numbers_and_text(device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream, size: Any) -> None:
    with contextlib.ExitStack() as opened:
        of_pools = [*_of_pools(opened, pool, stream, size)]
        of_mappings = [*_of_mappings(opened, device, size)]
    assert of_mappings == [2 * MiB] * len(of_mappings)
    sizes = [one for at, one in enumerate(of_pools[:-1]) if at not in (1, 3)]
    assert sizes == [2 * MiB] * len(sizes)


def test_text_that_is_no_size(device: sa.Device) -> None:
    each_raises(ValueError, lambda: vmm.HostTier(device, limit="2 apples"), match="limit='2 apples' is no size")
    each_raises(ValueError, lambda: vmm.GrowableBuffer(device, "two"), match="capacity='two'")
