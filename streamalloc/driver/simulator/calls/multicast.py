"""Multicast objects, and multimem operations for functions that stand for kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from streamalloc.driver.bindings import cuda

from .. import arguments
from ..constants import GRANULARITY, READ, READ_WRITE, STEP, Handle, device_place
from ..contexts import Context
from ..copy_operations import Move
from ..errors import Fault, NotModelled, Result, check, not_modelled
from ..machine import Machine
from ..multicast import Backing, MulticastObject, Segment
from ..physical import Memory
from ..timeline import Stream
from .base import driver_call
from .copies import CopyCalls

Apply = Callable[[int, int, int], None]
Combine = Callable[[list[bytes]], bytes]
_RECOMMENDED = 1  # CUmulticastGranularity_flags


class Update(Move):
    """Does something to each replica of a range. Atomic towards others of its kind, also of other processes."""

    def __init__(self, machine: Machine, context: Context, target: int, size: int, apply: Apply) -> None:
        super().__init__(machine, context, target, size)
        self._apply = apply

    def put(self, address: int, offset: int, size: int) -> None:
        self._apply(address, offset, size)

    def step(self) -> bool:
        found = self._machine.multicast.mapping_at(self._target)
        if found is None:
            self.fail()
            return True
        with found[1].table.locked():
            return super().step()


class Gather(Move):
    """Stores the result of a function of all replicas of a range, in the order in which the devices were added."""

    def __init__(
        self, machine: Machine, context: Context, target: int, source: int, size: int, combine: Combine
    ) -> None:
        super().__init__(machine, context, target, size)
        self._replicated = source
        self._combine = combine
        self._values = b""

    def step(self) -> bool:
        multicast, source = self._machine.multicast, self._replicated + self._done
        size = min(STEP, self._size - self._done)
        found = multicast.mapping_at(source)
        if found is None:
            self.fail()
            return True
        with found[1].table.locked():
            replicas = multicast.replicas(source, size)
            if replicas is None:
                self.fail()
                return True
            self._values = self._combine([_read(segments, size) for segments in replicas.values()])
        return super().step()

    def put(self, address: int, offset: int, size: int) -> None:
        ctypes.memmove(address, self._values, size)


def _read(segments: list[Segment], size: int) -> bytes:
    values = bytearray(size)
    for address, at, length in segments:
        values[at : at + length] = ctypes.string_at(address, length)
    return bytes(values)


class Launch:
    """Access to multicast memory, in the stream of a call, for a function that stands for a kernel."""

    def __init__(self, calls: MulticastCalls, stream: Stream) -> None:
        self._calls = calls
        self._machine = calls._machine
        self._stream = stream

    def update(self, address: int, size: int, apply: Apply) -> None:
        """Call ``apply(where, offset, size)`` for the bytes of each replica of a range, some at a time."""
        self._check(address, size, READ_WRITE)
        self._stream.submit(Update(self._machine, self._stream.context, address, size, apply))

    def gather(self, target: int, address: int, size: int, combine: Combine) -> None:
        """Store ``combine`` of the bytes of all replicas of a range at ``target``, step by step."""
        self._check(address, size, READ)
        if self._machine.banks.arenas.find(target) is not None:
            self._calls._check_fill(target, size, self._stream.context)
        self._stream.submit(Gather(self._machine, self._stream.context, target, address, size, combine))

    def _check(self, address: int, size: int, needed: int) -> None:
        found = self._machine.multicast.mapping_at(address)
        if found is None or address + size > found[0].end:
            raise ValueError(f"{address:#x} and the {size} bytes from there on are no mapping of a multicast object")
        if found[0].right(device_place(self._stream.context.device.ordinal)) & needed != needed:
            raise Fault(Result.CUDA_ERROR_ILLEGAL_ADDRESS)
        self._machine.multicast.check_bound(address, size)


class MulticastCalls(CopyCalls):
    """cuMulticast*."""

    # -- objects and teams -----------------------------------------------------------------------------------

    def cuMulticastGetGranularity(self, prop: Any, option: Any) -> int:
        """The size that is asked for is not looked at: users leave it out."""
        props = arguments.struct("prop", prop, cuda.CUmulticastObjectProp)
        wanted = arguments.number("option", option, cuda.CUmulticastGranularity_flags)
        self._multicast_properties(props)
        return self._machine.profile.multicast_granularity if wanted == _RECOMMENDED else GRANULARITY

    def cuMulticastCreate(self, prop: Any) -> Any:
        props = arguments.struct("prop", prop, cuda.CUmulticastObjectProp)
        devices, size, handle_types = self._multicast_properties(props)
        check(size and size % GRANULARITY == 0)
        if handle_types & Handle.FABRIC:
            # without an IMEX channel as for memory, where this was observed; the documentation lists the code here too
            check(self._machine.fabric is not None, Result.CUDA_ERROR_NOT_PERMITTED)
            if not self._machine.fabric:
                raise NotModelled("cuMulticastCreate with fabric handles where these are not supported")
        return cuda.CUmemGenericAllocationHandle(self._machine.multicast.create(devices, size, handle_types).handle)

    def _multicast_properties(self, props: Any) -> tuple[int, int, int]:
        """Number of devices, size in bytes, and handle types."""
        devices, handle_types = int(props.numDevices), int(props.handleTypes)
        check(devices and not int(props.flags) and handle_types & ~(Handle.POSIX_FD | Handle.FABRIC) == 0)
        able = sum(device.attributes["MULTICAST_SUPPORTED"] for device in self._machine.devices)
        check(able, Result.CUDA_ERROR_NOT_SUPPORTED)
        if devices == 1:
            # users say that it is refused, but not with which code (InternLM/lmdeploy#4296)
            raise NotModelled("a multicast object for one device")
        not_modelled(devices > able, "a multicast object for more devices than this machine has")
        return devices, int(props.size), handle_types

    def _multicast_object(self, handle: Any) -> MulticastObject:
        return self._machine.multicast.object(arguments.memory(handle))

    def cuMulticastAddDevice(self, mcHandle: Any, dev: Any) -> None:
        """The kernel module refuses a device that was added before, and one too many. The driver's result code is
        unknown.
        """
        found, device = self._multicast_object(mcHandle), self._device(dev)
        check(device.attributes["MULTICAST_SUPPORTED"], Result.CUDA_ERROR_NOT_SUPPORTED)
        check(found.table.add(device.ordinal, self._machine.multicast.has_slot))
        self._machine.timeline.announce()  # to threads that wait for the team

    # -- bindings --------------------------------------------------------------------------------------------

    def cuMulticastBindMem(
        self, mcHandle: Any, mcOffset: Any, memHandle: Any, memOffset: Any, size: Any, flags: Any
    ) -> None:
        self._bind_memory(mcHandle, None, mcOffset, memHandle, memOffset, size, flags)

    def cuMulticastBindMem_v2(
        self, mcHandle: Any, dev: Any, mcOffset: Any, memHandle: Any, memOffset: Any, size: Any, flags: Any
    ) -> None:
        self._bind_memory(mcHandle, self._device(dev).ordinal, mcOffset, memHandle, memOffset, size, flags)

    def _bind_memory(
        self, mcHandle: Any, device: int | None, mcOffset: Any, memHandle: Any, memOffset: Any, size: Any, flags: Any
    ) -> None:
        found, offset, number = self._place(mcHandle, mcOffset, size, flags)
        start = arguments.size_t(memOffset)
        handle = arguments.memory(memHandle)
        memory = self._machine.virtual.memory(handle)
        check(start % GRANULARITY == 0 and start + number <= memory.size)
        self._check_bindable(found, memory, device)
        self._machine.multicast.formed(found, "cuMulticastBindMem")
        found, memory = self._multicast_object(mcHandle), self._machine.virtual.memory(handle)
        found.bind(offset, number, Backing(memory.physical, memory.offset + start, memory.properties.device, memory))

    def cuMulticastBindAddr(self, mcHandle: Any, mcOffset: Any, memptr: Any, size: Any, flags: Any) -> None:
        self._bind_address(mcHandle, None, mcOffset, memptr, size, flags)

    def cuMulticastBindAddr_v2(
        self, mcHandle: Any, dev: Any, mcOffset: Any, memptr: Any, size: Any, flags: Any
    ) -> None:
        self._bind_address(mcHandle, self._device(dev).ordinal, mcOffset, memptr, size, flags)

    def _bind_address(
        self, mcHandle: Any, device: int | None, mcOffset: Any, memptr: Any, size: Any, flags: Any
    ) -> None:
        multicast = self._machine.multicast
        found, offset, number = self._place(mcHandle, mcOffset, size, flags)
        address = arguments.device_pointer(memptr)
        check(address % GRANULARITY == 0)
        backing = multicast.locate(address, number)
        if backing.memory is not None:
            self._check_bindable(found, backing.memory, device)
        else:
            check(backing.device is not None and device in (None, backing.device))
            assert backing.allocation is not None and backing.allocation.pool is not None
            check(backing.allocation.pool.handle_types or not found.properties.handle_types)
        multicast.formed(found, "cuMulticastBindAddr")
        self._multicast_object(mcHandle).bind(offset, number, multicast.locate(address, number))

    def _place(self, mcHandle: Any, mcOffset: Any, size: Any, flags: Any) -> tuple[MulticastObject, int, int]:
        """Multicast object, offset and size in bytes of a binding."""
        found = self._multicast_object(mcHandle)
        offset, number = arguments.size_t(mcOffset), arguments.size_t(size)
        check(arguments.unsigned_long_long(flags) == 0)
        check(number and number % GRANULARITY == 0 and offset % GRANULARITY == 0 and offset + number <= found.size)
        return found, offset, number

    @staticmethod
    def _check_bindable(found: MulticastObject, memory: Memory, device: int | None) -> None:
        properties = memory.properties
        if memory.bank is None:
            raise NotModelled("binding memory that was imported")
        if properties.compression or properties.tile_pool:
            raise NotModelled("binding memory that is compressible, or for tiles of arrays")
        if properties.device is None and device is not None:
            raise NotModelled("binding host memory")
        check(properties.device is not None and device in (None, properties.device))
        check(properties.handle_types or not found.properties.handle_types)

    def cuMulticastUnbind(self, mcHandle: Any, dev: Any, mcOffset: Any, size: Any) -> None:
        found, device = self._multicast_object(mcHandle), self._device(dev).ordinal
        _, offset, number = self._place(mcHandle, mcOffset, size, 0)
        check(device in found.table.devices, Result.CUDA_ERROR_INVALID_DEVICE)
        found.unbind(device, offset, number)

    @driver_call
    def multimem_launch(self, hStream: Any, kernel: Callable[[Launch], None]) -> None:
        """No function of the driver: submit a function that stands for a kernel (:mod:`streamalloc.testing`)."""
        not_modelled(self._machine.graphs.captures, "kernels during a stream capture")
        kernel(Launch(self, self._stream(hStream)))
