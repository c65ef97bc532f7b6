"""Tour of sharing between processes: the steps, and the other process's actions."""

from __future__ import annotations

from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc import ipc
from streamalloc.cli.choice import KEEP_ALL
from streamalloc.cli.needs import POSIX, need_shared_pools
from streamalloc.cli.steps import Claim, MiB, Parts, Tour, equal, every_byte, raised
from streamalloc.cli.worker import Worker, WorkerBase, read
from streamalloc.core.errors import size_text
from streamalloc.testing import Gate

PARTS = Parts()
part = PARTS.part


# --- the other process ----------------------------------------------------------------------------------------------


class WorkerActions(WorkerBase):
    """Actions of the other process; ``name`` is the key of an opened object."""

    def open(self, name: str, shared: str = "") -> list[Any]:
        """Open a descriptor given in hexadecimal, or receive an object; return its class, size and address."""
        opened = ipc.open(bytes.fromhex(shared), stream=self.stream) if shared else self.receive()
        self.opened[name] = opened
        return [type(opened).__name__, opened.nbytes, opened.address]

    def differing(self, name: str, value: int) -> int:
        """Return the number of bytes that differ from ``value``."""
        return int(np.count_nonzero(read(self.opened[name], self.stream) != value))

    def fill(self, name: str, start: int, stop: int, value: int) -> None:
        """Fill a range of bytes and wait for it."""
        self.opened[name][start:stop].fill(value, self.stream)
        self.stream.synchronize()

    def done(self) -> bool:
        """Whether the stream has no work left."""
        return self.stream.query()

    def close(self, name: str) -> None:
        """Close an opened object and wait for the stream."""
        self.opened.pop(name).close()
        self.stream.synchronize()

    def consume(self) -> list[int]:
        """Read a ring to its end; return the value that fills each item, or -1 for a mixed one."""
        numbers = []
        with ipc.Ring.consumer(ipc.Channel.from_fd(self.handles[0]), stream=self.stream, timeout=20) as ring:
            for item in ring:
                host = read(item, self.stream)
                numbers.append(int(host[0]) if (host == host[0]).all() else -1)
        return numbers


# --- the tour's own -------------------------------------------------------------------------------------------------


def _worker(tour: Tour) -> Worker:
    """Return the other process, shared by the parts; skip the part if pools cannot be shared."""
    need_shared_pools(tour.device)
    if tour.worker is None:
        tour.worker = tour.enter_context(Worker(tour.device.driver, __name__))
    return tour.worker


def _holds(worker: Worker, name: str, value: int) -> Claim:
    """Claim that all bytes of an opened object have this value, as the other process reads them."""
    return equal("bytes that differ in the other process", worker.ask("differing", name, value), 0)


_SHARED: dict[str, Any] = {"handle_types": POSIX, "release_threshold": KEEP_ALL}


@part(
    "One buffer in two processes",
    "A second Python process opens memory of this one, reads and writes it, and closes it.",
)
def two_processes(tour: Tour, stream: sa.Stream) -> None:
    worker = _worker(tour)
    with tour.pool(stream, **_SHARED) as pool, Gate(tour.device) as gate:
        buffer = pool.allocate(8 * MiB, stream)
        gate.hold(stream)
        buffer.fill(0x11)
        kind, nbytes, _ = worker.give("open", buffer, "first")
        tour.step(
            "another process opens 8 MiB, while a gate holds the fill",
            equal("it has", kind, ipc.ImportedBuffer.__name__),
            equal("size", nbytes, buffer.nbytes, size_text),
            equal("its stream has done its work", worker.ask("done"), False),
            figures=f"process {worker.process.pid}",
        )
        gate.open()
        filled = _holds(worker, "first", 0x11)
        tour.step("gate opened: its stream continues by itself, and it reads the filled bytes", filled)
        worker.ask("fill", "first", 2 * MiB, 6 * MiB, 0x22)
        quarters = read(buffer, stream).reshape(4, -1)
        ends, middle = every_byte("the ends", quarters[[0, 3]], 0x11), every_byte("the middle", quarters[1:3], 0x22)
        tour.step("it fills the middle, and this process sees that", ends, middle)
        second = pool.allocate(4 * MiB, stream)
        second.fill(0x33)
        shared = bytes(ipc.share(second))
        size = equal("size", worker.ask("open", "second", shared.hex())[1], second.nbytes, size_text)
        text = f"more memory of this pool is shared by {len(shared)} bytes, without a file descriptor"
        tour.step(text, size, _holds(worker, "second", 0x33))
        for name, memory in (("first", buffer), ("second", second)):
            worker.ask("close", name)
            memory.free()
        stream.synchronize()
        tour.pool_step("both closed there and freed here", pool, used=0)


@part("The lease", "The driver would reuse freed memory even if another process still reads it. Here the free waits.")
def lease(tour: Tour, stream: sa.Stream) -> None:
    worker = _worker(tour)
    with tour.pool(stream, **_SHARED) as pool:
        buffer = pool.allocate(8 * MiB, stream)
        buffer.fill(0x44)
        worker.give("open", buffer, "leased")
        refused = raised("the free", sa.StillImportedError, lambda: buffer.free(still_imported="raise"))
        tour.pool_step("a free that may not wait raises an error", pool, refused, used=8 * MiB)
        buffer.free()
        with pool.allocate(8 * MiB, stream) as other:
            other.fill(0x55)
            stream.synchronize()
            untouched = "freed here, new memory allocated and written: the first is unchanged"
            tour.pool_step(untouched, pool, _holds(worker, "leased", 0x44), used=16 * MiB)
            worker.ask("close", "leased")
            tour.pool_step("closed there: now its memory is free", pool, used=8 * MiB)


@part("A ring", "A sequence of items, sent through slots that are shared once.")
def ring(tour: Tour, stream: sa.Stream) -> None:
    worker = _worker(tour)
    slots, items = 4, 20
    with tour.pool(stream, **_SHARED) as pool:
        ours, theirs = ipc.Channel.pair()
        with ipc.Ring.producer(pool, MiB, slots, stream=stream) as producer:
            with theirs:
                worker.begin("consume", fds=[theirs.fileno()])
            producer.add(ours, timeout=20)
            used = pool.statistics().used
            for number in range(items):
                with producer.next(timeout=20) as slot:
                    slot.nbytes_used = MiB >> number % 3
                    slot.fill(number)
            memory = equal("used", used, slots * MiB, size_text)
            handed_off = equal("handed off", producer.statistics().handed_off, items)
            tour.step(f"{items} items sent through {slots} slots", handed_off, memory)
        tour.step("the other process received all of them in order", equal("items", worker.result(), [*range(items)]))
        stream.synchronize()
        tour.pool_step("closed on both sides", pool, used=0)
