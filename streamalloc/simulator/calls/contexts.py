"""Driver calls for devices, the driver's version and error names, and for contexts: primary contexts, created contexts,
the current context, peer access and limits.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

from streamalloc.driver.bindings import cuda
from streamalloc.simulator import arguments
from streamalloc.simulator.arguments import Context, ContextOrCurrent, Device, Event, Int, Size, UnsignedInt
from streamalloc.simulator.calls.base import Calls, call
from streamalloc.simulator.constants import BLOCK, round_up
from streamalloc.simulator.errors import Fault, Result, check, need, not_modelled
from streamalloc.simulator.profiles import Limit


def _names(enum: Any, prefix: str) -> dict[int, str]:
    """Return the names of an enum's members without ``prefix``, by number.

    If two members have one number, the name of the last one is used.
    """
    return {int(value): name.removeprefix(prefix) for name, value in enum.__members__.items()}


_DEVICE_ATTRIBUTES = _names(cuda.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_")
_PEER_ATTRIBUTES = _names(cuda.CUdevice_P2PAttribute, "CU_DEVICE_P2P_ATTRIBUTE_")


_PCI = re.compile(rb"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.[0-9a-f])?$")


_PROPERTIES = {  # Device attribute that gives the value of each field of a CUdevprop, by name of the field.
    "maxThreadsPerBlock": "MAX_THREADS_PER_BLOCK",
    "sharedMemPerBlock": "MAX_SHARED_MEMORY_PER_BLOCK",
    "totalConstantMemory": "TOTAL_CONSTANT_MEMORY",
    "SIMDWidth": "WARP_SIZE",
    "memPitch": "MAX_PITCH",
    "regsPerBlock": "MAX_REGISTERS_PER_BLOCK",
    "clockRate": "CLOCK_RATE",
    "textureAlign": "TEXTURE_ALIGNMENT",
}
_SCHEDULE_MASK = 0x07
_KNOWN_FLAGS = 0x1F


_NAMES = {int(limit): limit.name.removeprefix("CU_LIMIT_") for limit in cuda.CUlimit}
_FIXED = ("SHMEM_SIZE", "CIG_ENABLED")
_REFUSED = ("MAX_L2_FETCH_GRANULARITY", "PERSISTING_L2_CACHE_SIZE")
"""Limits for which the driver refuses values above the maximum. For other limits it uses the maximum instead."""
_TOO_LARGE_STACK = 512 << 10
_CACHE_CONFIGS = range(4)
_FOUR_BYTE_BANKS = cuda.CUsharedconfig.CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE


class ContextCalls(Calls):
    """The calls cuInit, cuDriverGetVersion, cuGetError*, cuCtx*, cuProfiler* and cuFlushGPUDirectRDMAWrites, and
    cuDevice* without those for pools and graph memory.
    """

    def cuInit(self, Flags: UnsignedInt) -> None:
        check(Flags == 0)
        if not self.ready:
            self.see_devices()
        self.ready = True

    def cuDriverGetVersion(self) -> int:
        return self.profile.driver_version

    def cuGetErrorName(self, error: Any) -> bytes:
        return self._error(error)[0].encode()

    def cuGetErrorString(self, error: Any) -> bytes:
        return self._error(error)[1].encode()

    def _error(self, error: Any) -> tuple[str, str]:
        """Return the name and the text of an error code.

        A code that only newer drivers know gives CUDA_ERROR_INVALID_VALUE, even if the bindings name it.
        """
        try:
            name = str(Result(int(error)).name)
        except ValueError:
            raise Fault(Result.CUDA_ERROR_INVALID_VALUE) from None
        return name, need(self.profile.error_strings.get(name))

    def cuDeviceGetCount(self) -> int:
        return len(self.devices)

    def cuDeviceGet(self, ordinal: Int) -> Any:
        check(0 <= ordinal < len(self.devices), Result.CUDA_ERROR_INVALID_DEVICE)
        return cuda.CUdevice(ordinal)

    def cuDeviceGetName(self, length: Int, dev: Device) -> bytes:
        check(length > 0)
        return self.profile.name.encode()[: length - 1].ljust(length, b"\0")

    def cuDeviceGetUuid(self, dev: Device) -> Any:
        found, uuid = dev.uuid, cuda.CUuuid()
        ctypes.memmove(int(uuid.getPtr()), found, len(found))
        return uuid

    cuDeviceGetUuid_v2 = cuDeviceGetUuid

    def cuDeviceTotalMem(self, dev: Device) -> int:
        return dev.bank.total

    def cuDeviceGetAttribute(self, attrib: Any, dev: Device) -> int:
        number = int(attrib.value) if hasattr(attrib, "value") else arguments.signed_int(attrib)
        return need(dev.attributes.get(_DEVICE_ATTRIBUTES.get(number, "")))

    def cuDeviceGetProperties(self, dev: Device) -> Any:
        attributes, properties = dev.attributes, cuda.CUdevprop()
        for name, attribute in _PROPERTIES.items():
            setattr(properties, name, attributes[attribute])
        properties.maxThreadsDim = [attributes[f"MAX_BLOCK_DIM_{axis}"] for axis in "XYZ"]
        properties.maxGridSize = [attributes[f"MAX_GRID_DIM_{axis}"] for axis in "XYZ"]
        return properties

    def cuDeviceComputeCapability(self, dev: Device) -> tuple[int, int]:
        attributes = dev.attributes
        return attributes["COMPUTE_CAPABILITY_MAJOR"], attributes["COMPUTE_CAPABILITY_MINOR"]

    def cuDeviceGetPCIBusId(self, length: Int, dev: Device) -> bytes:
        name = "{PCI_DOMAIN_ID:04x}:{PCI_BUS_ID:02x}:{PCI_DEVICE_ID:02x}.0".format_map(dev.attributes).encode()
        check(length > len(name))
        # The driver writes a zero byte after the name and leaves the rest of the buffer, which the bindings fill with
        # spaces (observed on H200: test_contexts).
        return (name + b"\0").ljust(length, b" ")

    def cuDeviceGetByPCIBusId(self, pciBusId: Any) -> Any:
        """Return the device with a PCI name. The name is that of cuDeviceGetPCIBusId; the domain or the function may be
        missing. Gives CUDA_ERROR_INVALID_VALUE for a text of another form, and CUDA_ERROR_INVALID_DEVICE if no device
        has the name.
        """
        read = need(_PCI.match(bytes(pciBusId).partition(b"\0")[0].lower()))
        wanted = [int(part or b"0", 16) for part in read.groups()]
        names = ("PCI_DOMAIN_ID", "PCI_BUS_ID", "PCI_DEVICE_ID")
        known = (one for one in self.devices if [one.attributes[name] for name in names] == wanted)
        return cuda.CUdevice(need(next(known, None), Result.CUDA_ERROR_INVALID_DEVICE).ordinal)

    def cuDeviceCanAccessPeer(self, dev: Device, peerDev: Device) -> int:
        return int(dev is not peerDev and self.has_access(dev.ordinal, peerDev.ordinal))

    def cuDeviceGetP2PAttribute(self, attrib: cuda.CUdevice_P2PAttribute, srcDevice: Device, dstDevice: Device) -> int:
        check(srcDevice is not dstDevice, Result.CUDA_ERROR_INVALID_DEVICE)
        return need(self.link(srcDevice.ordinal, dstDevice.ordinal).attributes.get(_PEER_ATTRIBUTES.get(attrib, "")))

    # -- primary contexts ------------------------------------------------------------------------------------

    def cuDevicePrimaryCtxRetain(self, dev: Device) -> Any:
        context = dev.primary
        context.alive = True
        context.retained += 1
        return cuda.CUcontext(context.handle)

    def cuDevicePrimaryCtxRelease(self, dev: Device) -> None:
        context = dev.primary
        check(context.retained, Result.CUDA_ERROR_INVALID_CONTEXT)
        context.retained -= 1
        if not context.retained:
            self._end_context(context)

    def cuDevicePrimaryCtxReset(self, dev: Device) -> None:
        context = dev.primary
        if context.alive:
            self._end_context(context)
            context.alive = context.retained > 0

    def cuDevicePrimaryCtxSetFlags(self, dev: Device, flags: UnsignedInt) -> None:
        dev.primary.flags = self._checked_flags(flags)

    @staticmethod
    def _checked_flags(flags: int) -> int:
        check(flags < 0x100 and flags & _SCHEDULE_MASK in (0, 1, 2, 4))
        not_modelled(flags & ~_KNOWN_FLAGS, f"context flags {flags:#x}")
        return flags

    def cuDevicePrimaryCtxGetState(self, dev: Device) -> tuple[int, int]:
        return dev.primary.flags, int(dev.primary.alive)

    # -- making and ending -----------------------------------------------------------------------------------

    def cuCtxCreate_v4(self, ctxCreateParams: Any, flags: UnsignedInt, dev: Device) -> Any:
        not_modelled(ctxCreateParams is not None, "cuCtxCreate with parameters")
        context = self.create_context(dev, flags=self._checked_flags(flags))
        self.scheduler.caller.contexts.append(context)
        return cuda.CUcontext(context.handle)

    # Before CUDA 13 the call is cuCtxCreate(flags, dev), from then on cuCtxCreate(params, flags, dev).
    cuCtxCreate = call(cuCtxCreate_v4, None) if hasattr(cuda, "cuCtxCreate_v4") else cuCtxCreate_v4

    def cuCtxDestroy(self, ctx: Context) -> None:
        check(not ctx.primary, Result.CUDA_ERROR_INVALID_CONTEXT)
        self._end_context(ctx)
        stack = self.scheduler.caller.contexts
        if stack and stack[-1] is ctx:
            stack.pop()

    def _end_context(self, context: Context) -> None:
        streams = context.all_streams()
        self.scheduler.wait(lambda: all(stream.done >= stream.seq for stream in streams))
        self.close_context(context)

    # -- the calling thread's context ------------------------------------------------------------------------

    def cuCtxGetCurrent(self) -> Any:
        context = self.current_or_none()
        return cuda.CUcontext(0 if context is None else context.handle)

    def cuCtxSetCurrent(self, ctx: arguments.ContextHandle) -> None:
        stack = self.scheduler.caller.contexts
        stack[-1:] = [self._find(Context, ctx)] if ctx else []

    def cuCtxPushCurrent(self, ctx: Context) -> None:
        self.scheduler.caller.contexts.append(ctx)

    def cuCtxPopCurrent(self) -> Any:
        stack = self.scheduler.caller.contexts
        check(stack, Result.CUDA_ERROR_INVALID_CONTEXT)
        return cuda.CUcontext(stack.pop().handle)

    def cuCtxGetDevice(self) -> Any:
        return cuda.CUdevice(self.current().device.ordinal)

    def cuCtxGetDevice_v2(self, ctx: ContextOrCurrent) -> Any:
        return cuda.CUdevice(ctx.device.ordinal)

    def _synchronize(self, given: Context | None = None) -> None:
        context = given or self.current()
        self._no_stream_captures(context)
        self._unsafe_during_capture()
        clock, unfinished, gone = context.clock(), context.unfinished(), list(context.retired.items())
        self.synchronize(clock, lambda: all(stream.done >= seq for stream, seq in unfinished))
        for number, seq in gone:
            if context.retired.get(number) == seq:
                del context.retired[number]
        context.check()

    cuCtxSynchronize = cuCtxSynchronize_v2 = call(_synchronize, ctx=ContextOrCurrent)

    def _no_stream_captures(self, context: Context) -> None:
        """Refuse a call on all streams of a context while one of them is captured.

        The captures of its streams become invalid.
        """
        self._spoil(stream.capture for stream in context.all_streams())

    def cuCtxGetFlags(self) -> int:
        context = self.current()
        return context.flags | context.implied_flags | (self.profile.context_flags if context.primary else 0)

    def cuCtxGetApiVersion(self, ctx: ContextOrCurrent) -> int:
        return self.profile.context_api_version

    def cuCtxGetId(self, ctx: ContextOrCurrent) -> int:
        return ctx.id

    def cuCtxGetStreamPriorityRange(self) -> tuple[int, int]:
        self.current()
        return self.profile.stream_priorities

    def cuCtxRecordEvent(self, hCtx: ContextOrCurrent, hEvent: Event) -> None:
        check(hEvent.context is hCtx, Result.CUDA_ERROR_INVALID_HANDLE)
        self._no_stream_captures(hCtx)
        # The record has no order with other streams. So a host that waits for such an event does not make frees in
        # those streams reusable (observed on H200: test_placements).
        hEvent.record_in(hCtx.marks, hCtx.unfinished())

    # -- access between peers --------------------------------------------------------------------------------

    def cuCtxEnablePeerAccess(self, peerContext: Context, Flags: UnsignedInt) -> None:
        context, peer = self.current(), peerContext
        check(Flags == 0)
        own, other = context.device.ordinal, peer.device.ordinal
        check(own != other and self.has_access(own, other), Result.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)
        check(peer.handle not in context.peers, Result.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
        context.peers.add(peer.handle)

    def cuCtxDisablePeerAccess(self, peerContext: Context) -> None:
        context = self.current()
        check(peerContext.handle in context.peers, Result.CUDA_ERROR_PEER_ACCESS_NOT_ENABLED)
        context.peers.remove(peerContext.handle)

    # -- limits of a context ---------------------------------------------------------------------------------

    def _limit(self, limit: Any) -> tuple[str, Limit]:
        name = _NAMES.get(int(limit), "MAX")
        not_modelled(name == "PER_BLOCK_MEMORY_SIZE", "the limit PER_BLOCK_MEMORY_SIZE")
        check(name != "MAX")
        return name, need(self.profile.limits.get(name), Result.CUDA_ERROR_UNSUPPORTED_LIMIT)

    def cuCtxGetLimit(self, limit: Any) -> int:
        context = self.current()
        name, known = self._limit(limit)
        return context.limits.get(name, known.default)

    def cuCtxSetLimit(self, limit: Any, value: Size) -> None:
        context = self.current()
        self._unsafe_during_capture()
        name, known = self._limit(limit)
        check(name not in _FIXED, Result.CUDA_ERROR_NOT_PERMITTED)
        least = need(known.least, f"setting {name}, whose range this profile does not have")
        check(name != "STACK_SIZE" or value < _TOO_LARGE_STACK)
        not_modelled(name == "STACK_SIZE" and value > known.most, f"a stack of {value} bytes")
        check(name not in _REFUSED or value <= known.most)
        value = min(max(round_up(value, known.step), least), known.most)
        if name == "STACK_SIZE":
            self._resize_stacks(context, context.limits.get(name, known.default), value)
        context.limits[name] = value

    def _resize_stacks(self, context: Context, before: int, after: int) -> None:
        """Change the memory of a context's stacks, from ``before`` to ``after`` bytes for each thread.

        The memory has a stack for each thread that can run at the same time (observed on H200: test_contexts).
        """
        device = context.device
        streams = context.all_streams()
        self.scheduler.wait(lambda: all(stream.done >= stream.seq for stream in streams))
        threads = device.attributes["MULTIPROCESSOR_COUNT"] * device.attributes["MAX_THREADS_PER_MULTIPROCESSOR"]
        change = (after * threads // BLOCK - before * threads // BLOCK) * BLOCK
        not_modelled(change > device.bank.free, "stacks that take more memory than there is")
        device.bank.used += change
        context.stacks += change

    # -- other settings --------------------------------------------------------------------------------------

    def cuCtxGetCacheConfig(self) -> Any:
        return cuda.CUfunc_cache(self.current().limits.get("cache", 0))

    def cuCtxSetCacheConfig(self, config: Any) -> None:
        context = self.current()
        check(int(config) in _CACHE_CONFIGS)
        context.limits["cache"] = int(config)

    def cuCtxGetSharedMemConfig(self) -> Any:
        self.current()
        return _FOUR_BYTE_BANKS

    def _nothing(self, *unused: Any) -> None:
        """Do nothing: the simulation has no L2 cache, no writes by other devices over the bus, and no profiler."""
        self.current()

    cuCtxResetPersistingL2Cache = cuFlushGPUDirectRDMAWrites = cuProfilerStart = cuProfilerStop = call(_nothing)

    # -- the wait of a whole context for an event ------------------------------------------------------------

    def cuCtxWaitEvent(self, hCtx: Context, hEvent: Event) -> None:
        """Make all later work of the context wait for the event, also in streams that are created later.

        The wait itself is no work: a stream without later work counts as idle (observed on H200: test_contexts).
        """
        context, event = hCtx, hEvent
        self._no_stream_captures(context)
        not_modelled(event.capture is not None, "waiting in a context for an event that was recorded in a capture")
        not_modelled(event.elsewhere is not None, "waiting in a context for another process")
        record = event.record
        if record is not None and not record.complete:
            context.awaited.append((record.stream, record.seq))
            for stream in context.all_streams():
                if stream is not context.marks:
                    stream.barrier += ((record.stream, record.seq),)
