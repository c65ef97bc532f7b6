"""Fills, copies, and batches of copies: ``cuMemset*`` and ``cuMemcpy*``. The calls for single copies of several rows,
``cuMemcpy2D*`` and ``cuMemcpy3D*``, are in :mod:`.arrays`, because their source or target can be an array.

A call checks ranges, alignment and access. The operation that it queues checks that the memory exists when it moves the
bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from streamalloc.driver.bindings import cuda
from streamalloc.simulator import arguments
from streamalloc.simulator.allocations import LiveMemory, is_gone, is_reachable
from streamalloc.simulator.arguments import Context, Size, Stream, UnsignedLongLong
from streamalloc.simulator.arrays import BoxCopy
from streamalloc.simulator.calls.base import EDGE_DATA, GONE, call
from streamalloc.simulator.calls.virtual import VirtualMemoryCalls
from streamalloc.simulator.constants import HOST, LEGACY_STREAM, READ, READ_WRITE, STEP, Location, device_place
from streamalloc.simulator.errors import Result, check, need, not_modelled
from streamalloc.simulator.graphs import NodeGraph, Values
from streamalloc.simulator.memory import Shape, Side, is_accessible, view_address
from streamalloc.simulator.multicast import MulticastMemory, Segment, incomplete
from streamalloc.simulator.physical import CreatedMemory, least_right
from streamalloc.simulator.scheduler import Operation

Put = Callable[[int, int, int], object]
"""Function that writes bytes of an operation. Arguments: the address to write to, the offset in bytes of these bytes
within the operation, the number of bytes to write.
"""


class PlannedCopy(Operation):
    """Operation that writes bytes in steps of limited size.

    If memory was unmapped since the call, the operation ends, and later calls in the context fail
    (CUDA_ERROR_ILLEGAL_ADDRESS); the process does not crash.
    """

    def __init__(
        self, machine: CopyCalls, context: Context, target: int, size: int, put: Put, source: int | None = None
    ) -> None:
        self._machine = machine
        self._context = context
        self._target = target
        self._size = size
        self._put = put
        self._done = 0
        self._into_simulated = machine.banks.arenas.find(target) is not None
        self._source = source
        self._from_simulated = source is not None and machine.banks.arenas.find(source) is not None
        self.heavy: bool = size > STEP

    def step(self) -> bool:
        size = min(STEP, self._size - self._done)
        targets, source = self._targets(size), self._source
        here = self._machine.banks.is_there
        if targets and (source is None or here(source + self._done, size, self._from_simulated)):
            for address, at, length in targets:
                self._put(address, self._done + at, length)
            self._done += size
            return self._done >= self._size
        return self.fail()

    def fail(self) -> bool:
        self._context.error = self._context.error or Result.CUDA_ERROR_ILLEGAL_ADDRESS
        return True

    def _targets(self, size: int) -> list[Segment] | None:
        """Return the targets of the next ``size`` bytes: one, or one for each replica of multicast memory. None if a
        target has no memory.
        """
        target = self._target + self._done
        if self._machine.banks.is_there(target, size, self._into_simulated, write=True):
            return [Segment(target, 0, size)]
        return self._machine.targets(target, size) if self._into_simulated else None

    def touches(self, start: int, end: int) -> bool:
        ends = ((self._target, self._into_simulated), (self._source or 0, self._from_simulated))
        return any(simulated and one < end and start < one + self._size for one, simulated in ends)


LOST = "a copy where nothing lies, which the driver takes for the host's: the real driver crashes"
_READING = "reading a multicast object with a copy: hardware defines it for multimem.ld_reduce alone"

OF_HOST, DEVICE, ARRAY, UNIFIED = 1, 2, 3, 4  # CUmemorytype
Contexts = tuple[Context, Context]
"""The contexts of a copy's target and source."""
FILL_FIELDS = ("dst", "pitch", "value", "elementSize", "width", "height")
"""Fields of a CUDA_MEMSET_NODE_PARAMS."""
PROMISED = {(DEVICE, DEVICE): "both", (DEVICE, OF_HOST): "dst", (OF_HOST, DEVICE): "src"}
"""Sides that must be device memory (``dst``, ``src`` or both), by the memory types of target and source of a copy."""

_OF_SIDE = ("XInBytes", "Y", "Z", "LOD", "MemoryType", "Host", "Device", "Array", "Pitch", "Height")
COPY_FIELDS = ("WidthInBytes", "Height", "Depth", *(side + name for side in ("src", "dst") for name in _OF_SIDE))
"""Fields of a CUDA_MEMCPY3D. A CUDA_MEMCPY2D has only some of them."""

# Values of CUmemcpySrcAccessOrder: the source is read in stream order, before the call returns, or at any time.
_IN_STREAM, _AT_CALL, _ANY = _ORDERS = 1, 2, 3
_POINTER = 1  # CUmemcpy3DOperandType
_OVERLAP = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_NO_COPY_FAILED = None if EDGE_DATA else (1 << 64) - 1
"""Value that calls of batches return: bindings before CUDA 13 return the index of the copy that failed."""


class CopyCalls(VirtualMemoryCalls):
    """The calls cuMemset* and cuMemcpy*, except copies that can be from or to arrays, which are in :mod:`.arrays`."""

    # -- fills -----------------------------------------------------------------------------------------------

    def _fill(
        self, width: int, target: int, value: int, count: int, hStream: int | None = None, rows: int = 1, pitch: int = 0
    ) -> None:
        # If no stream is given, the fill is made in the legacy stream, and the host waits only if the memory is host
        # memory (observed on H200: test_copies, test_planes).
        stream = self.stream(hStream or 0)
        captured = self._captured(stream)
        if not count or not rows:
            return
        size = count * width
        operation = self.filling(stream.context, target, value.to_bytes(width, "little"), count, rows, pitch)
        check(target % width == 0)
        # In a capture the memory is checked at the instantiation, not at the call (observed on H200: test_capture).
        if captured:
            values = (target, pitch, value, width, count, rows)
            stream.capture.add("MEMSET", operation, stream, dict(zip(FILL_FIELDS, values, strict=True)))
            return
        allocation = self._check_fill(target, (rows - 1) * pitch + size, stream.context)
        stream.submit(operation)
        if hStream is None and allocation.on_host:
            self._finish(stream)

    def _fill_rows(
        self, width: int, address: int, pitch: int, number: int, count: int, rows: int, hStream: int | None = None
    ) -> None:
        check(rows <= 1 or (pitch >= count * width and pitch % width == 0))
        self._fill(width, address, number, count, hStream, rows, pitch)

    cuMemsetD8 = cuMemsetD8Async = call(_fill, 1)
    cuMemsetD2D8 = cuMemsetD2D8Async = call(_fill_rows, 1)
    cuMemsetD16 = cuMemsetD16Async = call(_fill, 2)
    cuMemsetD2D16 = cuMemsetD2D16Async = call(_fill_rows, 2)
    cuMemsetD32 = cuMemsetD32Async = call(_fill, 4)
    cuMemsetD2D32 = cuMemsetD2D32Async = call(_fill_rows, 4)

    def _check_fill(self, address: int, size: int, context: Context) -> LiveMemory:
        allocation = need(self.allocations.find(address))
        check(allocation.known)
        if allocation.mapping is not None:
            check(least_right(self.span(address, size), device_place(context.device.ordinal)) == READ_WRITE)
            self._check_team(address, size)
        else:
            check(address + size <= allocation.end)
            check(is_reachable(allocation, context))
            not_modelled(is_gone(allocation, address, size), GONE)
        return allocation

    # -- operations ------------------------------------------------------------------------------------------

    def copying(self, context: Context, shape: Shape, target: Side, source: Side) -> Operation:
        """Return the operation that copies between two sides, neither of which is an array."""
        if shape.size > shape.width:
            return self._rows(context, shape, target, source)

        def put(address: int, offset: int, size: int, keep: object = source.data) -> None:
            ctypes.memmove(address, source.address + offset, size)

        read_later = source.address if source.data is None else None
        return PlannedCopy(self, context, target.address, shape.width, put, read_later)

    def filling(self, context: Context, target: int, pattern: bytes, count: int, rows: int, pitch: int) -> Operation:
        """Return the operation that fills ``rows`` rows of ``count`` elements. ``pattern``: the bytes of one element.

        ``pitch``: bytes from the start of a row to the start of the next row.
        """
        if rows > 1:
            row = pattern * count
            return self._rows(context, Shape(len(row), rows), Side(target, pitch), Side(view_address(row), data=row))

        def put(address: int, offset: int, size: int) -> None:
            if len(set(pattern)) == 1:
                ctypes.memset(address, pattern[0], size)
            else:
                ctypes.memmove(address, pattern * (size // len(pattern)), size)

        return PlannedCopy(self, context, target, count * len(pattern), put)

    def _rows(self, context: Context, shape: Shape, target: Side, source: Side) -> Operation:
        not_modelled(self.team_at(target.address), "several rows of a multicast object")
        return BoxCopy(self.banks, context, shape, target, source)

    # -- copies ----------------------------------------------------------------------------------------------

    def _copy_row(self, device: str, target: int, source: int, size: int, hStream: int | None = None) -> None:
        self._copy(Side(target), Side(source), Shape(size), hStream, device)

    cuMemcpy = cuMemcpyAsync = call(_copy_row, "")
    cuMemcpyHtoD = cuMemcpyHtoDAsync = call(_copy_row, "dst")
    cuMemcpyDtoH = cuMemcpyDtoHAsync = call(_copy_row, "src")
    cuMemcpyDtoD = cuMemcpyDtoDAsync = call(_copy_row, "both")

    def _copy_peer(
        self, target: int, context: Context, source: int, other: Context, size: int, hStream: int | None = None
    ) -> None:
        self._copy(Side(target), Side(source), Shape(size), hStream, "both", (context, other))

    cuMemcpyPeer = cuMemcpyPeerAsync = call(_copy_peer)

    def _copy_rows(self, copy: Any, hStream: int | None, depth: int, contexts: Contexts | None = None) -> None:
        """Copy ``depth`` planes between two sides, neither of which is an array.

        ``contexts``: contexts of target and source; None: the current context for both.
        """
        shape = Shape(int(copy.WidthInBytes), int(copy.Height), depth)
        if not shape.size:  # Not checked further: any addresses and pitches.
            self._copy(Side(0), Side(0), shape, hStream)
            return
        target, source, kinds = self._sides(copy, shape)
        self._copy(target, source, shape, hStream, PROMISED.get(kinds, ""), contexts, copy_values(copy, shape))

    def _sides(self, copy: Any, shape: Shape) -> tuple[Side, Side, tuple[int, int]]:
        """Return target and source of a copy without arrays, and a tuple of their memory types."""
        kinds = arguments.number_in(copy, "dstMemoryType"), arguments.number_in(copy, "srcMemoryType")
        not_modelled(ARRAY in kinds, "a copy of a plane of an array")
        return self._side(copy, "dst", kinds[0], shape), self._side(copy, "src", kinds[1], shape), kinds

    @staticmethod
    def _side(copy: Any, side: str, kind: int, shape: Shape) -> Side:
        x, y, z = (int(getattr(copy, side + name, 0)) for name in ("XInBytes", "Y", "Z"))
        check(kind in (OF_HOST, DEVICE, UNIFIED))
        pitch = int(getattr(copy, side + "Pitch")) or x + shape.width
        rows = int(getattr(copy, side + "Height", 0)) or y + shape.height
        address = int(getattr(copy, side + ("Host" if kind == OF_HOST else "Device")))
        check(shape.width <= pitch and shape.height <= rows)
        skipped = (z * rows + y) * pitch + x
        fits = x + shape.width <= pitch and y + shape.height <= rows
        return Side(address + skipped, pitch, rows * pitch, fits, skipped)

    def _copy(
        self,
        target: Side,
        source: Side,
        shape: Shape,
        hStream: int | None = None,
        device: str = "",
        contexts: Contexts | None = None,
        values: Values | None = None,
    ) -> None:
        """Check a copy and submit it, or add it to a captured graph.

        ``device``: the sides that the caller declared as device memory, ``dst``, ``src`` or both. ``hStream``: number
        of the stream's handle; None for a synchronous call. ``contexts``: contexts of target and source; None: the
        current context for both. ``values``: parameters of a graph node; None: those of a copy of one row.

        Pool memory must be accessible from the device of its side's context. Memory of cuMemAlloc can be copied from
        any context (observed on H200: test_two_devices; the driver stages such copies).
        """
        waits = hStream is None
        stream = self.stream(hStream or 0)
        captured = self._captured(stream)
        if not shape.size:
            return
        here = self.current_or_none() or stream.context
        graph = stream.capture.graph if captured else None
        destination, origin = self._check_copy(target, source, shape, device, contexts or (here, here), graph)
        if captured:
            values = values or _values_of_row(target.address, source.address, shape.size, device)
            stream.capture.add("MEMCPY", self.copying(stream.context, shape, target, source), stream, values)
            return
        # Without a current context, each side must lie in one mapping (observed on H200: test_mappings).
        if self.current_or_none() is None:
            for side, end in ((target, destination), (source, origin)):
                if end is not None and end.mapping is not None:
                    check(len(self.span(side.address, side.span(shape))) == 1)
        at_once = origin is not None or destination is None or self._quiet(stream, shape.size)
        # If a copy from pageable memory runs later, its source is read now, because the program may change it after the
        # call.
        source = source if at_once else source.read(shape)
        stream.submit(self.copying(stream.context, shape, target, source))
        ends = destination, origin
        of_host = [end is None or end.on_host for end in ends]
        # Memory of a host pool to which a device has access is copied like device memory (observed on H200:
        # test_copies).
        by_host = all(end is None or (end.on_host and end.pool is None) for end in ends)
        if destination is None or by_host or (waits and any(of_host)):
            self._finish(stream)

    def _quiet(self, stream: Stream, size: int) -> bool:
        """Whether an operation of ``size`` bytes, submitted now, would run before the call returns."""
        return not stream.catch_up() and stream.idle and size <= STEP and not self.scheduler.seeded

    def _finish(self, stream: Stream) -> None:
        """Wait for the submitted copy, without the effect that a synchronising call has on pools.

        Memory freed before the copy does not become reusable for other streams (observed on H200: test_placements's
        test_another_stream_reuses_after).
        """
        seq = stream.seq
        if stream.done < seq:
            self.scheduler.wait(lambda: stream.done >= seq)
        stream.context.check()

    def _check_copy(
        self, target: Side, source: Side, shape: Shape, device: str, contexts: Contexts, graph: NodeGraph | None
    ) -> tuple[LiveMemory | None, LiveMemory | None]:
        """Check both sides of a copy.

        Returns a tuple of the allocations of target and source; None for a side that the host copies.

        ``graph``: the graph to which the copy is added, else None. Addresses of the graph's own memory have no
        allocation yet.
        """
        found: list[LiveMemory | None] = []
        lost = ""
        ends = ((target, "dst", READ_WRITE), (source, "src", READ))
        for (side, name, needed), context in zip(ends, contexts, strict=True):
            address, size = side.address, side.span(shape)
            if graph is not None and graph.contains(address):
                check(side.fits and graph.covers(address, size))
                found.append(None)
                continue
            end = self._copy_end(address, size, device in (name, "both"), context, side.skipped)
            check(side.fits or (end is not None and end.pool is not None))
            found.append(end if self._check_mapped(address, size, end, needed, context) else None)
            lost = lost or self._lost(address, size, end, needed == READ_WRITE, graph is None)
        destination, origin = found
        if destination is not None and destination.mapping is not None and origin is None:
            unable = least_right(self.span(target.address, target.span(shape)), HOST) == READ
            not_modelled(unable, "a copy by the host to memory that it may only read: the real driver crashes")
        # This check comes last, because any other fault of the copy determines the result code (observed on H200:
        # test_copies).
        not_modelled(lost, lost)
        return destination, origin

    def _copy_end(
        self, address: int, size: int, must_be_device: bool, context: Context, skipped: int = 0
    ) -> LiveMemory | None:
        """Return the allocation of one side of a copy; None for pageable host memory.

        ``address``: address of the side's first copied byte. ``skipped``: bytes between the address that the caller
        named and this byte. ``must_be_device``: whether the name or the struct of the call says that the side is device
        memory.
        """
        start = address - skipped
        allocation = self.allocations.find(start)
        if allocation is None or not allocation.known:
            # Memory of a host pool without device access is unknown to the driver, which copies it as pageable memory.
            check(start and not must_be_device)
            return None
        if allocation.mapping is not None:
            return allocation  # The range is checked by the caller, because the range may continue in the next mapping.
        # Memory of a host pool is never taken for device memory, even if devices have access (observed on H200:
        # test_copies).
        check(not (must_be_device and allocation.pool is not None and allocation.on_host))
        # For pool memory the driver checks the span of the rows from the allocation's start, even if the rows begin
        # elsewhere (observed on H200: test_planes).
        check((address if allocation.pool is None else start) + size <= allocation.end)
        check(allocation.pool is None or allocation.pool.usable(context.device.ordinal))
        arena = self.banks.arenas.find(start) if skipped else None
        not_modelled(arena and address + size > arena.end, "a copy of rows that lie behind the addresses of a pool")
        return allocation

    def _lost(self, address: int, size: int, end: LiveMemory | None, write: bool, now: bool = True) -> str:
        """Return the reason why host memory on one side of a copy cannot be used; an empty text if it can.

        ``now`` is False for a copy in a graph, which uses the memory later: then pageable memory need not exist yet.
        """
        if end is None:
            freed = self.banks.arenas.find(address) is not None and self.allocations.find(address) is None
            return LOST if freed or (now and not is_accessible(address, size, write)) else ""
        return GONE if is_gone(end, address, size) else ""

    def _check_mapped(self, address: int, size: int, end: LiveMemory | None, needed: int, context: Context) -> bool:
        """Check that a copy in ``context`` can access one of its sides, if this side is mapped memory.

        Returns False if only the host has access. Then the host copies the side like pageable memory (observed on H200:
        test_planes).
        """
        if end is None or end.mapping is None:
            return True
        mappings = self.span(address, size)
        if least_right(mappings, device_place(context.device.ordinal)) & needed == needed:
            not_modelled(needed == READ and any(mapping.is_multicast for mapping in mappings), _READING)
            self._check_team(address, size)
            return True
        check(all(mapping.memory.properties.device is None for mapping in mappings))
        refused = least_right(mappings, HOST) & needed != needed
        not_modelled(refused, "a copy of mapped host memory that neither the device nor the host may use")
        return False

    def _check_team(self, address: int, size: int) -> None:
        """Check that all devices of the teams have memory under a range of multicast mappings.

        The PTX manual defines only writes by multimem instructions; users report that copies reach every device
        (NVIDIA/Fuser#5620).
        """
        for mapping in self.span(address, size):
            if isinstance(mapping.memory, MulticastMemory):
                first, end = max(address, mapping.base), min(address + size, mapping.end)
                mapping.memory.check_bound(first - mapping.base, end - first)

    # -- multicast mappings ----------------------------------------------------------------------------------

    def replicas(self, address: int, size: int) -> dict[int, list[Segment]] | None:
        """Return the segments behind a range of one multicast mapping, by the number of the device
        (:meth:`.Labels.number`). None if a device has no memory under a part of the range, or if the range is not in
        one such mapping.
        """
        found = self.team_at(address)
        if found is None or address + size > found[0].end:
            return None
        replicas = found[1].replicas(address - found[0].base, size)
        return None if incomplete(replicas, size) else replicas

    def targets(self, address: int, size: int) -> list[Segment] | None:
        """Return the segments of memory that a write to a range reaches, in multicast mappings and ordinary mappings.

        ``at`` of a segment counts from ``address``. None if a part of the range is unmapped or has no memory.
        """
        targets: list[Segment] = []
        end = address + size
        at = address
        while at < end:
            mapping = self.mapping_at(at)
            if mapping is None:
                return None
            stop = min(end, mapping.end)
            if isinstance(mapping.memory, CreatedMemory):
                targets.append(Segment(at, at - address, stop - at))
            else:
                replicas = self.replicas(at, stop - at)
                if replicas is None:
                    return None
                for segments in replicas.values():
                    targets += [Segment(to, at - address + inside, length) for to, inside, length in segments]
            at = stop
        return targets

    # -- batches ---------------------------------------------------------------------------------------------

    def cuMemcpyBatchAsync(
        self, dsts: Any, srcs: Any, sizes: Any, count: Size, attrs: Any, attrsIdxs: Any, numAttrs: Size, hStream: Any
    ) -> int | None:
        targets = [Side(int(one)) for one in arguments.structs("dsts", dsts, cuda.CUdeviceptr, count)]
        sources = [Side(int(one)) for one in arguments.structs("srcs", srcs, cuda.CUdeviceptr, count)]
        lengths = [arguments.size_t(one) for one in list(sizes)[:count]]
        attributes = arguments.structs("attrs", attrs, cuda.CUmemcpyAttributes, numAttrs)
        begins = [arguments.size_t(one) for one in list(attrsIdxs)[:numAttrs]]
        stream = self._stream_of_batch(hStream, count and all(lengths))
        orders = arguments.by_start(map(self._order, attributes), begins, count)
        self._copy_all(stream, list(zip(targets, sources, map(Shape, lengths), orders, strict=True)), _waits_for_row)
        return _NO_COPY_FAILED

    def cuMemcpy3DBatchAsync(self, numOps: Size, opList: Any, flags: UnsignedLongLong, hStream: Any) -> int | None:
        boxes = arguments.structs("opList", opList, cuda.CUDA_MEMCPY3D_BATCH_OP, numOps)
        stream = self._stream_of_batch(hStream, boxes and not flags)
        self._copy_all(stream, [self._box_of(one) for one in boxes], _waits_for_box)
        return _NO_COPY_FAILED

    def _stream_of_batch(self, hStream: Any, valid: object) -> Stream:
        handle = arguments.stream(hStream)
        check(self.current_or_none() is not None and valid and handle not in (0, LEGACY_STREAM))
        return self.stream(handle)

    def _copy_all(self, stream: Stream, copies: list[tuple[Side, Side, Shape, int]], waits_for: WaitsFor) -> None:
        """Submit the copies of a batch: tuples of target, source, shape and source access order. ``waits_for``: decides
        for each copy whether the host waits.
        """
        # A batch cannot be captured, but the refused call leaves the capture valid (observed on H200: test_copies).
        check(stream.capture is None, Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        context = self.current()
        ends = [self._check_copy(*one[:3], "", (context, context), None) for one in copies]
        waits = False
        for (target, source, shape, order), (destination, origin) in zip(copies, ends, strict=True):
            staged, waits_now = waits_for(order, destination, origin)
            source = source.read(shape) if staged else source
            stream.submit(self.copying(stream.context, shape, target, source))
            waits |= waits_now
        if waits:
            self._finish(stream)

    @staticmethod
    def _box_of(one: Any) -> tuple[Side, Side, Shape, int]:
        """Return target, source, shape and source access order of a CUDA_MEMCPY3D_BATCH_OP.

        A row length of 0 stands for the width of the box, a layer height of 0 for the height of the box.
        """
        extent, order = one.extent, arguments.number_in(one, "srcAccessOrder")
        width, height, depth = int(extent.width), int(extent.height), int(extent.depth)
        check(width and height and depth and order in _ORDERS and int(one.flags) in (0, _OVERLAP))
        sides = []
        for side in (one.dst, one.src):
            not_modelled(arguments.number_in(side, "type") != _POINTER, "a batch of copies of arrays")
            row, rows = int(side.op.ptr.rowLength) or width, int(side.op.ptr.layerHeight) or height
            check(width <= row and height <= rows)
            sides.append(Side(int(side.op.ptr.ptr), row, row * rows))
        return sides[0], sides[1], Shape(width, height, depth), order

    def _order(self, attributes: Any) -> int:
        order = ctypes.c_int.from_address(int(attributes.getPtr())).value
        check(order in _ORDERS and int(attributes.flags) in (0, _OVERLAP))
        for location in (attributes.srcLocHint, attributes.dstLocHint):
            if arguments.number_in(location, "type") == Location.DEVICE:
                check(0 <= int(location.id) < len(self.devices))
        return order


WaitsFor = Callable[[int, "LiveMemory | None", "LiveMemory | None"], tuple[bool, bool]]
"""Function of the source access order and of the allocations of target and source (None for pageable memory) of a copy.
Returns two answers: whether the call reads the source before it returns, and whether the host waits for the copy.
"""


def _waits_for_row(order: int, destination: LiveMemory | None, origin: LiveMemory | None) -> tuple[bool, bool]:
    """Return two answers for a copy of a row in a batch (:data:`WaitsFor`): whether the call reads the source early,
    that is before it returns, and whether the host waits for the copy.

    Observed on H200 (test_copies):

    * In stream order the call reads nothing early. It waits for a copy from pageable memory to a device.
    * In the other orders the call reads a pageable source early.
    * With the order "before the call returns", the call also reads pinned memory early if the target is pageable. It
      waits for all copies whose source it does not read early.
    """
    if order == _IN_STREAM:
        return False, origin is None and destination is not None and not destination.on_host
    staged = origin is None or (order == _AT_CALL and destination is None and origin.on_host)
    return staged, order == _AT_CALL and not staged


def _waits_for_box(order: int, destination: LiveMemory | None, origin: LiveMemory | None) -> tuple[bool, bool]:
    return origin is None, order == _AT_CALL or destination is None


def copy_values(copy: Any, shape: Shape) -> Values:
    """Return the fields of a copy struct of two or three dimensions as a dictionary, with the field names of a
    CUDA_MEMCPY3D.
    """
    values = {name: int(getattr(copy, name) or 0) for name in COPY_FIELDS if hasattr(copy, name)}
    return {**values, "Height": shape.height, "Depth": shape.depth}


def _values_of_row(target: int, source: int, size: int, device: str) -> Values:
    """Return the parameters of a graph node that copies one row, as fields of a CUDA_MEMCPY3D. ``device``: the sides
    that are declared device memory.
    """
    values: Values = {"WidthInBytes": size, "Height": 1, "Depth": 1}
    for side, at in (("dst", target), ("src", source)):
        kind = UNIFIED if not device else DEVICE if device in (side, "both") else OF_HOST
        values[side + "MemoryType"] = kind
        values[side + ("Host" if kind == OF_HOST else "Device")] = at
    return values
