"""Virtual memory, and what is left at the end."""

from __future__ import annotations

import os

import numpy as np

import streamalloc as sa
from streamalloc import vmm
from streamalloc.driver.bindings import cuda
from tests.checker.corpus.bench import PAGE, SIZE, Bench, hazard

# -- virtual memory -------------------------------------------------------------------------------------------


class Mapped:
    """Physical memory and where it is mapped, by raw calls. All of it goes at the end."""

    def __init__(self, b: Bench, count: int = 1, pages: int = 1, grant: bool = True) -> None:
        self.b, self.nbytes = b, pages * PAGE
        location = sa.MemLocation.device(0)
        self.handle = b.raw("cuMemCreate", self.nbytes, sa.MemAllocationProp(location=location).to_driver(), 0)
        self.at: list[int] = []
        self.mapped: set[int] = set()
        self.released = False
        b._stack.callback(self.close)
        for _ in range(count):
            address = int(b.raw("cuMemAddressReserve", self.nbytes, 0, 0, 0))
            self.at.append(address)
            self.map(address, grant)

    def map(self, address: int, grant: bool = True) -> None:
        self.b.raw("cuMemMap", address, self.nbytes, 0, self.handle, 0)
        self.mapped.add(address)
        if grant:
            self.grant(address)

    def grant(self, address: int, flags: int = 3) -> None:
        given = sa.MemAccessDesc(sa.MemLocation.device(0), sa.MemAccess(flags)).to_driver()
        self.b.raw("cuMemSetAccess", address, self.nbytes, [given], 1)

    def unmap(self, address: int) -> None:
        self.b.raw("cuMemUnmap", address, self.nbytes)
        self.mapped.discard(address)

    def release(self) -> None:
        self.b.raw("cuMemRelease", self.handle)
        self.released = True

    def close(self) -> None:
        self.b.device.synchronize()
        for address in tuple(self.mapped):
            self.unmap(address)
        for address in self.at:
            self.b.raw("cuMemAddressFree", address, self.nbytes)
        if not self.released:
            self.release()


@hazard("unmap while in use")
def unmapped_while_a_stream_writes(b: Bench, right: bool) -> None:
    memory = Mapped(b)
    b.at(memory.at[0], b.a)
    b.wait(b.a, right)
    memory.unmap(memory.at[0])


@hazard("unmap while in use")
def the_other_mapping_was_unmapped(b: Bench, right: bool) -> None:
    memory = Mapped(b, count=2)
    b.at(memory.at[0], b.a)
    memory.unmap(memory.at[1 if right else 0])


@hazard("use after free")
def used_after_the_unmap(b: Bench, right: bool) -> None:
    memory = Mapped(b)
    if not right:
        memory.unmap(memory.at[0])
    b.at(memory.at[0], b.a)


@hazard("use after free")
def the_middle_of_a_range_was_unmapped(b: Bench, right: bool) -> None:
    memory = Mapped(b)
    b.at(memory.at[0] + PAGE // 2, b.a, nbytes=16)
    b.a.synchronize()
    memory.unmap(memory.at[0])
    if right:
        memory.map(memory.at[0])
    b.at(memory.at[0] + PAGE // 2, b.b, nbytes=16)


@hazard("race")
def two_mappings_of_the_same_bytes(b: Bench, right: bool) -> None:
    memory = Mapped(b, count=2)
    b.at(memory.at[0], b.a)
    b.order(b.a, b.b, right)
    b.at(memory.at[1], b.b)


@hazard("race")
def a_mapping_of_a_handle_that_was_imported(b: Bench, right: bool) -> None:
    location, shareable = sa.MemLocation.device(0), sa.MemHandleType.POSIX_FILE_DESCRIPTOR
    prop = sa.MemAllocationProp(location=location, requested_handle_types=shareable).to_driver()
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    first = Mapped(b)
    second = Mapped(b)
    for one in (first, second):
        one.unmap(one.at[0])
        one.release()
    first.handle = b.raw("cuMemCreate", PAGE, prop, 0)
    fd = b.raw("cuMemExportToShareableHandle", first.handle, kind, 0)
    second.handle = b.raw("cuMemImportFromShareableHandle", fd, kind)
    os.close(fd)
    for one in (first, second):
        one.released = False
        one.map(one.at[0])
    b.at(first.at[0], b.a)
    b.order(b.a, b.b, right)
    b.at(second.at[0], b.b)


@hazard("race")
def a_mapping_of_a_handle_that_was_retained(b: Bench, right: bool) -> None:
    memory = Mapped(b)
    retained = b.raw("cuMemRetainAllocationHandle", memory.at[0])
    other = int(b.raw("cuMemAddressReserve", PAGE, 0, 0, 0))
    b.raw("cuMemMap", other, PAGE, 0, retained, 0)
    memory.grant(other)
    b.raw("cuMemRelease", retained)
    b.at(memory.at[0], b.a)
    b.order(b.a, b.b, right)
    b.at(other, b.b)
    b.device.synchronize()
    b.raw("cuMemUnmap", other, PAGE)
    b.raw("cuMemAddressFree", other, PAGE)


@hazard("access without a grant")
def nobody_was_given_access(b: Bench, right: bool) -> None:
    memory = Mapped(b, grant=right)
    b.at(memory.at[0], b.a)


@hazard("access without a grant")
def written_with_the_right_to_read(b: Bench, right: bool) -> None:
    memory = Mapped(b)
    memory.grant(memory.at[0], 3 if right else 1)
    b.at(memory.at[0], b.a)


@hazard("access without a grant")
def mapped_anew_without_a_grant(b: Bench, right: bool) -> None:
    memory = Mapped(b)
    memory.unmap(memory.at[0])
    memory.map(memory.at[0], grant=right)
    b.at(memory.at[0], b.a, write=False)


@hazard("access without a grant", gpus=2)
def a_peer_uses_a_pool_that_it_was_not_given(b: Bench, right: bool) -> None:
    peer = sa.Device(1, driver=b.driver)
    if right:
        b.pool.set_access(peer, sa.MemAccess.READWRITE)
    x = b.ready()
    with peer.create_stream() as stream:
        b.write(x, stream)
        stream.synchronize()


@hazard("double free")
def a_handle_released_twice(b: Bench, right: bool) -> None:
    memory = Mapped(b)
    memory.unmap(memory.at[0])
    memory.release()
    if not right:
        memory.release()


@hazard("release while in use", simulated="the real driver waits there, which nobody has promised")
def pinned_memory_freed_while_it_is_copied_to(b: Bench, right: bool) -> None:
    address = b.raw("cuMemHostAlloc", 64, 0)
    x = b.new(b.a, 64)
    b.raw("cuMemcpyAsync", address, x.address, 64, cuda.CUstream(b.a.handle))
    b.wait(b.a, right)
    b.raw("cuMemFreeHost", address)


@hazard("release while in use", simulated="the real driver waits there, which nobody has promised")
def host_memory_unregistered_while_it_is_copied_from(b: Bench, right: bool) -> None:
    memory = np.zeros(2 * 4096, np.uint8)
    address = -(-memory.ctypes.data // 4096) * 4096
    b.raw("cuMemHostRegister", address, 4096, 0)
    x = b.new(b.a)
    b.raw("cuMemcpyAsync", x.address, address, 4096, cuda.CUstream(b.a.handle))
    b.wait(b.a, right)
    b.raw("cuMemHostUnregister", address)


@hazard("double free")
def host_memory_unregistered_twice(b: Bench, right: bool) -> None:
    memory = np.zeros(SIZE, np.uint8)
    b.raw("cuMemHostRegister", memory.ctypes.data, SIZE, 0)
    for _ in range(1 if right else 2):
        b.raw("cuMemHostUnregister", memory.ctypes.data)


# -- leaks ----------------------------------------------------------------------------------------------------


@hazard("leak")
def pool_memory_is_not_freed(b: Bench, right: bool) -> None:
    address = b.raw("cuMemAllocAsync", SIZE, cuda.CUstream(b.a.handle))
    if right:
        b.raw("cuMemFreeAsync", address, cuda.CUstream(b.a.handle))
    b.driver.finish()
    if not right:
        b.raw("cuMemFreeAsync", address, cuda.CUstream(b.a.handle))


@hazard("leak")
def a_mapping_is_left(b: Bench, right: bool) -> None:
    memory = Mapped(b)
    if right:
        memory.unmap(memory.at[0])
        memory.release()
    b.driver.finish()


@hazard("leak")
def an_array_is_left(b: Bench, right: bool) -> None:
    """A level of another array, which ends with it, is no leak."""
    plain, deep = cuda.CUDA_ARRAY_DESCRIPTOR(), cuda.CUDA_ARRAY3D_DESCRIPTOR()
    for one in (plain, deep):
        one.Width, one.Height, one.NumChannels = 16, 16, 1
        one.Format = cuda.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT8
    levels = b.raw("cuMipmappedArrayCreate", deep, 2)
    b.raw("cuMipmappedArrayGetLevel", levels, 1)
    array = b.raw("cuArrayCreate", plain)
    if right:
        b.raw("cuArrayDestroy", array)
    b.driver.finish()
    if not right:
        b.raw("cuArrayDestroy", array)
    b.raw("cuMipmappedArrayDestroy", levels)


# -- rights, and what lies under addresses ---------------------------------------------------------------------


@hazard("access without a grant")
def access_is_taken_away_from_a_stream_that_works(b: Bench, right: bool) -> None:
    memory = Mapped(b)
    b.at(memory.at[0], b.a)
    b.wait(b.a, right)
    memory.grant(memory.at[0], 0)


@hazard("access without a grant")
def addresses_where_nothing_is_mapped(b: Bench, right: bool) -> None:
    memory = Mapped(b)
    at = int(b.raw("cuMemAddressReserve", PAGE, 0, 0, 0))
    if right:
        b.raw("cuMemMap", at, PAGE, 0, memory.handle, 0)
        memory.grant(at)
    b.at(at, b.a)
    b.a.synchronize()
    if right:
        b.raw("cuMemUnmap", at, PAGE)
    b.raw("cuMemAddressFree", at, PAGE)


@hazard("use after free")
def the_memory_lies_elsewhere_now(b: Bench, right: bool) -> None:
    addresses = b.keep(vmm.AddressRange(2 * PAGE, driver=b.driver))
    memory = b.keep(vmm.PhysicalMemory(b.device, PAGE))
    addresses.map(memory, access=b.device).close()
    addresses.map(memory, PAGE, access=b.device)
    b.at(addresses.address + PAGE if right else addresses.address, b.a)
    b.device.synchronize()


@hazard("unmap while in use")
def evicted_after_the_wrong_stream(b: Bench, right: bool) -> None:
    x = b.keep(vmm.GrowableBuffer(b.device, PAGE, PAGE, stream=b.a))
    b.write(x, b.b)
    x.evict(after=b.b if right else b.a)
    x.restore()


@hazard("use after free")
def used_while_it_is_evicted(b: Bench, right: bool) -> None:
    x = b.keep(vmm.GrowableBuffer(b.device, PAGE, PAGE, stream=b.a))
    x.evict()
    if right:
        x.restore()
    b.at(x.address, b.a)
    if not right:
        x.restore()
    b.device.synchronize()


@hazard("unmap while in use")
def a_group_sleeps_after_the_wrong_stream(b: Bench, right: bool) -> None:
    group = b.keep(vmm.SleepGroup(b.device))
    x = b.keep(group.allocate(PAGE, b.a))
    b.write(x, b.b)
    group.sleep(stream=b.a, after=b.b if right else b.a)
    group.wake(stream=b.a)


@hazard("leak")
def physical_memory_is_left_where_nothing_is_mapped(b: Bench, right: bool) -> None:
    memory = vmm.PhysicalMemory(b.device, PAGE)
    if right:
        memory.close()
    b.driver.finish()
    memory.close()
