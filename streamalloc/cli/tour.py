"""Show the library at its main job, and check every result on the way."""

from __future__ import annotations

import argparse
import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc.cli import tour_ipc, tour_multicast, tour_vmm
from streamalloc.cli.choice import Chosen, plural
from streamalloc.cli.steps import (
    KEEP_ALL,
    Claim,
    MiB,
    Tour,
    at_least,
    equal,
    every_byte,
    need_gates,
    need_host_pool,
    need_peer,
    raised,
)
from streamalloc.cli.terminal import Terminal, mib
from streamalloc.driver import DriverMisuseError, checked, use
from streamalloc.testing import Gate

__all__ = ["PARTS", "add_arguments", "run"]


def allocate_use_free(tour: Tour) -> None:
    stream = tour.device.create_stream()
    with sa.MemoryPool(tour.device) as pool:
        buffer = pool.allocate(16 * MiB, stream)
        tour.pool_step("allocated 16 MiB on a stream, without waiting", pool, used=16 * MiB)
        buffer.fill(0x5A)
        host = np.zeros(16 * MiB, np.uint8)
        buffer.copy_to(host)
        stream.synchronize()
        tour.step("filled it and copied it to a numpy array", every_byte("the array", host, 0x5A))
        buffer.free()
        tour.pool_step("freed it in stream order", pool, used=0)
        claim, words = raised("a fill of freed memory", sa.ClosedError, lambda: buffer.fill(0))
        tour.step("using it now is an error before the driver is reached", claim)
        tour.quote(words)
        stream.synchronize()


def two_streams(tour: Tour) -> None:
    need_gates(tour.device)
    producer, consumer = tour.device.create_stream(), tour.device.create_stream()
    with sa.MemoryPool(tour.device) as pool, Gate(tour.device) as gate:
        made = pool.allocate(8 * MiB, producer)
        result = pool.allocate(8 * MiB, consumer)
        gate.hold(producer)
        made.fill(0xC3)
        done = producer.record()
        consumer.wait(done)
        result.copy_from(made, consumer)
        made.free(consumer)
        tour.step(
            "one stream fills, held by a gate; the other waits and copies",
            equal("the event is complete", done.query(), False),
            equal("the waiting stream is done", consumer.query(), False),
        )
        tour.pool_step("freed the source in order after the copy", pool, used=8 * MiB)
        gate.open()
        consumer.synchronize()
        host = np.zeros(8 * MiB, np.uint8)
        result.copy_to(host)
        consumer.synchronize()
        tour.step(
            "gate opened: the copy came after the fill",
            equal("the event is complete", done.query(), True),
            every_byte("the copy", host, 0xC3),
        )
        result.free()


def reuse(tour: Tour) -> None:
    need_gates(tour.device)
    size = 20 * MiB
    first, second = tour.device.create_stream(), tour.device.create_stream()

    @contextlib.contextmanager
    def freed_behind_a_gate() -> Iterator[tuple[sa.MemoryPool, Gate, int, int]]:
        """20 MiB freed on the first stream, where a gate holds the free: their address, and what the pool reserves."""
        with sa.MemoryPool(tour.device, release_threshold=KEEP_ALL) as pool, Gate(tour.device) as gate:
            buffer = pool.allocate(size, first)
            address = buffer.address
            gate.hold(first)
            buffer.free()
            yield pool, gate, address, pool.statistics().reserved

    with freed_behind_a_gate() as (pool, gate, address, before):
        again = pool.allocate(size, first)
        tour.pool_step(
            "allocated on the same stream: the same memory again",
            pool,
            equal("address", again.address, address, hex),
            used=size,
            reserved=before,
        )
        again.free()

    with freed_behind_a_gate() as (pool, gate, address, before):
        other = pool.allocate(size, second)
        tour.pool_step(
            "on another stream: new memory, the pool grows",
            pool,
            equal("it is the memory that is being freed", other.address == address, False),
            equal("the pool has grown", pool.statistics().reserved > before, True),
            used=size,
        )
        other.free()

    with freed_behind_a_gate() as (pool, gate, address, before):
        second.wait(first.record())
        other = pool.allocate(size, second)
        tour.pool_step(
            "on another that waits for an event after the free: the same",
            pool,
            equal("address", other.address, address, hex),
            equal("the stream is done", second.query(), False),
            used=size,
            reserved=before,
        )
        gate.open()
        other.free()
        second.synchronize()

    with freed_behind_a_gate() as (pool, gate, address, before):
        gate.open()
        first.synchronize()
        other = pool.allocate(size, second)
        tour.pool_step(
            "on another, after gate and synchronisation: the same",
            pool,
            equal("address", other.address, address, hex),
            used=size,
            reserved=before,
        )
        other.free()
        second.synchronize()


def threshold_and_trim(tour: Tour) -> None:
    stream = tour.device.create_stream()
    size = 128 * MiB
    with sa.MemoryPool(tour.device) as pool:
        tour.step(
            "a new pool keeps nothing: its release threshold is 0",
            equal("threshold", pool.attributes.release_threshold, 0),
        )
        pool.allocate(size, stream).free()
        held = pool.statistics().reserved
        tour.pool_step(
            "allocated and freed 128 MiB, not synchronised: still held",
            pool,
            at_least("reserved before the synchronisation", held, size),
            used=0,
        )
        stream.synchronize()
        tour.pool_step("synchronised: all of it went back to the device", pool, used=0, reserved=0)

        pool.attributes.release_threshold = KEEP_ALL
        pool.allocate(size, stream).free()
        stream.synchronize()
        tour.pool_step("the same with the largest threshold: it stays", pool, used=0, reserved=held)

        for keep in (size // 2, 0):
            before = pool.statistics().reserved
            given_back = pool.trim(keep)
            after = pool.statistics().reserved
            tour.pool_step(
                f"trim({f'keep={mib(keep)}' if keep else ''}) says that {mib(given_back)} came back",
                pool,
                equal("given back", given_back, before - after, mib),
                equal("something was given back", given_back > 0, True),
                at_least("reserved after it", after, keep),
                used=0,
                reserved=None if keep else 0,
            )


def statistics(tour: Tour) -> None:
    stream = tour.device.create_stream()
    with sa.MemoryPool(tour.device) as pool:
        large, small = pool.allocate(48 * MiB, stream), pool.allocate(8 * MiB, stream)
        large.free()
        stream.synchronize()
        found = pool.statistics()
        tour.pool_step("allocated 48 and 8 MiB, freed the 48", pool, used=8 * MiB)
        tour.step(
            "the peaks remember what was there at most",
            equal("most used", found.used_high, 56 * MiB, mib),
            at_least("most reserved", found.reserved_high, 56 * MiB),
            figures=f"at most  {mib(found.reserved_high):>7}, used {mib(found.used_high):>7}",
        )
        pool.reset_peaks()
        found = pool.statistics()
        tour.step(
            "reset_peaks() sets them to what is there now",
            equal("most used", found.used_high, 8 * MiB, mib),
            equal("most reserved", found.reserved_high, found.reserved, mib),
            figures=f"at most  {mib(found.reserved_high):>7}, used {mib(found.used_high):>7}",
        )
        small.free()
        stream.synchronize()


def current_pool(tour: Tour) -> None:
    stream = tour.device.create_stream()
    before = sa.MemoryPool.current(tour.device)
    with sa.MemoryPool(tour.device) as pool:
        with pool.make_current():
            buffer = sa.allocate(MiB, stream)
            tour.pool_step(
                "inside `with pool.make_current():` allocate() takes from it",
                pool,
                equal("owner", buffer.owner is pool, True),
                used=MiB,
            )
            buffer.free()
        now = sa.MemoryPool.current(tour.device)
        tour.step("after it, the pool that was current before is again", equal("pool", now.handle, before.handle, hex))
        stream.synchronize()


def two_gpus(tour: Tour) -> None:
    peer = need_peer(tour)
    here, there = tour.device.create_stream(), peer.create_stream()
    with sa.MemoryPool(tour.device) as pool:
        buffer = pool.allocate(4 * MiB, here)
        here.synchronize()
        claim, words = raised("a fill by the other GPU", sa.InvalidValueError, lambda: buffer.fill(1, there))
        tour.step(
            f"GPU {peer.ordinal} may not use a pool of GPU 0 at first",
            equal("access", pool.access(peer), sa.MemAccess.NONE),
            claim,
        )
        tour.quote(words)
        pool.set_access(peer, sa.MemAccess.READWRITE)
        buffer.fill(0x77, there)
        here.wait(there)
        host = np.zeros(4 * MiB, np.uint8)
        buffer.copy_to(host)
        here.synchronize()
        tour.step(
            f"granted: GPU {peer.ordinal} fills memory that GPU 0 allocated before",
            equal("access", pool.access(peer), sa.MemAccess.READWRITE),
            every_byte("read back on GPU 0", host, 0x77),
        )
        pool.set_access(peer, sa.MemAccess.NONE)
        tour.step("and taken back", equal("access", pool.access(peer), sa.MemAccess.NONE))
        buffer.free()
        here.synchronize()


def host_pool(tour: Tour) -> None:
    location = need_host_pool(tour)
    stream = tour.device.create_stream()
    with sa.MemoryPool(location) as pool, sa.MemoryPool(tour.device) as device_pool:
        pool.set_access(tour.device, sa.MemAccess.READWRITE)
        buffer = pool.allocate(4 * MiB, stream)
        stream.synchronize()
        numbers = buffer.as_array(np.float32)
        tour.pool_step(
            f"4 MiB in host memory ({location.type.name.lower()}) as a numpy array, without a copy",
            pool,
            equal("the array's address", numbers.ctypes.data, buffer.address, hex),
            used=4 * MiB,
        )
        numbers[:] = np.arange(numbers.size, dtype=np.float32)
        on_device = device_pool.allocate(4 * MiB, stream)
        on_device.copy_from(buffer)
        buffer.fill(0)
        stream.synchronize()
        tour.step(
            "copied to the GPU; then the GPU cleared it, and the array shows that",
            equal("numbers that are not 0", int(np.count_nonzero(numbers)), 0),
        )
        on_device.copy_to(buffer)
        stream.synchronize()
        tour.step(
            "copied back: the array holds what numpy wrote",
            equal("the numbers are back", bool((numbers == np.arange(numbers.size, dtype=np.float32)).all()), True),
        )
        del numbers
        buffer.free()
        on_device.free()
        stream.synchronize()


def capture(tour: Tour) -> None:
    stream = tour.device.create_stream()
    memory = tour.device.graph_memory
    memory.trim()
    with sa.MemoryPool(tour.device) as pool:
        result = pool.allocate(4 * MiB, stream)
        result.fill(0)
        stream.synchronize()
        with stream.capture() as graph:
            scratch = sa.allocate(4 * MiB, stream)
            scratch.fill(0x2A)
            result.copy_from(scratch)
            claim, words = raised("the free", sa.CaptureError, lambda: result.free(stream))
            scratch.free()
        nodes = ["MEM_ALLOC", "MEMSET", "MEMCPY", "MEM_FREE"]
        tour.step(
            "allocation, fill, copy and free become nodes of a graph",
            equal("nodes", sorted(graph.nodes), sorted(nodes), ", ".join),
            figures=", ".join(graph.nodes),
        )
        tour.step("memory from outside cannot be freed in it; the capture goes on", claim)
        tour.quote(words)

        host = np.full(4 * MiB, 0xFF, np.uint8)
        result.copy_to(host)
        stream.synchronize()
        tour.step("nothing has run yet", every_byte("the result", host, 0), equal("graph memory", memory.reserved, 0))

        graph.launch(stream)
        stream.synchronize()
        result.copy_to(host)
        stream.synchronize()
        held = memory.statistics()
        tour.step(
            "launched: the graph filled its own memory and copied from it",
            every_byte("the result", host, 0x2A),
            at_least("memory held for graphs", held.reserved, 4 * MiB),
            figures=f"held for graphs {mib(held.reserved)}",
        )
        result.fill(0)
        graph.launch(stream)
        result.copy_to(host)
        stream.synchronize()
        tour.step(
            "launched again: it uses the same memory",
            every_byte("the result", host, 0x2A),
            equal("memory held for graphs", memory.reserved, held.reserved, mib),
            figures=f"held for graphs {mib(memory.reserved)}",
        )
        graph.close()
        given_back = memory.trim()
        tour.step(
            f"graph_memory.trim() says that {mib(given_back)} came back",
            equal("given back", given_back, held.reserved, mib),
            equal("memory held for graphs", memory.reserved, 0, mib),
            figures=f"held for graphs {mib(memory.reserved)}",
        )
        result.free()
        stream.synchronize()


def out_of_memory(tour: Tour) -> None:
    stream = tour.device.create_stream()
    limit, requested = 64 * MiB, 128 * MiB
    with sa.MemoryPool(tour.device, max_size=limit) as pool:
        held = pool.allocate(16 * MiB, stream)
        tour.pool_step("a pool of at most 64 MiB, of which 16 are taken", pool, used=16 * MiB)
        try:
            pool.allocate(requested, stream).free()
        except sa.OutOfMemoryError as error:
            tour.step(
                "asking for 128 MiB raises OutOfMemoryError, which carries the figures",
                equal("requested", error.requested, requested),
                equal("limit", error.limit, limit),
                equal("used", error.used, 16 * MiB),
                equal("a MemoryError too", isinstance(error, MemoryError), True),
            )
            tour.quote(str(error))
        else:
            tour.step("asking for 128 MiB", Claim("the allocation", "OutOfMemoryError", "no error", False))
        small = pool.allocate(8 * MiB, stream)
        tour.pool_step("the pool goes on working: 8 MiB more", pool, used=24 * MiB)
        small.free()
        held.free()
        stream.synchronize()


def addresses(tour: Tour) -> None:
    stream = tour.device.create_stream()
    with sa.MemoryPool(tour.device) as pool:
        buffer = pool.allocate(3 * MiB, stream)
        stream.synchronize()
        known = sa.pointer_attributes(buffer.address + 1000)
        tour.step(
            "of an address in the middle of an allocation",
            equal("kind", known.kind, sa.MemoryKind.DEVICE),
            equal("device", known.device, tour.device),
            equal("start of the allocation", known.base, buffer.address, hex),
            equal("size of the allocation", known.nbytes, 3 * MiB, mib),
            equal("its pool", known.pool is pool, True),
            figures=f"{known.kind.value} memory, {mib(known.nbytes)} from {known.base:#x}",
        )
        array = np.zeros(64, np.uint8)
        unknown = sa.pointer_attributes(array.ctypes.data)
        tour.step(
            "of an ordinary numpy array",
            equal("kind", unknown.kind, sa.MemoryKind.UNKNOWN),
            figures="unknown to the driver",
        )
        buffer.free()
        stream.synchronize()


PARTS: tuple[tuple[str, str, Callable[[Tour], None]], ...] = (
    (
        "Allocate, use, free",
        "Reserved is what the pool holds of the device's memory; used is what it has handed out.",
        allocate_use_free,
    ),
    ("Two streams and an event", "Work on one stream, use on another; the host waits for neither.", two_streams),
    (
        "Reuse of freed memory",
        "20 MiB are freed on a stream that a gate holds, so that the free is certainly still pending.",
        reuse,
    ),
    (
        "Release threshold and trim",
        "What a pool keeps when the host synchronises, and how to get it back by hand.",
        threshold_and_trim,
    ),
    ("Statistics and peaks", "What a pool holds now, and the most that it ever held.", statistics),
    ("The current pool", "The pool of allocations that name none.", current_pool),
    ("Two GPUs", "A pool's memory used by another GPU than the one that it is on.", two_gpus),
    ("Host memory and numpy", "A pool of memory that the CPU and the GPU both use in place.", host_pool),
    ("Stream capture", "Allocations in a captured stream belong to the graph.", capture),
    ("Out of memory", "What the error says.", out_of_memory),
    ("Pointer attributes", "What the driver knows about any address.", addresses),
    *tour_vmm.PARTS,
    *tour_ipc.PARTS,
    *tour_multicast.PARTS,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The tour takes no arguments."""


def run(chosen: Chosen, terminal: Terminal, options: argparse.Namespace) -> int:
    """Show every part; 0 if all that was claimed held, else 1."""
    terminal.line(terminal.bold(chosen.headline))
    # Accounts for all that the tour makes, so that its end can show that nothing was left behind.
    accounts = checked(chosen.driver)
    if not sa.Device(0).supports.memory_pools:
        terminal.line("This device has no stream-ordered memory pools: there is nothing to show.")
        return 1
    with use(accounts), warnings.catch_warnings():
        warnings.simplefilter("error", sa.PendingFreesWarning)
        with Tour(terminal) as tour:
            for title, about, part in PARTS:
                tour.run(title, about, part)
        terminal.heading("At the end")
        _nothing_left(tour, accounts)
    terminal.line()
    terminal.line(_verdict(tour))
    return 1 if tour.failed else 0


def _nothing_left(tour: Tour, accounts: Any) -> None:
    # Objects of a part that failed may be in reference cycles with its error.
    gc.collect()
    sa.Device(0, driver=accounts).synchronize()  # what was dropped is given back now
    try:
        accounts.assert_nothing_left()
    except DriverMisuseError as error:
        tour.step("all that was made is released", Claim("left behind", "nothing", str(error), False))
    else:
        tour.step(
            "all pools, allocations, memory, address ranges, arrays, streams, events and graphs are released",
            equal("left behind", 0, 0),
        )


def _verdict(tour: Tour) -> str:
    skipped = f", {plural(tour.skipped, 'part')} skipped" if tour.skipped else ""
    if tour.failed:
        return tour.terminal.bad(f"{tour.failed} of {plural(tour.checks, 'check')} failed") + skipped
    return tour.terminal.good(f"All {plural(tour.checks, 'check')} held") + skipped + "."
