"""Multicast objects, and the way in for what stands for kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamalloc.driver.bindings import cuda

from .. import arguments
from ..errors import Fault, NotModelled, Result, check
from ..machine import Context, Machine
from ..multicast import Backing, MulticastObject
from ..timeline import Operation
from ..virtual import GRANULARITY, READ, READ_WRITE, Memory, device_place
from .base import modelled
from .copies import CopyCalls

_POSIX_FD, _FABRIC = 1, 8  # CUmemAllocationHandleType
_RECOMMENDED = 1  # CUmulticastGranularity_flags


class Launch:
    """What a stand-in for a kernel is made with."""

    def __init__(self, machine: Machine, context: Context, check_fill: Callable[[int, int, Context], None]) -> None:
        self.machine = machine
        self.context = context
        self._check_fill = check_fill

    def check_multicast(self, address: int, size: int, *, writes: bool) -> None:
        """That work here may go to a range of a multicast object."""
        found, needed = self.machine.multicast.mapping_at(address), READ_WRITE if writes else READ
        if found is None or address + size > found[0].end:
            raise ValueError(f"{address:#x} and the {size} bytes from there on are no mapping of a multicast object")
        if found[0].right(device_place(self.context.device.ordinal)) & needed != needed:
            raise Fault(Result.CUDA_ERROR_ILLEGAL_ADDRESS)
        self.machine.multicast.check_bound(address, size)

    def check_target(self, address: int, size: int) -> None:
        """That work here may write to a range."""
        if self.machine.arenas.find(address) is not None:
            self._check_fill(address, size, self.context)


class MulticastCalls(CopyCalls):
    """cuMulticast*."""

    # -- objects and teams -----------------------------------------------------------------------------------

    @modelled(1)
    def cuMulticastGetGranularity(self, prop: Any, option: Any) -> int:
        """The size that is asked for is not looked at: users leave it out."""
        props = arguments.struct("prop", prop, cuda.CUmulticastObjectProp)
        wanted = arguments.member("option", option, cuda.CUmulticastGranularity_flags)
        check(props is not None)
        self._multicast_properties(props)
        return self._machine.profile.multicast_granularity if wanted == _RECOMMENDED else GRANULARITY

    @modelled(1)
    def cuMulticastCreate(self, prop: Any) -> Any:
        props = arguments.struct("prop", prop, cuda.CUmulticastObjectProp)
        check(props is not None)
        devices, size, handle_types = self._multicast_properties(props)
        check(size and size % GRANULARITY == 0)
        if handle_types & _FABRIC:
            # without an IMEX channel as for memory, where this was observed; the documentation lists the code here too
            check(self._machine.fabric is not None, Result.CUDA_ERROR_NOT_PERMITTED)
            if not self._machine.fabric:
                raise NotModelled("cuMulticastCreate with fabric handles where these are not supported")
        return cuda.CUmemGenericAllocationHandle(self._machine.multicast.create(devices, size, handle_types).handle)

    def _multicast_properties(self, props: Any) -> tuple[int, int, int]:
        """How many devices, bytes, and handle types."""
        devices, handle_types = int(props.numDevices), int(props.handleTypes)
        check(devices and not int(props.flags) and handle_types & ~(_POSIX_FD | _FABRIC) == 0)
        able = sum(device.attributes["MULTICAST_SUPPORTED"] for device in self._machine.devices)
        check(able, Result.CUDA_ERROR_NOT_SUPPORTED)
        if devices == 1:
            # users say that it is refused, but not with which code (InternLM/lmdeploy#4296)
            raise NotModelled("a multicast object for one device")
        if devices > able:
            raise NotModelled("a multicast object for more devices than this machine has")
        return devices, int(props.size), handle_types

    def _multicast_object(self, handle: Any) -> MulticastObject:
        return self._machine.multicast.object(arguments.memory(handle))

    @modelled(0)
    def cuMulticastAddDevice(self, mcHandle: Any, dev: Any) -> None:
        """The kernel module refuses a device that was added before, and one too many; as what the driver passes that on
        is not known.
        """
        found, device = self._multicast_object(mcHandle), self._device(dev)
        check(device.attributes["MULTICAST_SUPPORTED"], Result.CUDA_ERROR_NOT_SUPPORTED)
        check(found.team.add(device.ordinal, self._machine.multicast.has_slot))
        self._machine.timeline.announce()  # to threads that wait for the team

    # -- bindings --------------------------------------------------------------------------------------------

    @modelled(0)
    def cuMulticastBindMem(
        self, mcHandle: Any, mcOffset: Any, memHandle: Any, memOffset: Any, size: Any, flags: Any
    ) -> None:
        self._bind_memory(mcHandle, None, mcOffset, memHandle, memOffset, size, flags)

    @modelled(0)
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
        found.bind(offset, number, Backing(memory.physical, memory.offset + start, memory))

    @modelled(0)
    def cuMulticastBindAddr(self, mcHandle: Any, mcOffset: Any, memptr: Any, size: Any, flags: Any) -> None:
        self._bind_address(mcHandle, None, mcOffset, memptr, size, flags)

    @modelled(0)
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
        """Where in which object, and how many bytes."""
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

    @modelled(0)
    def cuMulticastUnbind(self, mcHandle: Any, dev: Any, mcOffset: Any, size: Any) -> None:
        found, device = self._multicast_object(mcHandle), self._device(dev).ordinal
        _, offset, number = self._place(mcHandle, mcOffset, size, 0)
        check(device in found.team.devices, Result.CUDA_ERROR_INVALID_DEVICE)
        found.unbind(device, offset, number)

    @modelled(0)
    def multimem_launch(self, hStream: Any, stand_in: Callable[[Launch], Operation]) -> None:
        """No function of the driver: put what stands for a kernel into a stream (:mod:`streamalloc.testing`)."""
        if self._machine.captures:
            raise NotModelled("kernels during a stream capture")
        stream = self._stream(hStream)
        stream.submit(stand_in(Launch(self._machine, stream.context, self._check_fill)))
