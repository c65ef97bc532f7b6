"""An exception out of a signal handler that is kept, with the frames of its traceback, leaves no lock of core held."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.core.deferred import Deferred, deferred_queue
from streamalloc.core.fence import (
    Fence,
    context_event,
    ordered_after,
    queue_if_allowed,
    record_uncaptured,
    settle,
)
from streamalloc.core.session import session_of
from streamalloc.interop.bridge import FreeAfterAll, free_after_all
from tests.interrupting import Interrupt, Interrupted, since_3_11

pytestmark = [
    pytest.mark.simulated_only("where a signal may come is the same on any driver"),
    since_3_11,
    pytest.mark.filterwarnings("ignore:.*was dropped without close:ResourceWarning"),
]


class Item(Deferred):
    def attempt(self) -> bool:
        return True


class World:
    def __init__(self) -> None:
        self.device = sa.Device(0, driver=sd.simulated())
        self.session = session_of(self.device)
        self.default = self.device.default_stream
        self.streams = [self.device.create_stream() for _ in range(2)]
        self.pool = sa.MemoryPool(self.device)
        self.work = Fence(self.session)

    def free_after_all(self) -> None:
        free_after_all(FreeAfterAll(self.pool.allocate(64, self.streams[0])))

    def held(self) -> list[str]:
        """The locks that another thread would wait for, and captures, which would pause its work."""
        locks = {"beginning": deferred_queue(self.session).beginning}
        locks |= {repr(stream): stream._in_use for stream in (*self.streams, self.default)}
        held = ["captures"] * deferred_queue(self.session).paused
        for name, lock in locks.items():
            if lock.acquire(blocking=False):
                lock.release()
            else:
                held.append(name)
        return held

    def capture(self) -> None:
        with self.streams[0].capture():
            pass


CALLS: dict[str, Callable[[World], object]] = {
    "ordered_after": lambda it: ordered_after(it.streams[0], sa.Stream.record),
    "ordered_after a default stream": lambda it: ordered_after(it.default, sa.Stream.record),
    "queue_if_allowed": lambda it: queue_if_allowed(it.streams[0], it.streams[0].record),
    "record_uncaptured": lambda it: record_uncaptured(it.streams[0]),
    "settle": lambda it: settle(it.streams[0], Item(), None, it.streams[1]),
    "free_after_all": World.free_after_all,
    "context_event": lambda it: context_event(it.device),
    "done": lambda it: it.work.done(),
    "capture": World.capture,
}


@pytest.mark.parametrize("name", CALLS)
def test_another_thread_goes_on(name: str) -> None:
    world, call = World(), CALLS[name]
    points, kept = Interrupt(), []
    call(world)  # what is made once is there
    with points:
        call(world)
    with ThreadPoolExecutor(1) as other:
        for nth in points:
            try:
                with Interrupt(nth) as interrupt:
                    call(world)
            except Interrupted as error:
                kept.append(error)
            assert not other.submit(world.held).result(), interrupt.came
            assert not any(stream._attempting for stream in (*world.streams, world.default)), interrupt.came
    assert len(kept) > 2
    kept.clear()  # no cycle of frames is left to the collector
