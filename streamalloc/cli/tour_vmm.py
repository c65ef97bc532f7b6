"""Tour of virtual memory: mapping by hand, growth, eviction, striping and sparse arrays."""

from __future__ import annotations

import numpy as np

import streamalloc as sa
from streamalloc import vmm
from streamalloc.cli.choice import KEEP_ALL
from streamalloc.cli.needs import need_host_pool, need_virtual_memory
from streamalloc.cli.steps import Claim, MiB, Parts, Tour, equal, every_byte, raised
from streamalloc.cli.worker import read
from streamalloc.core.errors import size_text

PARTS = Parts()
part = PARTS.part


def _access(what: str, mapping: vmm.Mapping, device: sa.Device, expected: sa.MemAccess) -> Claim:
    return equal(what, mapping.access(device), expected, lambda access: access.name)


@part(
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


@part("A buffer that grows in place", "New memory is mapped after the old: no byte moves.")
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


@part("Evict and restore", "The memory is released, the addresses stay, and the bytes are restored later.")
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
