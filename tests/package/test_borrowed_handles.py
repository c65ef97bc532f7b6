"""Handles of other code: nothing of the package ends a handle that it did not make, on whatever way it came here."""

import contextlib
import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import interop, multicast, observing, vmm
from streamalloc.core.fence import Fence, await_closed, ordered_after, queue_behind
from streamalloc.core.library_streams import as_stream
from streamalloc.core.session import session_of
from streamalloc.driver.account import ENDERS, MAKERS
from streamalloc.driver.bindings import cuda
from tests.support import end_what_was_dropped

PAGE = 2 << 20
LEGACY, PER_THREAD = 1, 2


class Owners:
    """A driver around a driver: notes each handle that is ended and was not made through it, or not so often."""

    used = shared = opened = None

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.live: Counter[tuple[str, int]] = Counter()
        self.strangers: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._driver, name)
        if name in MAKERS:
            function = functools.partial(self._make, name, function)
        elif name in ENDERS:
            function = functools.partial(self._end, name, function)
        if name.startswith("cu"):
            setattr(self, name, function)
        return function

    def _make(self, name: str, make: Callable[..., Any], *args: Any) -> Any:
        answer = make(*args)
        if not answer[0]:
            self.live[MAKERS[name], int(answer[1])] += 1
        return answer

    def _end(self, name: str, end: Callable[..., Any], handle: Any, *args: Any) -> Any:
        owned = [(kind, int(handle)) for kind in ENDERS[name] if self.live[kind, int(handle)]]
        if not owned:
            self.stranger(name, int(handle))
            return (cuda.CUresult.CUDA_SUCCESS,)
        answer = end(handle, *args)
        if not answer[0]:
            self.live[owned[0]] -= 1
        return answer

    def stranger(self, name: str, handle: int) -> None:
        """A handle that is not the package's was to be ended."""
        self.strangers.append((name, handle))


class World:
    """A device, and what other code has made on it past the package."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.driver = Owners(machine)
        self.device = sa.Device(0, driver=self.driver)
        self.stack = contextlib.ExitStack()
        with self.device.current():
            self.handle = int(self.made("cuStreamCreate", 1, end="cuStreamDestroy"))
            self.other = int(self.made("cuStreamCreate", 0, end="cuStreamDestroy"))
            self.event = self.made("cuEventCreate", 2, end="cuEventDestroy")

    def made(self, name: str, *args: Any, end: str) -> Any:
        result, raw = getattr(self.machine, name)(*args)
        assert not result
        self.stack.callback(getattr(self.machine, end), raw)
        return raw

    def check(self) -> None:
        """Attempt deferred releases; the handles of other code still work, and nobody has tried to end them."""
        gc.collect()
        end_what_was_dropped()
        gc.collect()
        assert self.driver.strangers == []
        for handle in (self.handle, self.other):
            assert not self.machine.cuStreamSynchronize(cuda.CUstream(handle))[0]
        assert not self.machine.cuEventSynchronize(self.event)[0]


@pytest.fixture
def world(machine: Any) -> Iterator[World]:
    world = World(machine)
    yield world
    world.device.synchronize()
    world.stack.close()


# -- memory, and the streams that it is on ---------------------------------------------------------------------------


def _mapped(world: World) -> vmm.AddressRange:
    table = vmm.AddressRange(2 * PAGE, driver=world.driver)
    for place in (0, PAGE):
        with vmm.PhysicalMemory(world.device, PAGE) as page:
            table.map(page, place, access=world.device)
    return table


def _cached(world: World, stream: sa.Stream) -> sa.Buffer:
    cache = sa.CachingAllocator(sa.MemoryPool(world.device))
    cache.allocate(PAGE, stream).free()
    return cache.allocate(PAGE, stream)


def _observed(world: World, stream: sa.Stream) -> sa.Memory:
    pool = sa.MemoryPool(world.device)
    with observing.observe(pool):
        return pool.allocate(PAGE, stream)


def _awake(world: World, stream: sa.Stream) -> sa.Memory:
    group = vmm.SleepGroup(world.device)
    buffer = group.allocate(PAGE, stream)
    group.sleep()
    group.wake()
    return buffer


def _symmetric(world: World) -> sa.Memory:
    memory = multicast.SymmetricMemory.local([world.device], PAGE, multicast=False)
    return world.stack.enter_context(memory).buffers[0]


ON_A_STREAM: dict[str, Callable[[World, sa.Stream], sa.Memory]] = {
    "pool": lambda world, stream: sa.MemoryPool(world.device).allocate(PAGE, stream),
    "current pool": lambda world, stream: sa.allocate(PAGE, stream),
    "cache": _cached,
    "observed pool": _observed,
    "host pool": lambda world, stream: sa.MemoryPool(sa.MemLocation.host(), driver=world.driver).allocate(64, stream),
    "growable": lambda world, stream: vmm.GrowableBuffer(world.device, 2 * PAGE, PAGE, stream=stream),
    "sleeping": _awake,
}
WITHOUT_A_STREAM: dict[str, Callable[[World], sa.Memory]] = {
    "range": lambda world: _mapped(world).view(),
    "growable": lambda world: vmm.GrowableBuffer(world.device, 2 * PAGE, PAGE),
    "sleeping": lambda world: vmm.SleepGroup(world.device).allocate(PAGE),
    "symmetric": _symmetric,
}
STREAMS: dict[str, Callable[[World], sa.Stream]] = {
    "ours": lambda world: world.device.create_stream(),
    "ours, blocking": lambda world: world.device.create_stream(blocking=True),
    "default": lambda world: world.device.default_stream,
    "per-thread": lambda world: world.device.per_thread_stream,
    "borrowed": lambda world: sa.Stream.of_handle(world.device, world.other, None),
    "of an object": lambda world: as_stream(_cuda_stream(world.other), session_of(world.device)),
}


def _cuda_stream(handle: int) -> Any:
    return SimpleNamespace(__cuda_stream__=lambda: (0, handle))


def _array(memory: sa.Memory, stream: int | None) -> Any:
    """An array of another library over some memory."""
    interface = {"shape": (memory.nbytes,), "typestr": "|u1", "version": 3, "data": (memory.address, False)}
    return SimpleNamespace(__cuda_array_interface__=interface | ({} if stream is None else {"stream": stream}))


# -- the ways by which a handle of other code comes here ---------------------------------------------------------------


def _exported(world: World, memory: sa.Memory, stream: int | None) -> None:
    for one in (memory, memory[8:], memory.view_as(np.uint8)):
        one.__dlpack__(stream=stream)
        one.__dlpack__(stream=stream, max_version=(1, 0))


def _lent(world: World, memory: sa.Memory, stream: int) -> None:
    interop.loans.Lent(memory.view_as(np.uint8), _cuda_stream(stream))
    interop.loans.Lent(memory.view_as(np.uint8), None).__dlpack__(stream=stream)


def _borrowed(world: World, memory: sa.Memory, stream: int) -> None:
    with world.device.create_stream() as own, interop.borrow(_array(memory, stream), own) as borrowed:
        borrowed.fill(1)
    interop.borrow(_array(memory, stream), _cuda_stream(stream), lender=_cuda_stream(stream), driver=world.driver)
    interop.borrow(memory, memory.stream)


def _copied(world: World, memory: sa.Memory, stream: int) -> None:
    memory.copy_from(_array(memory, stream))
    memory.copy_to(_array(memory, stream), _cuda_stream(stream))
    memory.fill(3, _cuda_stream(stream))


def _waited_for(world: World, memory: sa.Memory, stream: int) -> None:
    ours = memory.stream
    ours.wait(_cuda_stream(stream))
    ours.wait(world.event)
    ours.wait(ours.record())
    sa.Stream.of_handle(world.device, stream, ours).wait(ours)
    Fence(session_of(ours)).precede(as_stream(_cuda_stream(stream), session_of(ours)))


def _closed(world: World, memory: sa.Memory, stream: int) -> None:
    with as_stream(_cuda_stream(stream), session_of(memory)) as borrowed:
        event = borrowed.record()
        event.close()
    with sa.Stream.of_handle(world.device, stream, None) as borrowed:
        borrowed.record().close()
    sa.Stream.of_handle(world.device, stream, None).record().close()
    await_closed(borrowed)
    ordered_after(borrowed, sa.Stream.record)
    world.device.default_stream.close()
    queue_behind(sa.Stream.of_handle(world.device, stream, None), interop.bridge.FreeAfterAll(_plain(world)))


def _plain(world: World) -> sa.Buffer:
    return sa.MemoryPool(world.device).allocate(64, world.device.default_stream)


def _by_a_bridge(world: World, memory: sa.Memory, stream: int) -> None:
    pool = sa.MemoryPool(world.device)
    for source in (pool, sa.CachingAllocator(pool)):
        for owner in (None, world):
            sources = interop.bridge.Sources([source])
            held = [sources.allocate(100_000, 0, handle, owner) for handle in (stream, 0, stream)]
            held.clear()
            ledger = interop.bridge.Ledger(sources)
            ledger.free(ledger.allocate(100_000, 0, stream, owner), 0, world.other)


def _freed(world: World, memory: sa.Memory, stream: int) -> None:
    buffer = _plain(world)
    buffer.free(_cuda_stream(stream))
    sa.MemoryPool(world.device).allocate(64, _cuda_stream(stream))


WAYS: dict[str, Callable[[World, sa.Memory, int], None]] = {
    "DLPack": _exported,
    "lent": _lent,
    "borrowed": _borrowed,
    "copies": _copied,
    "waits": _waited_for,
    "closed": _closed,
    "bridges": _by_a_bridge,
    "allocated and freed on": _freed,
}


@pytest.mark.parametrize("on", STREAMS)
@pytest.mark.parametrize("kind", ON_A_STREAM)
def test_memory_on_a_stream(world: World, kind: str, on: str) -> None:
    _use(world, lambda: ON_A_STREAM[kind](world, STREAMS[on](world)))


@pytest.mark.parametrize("kind", WITHOUT_A_STREAM)
def test_memory_without_a_stream(world: World, kind: str) -> None:
    _use(world, lambda: WITHOUT_A_STREAM[kind](world))


def _use(world: World, make: Callable[[], sa.Memory]) -> None:
    for way in WAYS.values():
        memory = make()
        if not (memory.host_accessible and way in (_lent, _borrowed, _copied)):
            # The handles of default streams mean nothing without a context.
            with world.device.current():
                for stream in (world.handle, LEGACY, PER_THREAD):
                    way(world, memory, stream)
        # Nothing orders the end of the memory after work that other streams do on it.
        world.device.synchronize()
        del memory
        world.check()


def test_pools_of_other_code(world: World) -> None:
    properties = sa.MemPoolProps(location=sa.MemLocation.device(0)).to_driver()
    raw = world.made("cuMemPoolCreate", properties, end="cuMemPoolDestroy")
    known = sa.MemoryPool._of_handle(session_of(world.device), raw, world.device.location, sa.MemAllocationType.PINNED)
    assert not known.owned
    stream = world.device.create_stream()
    known.allocate(64, stream).free()
    with known.make_current():
        sa.MemoryPool.current(world.device).close()
    sa.MemoryPool.default(world.device).close()
    known.close()
    stream.synchronize()
    del known, stream
    world.check()


def test_events_that_a_borrowed_stream_keeps_are_destroyed(world: World) -> None:
    """They are the package's own, and are kept for the next record."""
    for close in (True, False):
        stream = sa.Stream.of_handle(world.device, world.handle, None)
        events = [stream.record() for _ in range(3)]
        for event in events:
            event.close()
        del event, events
        if close:
            stream.close()
        del stream
        gc.collect()
        assert not [handle for (kind, handle), count in world.driver.live.items() if kind == "event" and count]
    world.check()
