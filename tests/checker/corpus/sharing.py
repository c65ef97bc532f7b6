"""Memory of other processes, and multicast objects."""

import os

import numpy as np

import streamalloc as sa
from streamalloc import ipc, multicast, vmm
from streamalloc.driver.bindings import cuda
from streamalloc.testing import multimem_ld_reduce, multimem_red, multimem_st
from tests.checker.corpus.bench import PAGE, POSIX, THINGS, Bench, hazard, programs

_FILE = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
# The library tells importers by a word when memory is ready, in the order of the stream that it is given.
THINGS["share"] = lambda b, memory, stream: ipc.share(memory, stream=stream)
THINGS["shareable"] = lambda b: b.keep(vmm.GrowableBuffer(b.device, PAGE, PAGE, handle_types=POSIX, stream=b.a))
_NO_OBJECTS = "no test makes multicast objects on GPUs that others share"

programs(
    """
export before completion
    exported_while_it_is_filled: x = of_shared_pool; fill x 1; + synchronize a; cuMemPoolExportPointer x
    exported_while_it_is_allocated: x = of_shared_pool; e = interprocess; + record a e; cuMemPoolExportPointer x
    exported_with_an_event_of_another_stream: x = of_shared_pool; fill x 1 a; e = interprocess; record a|b e;
        cuMemPoolExportPointer x
    shared_in_the_order_of_another_stream: x = of_shared_pool; synchronize a; write x a; share x a|b
    a_growable_buffer_is_shared_in_the_order_of_another_stream: x = shareable; write x b; share x b|a
    plain_memory_is_exported_while_it_is_filled: x = cuMemAlloc 4096; cuMemsetD8Async x 1 4096 a; + synchronize a;
        cuIpcGetMemHandle x; synchronize device; cuMemFree x
race
    an_import_reads_what_is_written: x = of_shared_pool; synchronize a; y = opened x; write x a; + wait b a; look y b;
        synchronize b; cuMemFreeAsync y b; synchronize b
free before the importer's
    the_exporter_frees_first: x = of_shared_pool; synchronize a; y = opened x; - free x; cuMemFreeAsync y a; + free x
    the_exporter_does_not_wait_for_the_importer: x = of_shared_pool; synchronize a; y = opened x; cuMemFreeAsync y b;
        + wait a b; free x
"""
)
programs(
    """
race
    a_replica_is_read_while_the_object_is_written: t = team; store t a; + wait b a; r = replica t 0; look r b 64
    a_replica_of_the_other_device: t = team; p = peer; s = stream_of p; r = replica t 1; at r+128 s 64; + wait a s;
        reduce t a
    reduced_while_a_replica_is_written: t = team; x = new a; a > b; r = replica t 1; at r b 16; + wait a b;
        load_reduce t x a
    a_replica_is_read_while_it_is_reduced: t = team; reduce t a; + wait b a; r = replica t 0; look r b 64
    two_devices_store_through_the_object: t = team; p = peer; s = stream_of p; + reduce t a; + reduce t s; - store t a;
        - store t s; synchronize a; synchronize s
""",
    gpus=2,
    simulated=_NO_OBJECTS,
)

# -- multicast objects ----------------------------------------------------------------------------------------


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


THINGS["team"] = Team
THINGS["replica"] = lambda b, team, number: team.ranges[number].address
THINGS["store"] = lambda b, team, stream: multimem_st(stream, team.view, np.ones(64, np.uint32))
THINGS["reduce"] = lambda b, team, stream: multimem_red(stream, team.view, np.ones(64, np.uint32))
THINGS["load_reduce"] = lambda b, team, x, stream: multimem_ld_reduce(stream, x, team.view, 16, np.uint32)


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


# -- exports ---------------------------------------------------------------------------------------------------


@hazard("export before completion")
def physical_memory_is_exported_while_it_is_written(b: Bench, right: bool) -> None:
    addresses = b.keep(vmm.AddressRange(PAGE, driver=b.driver))
    memory = b.keep(vmm.PhysicalMemory(b.device, PAGE, handle_types=POSIX))
    addresses.map(memory, access=b.device)
    b.at(addresses.address, b.a)
    b.wait(b.a, right)
    handle = cuda.CUmemGenericAllocationHandle(memory.handle)
    os.close(int(b.raw("cuMemExportToShareableHandle", handle, _FILE, 0)))
    b.device.synchronize()


@hazard("race")
def two_imports_of_one_file(b: Bench, right: bool) -> None:
    """As in a process that imports: what has exported the memory is not seen."""
    memory = b.keep(vmm.PhysicalMemory(sa.Device(0, driver=b.driver.wrapped), PAGE, handle_types=POSIX))
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
