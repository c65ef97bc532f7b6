"""Fills and copies.

Ranges, alignment and access are checked when the call is made; whether the memory is still there, when it is
touched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from .. import arguments
from ..allocations import Allocation, is_gone
from ..arguments import DevicePointer, HostPointer, Size
from ..constants import HOST, READ, READ_WRITE, STEP, device_place
from ..contexts import Context
from ..copy_operations import Shape, fill
from ..errors import Fault, NotModelled, check, need, not_modelled
from ..graphs import Graph, Values
from ..memory import is_accessible
from ..physical import least_right
from ..timeline import Stream
from .base import GONE, Calls

LOST = "a copy where nothing lies, which the driver takes for the host's: the real driver crashes"
_READING = "reading a multicast object with a copy: hardware defines it for multimem.ld_reduce alone"


OF_HOST, DEVICE, ARRAY, UNIFIED = 1, 2, 3, 4  # CUmemorytype
Contexts = tuple[Context, Context]
"""Contexts of the two ends of a copy, target first."""
FILL_FIELDS = ("dst", "pitch", "value", "elementSize", "width", "height")
"""Fields of a CUDA_MEMSET_NODE_PARAMS."""

_VALUES: dict[int, Callable[[Any], int]] = {
    1: arguments.unsigned_char,
    2: arguments.unsigned_short,
    4: arguments.unsigned_int,
}


class CopyCalls(Calls):
    """cuMemset*, cuMemcpy*."""

    # -- fills -----------------------------------------------------------------------------------------------

    def cuMemsetD8(self, dstDevice: Any, uc: Any, N: Any) -> None:
        self._fill(dstDevice, uc, N, 1)

    def cuMemsetD16(self, dstDevice: Any, us: Any, N: Any) -> None:
        self._fill(dstDevice, us, N, 2)

    def cuMemsetD32(self, dstDevice: Any, ui: Any, N: Any) -> None:
        self._fill(dstDevice, ui, N, 4)

    def cuMemsetD8Async(self, dstDevice: Any, uc: Any, N: Any, hStream: Any) -> None:
        self._fill(dstDevice, uc, N, 1, hStream)

    def cuMemsetD16Async(self, dstDevice: Any, us: Any, N: Any, hStream: Any) -> None:
        self._fill(dstDevice, us, N, 2, hStream)

    def cuMemsetD32Async(self, dstDevice: Any, ui: Any, N: Any, hStream: Any) -> None:
        self._fill(dstDevice, ui, N, 4, hStream)

    def _fill(
        self, dstDevice: Any, value: Any, N: Any, width: int, hStream: Any = None, rows: int = 1, pitch: int = 0
    ) -> None:
        # without a stream: in the legacy stream; the host waits only for a copy of host memory
        # (observed on H200: test_copies, test_planes)
        address = arguments.device_pointer(dstDevice)
        number = _VALUES[width](value)
        count = arguments.size_t(N)
        stream = self._stream(hStream)
        captured = bool(self._machine.graphs.captures) and self._captured(stream)
        if not count or not rows:
            return
        size = count * width
        pattern = number.to_bytes(width, "little")
        operation = fill(self._machine, stream.context, address, pattern, count, rows, pitch)
        check(address % width == 0)
        if captured:  # the location is checked later (observed on H200: test_capture)
            values = (address, pitch, number, width, count, rows)
            stream.capture.add("MEMSET", operation, stream, dict(zip(FILL_FIELDS, values, strict=True)))
            return
        allocation = self._check_fill(address, (rows - 1) * pitch + size, stream.context)
        stream.submit(operation)
        if hStream is None and allocation.on_host:
            self._finish(stream)

    def _check_fill(self, address: int, size: int, context: Context) -> Allocation:
        allocation = need(self._machine.allocations.find(address))
        check(allocation.known)
        if allocation.mapping is not None:
            mappings = self._machine.virtual.span(address, size)
            check(least_right(mappings, device_place(context.device.ordinal)) == READ_WRITE)
            self._check_team(address, size)
        else:
            check(address + size <= allocation.base + allocation.size)
            check(_reachable(allocation, context))
            not_modelled(is_gone(allocation, address, size), GONE)
        return allocation

    # -- copies ----------------------------------------------------------------------------------------------

    def cuMemcpy(self, dst: DevicePointer, src: DevicePointer, ByteCount: Size) -> None:
        self._copy(dst, src, Shape.row(ByteCount))

    def cuMemcpyAsync(self, dst: DevicePointer, src: DevicePointer, ByteCount: Size, hStream: Any) -> None:
        self._copy(dst, src, Shape.row(ByteCount), hStream)

    def cuMemcpyHtoD(self, dstDevice: DevicePointer, srcHost: HostPointer, ByteCount: Size) -> None:
        self._copy(dstDevice, srcHost, Shape.row(ByteCount), device="dst")

    def cuMemcpyHtoDAsync(self, dstDevice: DevicePointer, srcHost: HostPointer, ByteCount: Size, hStream: Any) -> None:
        self._copy(dstDevice, srcHost, Shape.row(ByteCount), hStream, "dst")

    def cuMemcpyDtoH(self, dstHost: HostPointer, srcDevice: DevicePointer, ByteCount: Size) -> None:
        self._copy(dstHost, srcDevice, Shape.row(ByteCount), device="src")

    def cuMemcpyDtoHAsync(self, dstHost: HostPointer, srcDevice: DevicePointer, ByteCount: Size, hStream: Any) -> None:
        self._copy(dstHost, srcDevice, Shape.row(ByteCount), hStream, "src")

    def cuMemcpyDtoD(self, dstDevice: DevicePointer, srcDevice: DevicePointer, ByteCount: Size) -> None:
        self._copy(dstDevice, srcDevice, Shape.row(ByteCount), device="both")

    def cuMemcpyDtoDAsync(
        self, dstDevice: DevicePointer, srcDevice: DevicePointer, ByteCount: Size, hStream: Any
    ) -> None:
        self._copy(dstDevice, srcDevice, Shape.row(ByteCount), hStream, "both")

    def cuMemcpyPeer(
        self, dstDevice: DevicePointer, dstContext: Any, srcDevice: DevicePointer, srcContext: Any, ByteCount: Size
    ) -> None:
        contexts = (self._alive(dstContext), self._alive(srcContext))
        self._copy(dstDevice, srcDevice, Shape.row(ByteCount), None, "both", contexts)

    def cuMemcpyPeerAsync(
        self,
        dstDevice: DevicePointer,
        dstContext: Any,
        srcDevice: DevicePointer,
        srcContext: Any,
        ByteCount: Size,
        hStream: Any,
    ) -> None:
        contexts = (self._alive(dstContext), self._alive(srcContext))
        self._copy(dstDevice, srcDevice, Shape.row(ByteCount), hStream, "both", contexts)

    def _copy(
        self,
        target: int,
        source: int,
        shape: Shape,
        hStream: Any = None,
        device: str = "",
        contexts: Contexts | None = None,
        values: Values | None = None,
    ) -> None:
        """``device`` says which ends the caller promised to be device memory; ``hStream`` None: a call that
        waits; ``values``: of what is no single row, as a node of a graph has it.

        Pool memory must be accessible from the device of the current context, plain memory from anywhere
        (observed on H200: test_two_devices; the driver stages such copies).
        """
        machine = self._machine
        waits = hStream is None
        stream = self._stream(hStream)
        captured = bool(machine.graphs.captures) and self._captured(stream)
        if not shape.size:
            return
        here = machine.current_or_none() or stream.context
        graph = stream.capture.graph if captured else None
        try:
            destination, origin = self._check_copy(target, source, shape, device, contexts or (here, here), graph)
        except Fault:
            if shape.fits:
                raise
            to, start = target - shape.left_out[0], source - shape.left_out[1]
            self._check_copy(to, start, shape, device, contexts or (here, here), graph)
            not_modelled(self._in_pools(to, start), "a copy of rows that do not fit and go beyond the memory of a pool")
            raise
        if not shape.fits:
            self._check_loose(destination, origin, waits or captured)
        if captured:
            values = values or _values_of_row(target, source, shape.size, device)
            stream.capture.add("MEMCPY", shape.copy(machine, stream.context, target, source), stream, values)
            return
        at_once = origin is not None or destination is None or self._quiet(stream, shape.size)
        # pageable memory is read before the call returns
        taken = source if at_once else ctypes.string_at(source, shape.source_span)
        stream.submit(shape.copy(machine, stream.context, target, taken))
        of_host = [end is None or end.on_host for end in (destination, origin)]
        if destination is None or all(of_host) or (waits and any(of_host)):
            self._finish(stream)

    def _in_pools(self, *addresses: int) -> bool:
        found = [self._machine.allocations.find(address) for address in addresses]
        return any(one is not None and one.pool is not None for one in found)

    @staticmethod
    def _check_loose(destination: Allocation | None, origin: Allocation | None, otherwise: bool) -> None:
        """Between memory of pools the driver does not look whether rows fit behind what is left out before them, at
        least where the host does not wait (observed on H200: test_planes).
        """
        in_pools = [end is not None and end.pool is not None for end in (destination, origin)]
        check(any(in_pools))
        not_modelled(otherwise or not all(in_pools), "a copy of rows that do not fit, with memory of a pool")

    def _quiet(self, stream: Stream, size: int) -> bool:
        """Whether a small operation submitted now runs before the call returns."""
        return not stream.catch_up() and stream.idle and size <= STEP and not self._machine.timeline.seeded

    def _finish(self, stream: Stream) -> None:
        """Wait for the submitted copy. Pools do not see its frees, unlike those before a synchronising call (observed
        on H200).
        """
        seq = stream.seq
        if stream.done < seq:
            self._machine.timeline.wait(lambda: stream.done >= seq)
        stream.context.check()

    def _check_copy(
        self, target: int, source: int, shape: Shape, device: str, contexts: Contexts, graph: Graph | None = None
    ) -> tuple[Allocation | None, Allocation | None]:
        """Both ends of a copy: the allocation of each, or None for memory that only the host uses. Addresses of the
        ``graph`` that the copy is for are none of an allocation yet.
        """
        found: list[Allocation | None] = []
        lost = ""
        spans = ((target, shape.target_span, "dst", READ_WRITE), (source, shape.source_span, "src", READ))
        for (address, size, side, needed), context in zip(spans, contexts, strict=True):
            if graph is not None and graph.holds(address):
                check(graph.covers(address, size))
                found.append(None)
                continue
            end = self._copy_end(address, size, device in (side, "both"), device == "both", context)
            found.append(end if self._check_mapped(address, size, end, needed, context) else None)
            lost = lost or self._lost(address, size, end, needed == READ_WRITE, graph is None)
        destination, origin = found
        if destination is not None and destination.mapping is not None and origin is None:
            unable = least_right(self._machine.virtual.span(target, shape.target_span), HOST) == READ
            not_modelled(unable, "a copy by the host to memory that it may only read: the real driver crashes")
        # the last check (observed on H200: test_copies)
        not_modelled(lost, lost)
        return destination, origin

    def _copy_end(
        self, address: int, size: int, must_be_device: bool, no_host_pool: bool, context: Context
    ) -> Allocation | None:
        """The allocation of one end of a copy; None for pageable host memory."""
        allocation = self._machine.allocations.find(address)
        if allocation is None or not allocation.known:
            # host pool memory that no device has access to is like any other host memory
            check(address and not must_be_device)
            return None
        if allocation.mapping is not None:
            return allocation  # the range can continue in the next mapping
        # memory of a host pool is no device memory, whatever its access (observed on H200: test_copies)
        check(not (must_be_device and allocation.pool is not None and allocation.on_host))
        check(address + size <= allocation.base + allocation.size)
        check(not (no_host_pool and allocation.pool is not None and allocation.on_host))
        if allocation.pool is not None:
            check(_accessible(allocation, context))
        return allocation

    def _lost(self, address: int, size: int, end: Allocation | None, write: bool, now: bool = True) -> str:
        """The reason why memory of the host cannot be used, or "". A copy in a graph uses it later, not ``now``."""
        machine = self._machine
        if end is None:
            freed = machine.banks.arenas.find(address) is not None and machine.allocations.find(address) is None
            return LOST if freed or (now and not is_accessible(address, size, write)) else ""
        return GONE if is_gone(end, address, size) else ""

    def _check_mapped(self, address: int, size: int, end: Allocation | None, needed: int, context: Context) -> bool:
        """That work of ``context`` may touch mapped memory as a copy does; false where the host does it, as with memory
        that the driver does not know (observed on H200: test_planes).
        """
        if end is None or end.mapping is None:
            return True
        mappings = self._machine.virtual.span(address, size)
        if least_right(mappings, device_place(context.device.ordinal)) & needed == needed:
            not_modelled(needed == READ and any(mapping.is_multicast for mapping in mappings), _READING)
            self._check_team(address, size)
            return True
        check(all(mapping.memory.properties.device is None for mapping in mappings))
        if least_right(mappings, HOST) & needed != needed:
            raise NotModelled("a copy of mapped host memory that neither the device nor the host may use")
        return False

    def _check_team(self, address: int, size: int) -> None:
        """That all devices of the teams have memory under a range of mappings, which may be of multicast objects.

        By the PTX manual other writes than those of multimem instructions are undefined; that copies reach every device
        is what users report (NVIDIA/Fuser#5620).
        """
        for mapping in self._machine.virtual.span(address, size):
            if mapping.is_multicast:
                first, end = max(address, mapping.base), min(address + size, mapping.end)
                self._machine.multicast.check_bound(first, end - first)


def _values_of_row(target: int, source: int, size: int, device: str) -> Values:
    """A copy of a single row as a node of a graph has it."""
    values: Values = {"WidthInBytes": size, "Height": 1, "Depth": 1}
    for side, at in (("dst", target), ("src", source)):
        kind = UNIFIED if not device else DEVICE if device in (side, "both") else OF_HOST
        values[side + "MemoryType"] = kind
        values[side + ("Host" if kind == OF_HOST else "Device")] = at
    return values


def _accessible(allocation: Allocation, context: Context) -> bool:
    pool = allocation.pool
    return pool is None or pool.accessible(context.device.ordinal)


def _reachable(allocation: Allocation, context: Context) -> bool:
    """Whether work in ``context`` may touch the memory directly: its own, the host's, a peer's that was
    enabled.
    """
    if allocation.pool is not None or allocation.device is None:
        return _accessible(allocation, context)
    if allocation.device == context.device.ordinal:
        return True
    return allocation.context is not None and allocation.context.handle in context.peers
