"""A dropped pool ends although the addresses of its last allocations were lost, and frees nothing that somebody has."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.core.internal import Deferred, deferred_queue
from streamalloc.core.session import session_of
from streamalloc.driver.bindings import cuda
from streamalloc.testing import Gate
from tests.interrupting import Interrupted
from tests.support import MiB, names, read

ALLOCATE, DESTROY = "cuMemAllocFromPoolAsync", "cuMemPoolDestroy"


class Losing:
    """A driver around a driver that raises, where told to, when an allocation has been made."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.loses = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def cuMemAllocFromPoolAsync(self, *args: Any) -> Any:
        answer = self._driver.cuMemAllocFromPoolAsync(*args)
        if self.loses:
            raise Interrupted
        return answer


class World:
    """A device whose driver is traced, and checked unless memory is to be cached, and a pool of it."""

    def __init__(self, machine: Any, check: bool = True) -> None:
        self.traced = sd.traced(machine)
        self.checked: Any = sd.checked(self.traced) if check else self.traced
        self.driver: Any = Losing(self.checked)
        self.device = sa.Device(0, driver=self.driver)
        self.stream = self.device.create_stream()
        self.pool: Any = sa.MemoryPool(self.device)
        self.destroys: list[str] = []

    def lose(self, nbytes: int) -> None:
        self.driver.loses = True
        with contextlib.suppress(Interrupted):
            self.pool.allocate(nbytes, self.stream)
        self.driver.loses = False

    def drop_pool(self) -> None:
        self.pool = None
        gc.collect()

    def destroyed(self) -> bool:
        """Whether the pool is destroyed, after the points of work and the collections that a program has."""
        for _ in range(5):
            self.device.synchronize()
            self.destroys += names(self.traced, DESTROY)
            self.traced.calls.clear()  # they keep blocks of caches
            gc.collect()
        return self.destroys == [DESTROY]


@pytest.fixture
def world(machine: Any) -> Iterator[World]:
    world = World(machine)
    yield world
    assert [str(hazard) for hazard in world.checked.hazards] == []


@pytest.mark.parametrize("closed", [False, True])
def test_one(world: World, closed: bool) -> None:
    world.lose(100)
    if closed:
        world.pool.close()
    assert not world.destroyed()
    world.drop_pool()
    assert world.destroyed()


def test_after_the_work_of_streams(world: World) -> None:
    """The checker reports a free that nothing orders after the allocation."""
    with Gate(world.device) as gate:
        gate.hold(world.stream)
        world.lose(100)
        world.drop_pool()
        deferred_queue(session_of(world.device)).work()
        assert len(names(world.traced, "cuMemFreeAsync")) == 2  # with that of the probe
    assert world.destroyed()


def test_several_in_several_chunks(world: World) -> None:
    kept = [world.pool.allocate(size, world.stream) for size in (512, 3 * MiB, 100)]
    for size in (100, 3 * MiB, 40 * MiB, 5, 20 * MiB + 1):
        world.lose(size)
        kept.append(world.pool.allocate(700, world.stream))
    for buffer in kept:
        buffer.free()
    del buffer, kept
    world.drop_pool()
    assert world.destroyed()


@pytest.mark.parametrize("closed", [False, True])
def test_not_while_a_buffer_lives(world: World, closed: bool) -> None:
    world.lose(100)
    buffer = world.pool.allocate(100, world.stream)
    buffer.fill(7)
    world.lose(100)
    if closed:
        world.pool.close()
    world.drop_pool()
    assert not world.destroyed() and (read(buffer) == 7).all()
    buffer.free()
    del buffer
    assert world.destroyed()


@pytest.mark.parametrize("where", ["in a free list", "between a free list and a buffer"])
@pytest.mark.parametrize("closed", [False, True])
def test_in_a_cache(machine: Any, closed: bool, where: str) -> None:
    """A cache that is dropped with a block that nobody has."""
    world = World(machine, check=False)
    cache: Any = sa.CachingAllocator(world.pool)
    buffers: Any = [cache.allocate(size, world.stream) for size in (100, 3000, 3000)]
    for buffer in buffers:
        buffer.free()
    del buffers, buffer
    if where == "in a free list":
        world.lose(70_000)
    else:
        # A handler that raises after the list has lost the block, before a buffer has it.
        world.stream.free_lists[cache._key][(3000 - 1) >> 9].pop()
    if closed:
        cache.close()
        world.pool.close()
    world.device.synchronize()
    del cache
    world.drop_pool()
    assert world.destroyed()


def test_not_in_a_cache_while_a_buffer_lives(machine: Any) -> None:
    world = World(machine, check=False)
    cache: Any = sa.CachingAllocator(world.pool)
    cache.allocate(3000, world.stream).free()
    world.stream.free_lists[cache._key][(3000 - 1) >> 9].pop()
    buffer = cache.allocate(100, world.stream)
    buffer.fill(7)
    del cache
    world.drop_pool()
    assert not world.destroyed() and (read(buffer) == 7).all()
    del buffer
    assert world.destroyed()


class Waiting(Deferred):
    """An item that ends when told to; it may have memory of any pool, or of one."""

    ready = False
    address: int | None = None

    def attempt(self) -> bool:
        return self.ready

    def memory(self) -> int | None:
        return self.address


@pytest.mark.parametrize("of_its", [False, True])
def test_beside_what_waits_with_other_memory(world: World, of_its: bool) -> None:
    other = sa.MemoryPool(world.device)
    buffer = (world.pool if of_its else other).allocate(100, world.stream)
    world.lose(100)
    item = Waiting()
    item.address = buffer.address
    if of_its:  # as an item that frees a dropped buffer has it
        buffer._ptr = None
        del buffer
    deferred_queue(session_of(world.device)).submit(item)
    world.drop_pool()
    assert world.destroyed() != of_its
    item.ready = True
    if of_its:
        raw = cuda.CUstream(world.stream.handle)
        assert not world.checked.cuMemFreeAsync(cuda.CUdeviceptr(item.address), raw)[0]
        assert world.destroyed()


def test_not_while_anything_else_waits_in_the_queue(world: World) -> None:
    world.lose(100)
    item = Waiting()
    deferred_queue(session_of(world.device)).submit(item)
    world.drop_pool()
    assert not world.destroyed()
    item.ready = True
    assert world.destroyed()


def test_not_what_other_code_allocates(world: World) -> None:
    """Other code that has the pool's handle may allocate at any time."""
    handle, raw = cuda.CUmemoryPool(world.pool.handle), cuda.CUstream(world.stream.handle)
    result, address = world.checked.cuMemAllocFromPoolAsync(100, handle, raw)
    world.drop_pool()
    assert not result and not world.destroyed()
    assert not world.checked.cuMemFreeAsync(address, raw)[0]
    assert world.destroyed()


def test_not_what_was_allocated_while_the_pool_was_current(world: World) -> None:
    with world.pool.make_current():
        buffer = sa.allocate(100, world.stream)
    world.drop_pool()
    buffer.fill(3)
    assert not world.destroyed() and (read(buffer) == 3).all()
    buffer.free()
    assert world.destroyed()


class Working:
    """An object of a garbage cycle whose finaliser comes to a point of work."""

    def __init__(self, world: World, *others: object) -> None:
        self.queue = deferred_queue(session_of(world.device))
        self.others = others

    def __del__(self) -> None:
        self.queue.work()


def test_not_in_the_collection_that_drops_the_pool(world: World) -> None:
    """Finalisers of buffers in the same cycle come after points of work in it."""
    gc.collect()
    first = Working(world)
    buffers = [world.pool.allocate(100, world.stream) for _ in range(3)]
    first.others = (buffers, Working(world, buffers), first)
    del first, buffers
    world.drop_pool()
    assert world.destroyed()
