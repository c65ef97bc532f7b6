"""Show the library at its main tasks and check every result."""

from __future__ import annotations

import argparse
import gc
import warnings
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc import vmm
from streamalloc.cli import tour_sharing
from streamalloc.cli.machine import KEEP_ALL, Chosen, need_gates, need_host_pool, need_peers, need_virtual_memory
from streamalloc.cli.steps import Claim, MiB, Part, Parts, Tour, at_least, equal, every_byte, raised
from streamalloc.cli.terminal import Terminal, plural
from streamalloc.cli.worker import read
from streamalloc.core.errors import size_text
from streamalloc.driver import DriverMisuseError, checked, use
from streamalloc.testing import Gate

POOLS, VMM = Parts(), Parts()


# --- pools ----------------------------------------------------------------------------------------------------------


@POOLS.add(
    "Allocate, use, free", "Reserved: memory that the pool holds. Used: memory in allocations that are not freed."
)
def allocate_use_free(tour: Tour, stream: sa.Stream) -> None:
    with tour.pool(stream) as pool:
        buffer = pool.allocate(16 * MiB, stream)
        tour.pool_step("allocated 16 MiB on a stream, without waiting", pool, used=16 * MiB)
        buffer.fill(0x5A)
        tour.step("filled it and copied it to a numpy array", every_byte("the array", read(buffer, stream), 0x5A))
        buffer.free()
        tour.pool_step("freed it in stream order", pool, used=0)
        refused = raised("a fill of freed memory", sa.ClosedError, lambda: buffer.fill(0))
        tour.step("using it now raises an error before any driver call", refused)


@POOLS.add("Two streams and an event", "One stream writes, another reads; the host waits for neither.")
def two_streams(tour: Tour, producer: sa.Stream) -> None:
    need_gates(tour.device)
    consumer = tour.device.create_stream()
    with tour.pool(consumer) as pool, Gate(tour.device) as gate, pool.allocate(8 * MiB, consumer) as result:
        made = pool.allocate(8 * MiB, producer)
        gate.hold(producer)
        made.fill(0xC3)
        done = producer.record()
        consumer.wait(done)
        result.copy_from(made, consumer)
        made.free(consumer)
        event = equal("the event is complete", done.query(), False)
        waiting = equal("the waiting stream is done", consumer.query(), False)
        tour.step("one stream fills, held by a gate; the other waits and copies", event, waiting)
        tour.pool_step("freed the source on the second stream, after the copy", pool, used=8 * MiB)
        gate.open()
        copy = every_byte("the copy", read(result, consumer), 0xC3)
        tour.step("gate opened: the copy ran after the fill", equal("the event is complete", done.query(), True), copy)


@POOLS.add("Reuse of freed memory", "A gate holds the stream on which 20 MiB are freed, so the free is still pending.")
def reuse(tour: Tour, first: sa.Stream) -> None:
    need_gates(tour.device)
    second = tour.device.create_stream()

    for text, stream, waits, opened in (
        ("allocated on the same stream: the same memory", first, False, False),
        ("on another stream: new memory, the pool grows", second, False, False),
        ("on another that waits for an event after the free: the same memory", second, True, False),
        ("on another, after gate and synchronization: the same memory", second, False, True),
    ):
        same = stream is first or waits or opened
        with tour.pool(second, release_threshold=KEEP_ALL) as pool, Gate(tour.device) as gate:
            buffer = pool.allocate(20 * MiB, first)
            address = buffer.address
            gate.hold(first)
            buffer.free()
            before = pool.statistics().reserved
            if waits:
                second.wait(first.record())
            if opened:
                gate.open()
                first.synchronize()
            with pool.allocate(20 * MiB, stream) as again:
                claims = [equal("it is the freed memory", again.address == address, same)]
                claims.append(equal("the pool has grown", pool.statistics().reserved > before, not same))
                if waits:
                    claims.append(equal("the stream is done", stream.query(), False))
                tour.pool_step(text, pool, *claims, used=20 * MiB)


@POOLS.add("Release threshold and trim", "The memory that a pool keeps at a synchronization, and how to release it.")
def threshold_and_trim(tour: Tour, stream: sa.Stream) -> None:
    size = 128 * MiB
    with tour.pool(stream) as pool:
        threshold = equal("threshold", pool.attributes.release_threshold, 0)
        tour.step("a new pool keeps nothing: its release threshold is 0", threshold)
        pool.allocate(size, stream).free()
        held = pool.statistics().reserved
        enough = at_least("reserved before the synchronization", held, size)
        tour.pool_step("allocated and freed 128 MiB, not synchronized: still reserved", pool, enough, used=0)
        stream.synchronize()
        tour.pool_step("synchronized: all of it is released to the device", pool, used=0, reserved=0)

        pool.attributes.release_threshold = KEEP_ALL
        pool.allocate(size, stream).free()
        stream.synchronize()
        tour.pool_step("the same with the largest threshold: it stays reserved", pool, used=0, reserved=held)

        for keep in (size // 2, 0):
            before = pool.statistics().reserved
            released = pool.trim(keep)
            after = pool.statistics().reserved
            tour.pool_step(
                f"trim({f'keep={size_text(keep)}' if keep else ''}) released {size_text(released)}",
                pool,
                equal("released", released, before - after, size_text),
                equal("it released memory", released > 0, True),
                at_least("reserved after it", after, keep),
                used=0,
                reserved=None if keep else 0,
            )


@POOLS.add("Two GPUs", "One GPU uses memory of another GPU's pool.")
def two_gpus(tour: Tour, here: sa.Stream) -> None:
    _, peer, *_ = need_peers(tour.device.driver)
    there = peer.create_stream()

    def access(expected: sa.MemAccess) -> Claim:
        return equal("access", pool.access(peer), expected)

    with tour.pool(here) as pool, pool.allocate(4 * MiB, here) as buffer:
        here.synchronize()
        refused = raised("a fill by the other GPU", sa.InvalidValueError, lambda: buffer.fill(1, there))
        tour.step(f"GPU {peer.ordinal} has no access to a new pool of GPU 0", access(sa.MemAccess.NONE), refused)
        pool.set_access(peer, sa.MemAccess.READWRITE)
        buffer.fill(0x77, there)
        here.wait(there)
        filled = every_byte("read back on GPU 0", read(buffer, here), 0x77)
        text = f"access granted: GPU {peer.ordinal} fills memory allocated before"
        tour.step(text, access(sa.MemAccess.READWRITE), filled)
        pool.set_access(peer, sa.MemAccess.NONE)
        tour.step("access revoked", access(sa.MemAccess.NONE))


@POOLS.add("Host memory and numpy", "A pool of memory that CPU and GPU use at the same address.")
def host_pool(tour: Tour, stream: sa.Stream) -> None:
    location = need_host_pool(tour.device)
    with (
        tour.pool(stream, location) as pool,
        tour.pool(stream) as device_pool,
        pool.allocate(4 * MiB, stream) as buffer,
        device_pool.allocate(4 * MiB, stream) as on_device,
    ):
        pool.set_access(tour.device, sa.MemAccess.READWRITE)
        stream.synchronize()
        numbers = buffer.as_array(np.float32)
        in_place = equal("the array's address", numbers.ctypes.data, buffer.address, hex)
        text = f"4 MiB in host memory ({location.type.name.lower()}) as a numpy array, without a copy"
        tour.pool_step(text, pool, in_place, used=4 * MiB)
        written = np.arange(numbers.size, dtype=np.float32)
        numbers[:] = written
        on_device.copy_from(buffer)
        buffer.fill(0)
        stream.synchronize()
        cleared = equal("numbers that are not 0", int(np.count_nonzero(numbers)), 0)
        tour.step("copied to the GPU; then the GPU cleared it, and the array is 0", cleared)
        on_device.copy_to(buffer)
        stream.synchronize()
        there = equal("the numbers are back", bool((numbers == written).all()), True)
        tour.step("copied back: the array has the numbers that numpy wrote", there)
        del numbers


@POOLS.add("Stream capture", "Allocations in a captured stream belong to the graph.")
def capture(tour: Tour, stream: sa.Stream) -> None:
    memory = tour.device.graph_memory
    memory.trim()
    before = memory.reserved  # bytes held for other graphs of the process

    def step(text: str, *claims: Claim, held: int) -> None:
        """Print a step with the memory held for its graph, which must be ``held`` bytes."""
        found = memory.reserved - before
        figures = f"held for graphs {size_text(found)}"
        tour.step(text, *claims, equal("memory held for graphs", found, held, size_text), figures=figures)

    with tour.pool(stream) as pool, pool.allocate(4 * MiB, stream) as result:
        result.fill(0)
        stream.synchronize()
        with stream.capture() as graph:
            scratch = sa.allocate(4 * MiB, stream)
            scratch.fill(0x2A)
            result.copy_from(scratch)
            refused = raised("the free", sa.CaptureError, lambda: result.free(stream))
            scratch.free()
        tour.step(
            "allocation, fill, copy and free become nodes of a graph",
            equal("nodes", sorted(graph.nodes), ["MEMCPY", "MEMSET", "MEM_ALLOC", "MEM_FREE"], ", ".join),
            figures=", ".join(graph.nodes),
        )
        tour.step("memory from outside cannot be freed in it; the capture continues", refused)
        step("captured only: nothing has run yet", every_byte("the result", read(result, stream), 0), held=0)

        graph.launch(stream)
        filled = every_byte("the result", read(result, stream), 0x2A)
        held = memory.reserved - before
        enough = at_least("memory held for graphs", held, 4 * MiB)
        step("launched: the graph filled its own memory and copied from it", filled, enough, held=held)
        result.fill(0)
        graph.launch(stream)
        filled = every_byte("the result", read(result, stream), 0x2A)
        step("launched again: it uses the same memory", filled, held=held)
        graph.close()
        released = memory.trim()
        all_of_it = equal("released", released, held, size_text)
        step(f"graph_memory.trim() released {size_text(released)}", all_of_it, held=0)


@POOLS.add("Out of memory", "The error carries the figures of the pool.")
def out_of_memory(tour: Tour, stream: sa.Stream) -> None:
    limit, requested = 64 * MiB, 128 * MiB
    with tour.pool(stream, max_size=limit) as pool, pool.allocate(16 * MiB, stream):
        tour.pool_step("a pool of at most 64 MiB, with 16 MiB allocated", pool, used=16 * MiB)
        figures: dict[str, Any] = {"limit": limit, "requested": requested, "used": 16 * MiB}
        claims: list[Claim] = []

        def fail() -> None:
            try:
                pool.allocate(requested, stream)
            except sa.OutOfMemoryError as error:
                claims.extend(equal(name, getattr(error, name), value) for name, value in figures.items())
                raise

        claims.append(raised("the allocation", MemoryError, fail))
        tour.step("allocating 128 MiB raises OutOfMemoryError with the figures", *claims)
        with pool.allocate(8 * MiB, stream):
            tour.pool_step("the pool still works: 8 MiB more", pool, used=24 * MiB)


# --- virtual memory -------------------------------------------------------------------------------------------------


def _access(what: str, mapping: vmm.Mapping, device: sa.Device, expected: sa.MemAccess) -> Claim:
    return equal(what, mapping.access(device), expected, lambda access: access.name)


@VMM.add(
    "Virtual memory by hand",
    "Physical memory has no address, and an address range has no memory. Mapping joins them; access permits "
    "use. Ranges are drawn in brackets: 0 for memory of GPU 0, a dot for unmapped addresses.",
)
def by_hand(tour: Tour, stream: sa.Stream) -> None:
    need_virtual_memory(tour.device)
    granule = vmm.PhysicalMemory.granularity(tour.device)
    size = 2 * granule
    with vmm.AddressRange(16 * granule) as addresses, vmm.PhysicalMemory(tour.device, size) as memory:

        def drawn(text: str, *claims: Claim) -> None:
            """Print a step with a drawing of the mappings."""
            tour.step(text, *claims, figures=f"[{addresses.draw(32)}]")

        nothing = equal("mapped", addresses.mapped_bytes, 0)
        drawn(f"{size_text(size)} of physical memory, and {size_text(addresses.nbytes)} of addresses", nothing)
        first, second = addresses.map(memory, 0), addresses.map(memory, 8 * granule)
        drawn(
            "mapped at two addresses; no device has access yet",
            equal("mappings", memory.mapping_count, 2),
            _access("access", first, tour.device, sa.MemAccess.NONE),
            raised("a fill", ValueError, lambda: first.fill(0, stream)),
        )
        first.set_access(tour.device, sa.MemAccess.READWRITE)
        second.set_access(tour.device, sa.MemAccess.READ)
        both = _access("access at the first", first, tour.device, sa.MemAccess.READWRITE)
        only = _access("access at the second", second, tour.device, sa.MemAccess.READ)
        tour.step("access for the GPU: read and write at the first address, read at the second", both, only)
        first.fill(0x3C, stream)
        copied = every_byte("the copy", read(second, stream), 0x3C)
        tour.step("filled at the first address, read at the second", copied)
        refused = raised("a fill", sa.InvalidValueError, lambda: second.fill(0, stream))
        tour.step("writing at the second address raises an error", refused)
        memory.close()
        first.close()
        copied = every_byte("the copy", read(second, stream), 0x3C)
        unmapped = equal("the first is unmapped", first.closed, True)
        drawn("handle closed, first mapping closed: the second keeps the memory", unmapped, copied)
        refused = raised("closing the range", ValueError, addresses.close)
        tour.step("addresses cannot be freed while memory is mapped", refused)
        second.close()


@VMM.add("A buffer that grows in place", "New memory is mapped after the old: no byte moves.")
def growth(tour: Tour, stream: sa.Stream) -> None:
    need_virtual_memory(tour.device)
    chunk, chunks = 4 * MiB, 8
    numbers = list(range(1, chunks + 1))
    # More addresses than device memory, so that a later step can fail to grow.
    with vmm.GrowableBuffer(tour.device, tour.device.memory_info().total + 64 * MiB, stream=stream) as buffer:
        address = buffer.address

        def step(text: str, *claims: Claim, mapped: int) -> None:
            """Print a step; check that the address is unchanged and that ``mapped`` chunks are mapped."""
            found = buffer.mapped_bytes
            same = equal("address", buffer.address, address, hex)
            size = equal("mapped", found, mapped * chunk, size_text)
            tour.step(text, *claims, same, size, figures=f"mapped {size_text(found):>7}")

        def contents() -> Claim:
            """Claim that each chunk is filled with its number."""
            found = read(buffer, stream).reshape(-1, chunk)
            shown = [int(one[0]) if (one == one[0]).all() else -1 for one in found]
            return equal("chunks", shown, numbers[: buffer.nbytes // chunk])

        step(f"{buffer.capacity / (1 << 30):.0f} GiB of addresses, more than the device has memory", mapped=0)
        for number in numbers:
            buffer.grow(chunk)
            buffer[buffer.nbytes - chunk :].fill(number, stream)
        step(f"grown {chunks} times by {size_text(chunk)}: the address is the same", mapped=chunks)
        tour.step("the bytes written before each growth are unchanged", contents())
        step(
            "a failed growth changes nothing",
            raised("the growth", sa.OutOfMemoryError, lambda: buffer.resize(buffer.capacity)),
            equal("size", buffer.nbytes, chunks * chunk, size_text),
            _access("access", buffer.mappings[-1], tour.device, sa.MemAccess.READWRITE),
            contents(),
            mapped=chunks,
        )
        tail = buffer[-chunk:]
        tail.fill(0, stream)
        buffer.resize(3 * chunk, after=stream.record())
        refused = raised("a fill", sa.ClosedError, lambda: tail.fill(0, stream))
        step("shrunk after an event: the rest is unchanged", contents(), refused, mapped=3)


def _mapped(address: int) -> bool:
    """Whether physical memory is mapped at an address."""
    try:
        vmm.PhysicalMemory.at(address).close()
    except sa.InvalidValueError:
        return False
    return True


@VMM.add("Evict and restore", "The memory is released, the addresses stay, and the bytes are restored later.")
def eviction(tour: Tour, stream: sa.Stream) -> None:
    need_virtual_memory(tour.device)
    location = need_host_pool(tour.device)
    size = 32 * MiB
    numbers = np.arange(size // 4, dtype=np.uint32)
    with (
        sa.MemoryPool(location, release_threshold=KEEP_ALL) as pool,
        vmm.GrowableBuffer(tour.device, size, size, stream=stream) as buffer,
    ):
        pool.set_access(tour.device, sa.MemAccess.READWRITE)
        buffer.copy_from(numbers)
        address, free = buffer.address, tour.device.memory_info().free

        def step(text: str, *claims: Claim, there: bool, backup: int) -> None:
            """Print a step; check the mapping at the address and the bytes in the backup pool."""
            nonlocal free
            before, free = free, tour.device.memory_info().free
            tour.step(
                text,
                equal("the address is reserved", buffer.address, address, hex),
                equal("memory is mapped there", _mapped(address), there),
                equal("in the backup pool", pool.statistics().used, backup, size_text),
                *claims,
                figures=f"free on the GPU {(free - before) / MiB:+,.0f} MiB",
            )

        buffer.evict(pool)
        step(f"{size_text(size)} evicted, with a copy in host memory", there=False, backup=size)
        refused = raised("a fill", sa.EvictedError, lambda: buffer.fill(0))
        tour.step("using it now raises an error before any driver call", refused)
        buffer.restore()
        differ = equal("numbers that differ", int(np.count_nonzero(read(buffer, stream).view(np.uint32) != numbers)), 0)
        step("restored: the same bytes at the same address", differ, there=True, backup=0)
        buffer.evict()
        nothing = _mapped(address)
        buffer.restore()
        buffer.fill(0x6B)
        tour.step(
            "the same without a copy: the bytes are lost, address and access are not",
            equal("memory is mapped there while it is evicted", nothing, False),
            equal("address", buffer.address, address, hex),
            every_byte("what was written afterwards", read(buffer, stream), 0x6B),
        )


# --- the command ----------------------------------------------------------------------------------------------------


TOURS: dict[str, list[Part]] = {
    "pools": POOLS,
    "vmm": VMM,
    "ipc": tour_sharing.IPC,
    "multicast": tour_sharing.MULTICAST,
}
PARTS = [one for parts in TOURS.values() for one in parts]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tour``."""
    parser.add_argument("name", nargs="?", choices=TOURS, help="one area (default: all)")


def run(chosen: Chosen, terminal: Terminal, options: argparse.Namespace) -> int:
    """Run the parts; return 0 if all claims held, else 1."""
    terminal.line(terminal.bold(chosen.headline))
    # The checker records all objects, so that the last step can check for leaks.
    accounts = checked(chosen.driver)
    if not sa.Device(0).supports.memory_pools:
        terminal.line("This device has no stream-ordered memory pools, which the tour needs.")
        return 1
    with use(accounts), warnings.catch_warnings():
        warnings.simplefilter("error", sa.PendingFreesWarning)
        with Tour(terminal) as tour:
            for one in PARTS if options.name is None else TOURS[options.name]:
                tour.run(one)
        terminal.heading("At the end")
        _nothing_left(tour, accounts)
    terminal.line()
    skipped = f", {plural(tour.skipped, 'part')} skipped" if tour.skipped else ""
    if tour.failed:
        terminal.line(terminal.bad(f"{tour.failed} of {plural(tour.checks, 'check')} failed") + skipped)
        return 1
    terminal.line(terminal.good(f"All {plural(tour.checks, 'check')} held") + skipped + ".")
    return 0


def _nothing_left(tour: Tour, accounts: Any) -> None:
    # After a failed part, its objects may be in a reference cycle with the error.
    gc.collect()
    sa.Device(0, driver=accounts).synchronize()  # releases dropped objects
    leaks = "nothing"
    try:
        accounts.assert_nothing_left()
    except DriverMisuseError as error:
        leaks = str(error)
    text = "all pools, allocations, memory, address ranges, arrays, streams, events and graphs are released"
    tour.step(text, equal("left behind", leaks, "nothing"))
