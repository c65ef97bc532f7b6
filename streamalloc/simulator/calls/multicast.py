"""Driver calls for multicast objects, and multimem operations for Python functions that replace kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Annotated, Any

from streamalloc.driver.bindings import cuda
from streamalloc.simulator.arguments import Device, Handle, Size, Stream
from streamalloc.simulator.calls.base import Method, call
from streamalloc.simulator.calls.copies import CopyCalls, PlannedCopy, Put
from streamalloc.simulator.calls.virtual import team_of
from streamalloc.simulator.constants import NOWHERE, READ, READ_WRITE, STEP, HandleType, device_place
from streamalloc.simulator.contexts import Context
from streamalloc.simulator.errors import Fault, Result, check, need, need_a, not_modelled
from streamalloc.simulator.multicast import FORMED, Backing, MulticastMemory, MulticastTable, Segment
from streamalloc.simulator.physical import CreatedMemory
from streamalloc.simulator.pool import Pool

Combine = Callable[[list[bytes]], bytes]
Team = Annotated[MulticastMemory, Handle(cuda.CUmemGenericAllocationHandle), team_of]


class Update(PlannedCopy):
    """Operation that updates each replica of a range.

    The lock of the multicast object is held during a step, so that no other process or operation updates the object
    meanwhile.
    """

    def step(self) -> bool:
        found = self._machine.team_at(self._target)
        if found is None:
            return self.fail()
        with found[1].table.locked():
            return super().step()


class Gather(PlannedCopy):
    """Operation that combines the replicas of a range by a function, and stores the result at an address.

    ``combine`` gets a list with the bytes of each replica, in the order in which the devices were added to the team. It
    returns the bytes to store, and is called for each part of at most :data:`STEP` bytes.
    """

    def __init__(
        self, machine: MulticastCalls, context: Context, target: int, source: int, size: int, combine: Combine
    ) -> None:
        super().__init__(machine, context, target, size, self._store)
        self._replicated = source
        self._combine = combine
        self._values = b""

    def step(self) -> bool:
        source, size = self._replicated + self._done, min(STEP, self._size - self._done)
        found = self._machine.team_at(source)
        if found is None:
            return self.fail()
        with found[1].table.locked():
            replicas = self._machine.replicas(source, size)
            if replicas is None:
                return self.fail()
            self._values = self._combine([_read(segments, size) for segments in replicas.values()])
        return super().step()

    def _store(self, address: int, offset: int, size: int) -> None:
        ctypes.memmove(address, self._values, size)


def _read(segments: list[Segment], size: int) -> bytes:
    values = bytearray(size)
    for address, at, length in segments:
        values[at : at + length] = ctypes.string_at(address, length)
    return bytes(values)


class MulticastCalls(CopyCalls):
    """The calls cuMulticast*, and ``multimem_*`` operations for Python functions that replace kernels."""

    # -- objects and teams -----------------------------------------------------------------------------------

    def cuMulticastGetGranularity(
        self, prop: cuda.CUmulticastObjectProp, option: cuda.CUmulticastGranularity_flags
    ) -> int:
        """Return the granularity in bytes for an object with these properties. The size in the properties is ignored,
        because programs omit it.

        Gives CUDA_ERROR_NOT_SUPPORTED if no device supports multicast, and CUDA_ERROR_INVALID_VALUE for other wrong
        properties. Raises :class:`NotModelled` for a number of devices that ``cuMulticastCreate`` refuses in this way,
        and for handle types without a granularity in the profile.
        """
        handle_types = self._multicast_properties(prop)[2]
        refused = "cuMulticastGetGranularity of handle types that this profile has no granularity for"
        return need(self.profile.granularity("MULTICAST", handle_types), refused)[int(option)]

    def cuMulticastCreate(self, prop: cuda.CUmulticastObjectProp) -> Any:
        devices, size, handle_types = self._multicast_properties(prop)
        check(size and self._fits(size))
        if handle_types & HandleType.FABRIC:
            # This result code was observed for ``cuMemCreate`` without an IMEX channel, and is documented for this
            # call.
            check(self.fabric is not None, Result.CUDA_ERROR_NOT_PERMITTED)
            not_modelled(not self.fabric, "cuMulticastCreate with fabric handles where these are not supported")
        table = MulticastTable.create(str(self.labels.new("multicast", NOWHERE)), devices, size, handle_types)
        return cuda.CUmemGenericAllocationHandle(self.memories.add(MulticastMemory(self, table, False)).handle)

    def _fits(self, *sizes: int) -> bool:
        """Whether ``sizes`` (sizes, offsets or addresses) are all multiples of the granularity."""
        return not any(size % self.profile.team_page for size in sizes)

    def _multicast_properties(self, props: Any) -> tuple[int, int, int]:
        """Check the properties of an object. Returns the number of devices, the size in bytes, and the handle types."""
        devices, handle_types = int(props.numDevices), int(props.handleTypes)
        check(devices and not int(props.flags) and handle_types & ~(HandleType.POSIX_FD | HandleType.FABRIC) == 0)
        check(any(device.attributes["MULTICAST_SUPPORTED"] for device in self.devices), Result.CUDA_ERROR_NOT_SUPPORTED)
        # The driver refuses an object for one device, with an unknown result code (InternLM/lmdeploy#4296).
        not_modelled(devices == 1, "a multicast object for one device")
        too_many = devices > self.spec.devices and not self.spec.host_name
        not_modelled(too_many, "a multicast object for more devices than this machine has")
        return devices, int(props.size), handle_types

    def cuMulticastAddDevice(self, mcHandle: Team, dev: Device) -> None:
        """Add a device to the team. Gives CUDA_ERROR_NOT_SUPPORTED for a device without multicast.

        NVIDIA's kernel module refuses a device that was added before, and a device beyond the size of the team. The
        result code of the driver is unknown; here it is CUDA_ERROR_INVALID_VALUE.
        """
        check(dev.attributes["MULTICAST_SUPPORTED"], Result.CUDA_ERROR_NOT_SUPPORTED)
        # The switch may have no free slot for a further team. Only objects of this machine are counted.
        formed = {one.serial for one in self._objects() if one.table.state == FORMED}
        check(mcHandle.table.add(self.labels.number(dev.ordinal), len(formed) < self.spec.multicast_slots))
        self.scheduler.announce()  # This wakes threads that wait until the team is complete.

    def _objects(self) -> set[MulticastMemory]:
        """Return the multicast objects that have a handle or a mapping in this machine."""
        mapped = (one.mapping.memory for one in self.allocations.at.values() if one.mapping is not None)
        return {one for one in (*self.memories.values(), *mapped) if isinstance(one, MulticastMemory)}

    def _release(self) -> None:
        for one in self._objects():
            one.close()
        super()._release()

    # -- bindings --------------------------------------------------------------------------------------------

    def _bind_memory(
        self, found: MulticastMemory, offset: int, handle: int, start: int, size: int, flags: int, device: Any = None
    ) -> None:
        self._check_part(found, offset, size, flags)
        memory = self.memory(handle)
        check(self._fits(start) and start + size <= memory.size)
        self._check_bindable(found, memory, device)
        found.wait_for_team("cuMulticastBindMem")
        # Both handles are looked up again, because other threads may have released them during the wait for the team.
        found, memory = team_of(self, found.handle), self.memory(handle)
        found.bind(offset, size, Backing(memory.physical, memory.offset + start, memory.properties.device, memory))

    def _bind_address(
        self, found: MulticastMemory, offset: int, address: int, size: int, flags: int, device: Any = None
    ) -> None:
        self._check_part(found, offset, size, flags)
        check(self._fits(address))
        backing = self._locate(address, size)
        if backing.memory is not None:
            self._check_bindable(found, backing.memory, device)
        else:
            check(backing.device is not None and (device is None or device.ordinal == backing.device))
            assert backing.allocation is not None and backing.allocation.pool is not None
            check(backing.allocation.pool.handle_types or not found.properties.handle_types)
        found.wait_for_team("cuMulticastBindAddr")
        team_of(self, found.handle).bind(offset, size, self._locate(address, size))

    def _locate(self, address: int, size: int) -> Backing:
        """Return the memory at an address range, which must lie in one mapping or one pool allocation."""
        allocation = need(self.allocations.find(address))
        mapping, pool = allocation.mapping, allocation.pool
        if mapping is not None:
            memory = need_a(CreatedMemory, mapping.memory, "binding a multicast object to another")
            not_modelled(len(self.span(address, size)) > 1, "cuMulticastBindAddr of more than one mapping")
            return Backing(memory.physical, memory.offset + address - mapping.base, memory.properties.device, memory)
        check(address + size <= allocation.end)
        check(pool is not None)  # Documented: of cuMemCreate or of a pool.
        pool = need_a(Pool, pool, "cuMulticastBindAddr of another process's pool memory")
        return Backing(pool.physical, address - pool.base, pool.device, allocation=allocation)

    def _on_device(self, bind: Method, found: MulticastMemory, device: Device, *rest: Any) -> None:
        bind(self, found, *rest, device)

    cuMulticastBindMem = call(_bind_memory, mcHandle=Team)
    cuMulticastBindMem_v2 = call(_on_device, _bind_memory, mcHandle=Team)
    cuMulticastBindAddr = call(_bind_address, mcHandle=Team)
    cuMulticastBindAddr_v2 = call(_on_device, _bind_address, mcHandle=Team)

    def _check_part(self, found: MulticastMemory, offset: int, size: int, flags: int = 0) -> None:
        check(flags == 0)
        check(size and self._fits(size, offset) and offset + size <= found.size)

    @staticmethod
    def _check_bindable(found: MulticastMemory, memory: CreatedMemory, device: Device | None) -> None:
        properties = memory.properties
        not_modelled(memory.bank is None, "binding memory that was imported")
        special = properties.compression or properties.tile_pool
        not_modelled(special, "binding memory that is compressible, or for tiles of arrays")
        not_modelled(properties.device is None and device is not None, "binding host memory")
        check(properties.device is not None and (device is None or device.ordinal == properties.device))
        check(properties.handle_types or not found.properties.handle_types)

    def cuMulticastUnbind(self, mcHandle: Team, dev: Device, mcOffset: Size, size: Size) -> None:
        self._check_part(mcHandle, mcOffset, size)
        number = self.labels.number(dev.ordinal)
        check(number in mcHandle.table.devices, Result.CUDA_ERROR_INVALID_DEVICE)
        mcHandle.unbind(number, mcOffset, size)

    # -- multimem operations, for Python functions that replace kernels (streamalloc.testing) ----------------

    def multimem_update(self, hStream: Stream, address: int, size: int, apply: Put) -> None:
        """Queue an operation that calls ``apply(where, offset, size)`` for the bytes of each replica of a range.

        ``where``: address of the bytes; ``offset``: their offset in the range. Raises ``ValueError`` if the range is
        not in one mapping of a multicast object, and :class:`NotModelled` during a stream capture or if a device of the
        team has no memory there. Gives CUDA_ERROR_ILLEGAL_ADDRESS without access. This is not a driver function.
        """
        self._check_replicated(hStream, address, size, READ_WRITE)
        hStream.submit(Update(self, hStream.context, address, size, apply))

    def multimem_gather(self, hStream: Stream, target: int, address: int, size: int, combine: Combine) -> None:
        """Queue an operation that combines the replicas of a range, and stores the result at ``target``.

        ``combine`` is called for one part of the range at a time (:class:`Gather`). It gets a list with the bytes of
        each replica, and returns as many bytes. Gives and raises the errors of :meth:`multimem_update`; gives
        CUDA_ERROR_INVALID_VALUE if the device cannot write to ``target``. This is not a driver function.
        """
        self._check_replicated(hStream, address, size, READ)
        self._check_fill(target, size, hStream.context)
        hStream.submit(Gather(self, hStream.context, target, address, size, combine))

    def _check_replicated(self, stream: Stream, address: int, size: int, needed: int) -> None:
        not_modelled(self.graphs.captures, "kernels during a stream capture")
        found = self.team_at(address)
        if found is None or address + size > found[0].end:
            raise ValueError(f"{address:#x} and the {size} bytes from there on are no mapping of a multicast object")
        if found[0].right(device_place(stream.context.device.ordinal)) & needed != needed:
            raise Fault(Result.CUDA_ERROR_ILLEGAL_ADDRESS)
        found[1].check_bound(address - found[0].base, size)
