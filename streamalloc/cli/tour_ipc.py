"""The parts of the tour about sharing between processes, and what the other process does in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc import ipc, vmm
from streamalloc.cli.peer import Action, Here, Peer, PeerError
from streamalloc.cli.steps import KEEP_ALL, Claim, MiB, Skipped, Tour, equal, every_byte, need_gates, raised
from streamalloc.cli.terminal import mib
from streamalloc.testing import Gate

__all__ = ["ACTIONS", "PARTS"]

POSIX = sa.MemHandleType.POSIX_FILE_DESCRIPTOR


# --- the other process ----------------------------------------------------------------------------------------------


def _open(here: Here, name: str) -> list[Any]:
    opened = here.opened[name] = here.receive()
    return [type(opened).__name__, opened.nbytes, opened.address]


def _open_bytes(here: Here, name: str, text: str) -> int:
    opened = here.opened[name] = ipc.open(bytes.fromhex(text), stream=here.stream)
    return int(opened.nbytes)


def _others(here: Here, name: str, value: int) -> int:
    """How many bytes of something are not ``value``."""
    memory = here.opened[name]
    host = np.empty(memory.nbytes, np.uint8)
    memory.copy_to(host, here.stream)
    here.stream.synchronize()
    return int(np.count_nonzero(host != value))


def _fill(here: Here, name: str, start: int, stop: int, value: int) -> None:
    here.opened[name][start:stop].fill(value, here.stream)
    here.stream.synchronize()


def _done(here: Here) -> bool:
    """Whether the stream has done all that it was given."""
    return here.stream.query()


def _close(here: Here, name: str) -> None:
    here.opened.pop(name).close()
    here.stream.synchronize()


def _consume(here: Here) -> list[int]:
    """Take a ring's items until its end; the number that each one is filled with, or -1."""
    numbers = []
    with ipc.Ring.consumer(ipc.Channel.from_fd(here.handles[0]), stream=here.stream, timeout=20) as ring:
        for item in ring:
            host = np.empty(item.nbytes, np.uint8)
            item.copy_to(host, here.stream)
            here.stream.synchronize()
            numbers.append(int(host[0]) if (host == host[0]).all() else -1)
    return numbers


ACTIONS: dict[str, Action] = {
    "open": _open,
    "open bytes": _open_bytes,
    "others": _others,
    "fill": _fill,
    "done": _done,
    "close": _close,
    "consume": _consume,
}


# --- the tour's own -------------------------------------------------------------------------------------------------


def _peer(tour: Tour) -> Peer:
    """The other process, which the parts share. Where memory cannot be shared the part is skipped."""
    need_gates(tour.device)
    if POSIX not in (tour.device.supports.pool_handle_types or sa.MemHandleType.NONE):
        raise Skipped("this device's pools cannot be shared with other processes")
    if tour.partner is None:
        tour.partner = tour.resources.enter_context(Peer(tour.device.driver, __name__))
    return tour.partner


def _pool(tour: Tour) -> sa.MemoryPool:
    return sa.MemoryPool(tour.device, handle_types=POSIX, release_threshold=KEEP_ALL)


def _refused(what: str, kind: str, call: Callable[[], object]) -> tuple[Claim, str]:
    """The other process refuses something with this error; the claim, and the error's text."""
    try:
        call()
    except PeerError as error:
        return equal(what, error.kind, kind), str(error)
    return Claim(what, kind, "no error", False), ""


def two_processes(tour: Tour) -> None:
    peer = _peer(tour)
    stream = tour.device.create_stream()
    host = np.zeros(8 * MiB, np.uint8)
    with _pool(tour) as pool, Gate(tour.device) as gate:
        buffer = pool.allocate(8 * MiB, stream)
        gate.hold(stream)
        buffer.fill(0x11)
        kind, nbytes, _ = peer.give("open", buffer, "first")
        tour.step(
            "another process opens 8 MiB, while a gate holds what fills them",
            equal("it has", kind, ipc.ImportedBuffer.__name__),
            equal("size", nbytes, buffer.nbytes, mib),
            equal("its stream has done its work", peer.ask("done"), False),
            figures=f"process {peer.pid}",
        )
        gate.open()
        tour.step(
            "gate opened: its stream goes on by itself, and it reads what was filled here",
            equal("other bytes that it finds", peer.ask("others", "first", 0x11), 0),
        )
        peer.ask("fill", "first", 2 * MiB, 6 * MiB, 0x22)
        buffer.copy_to(host)
        stream.synchronize()
        quarters = host.reshape(4, -1)
        tour.step(
            "it fills the middle, and this process sees that",
            every_byte("the ends", quarters[[0, 3]], 0x11),
            every_byte("the middle", quarters[1:3], 0x22),
        )
        second = pool.allocate(4 * MiB, stream)
        second.fill(0x33)
        shared = ipc.share(second)
        tour.step(
            f"more memory of this pool takes {len(bytes(shared))} bytes to share, and no descriptor along",
            equal("size", peer.ask("open bytes", "second", bytes(shared).hex()), second.nbytes, mib),
            equal("other bytes that it finds", peer.ask("others", "second", 0x33), 0),
        )
        for name, memory in (("first", buffer), ("second", second)):
            peer.ask("close", name)
            memory.free()
        stream.synchronize()
        tour.pool_step("both closed there and freed here", pool, used=0)


def lease(tour: Tour) -> None:
    peer = _peer(tour)
    stream = tour.device.create_stream()
    with _pool(tour) as pool:
        buffer = pool.allocate(8 * MiB, stream)
        buffer.fill(0x44)
        peer.give("open", buffer, "leased")
        assert isinstance(buffer, sa.Buffer)
        claim, words = raised("the free", sa.StillImportedError, lambda: buffer.free(still_imported="raise"))
        tour.pool_step("a free that must not wait is refused", pool, claim, used=8 * MiB)
        tour.quote(words)
        buffer.free()
        other = pool.allocate(8 * MiB, stream)
        other.fill(0x55)
        stream.synchronize()
        tour.pool_step(
            "freed here, and new memory written: the other one is not touched",
            pool,
            equal("other bytes that it finds", peer.ask("others", "leased", 0x44), 0),
            used=16 * MiB,
        )
        peer.ask("close", "leased")
        tour.pool_step("closed there: now its memory is free", pool, used=8 * MiB)
        other.free()
        stream.synchronize()


def stale(tour: Tour) -> None:
    peer = _peer(tour)
    stream = tour.device.create_stream()
    with _pool(tour) as pool:
        buffer = pool.allocate(MiB, stream)
        kept = pool.allocate(MiB, stream)
        peer.give("open", kept, "kept")  # so that the other process has the pool
        data = bytes(ipc.share(buffer))
        buffer.free()
        again = pool.allocate(MiB, stream)
        claim, words = _refused(
            "opening it", sa.StaleDescriptorError.__name__, lambda: peer.ask("open bytes", "stale", data.hex())
        )
        tour.step("memory that was freed cannot be opened, whoever has it now", claim)
        tour.quote(words)
        damaged = bytearray(data)
        damaged[-20] ^= 1
        claim, words = _refused(
            "opening it", ValueError.__name__, lambda: peer.ask("open bytes", "damaged", damaged.hex())
        )
        tour.step("nor can anything with a descriptor that was damaged on its way", claim)
        tour.quote(words)
        private = sa.MemoryPool(tour.device)
        own = private.allocate(MiB, stream)
        claim, words = raised("sharing it", ValueError, lambda: ipc.share(own))
        tour.step("memory that was not made for sharing is refused before a byte is sent", claim)
        tour.quote(words)
        peer.ask("close", "kept")
        for memory in (own, again, kept):
            memory.free()
        stream.synchronize()
        private.close()


def growing(tour: Tour) -> None:
    peer = _peer(tour)
    if not tour.device.supports.virtual_memory_management:
        raise Skipped("this device's memory cannot be mapped by hand")
    stream = tour.device.create_stream()
    chunk = 4 * MiB
    with vmm.GrowableBuffer(tour.device, 8 * chunk, chunk, handle_types=POSIX, stream=stream) as buffer:
        buffer.fill(0x61)
        kind, nbytes, address = peer.give("open", buffer, "growing")
        tour.step(
            f"{mib(chunk)} of a buffer that can grow to {mib(buffer.capacity)}",
            equal("it has", kind, ipc.ImportedRange.__name__),
            equal("size", nbytes, chunk, mib),
            equal("other bytes that it finds", peer.ask("others", "growing", 0x61), 0),
        )
        buffer.grow(chunk)
        buffer.fill(0x62)
        _, nbytes, later = peer.give("open", buffer, "growing")
        tour.step(
            "grown here and shared again: there too it grows in place",
            equal("address", later, address, hex),
            equal("size", nbytes, 2 * chunk, mib),
            equal("other bytes that it finds", peer.ask("others", "growing", 0x62), 0),
        )
        peer.ask("close", "growing")


def ring(tour: Tour) -> None:
    peer = _peer(tour)
    stream = tour.device.create_stream()
    slots, items = 4, 20
    with _pool(tour) as pool:
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
            found = producer.statistics()
            tour.step(
                f"{items} items handed on through {slots} slots",
                equal("handed off", found.handed_off, items),
                equal("memory that was used", used, slots * MiB, mib),
            )
        tour.step("the other process got all of them, in order", equal("items", peer.result(), list(range(items))))
        stream.synchronize()
        tour.pool_step("closed on both sides", pool, used=0)


PARTS: tuple[tuple[str, str, Callable[[Tour], None]], ...] = (
    (
        "One buffer in two processes",
        "A second Python process opens memory of this one, reads and writes it, and gives it back.",
        two_processes,
    ),
    (
        "The lease",
        "The driver would reuse memory that its owner freed, whoever still reads it. Here the free waits.",
        lease,
    ),
    ("What is refused", "Descriptors that are stale or damaged, and memory that cannot be shared.", stale),
    ("A growing buffer in two processes", "Only what is new has to be sent and mapped.", growing),
    ("A ring", "A stream of data, through slots that are shared once.", ring),
)
