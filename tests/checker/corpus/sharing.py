"""Memory of other processes, and multicast objects."""

from __future__ import annotations

import os

import numpy as np

import streamalloc as sa
from streamalloc import ipc, multicast, vmm
from streamalloc.driver.bindings import cuda
from streamalloc.testing import multimem_ld_reduce, multimem_red, multimem_st
from tests.checker.corpus.bench import PAGE, SIZE, Bench, hazard
from tests.support import KEEP

# -- sharing --------------------------------------------------------------------------------------------------


_POSIX = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
_FILE = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class Imported:
    """A pool that was exported and imported in the same process, as hardware allows."""

    def __init__(self, b: Bench) -> None:
        self.pool = b.keep(sa.MemoryPool(b.device, handle_types=_POSIX, release_threshold=KEEP))
        kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self.b = b
        fd = b.raw("cuMemPoolExportToShareableHandle", cuda.CUmemoryPool(self.pool.handle), kind, 0)
        self.imported = b.raw("cuMemPoolImportFromShareableHandle", fd, kind, 0)
        os.close(fd)
        b._stack.callback(lambda: b.raw("cuMemPoolDestroy", self.imported))

    def open(self, buffer: sa.Buffer) -> int:
        data = self.b.raw("cuMemPoolExportPointer", buffer.address)
        return int(self.b.raw("cuMemPoolImportPointer", self.imported, data))


@hazard("export before completion")
def exported_while_it_is_filled(b: Bench, right: bool) -> None:
    shared = Imported(b)
    x = shared.pool.allocate(SIZE, b.a)
    x.fill(1)
    b.wait(b.a, right)
    b.raw("cuMemPoolExportPointer", x.address)
    b.done(x)


@hazard("export before completion")
def exported_while_it_is_allocated(b: Bench, right: bool) -> None:
    shared = Imported(b)
    x = shared.pool.allocate(SIZE, b.a)
    if right:
        b.a.record(b.event(interprocess=True))
    b.raw("cuMemPoolExportPointer", x.address)
    b.done(x)


@hazard("race")
def an_import_reads_what_is_written(b: Bench, right: bool) -> None:
    shared = Imported(b)
    x = shared.pool.allocate(SIZE, b.a)
    b.a.synchronize()
    opened = shared.open(x)
    b.write(x, b.a)
    if right:
        b.b.wait(b.a)
    b.at(opened, b.b, write=False)
    b.b.synchronize()
    b.raw("cuMemFreeAsync", opened, cuda.CUstream(b.b.handle))
    b.b.synchronize()
    b.done(x)


@hazard("free before the importer's")
def the_exporter_frees_first(b: Bench, right: bool) -> None:
    shared = Imported(b)
    x = shared.pool.allocate(SIZE, b.a)
    b.a.synchronize()
    opened = shared.open(x)
    steps = [lambda: b.raw("cuMemFreeAsync", opened, cuda.CUstream(b.a.handle)), x.free]
    for step in steps if right else steps[::-1]:
        step()


@hazard("free before the importer's")
def the_exporter_does_not_wait_for_the_importer(b: Bench, right: bool) -> None:
    shared = Imported(b)
    x = shared.pool.allocate(SIZE, b.a)
    b.a.synchronize()
    opened = shared.open(x)
    b.raw("cuMemFreeAsync", opened, cuda.CUstream(b.b.handle))
    if right:
        b.a.wait(b.b)
    x.free()


# -- multicast objects ----------------------------------------------------------------------------------------


_NO_OBJECTS = "no test makes multicast objects on GPUs that others share"


class Team:
    """A multicast object of two devices with memory of both."""

    def __init__(self, b: Bench) -> None:
        self.devices = [sa.Device(ordinal, driver=b.driver) for ordinal in (0, 1)]
        self.object = b.keep(multicast.MulticastObject(PAGE, 2, driver=b.driver))
        for device in self.devices:
            self.object.add_device(device)
        self.memories = [b.keep(vmm.PhysicalMemory(device, PAGE)) for device in self.devices]
        self.bindings = [self.object.bind(memory) for memory in self.memories]
        self.ranges = [b.keep(vmm.AddressRange(PAGE, driver=b.driver)) for _ in self.devices]
        for range_, memory in zip(self.ranges, self.memories, strict=True):
            range_.map(memory, access=self.devices)
        self.view = b.keep(b.keep(vmm.AddressRange(PAGE, driver=b.driver)).map(self.object, access=self.devices))


@hazard("race", gpus=2, simulated=_NO_OBJECTS)
def a_replica_is_read_while_the_object_is_written(b: Bench, right: bool) -> None:
    team = Team(b)
    multimem_st(b.a, team.view, np.ones(64, np.uint32))
    if right:
        b.b.wait(b.a)
    b.at(team.ranges[0].address, b.b, write=False, nbytes=64)


@hazard("race", gpus=2, simulated=_NO_OBJECTS)
def a_replica_of_the_other_device(b: Bench, right: bool) -> None:
    team = Team(b)
    other = b.keep(team.devices[1].create_stream())
    b.at(team.ranges[1].address + 128, other, nbytes=64)
    if right:
        b.a.wait(other)
    multimem_red(b.a, team.view, np.ones(64, np.uint32))


@hazard("race", gpus=2, simulated=_NO_OBJECTS)
def reduced_while_a_replica_is_written(b: Bench, right: bool) -> None:
    team = Team(b)
    x = b.new(b.a)
    b.order(b.a, b.b)
    b.at(team.ranges[1].address, b.b, nbytes=16)
    if right:
        b.a.wait(b.b)
    multimem_ld_reduce(b.a, x, team.view, 16, np.uint32)


@hazard("unmap while in use", gpus=2, simulated=_NO_OBJECTS)
def unbound_while_the_object_is_written(b: Bench, right: bool) -> None:
    team = Team(b)
    multimem_st(b.a, team.view, np.ones(64, np.uint32))
    b.wait(b.a, right)
    b.raw("cuMulticastUnbind", cuda.CUmemGenericAllocationHandle(team.object.handle), 0, 0, PAGE)
    memory = cuda.CUmemGenericAllocationHandle(team.memories[0].handle)
    b.device.synchronize()
    b.raw("cuMulticastBindMem", cuda.CUmemGenericAllocationHandle(team.object.handle), 0, memory, 0, PAGE, 0)


@hazard("unmap while in use", gpus=2, simulated=_NO_OBJECTS)
def the_object_is_unmapped_while_it_is_written(b: Bench, right: bool) -> None:
    team = Team(b)
    at = int(b.raw("cuMemAddressReserve", PAGE, 0, 0, 0))
    b.raw("cuMemMap", at, PAGE, 0, cuda.CUmemGenericAllocationHandle(team.object.handle), 0)
    given = sa.MemAccessDesc(sa.MemLocation.device(0), sa.MemAccess.READWRITE).to_driver()
    b.raw("cuMemSetAccess", at, PAGE, [given], 1)
    multimem_st(b.a, at, np.ones(64, np.uint32))
    b.wait(b.a, right)
    b.raw("cuMemUnmap", at, PAGE)
    b.device.synchronize()
    b.raw("cuMemAddressFree", at, PAGE)


@hazard("race", gpus=2, simulated=_NO_OBJECTS)
def two_devices_store_through_the_object(b: Bench, right: bool) -> None:
    """Reductions may come in any order, stores may not."""
    team = Team(b)
    with team.devices[1].create_stream() as other:
        for stream in (b.a, other):
            (multimem_red if right else multimem_st)(stream, team.view, np.ones(16, np.uint32))
        b.a.synchronize()
        other.synchronize()


# -- exports ---------------------------------------------------------------------------------------------------


@hazard("export before completion")
def exported_with_an_event_of_another_stream(b: Bench, right: bool) -> None:
    shared = Imported(b)
    x = shared.pool.allocate(SIZE, b.a)
    x.fill(1, b.a)
    (b.a if right else b.b).record(b.event(interprocess=True))
    b.raw("cuMemPoolExportPointer", x.address)
    b.done(x)


@hazard("export before completion")
def plain_memory_is_exported_while_it_is_filled(b: Bench, right: bool) -> None:
    address = int(b.raw("cuMemAlloc", SIZE))
    b.raw("cuMemsetD8Async", address, 1, SIZE, cuda.CUstream(b.a.handle))
    b.wait(b.a, right)
    b.raw("cuIpcGetMemHandle", address)
    b.device.synchronize()
    b.raw("cuMemFree", address)


@hazard("export before completion")
def physical_memory_is_exported_while_it_is_written(b: Bench, right: bool) -> None:
    addresses = b.keep(vmm.AddressRange(PAGE, driver=b.driver))
    memory = b.keep(vmm.PhysicalMemory(b.device, PAGE, handle_types=_POSIX))
    addresses.map(memory, access=b.device)
    b.at(addresses.address, b.a)
    b.wait(b.a, right)
    handle = cuda.CUmemGenericAllocationHandle(memory.handle)
    os.close(int(b.raw("cuMemExportToShareableHandle", handle, _FILE, 0)))
    b.device.synchronize()


@hazard("export before completion")
def a_growable_buffer_is_shared_in_the_order_of_another_stream(b: Bench, right: bool) -> None:
    x = b.keep(vmm.GrowableBuffer(b.device, PAGE, PAGE, handle_types=_POSIX, stream=b.a))
    b.write(x, b.b)
    ipc.share(x, stream=b.b if right else b.a)
    b.device.synchronize()


@hazard("race")
def two_imports_of_one_file(b: Bench, right: bool) -> None:
    """As in a process that imports: what has exported the memory is not seen."""
    memory = b.keep(vmm.PhysicalMemory(sa.Device(0, driver=b.driver.wrapped), PAGE, handle_types=_POSIX))
    with memory.export() as file:
        handles = [b.raw("cuMemImportFromShareableHandle", file.fileno(), _FILE) for _ in range(2)]
    given = sa.MemAccessDesc(sa.MemLocation.device(0), sa.MemAccess.READWRITE).to_driver()
    at = int(b.raw("cuMemAddressReserve", 2 * PAGE, 0, 0, 0))
    for number, handle in enumerate(handles):
        b.raw("cuMemMap", at + number * PAGE, PAGE, 0, handle, 0)
    b.raw("cuMemSetAccess", at, 2 * PAGE, [given], 1)
    b.at(at, b.a)
    b.order(b.a, b.b, right)
    b.at(at + PAGE, b.b)
    b.device.synchronize()
    b.raw("cuMemUnmap", at, 2 * PAGE)
    b.raw("cuMemAddressFree", at, 2 * PAGE)
    for handle in handles:
        b.raw("cuMemRelease", handle)
