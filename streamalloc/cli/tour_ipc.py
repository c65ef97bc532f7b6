"""The parts of the tour about sharing between processes, and what the other process does in them."""

from __future__ import annotations

from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc import ipc, vmm
from streamalloc.cli.choice import KEEP_ALL
from streamalloc.cli.claims import Claim, ends_and_middle, equal, raised
from streamalloc.cli.peer import POSIX, Here, Peer, can_share_pools, read
from streamalloc.cli.steps import MiB, Parts, Tour, need
from streamalloc.core.errors import size_text
from streamalloc.testing import Gate

__all__ = ["PARTS", "Other"]

PARTS = Parts()
part = PARTS.part


# --- the other process ----------------------------------------------------------------------------------------------


class Other(Here):
    """What the other process does; ``name`` is what it calls the thing."""

    def open(self, name: str, shared: str = "") -> list[Any]:
        """Open what these bytes describe, or else what is sent."""
        opened = ipc.open(bytes.fromhex(shared), stream=self.stream) if shared else self.receive()
        self.opened[name] = opened
        return [type(opened).__name__, opened.nbytes, opened.address]

    def others(self, name: str, value: int) -> int:
        """How many bytes of something are not ``value``."""
        return int(np.count_nonzero(read(self.opened[name], self.stream) != value))

    def fill(self, name: str, start: int, stop: int, value: int) -> None:
        self.opened[name][start:stop].fill(value, self.stream)
        self.stream.synchronize()

    def done(self) -> bool:
        """Whether the stream has done all that it was given."""
        return self.stream.query()

    def close(self, name: str) -> None:
        self.opened.pop(name).close()
        self.stream.synchronize()

    def consume(self) -> list[int]:
        """Take a ring's items until its end; the number that each one is filled with, or -1."""
        numbers = []
        with ipc.Ring.consumer(ipc.Channel.from_fd(self.handles[0]), stream=self.stream, timeout=20) as ring:
            for item in ring:
                host = read(item, self.stream)
                numbers.append(int(host[0]) if (host == host[0]).all() else -1)
        return numbers


# --- the tour's own -------------------------------------------------------------------------------------------------


def _peer(tour: Tour) -> Peer:
    """The other process, which the parts share. Where memory cannot be shared the part is skipped."""
    tour.need_gates()
    need(can_share_pools(tour.device), "this device's pools cannot be shared with other processes")
    if tour.partner is None:
        tour.partner = tour.resources.enter_context(Peer(tour.device.driver, __name__))
    return tour.partner


def _holds(peer: Peer, name: str, value: int) -> Claim:
    """Something that the other process has opened has this value throughout there."""
    return equal("other bytes that it finds", peer.ask("others", name, value), 0)


_SHARED: dict[str, Any] = {"handle_types": POSIX, "release_threshold": KEEP_ALL}


@part(
    "One buffer in two processes",
    "A second Python process opens memory of this one, reads and writes it, and gives it back.",
)
def two_processes(tour: Tour, stream: sa.Stream) -> None:
    peer = _peer(tour)
    with tour.pool(stream, **_SHARED) as pool, Gate(tour.device) as gate:
        buffer = pool.allocate(8 * MiB, stream)
        gate.hold(stream)
        buffer.fill(0x11)
        kind, nbytes, _ = peer.give("open", buffer, "first")
        tour.step(
            "another process opens 8 MiB, while a gate holds what fills them",
            equal("it has", kind, ipc.ImportedBuffer.__name__),
            equal("size", nbytes, buffer.nbytes, size_text),
            equal("its stream has done its work", peer.ask("done"), False),
            figures=f"process {peer.process.pid}",
        )
        gate.open()
        filled = _holds(peer, "first", 0x11)
        tour.step("gate opened: its stream goes on by itself, and it reads what was filled here", filled)
        peer.ask("fill", "first", 2 * MiB, 6 * MiB, 0x22)
        quarters = ends_and_middle(read(buffer, stream), 0x11, 0x22)
        tour.step("it fills the middle, and this process sees that", *quarters)
        second = pool.allocate(4 * MiB, stream)
        second.fill(0x33)
        shared = bytes(ipc.share(second))
        size = equal("size", peer.ask("open", "second", shared.hex())[1], second.nbytes, size_text)
        text = f"more memory of this pool takes {len(shared)} bytes to share, and no descriptor along"
        tour.step(text, size, _holds(peer, "second", 0x33))
        for name, memory in (("first", buffer), ("second", second)):
            peer.ask("close", name)
            memory.free()
        stream.synchronize()
        tour.pool_step("both closed there and freed here", pool, used=0)


@part("The lease", "The driver would reuse memory that its owner freed, whoever still reads it. Here the free waits.")
def lease(tour: Tour, stream: sa.Stream) -> None:
    peer = _peer(tour)
    with tour.pool(stream, **_SHARED) as pool:
        buffer = pool.allocate(8 * MiB, stream)
        buffer.fill(0x44)
        peer.give("open", buffer, "leased")
        refused = raised("the free", sa.StillImportedError, lambda: buffer.free(still_imported="raise"))
        tour.pool_step("a free that must not wait is refused", pool, refused, used=8 * MiB)
        buffer.free()
        with pool.allocate(8 * MiB, stream) as other:
            other.fill(0x55)
            stream.synchronize()
            untouched = "freed here, and new memory written: the other one is not touched"
            tour.pool_step(untouched, pool, _holds(peer, "leased", 0x44), used=16 * MiB)
            peer.ask("close", "leased")
            tour.pool_step("closed there: now its memory is free", pool, used=8 * MiB)


@part("What is refused", "Descriptors that are stale or damaged, and memory that cannot be shared.")
def stale(tour: Tour, stream: sa.Stream) -> None:
    peer = _peer(tour)

    def refused(name: str, data: bytearray, kind: type[Exception]) -> Claim:
        return raised("opening it", kind, lambda: peer.ask("open", name, data.hex()))

    with tour.pool(stream, **_SHARED) as pool, pool.allocate(MiB, stream) as kept:
        buffer = pool.allocate(MiB, stream)
        peer.give("open", kept, "kept")  # so that the other process has the pool
        data = bytearray(bytes(ipc.share(buffer)))
        buffer.free()
        with pool.allocate(MiB, stream):
            claim = refused("stale", data, sa.StaleDescriptorError)
            tour.step("memory that was freed cannot be opened, whoever has it now", claim)
        data[-20] ^= 1
        claim = refused("damaged", data, ValueError)
        tour.step("nor can anything with a descriptor that was damaged on its way", claim)
        with tour.pool(stream) as private, private.allocate(MiB, stream) as own:
            claim = raised("sharing it", ValueError, lambda: ipc.share(own))
            tour.step("memory that was not made for sharing is refused before a byte is sent", claim)
        peer.ask("close", "kept")


@part("A growing buffer in two processes", "Only what is new has to be sent and mapped.")
def growing(tour: Tour, stream: sa.Stream) -> None:
    peer = _peer(tour)
    tour.need_virtual_memory()
    chunk = 4 * MiB
    with vmm.GrowableBuffer(tour.device, 8 * chunk, chunk, handle_types=POSIX, stream=stream) as buffer:
        buffer.fill(0x61)
        kind, nbytes, address = peer.give("open", buffer, "growing")
        tour.step(
            f"{size_text(chunk)} of a buffer that can grow to {size_text(buffer.capacity)}",
            equal("it has", kind, ipc.ImportedRange.__name__),
            equal("size", nbytes, chunk, size_text),
            _holds(peer, "growing", 0x61),
        )
        buffer.grow(chunk)
        buffer.fill(0x62)
        _, nbytes, later = peer.give("open", buffer, "growing")
        tour.step(
            "grown here and shared again: there too it grows in place",
            equal("address", later, address, hex),
            equal("size", nbytes, 2 * chunk, size_text),
            _holds(peer, "growing", 0x62),
        )
        peer.ask("close", "growing")


@part("A ring", "A stream of data, through slots that are shared once.")
def ring(tour: Tour, stream: sa.Stream) -> None:
    peer = _peer(tour)
    slots, items = 4, 20
    with tour.pool(stream, **_SHARED) as pool:
        ours, theirs = ipc.Channel.pair()
        with ipc.Ring.producer(pool, MiB, slots, stream=stream) as producer:
            with theirs:
                peer.begin("consume", fds=[theirs.fileno()])
            producer.add(ours, timeout=20)
            used = pool.statistics().used
            for number in range(items):
                with producer.next(timeout=20) as slot:
                    slot.nbytes_used = MiB >> number % 3
                    slot.fill(number)
            memory = equal("memory that was used", used, slots * MiB, size_text)
            handed_off = equal("handed off", producer.statistics().handed_off, items)
            tour.step(f"{items} items handed on through {slots} slots", handed_off, memory)
        tour.step("the other process got all of them, in order", equal("items", peer.result(), list(range(items))))
        stream.synchronize()
        tour.pool_step("closed on both sides", pool, used=0)
