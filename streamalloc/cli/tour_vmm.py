"""The parts of the tour about virtual memory: mapping by hand, growth, eviction, striping and sparse arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import streamalloc as sa
from streamalloc import vmm
from streamalloc.cli.steps import (
    KEEP_ALL,
    Claim,
    MiB,
    Skipped,
    Tour,
    equal,
    every_byte,
    need_host_pool,
    need_peer,
    raised,
)
from streamalloc.cli.terminal import mib

__all__ = ["PARTS"]


def _need_virtual_memory(device: sa.Device) -> None:
    if not device.supports.virtual_memory_management:
        raise Skipped("this device's memory cannot be mapped by hand")


def _access(what: str, found: sa.MemAccess, expected: sa.MemAccess) -> Claim:
    return equal(what, found, expected, lambda access: access.name)


def _drawn(range: vmm.AddressRange) -> str:
    """The range as figures of a step: where memory is mapped, and of which device."""
    return f"[{range.draw(32)}]"


def by_hand(tour: Tour) -> None:
    _need_virtual_memory(tour.device)
    stream = tour.device.create_stream()
    granule = vmm.PhysicalMemory.granularity(tour.device)
    size = 2 * granule
    host = np.zeros(size, np.uint8)
    with vmm.AddressRange(16 * granule) as addresses, vmm.PhysicalMemory(size, tour.device) as memory:
        tour.step(
            f"{mib(size)} of physical memory, and {mib(addresses.nbytes)} of addresses",
            equal("mapped", addresses.mapped_bytes, 0),
            figures=_drawn(addresses),
        )
        first, second = addresses.map(memory, 0), addresses.map(memory, 8 * granule)
        claim, words = raised("a fill", ValueError, lambda: first.fill(0, stream))
        tour.step(
            "mapped in two places, as aliases; nobody may use them yet",
            equal("places", memory.mapping_count, 2),
            _access("access", first.access(tour.device), sa.MemAccess.NONE),
            claim,
            figures=_drawn(addresses),
        )
        tour.quote(words)
        first.set_access(tour.device, sa.MemAccess.READWRITE)
        second.set_access(tour.device, sa.MemAccess.READ)
        tour.step(
            "access for the GPU: read and write at the first, read only at the second",
            _access("access at the first", first.access(tour.device), sa.MemAccess.READWRITE),
            _access("access at the second", second.access(tour.device), sa.MemAccess.READ),
        )
        first.fill(0x3C, stream)
        second.copy_to(host, stream)
        stream.synchronize()
        tour.step("filled at the first address, read at the second", every_byte("the copy", host, 0x3C))
        claim, words = raised("a fill", sa.InvalidValueError, lambda: second.fill(0, stream))
        tour.step("the driver refuses to write at the second", claim)
        tour.quote(words)
        memory.close()
        first.close()
        host[:] = 0
        second.copy_to(host, stream)
        stream.synchronize()
        tour.step(
            "handle closed, first place unmapped: the second keeps it",
            equal("the first is unmapped", first.closed, True),
            every_byte("the copy", host, 0x3C),
            figures=_drawn(addresses),
        )
        claim, words = raised("closing the range", ValueError, addresses.close)
        tour.step("addresses cannot be freed while something is mapped", claim)
        tour.quote(words)
        second.close()


def growth(tour: Tour) -> None:
    _need_virtual_memory(tour.device)
    stream = tour.device.create_stream()
    piece, pieces = 4 * MiB, 8
    # More addresses than the device has memory, so that a growth can be asked for that must fail.
    total = tour.device.memory_info().total
    host = np.zeros(piece * pieces, np.uint8)

    def contents(count: int) -> list[int]:
        """The first ``count`` pieces as the numbers that they are filled with; -1 for a mixture."""
        buffer[: count * piece].copy_to(host[: count * piece], stream)
        stream.synchronize()
        return [int(part[0]) if (part == part[0]).all() else -1 for part in host[: count * piece].reshape(count, piece)]

    numbers = list(range(1, pieces + 1))
    with vmm.GrowableBuffer(tour.device, total + 64 * MiB, stream=stream) as buffer:
        address = buffer.address
        tour.step(
            f"{buffer.capacity / (1 << 30):.0f} GiB of addresses, more than the device has memory",
            equal("mapped", buffer.mapped_bytes, 0, mib),
            figures=f"mapped {mib(buffer.mapped_bytes):>7}",
        )
        for number in numbers:
            buffer.grow(piece)
            buffer[buffer.nbytes - piece :].fill(number, stream)
        tour.step(
            f"grown {pieces} times by {mib(piece)}: the address is the same",
            equal("address", buffer.address, address, hex),
            equal("mapped", buffer.mapped_bytes, pieces * piece, mib),
            figures=f"mapped {mib(buffer.mapped_bytes):>7}",
        )
        tour.step("what was written before each growth is there", equal("pieces", contents(pieces), numbers))
        claim, words = raised("the growth", sa.OutOfMemoryError, lambda: buffer.resize(buffer.capacity))
        tour.step(
            "a growth that fails changes nothing",
            claim,
            equal("size", buffer.nbytes, pieces * piece, mib),
            _access("access", buffer.mappings[-1].access(tour.device), sa.MemAccess.READWRITE),
            equal("pieces", contents(pieces), numbers),
            figures=f"mapped {mib(buffer.mapped_bytes):>7}",
        )
        tour.quote(words)
        tail = buffer[-piece:]
        tail.fill(0, stream)
        buffer.resize(3 * piece, after=stream.record())
        claim, words = raised("a fill", sa.ClosedError, lambda: tail.fill(0, stream))
        tour.step(
            "shrunk once an event had passed: the rest is as it was",
            equal("address", buffer.address, address, hex),
            equal("mapped", buffer.mapped_bytes, 3 * piece, mib),
            equal("pieces", contents(3), numbers[:3]),
            claim,
            figures=f"mapped {mib(buffer.mapped_bytes):>7}",
        )
        tour.quote(words)


def eviction(tour: Tour) -> None:
    _need_virtual_memory(tour.device)
    location = need_host_pool(tour)
    stream = tour.device.create_stream()
    size = 32 * MiB
    numbers = np.arange(size // 4, dtype=np.uint32)
    found = np.zeros_like(numbers)

    def mapped(address: int) -> bool:
        """Whether the driver has physical memory at an address."""
        try:
            vmm.PhysicalMemory.at(address).close()
        except sa.InvalidValueError:
            return False
        return True

    with (
        sa.MemoryPool(location, release_threshold=KEEP_ALL) as pool,
        vmm.GrowableBuffer(tour.device, size, size, stream=stream) as buffer,
    ):
        pool.set_access(tour.device, sa.MemAccess.READWRITE)
        buffer.copy_from(numbers)
        address = buffer.address
        before = tour.device.memory_info().free
        buffer.evict(pool)
        free = tour.device.memory_info().free
        tour.step(
            f"{mib(size)} evicted, with a copy in host memory",
            equal("the address is reserved", buffer.address, address, hex),
            equal("there is memory at it", mapped(address), False),
            equal("in the backup pool", pool.statistics().used, size, mib),
            figures=f"free on the GPU {(free - before) / MiB:+,.0f} MiB",
        )
        claim, words = raised("a fill", sa.EvictedError, lambda: buffer.fill(0))
        tour.step("using it now is an error before the driver is reached", claim)
        tour.quote(words)
        before = free
        buffer.restore()
        buffer.copy_to(found)
        stream.synchronize()
        free = tour.device.memory_info().free
        tour.step(
            "restored: the same bytes at the same address",
            equal("address", buffer.address, address, hex),
            equal("there is memory at it", mapped(address), True),
            equal("numbers that differ", int(np.count_nonzero(found != numbers)), 0),
            equal("in the backup pool", pool.statistics().used, 0, mib),
            figures=f"free on the GPU {(free - before) / MiB:+,.0f} MiB",
        )
        buffer.evict()
        nothing = mapped(address)
        buffer.restore()
        buffer.fill(0x6B)
        buffer.copy_to(found)
        stream.synchronize()
        tour.step(
            "the same without a copy: the bytes are given up, address and access are not",
            equal("there is memory at it while it is evicted", nothing, False),
            equal("address", buffer.address, address, hex),
            every_byte("what was written afterwards", found.view(np.uint8), 0x6B),
        )


def striping(tour: Tour) -> None:
    _need_virtual_memory(tour.device)
    peer = need_peer(tour)
    devices = (tour.device, peer)
    here, there = tour.device.create_stream(), peer.create_stream()
    size = 16 * MiB
    host = np.zeros(size, np.uint8)
    with vmm.stripe(size, devices, stream=here) as buffer:
        halves = [vmm.PhysicalMemory.at(mapping.address, driver=buffer.device.driver) for mapping in buffer.mappings]
        tour.step(
            f"one buffer of {mib(size)}, half of it on each GPU",
            equal(
                "whose memory the halves are",
                [memory.query().location for memory in halves],
                [device.location for device in devices],
            ),
            equal(
                "access of both to both",
                {mapping.access(device) for mapping in buffer.mappings for device in devices},
                {sa.MemAccess.READWRITE},
            ),
            figures=_drawn(buffer.range),
        )
        buffer.fill(0x11)
        there.wait(here)
        buffer[size // 4 : size * 3 // 4].fill(0x22, there)
        here.wait(there)
        buffer.copy_to(host)
        here.synchronize()
        quarters = host.reshape(4, -1)
        tour.step(
            f"GPU 0 fills all of it, then GPU {peer.ordinal} the middle, across the seam",
            every_byte("the ends", quarters[[0, 3]], 0x11),
            every_byte("the middle", quarters[1:3], 0x22),
        )


def sparse(tour: Tour) -> None:
    _need_virtual_memory(tour.device)
    if not tour.device.supports.sparse_arrays:
        raise Skipped("this device has no sparse arrays")
    stream = tour.device.create_stream()
    side = 1024
    picture = np.resize(np.arange(1, 252, dtype=np.uint8), (side, side))
    found = np.zeros_like(picture)
    granule = vmm.PhysicalMemory.granularity(tour.device)
    with vmm.TilePool(tour.device, granule) as pool, vmm.SparseArray(tour.device, (side, side)) as array:
        height, width = array.tile
        corner = (slice(0, height), slice(width, 2 * width))
        tour.step(
            f"an array of {side} x {side} elements in tiles of {height} x {width}, none of which has memory",
            equal("mapped", array.mapped_bytes, 0),
        )
        array.map(pool, corner, stream=stream)
        array.copy_from(picture, stream)
        array.copy_to(found, stream)
        stream.synchronize()
        expected = np.zeros_like(picture)
        expected[corner] = picture[corner]
        tour.step(
            "one tile mapped, all written: it keeps them, the rest reads 0",
            equal("elements that differ", int(np.count_nonzero(found != expected)), 0),
            equal("tiles with memory", int(array.mapped().sum()), 1),
            figures=f"{pool.tiles - pool.free_tiles} of {pool.tiles} tiles of the pool",
        )
        array.unmap(corner, stream=stream)
        array.copy_to(found, stream)
        stream.synchronize()
        tour.step(
            "unmapped in stream order: it reads 0 as well",
            equal("elements that are not 0", int(np.count_nonzero(found)), 0),
            equal("tiles in use", pool.tiles - pool.free_tiles, 0),
            figures=f"{pool.tiles - pool.free_tiles} of {pool.tiles} tiles of the pool",
        )


PARTS: tuple[tuple[str, str, Callable[[Tour], None]], ...] = (
    (
        "Virtual memory by hand",
        "Physical memory has no address, and a range of addresses no memory: mapping joins them, and "
        "access opens them. Ranges are drawn in brackets: 0 for memory of GPU 0, a dot for a hole.",
        by_hand,
    ),
    (
        "A buffer that grows in place",
        "Memory is mapped behind what is there: nothing moves, nothing is copied.",
        growth,
    ),
    ("Evict and restore", "The memory goes back to the GPU, the addresses stay, and the bytes return later.", eviction),
    ("One buffer over two GPUs", "Memory of several GPUs side by side in one range of addresses.", striping),
    ("A sparse array", "A texture of which only some tiles have memory.", sparse),
)
