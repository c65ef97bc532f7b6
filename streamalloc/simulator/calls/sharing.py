"""Driver calls for sharing between processes: exported and imported pools and memory, IPC handles of cuMemAlloc memory
and of events.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Callable
from typing import Any

from streamalloc.driver.bindings import cuda, opaque_bytes, opaque_struct
from streamalloc.simulator import arguments, contexts
from streamalloc.simulator.allocations import DeviceMemory, PoolMemory
from streamalloc.simulator.arguments import DevicePointer, HostPointer, MemoryHandle, PoolHandle, UnsignedLongLong
from streamalloc.simulator.calls.base import Calls
from streamalloc.simulator.constants import HANDLE_BYTES, EventFlag, HandleType, device_place
from streamalloc.simulator.errors import NotModelled, Result, check, need_a, not_modelled
from streamalloc.simulator.memory import Physical, is_accessible
from streamalloc.simulator.multicast import MulticastMemory
from streamalloc.simulator.physical import CreatedMemory, Properties
from streamalloc.simulator.pool import OpenedPool, Pool

_HANDLE_TYPES = (HandleType.NONE, HandleType.POSIX_FD, HandleType.WIN32, HandleType.WIN32_KMT, HandleType.FABRIC)
_LAZY_ENABLE_PEER_ACCESS = 1  # the only flag of CUipcMem_flags


def _handle_type(name: str, value: Any, read: Any = arguments.member) -> int:
    number: int = read(name, value, cuda.CUmemAllocationHandleType)
    if number not in _HANDLE_TYPES:
        raise TypeError(f"Unsupported attribute: {getattr(value, 'name', value)}")
    return number


class SharingCalls(Calls):
    """The calls cuMemPool*Shareable*, cuMemPool*Pointer, cuMem*Shareable* and cuIpc*."""

    def _not_during_capture(self) -> None:
        """Raise :class:`NotModelled` while a capture forbids unsafe calls of this thread: it is unknown whether this
        call is one.
        """
        caller = self.scheduler.caller
        forbids = any(capture.forbids(caller) for capture in self.graphs.captures)
        not_modelled(forbids, "sharing with other processes while a stream capture forbids unsafe calls")

    def _need_channel(self, kind: int) -> None:
        """Refuse fabric handles without an IMEX channel. The default is no channel, as on the observed machine."""
        check(kind != HandleType.FABRIC or self.fabric, Result.CUDA_ERROR_NOT_PERMITTED)

    # -- exporting and importing as a whole ------------------------------------------------------------------

    def cuMemPoolExportToShareableHandle(self, pool: PoolHandle, handleType: Any, flags: UnsignedLongLong) -> Any:
        kind = _handle_type("handleType", handleType)
        found = self.pools.get(pool)
        self._not_during_capture()
        check(kind & found.handle_types and not flags)
        self._need_channel(kind)
        physical = found.export()
        # The driver's descriptor is inheritable, unlike those that Python makes (observed on H200: test_sharing)
        return self._export("pool", kind, physical, lambda: fcntl.fcntl(physical.fd, fcntl.F_DUPFD, 0))

    def cuMemPoolImportFromShareableHandle(self, handle: HostPointer, handleType: Any, flags: UnsignedLongLong) -> Any:
        kind = _handle_type("handleType", handleType, arguments.number)
        self._not_during_capture()
        check(not flags)
        known = kind in (HandleType.POSIX_FD, HandleType.FABRIC)
        not_modelled(not known, f"cuMemPoolImportFromShareableHandle of {handleType!r}")
        return cuda.CUmemoryPool(self._import("pool", kind, handle).handle)

    def cuMemExportToShareableHandle(self, handle: MemoryHandle, handleType: Any, flags: UnsignedLongLong) -> Any:
        kind = _handle_type("handleType", handleType)
        memory = self.virtual.named(handle)
        self._not_during_capture()
        check(kind & memory.properties.handle_types and not flags)
        not_modelled(isinstance(memory, CreatedMemory) and memory.properties.device is None, "exporting host memory")
        self._need_channel(kind)
        if not isinstance(memory, MulticastMemory):
            physical = need_a(CreatedMemory, memory).physical
            return self._export("memory", kind, physical, physical.lend)
        not_modelled(memory.imported, "exporting a multicast object that was imported")
        memory.table.has_fabric_handle |= kind == HandleType.FABRIC
        return self._export("memory", kind, memory.table.physical, memory.table.export)

    def _export(self, name: str, kind: int, physical: Physical, lend: Callable[[], int]) -> Any:
        """Export a file. Returns a new descriptor, made by ``lend``, or a fabric handle. ``name``: pool or memory."""
        if kind == HandleType.POSIX_FD:
            return lend()
        physical.lent = True
        physical.seal()
        return opaque_struct("CUmemFabricHandle", self.sharing.fabric_handle(name, physical))

    def cuMemImportFromShareableHandle(self, osHandle: HostPointer, shHandleType: Any) -> Any:
        kind = _handle_type("shHandleType", shHandleType, arguments.number)
        self._not_during_capture()
        check(kind != HandleType.NONE)
        check(kind != HandleType.WIN32, Result.CUDA_ERROR_NOT_SUPPORTED)
        not_modelled(kind == HandleType.WIN32_KMT, f"cuMemImportFromShareableHandle of {shHandleType!r}")
        return cuda.CUmemGenericAllocationHandle(self._import("memory", kind, osHandle).handle)

    def _import(self, kind: str, handle_type: int, given: int) -> OpenedPool | CreatedMemory | MulticastMemory:
        """Import a pool or memory (``kind``).

        ``given``: a file descriptor, which the caller keeps, or the address of a fabric handle.
        """
        sharing = self.sharing
        take = sharing.import_pool if kind == "pool" else self._import_memory
        if handle_type == HandleType.POSIX_FD:
            return take(given, False)
        self._need_channel(handle_type)
        wild = not is_accessible(given, HANDLE_BYTES)
        not_modelled(wild, "importing a descriptor as a fabric handle: the real driver crashes")
        fd = sharing.open_fabric(kind, ctypes.string_at(given, HANDLE_BYTES))
        try:
            return take(fd, True)
        finally:
            os.close(fd)

    def _import_memory(self, fd: int, fabric: bool) -> CreatedMemory | MulticastMemory:
        """Import physical memory or a multicast object.

        Each import has a separate handle, and takes no memory from the device (H200: test_physical_memory).
        """
        label = self.sharing.recognise(fd, "memory", fabric=fabric)
        if label.kind == "multicast":
            return self.multicast.open(fd)
        physical = Physical.adopt(os.dup(fd))
        properties = Properties(device_place(label.place.id), compression=label.compression)
        return self.virtual.adopt(physical, 0, physical.size, properties, None)

    # -- single allocations of a pool ------------------------------------------------------------------------

    def cuMemPoolExportPointer(self, ptr: DevicePointer) -> Any:
        allocation = self.allocations.at.get(ptr)
        self._unsafe_during_capture()
        allocation = need_a(PoolMemory, allocation)
        pool = need_a(Pool, allocation.pool)
        check(pool.handle_types)
        exportable = pool.handle_types & HandleType.POSIX_FD or self.fabric
        refused = pool.destroyed or not exportable
        not_modelled(refused, "cuMemPoolExportPointer of a pool that can no longer, or not here, be exported itself")
        check(pool.space.physical.kept)  # the pool must be exported first (observed on H200: test_sharing)
        data = self.sharing.export_pointer(pool, allocation.block.start, allocation.size)
        return opaque_struct("CUmemPoolPtrExportData", data)

    def cuMemPoolImportPointer(self, pool: PoolHandle, shareData: cuda.CUmemPoolPtrExportData) -> Any:
        self._not_during_capture()
        found = self.sharing.pools.get(pool)
        if found is None:
            self.pools.get(pool)
            raise NotModelled("importing a pointer into a pool that was not imported")
        return cuda.CUdeviceptr(self.sharing.import_pointer(found, opaque_bytes(shareData)))

    # -- plain memory ----------------------------------------------------------------------------------------

    def cuIpcGetMemHandle(self, dptr: DevicePointer) -> Any:
        allocation = self.allocations.find(dptr)
        self.current()
        self._not_during_capture()
        plain = need_a(DeviceMemory, allocation)
        return opaque_struct("CUipcMemHandle", self.sharing.memory_handle(plain))

    def cuIpcOpenMemHandle(self, handle: Any, Flags: arguments.UnsignedInt) -> Any:
        data = opaque_bytes(arguments.struct("handle", handle, cuda.CUipcMemHandle, optional=False))
        context = self.current()
        self._not_during_capture()
        check(Flags == _LAZY_ENABLE_PEER_ACCESS)
        return cuda.CUdeviceptr(self.sharing.open_memory(data, context))

    def cuIpcCloseMemHandle(self, dptr: DevicePointer) -> None:
        """Undo one open; undoing the last one unmaps the memory.

        The call waits for queued work first, as cuMemFree does.
        """
        sharing = self.sharing
        self.current()
        self._not_during_capture()
        sharing.opened_at(dptr)
        self.drain(sharing.opened_at(dptr).device)
        opened = sharing.opened_at(dptr)  # another thread may have closed it during the wait
        opened.times -= 1
        if not opened.times:
            sharing.forget_memory(opened)

    # -- events ----------------------------------------------------------------------------------------------

    def cuIpcGetEventHandle(self, event: arguments.QueueEvent) -> Any:
        self.current()
        check(event.flags & EventFlag.INTERPROCESS and not event.opened, Result.CUDA_ERROR_INVALID_HANDLE)
        return opaque_struct("CUipcEventHandle", self.sharing.event_handle(event))

    def cuIpcOpenEventHandle(self, handle: Any) -> Any:
        data = opaque_bytes(arguments.struct("handle", handle, cuda.CUipcEventHandle, optional=False))
        context = self.current()
        self._not_during_capture()
        shared = self.sharing.open_event(data)
        event = contexts.QueueEvent(
            context, EventFlag.DISABLE_TIMING | EventFlag.INTERPROCESS, shared=shared, opened=True
        )
        return cuda.CUevent(self.events.add(event).handle)
