"""Copies in batches."""

from __future__ import annotations

import ctypes
from typing import Any

from streamalloc.driver.bindings import cuda

from .. import arguments
from ..allocations import Allocation
from ..arguments import Size, UnsignedLongLong
from ..constants import LEGACY_STREAM, Location
from ..copy_operations import Copy, Shape
from ..errors import Result, check, not_modelled
from ..timeline import Stream
from .base import EDGE_DATA
from .copies import CopyCalls

# CUmemcpySrcAccessOrder: sources are read in stream order, before the call returns, or whenever it is best.
_IN_STREAM, _AT_CALL, _ANY = _ORDERS = 1, 2, 3
_POINTER = 1  # CUmemcpy3DOperandType
_OVERLAP = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class BatchCalls(CopyCalls):
    """cuMemcpyBatchAsync, cuMemcpy3DBatchAsync."""

    if EDGE_DATA:  # earlier bindings return more

        def cuMemcpyBatchAsync(
            self,
            dsts: Any,
            srcs: Any,
            sizes: Any,
            count: Size,
            attrs: Any,
            attrsIdxs: Any,
            numAttrs: Size,
            hStream: Any,
        ) -> None:
            targets = [int(one) for one in arguments.structs("dsts", dsts, cuda.CUdeviceptr, count)]
            sources = [int(one) for one in arguments.structs("srcs", srcs, cuda.CUdeviceptr, count)]
            lengths = [arguments.size_t(one) for one in list(sizes)[:count]]
            attributes = arguments.structs("attrs", attrs, cuda.CUmemcpyAttributes, numAttrs)
            begins = [arguments.size_t(one) for one in list(attrsIdxs)[:numAttrs]]
            check(self._machine.current_or_none() is not None and count and all(lengths))
            check(arguments.stream(hStream) not in (0, LEGACY_STREAM))
            stream = self._stream(hStream)
            check(begins and begins[0] == 0 and begins[-1] < count and begins == sorted(set(begins)))
            orders = [self._order(one) for one in attributes]
            # the capture stays valid (observed on H200: test_batches)
            check(stream.capture is None, Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
            context = self._machine.current()
            ends = [
                self._check_copy(target, source, Shape.row(size), "", (context, context))
                for target, source, size in zip(targets, sources, lengths, strict=True)
            ]
            waits = False
            for number, (target, source, size) in enumerate(zip(targets, sources, lengths, strict=True)):
                order = orders[sum(begin <= number for begin in begins) - 1]
                waits |= self._copy_one_of_batch(stream, target, source, size, order, *ends[number])
            if waits:
                self._finish(stream)

        def cuMemcpy3DBatchAsync(self, numOps: Size, opList: Any, flags: UnsignedLongLong, hStream: Any) -> None:
            boxes = arguments.structs("opList", opList, cuda.CUDA_MEMCPY3D_BATCH_OP, numOps)
            check(self._machine.current_or_none() is not None and boxes and not flags)
            check(arguments.stream(hStream) not in (0, LEGACY_STREAM))
            stream = self._stream(hStream)
            shapes = [self._box_of(one) for one in boxes]
            check(stream.capture is None, Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
            context = self._machine.current()
            waits = False
            ends = [
                self._check_copy(target, source, shape, "", (context, context)) for target, source, shape, _ in shapes
            ]
            for (target, source, shape, order), (destination, origin) in zip(shapes, ends, strict=True):
                taken = ctypes.string_at(source, shape.source_span) if origin is None else source
                stream.submit(shape.copy(self._machine, context, target, taken))
                waits |= order == _AT_CALL or destination is None
            if waits:
                self._finish(stream)

    @staticmethod
    def _box_of(one: Any) -> tuple[int, int, Shape, int]:
        """Target, source, shape and order of an entry. A row length or layer height of 0 means that of the copy."""
        extent, order = one.extent, arguments.number_in(one, "srcAccessOrder")
        width, height, depth = int(extent.width), int(extent.height), int(extent.depth)
        check(width and height and depth and order in _ORDERS and int(one.flags) in (0, _OVERLAP))
        steps = []
        for side in (one.dst, one.src):
            not_modelled(arguments.number_in(side, "type") != _POINTER, "a batch of copies of arrays")
            row, rows = int(side.op.ptr.rowLength) or width, int(side.op.ptr.layerHeight) or height
            check(width <= row and height <= rows)
            steps.append((row, row * rows))
        shape = Shape(width, height, depth, *steps[0], *steps[1])
        return int(one.dst.op.ptr.ptr), int(one.src.op.ptr.ptr), shape, order

    def _order(self, attributes: Any) -> int:
        order = ctypes.c_int.from_address(int(attributes.getPtr())).value
        check(order in _ORDERS and int(attributes.flags) in (0, _OVERLAP))
        for location in (attributes.srcLocHint, attributes.dstLocHint):
            if arguments.number_in(location, "type") == Location.DEVICE:
                check(0 <= int(location.id) < len(self._machine.devices))
        return order

    def _copy_one_of_batch(
        self,
        stream: Stream,
        target: int,
        source: int,
        size: int,
        order: int,
        destination: Allocation | None,
        origin: Allocation | None,
    ) -> bool:
        """Whether the call has to wait: for pageable memory that a device reads in stream order, and for memory that is
        to be read before the call returns, unless the host does that (observed on H200: test_batches).
        """
        staged = order != _IN_STREAM and (
            origin is None or (order == _AT_CALL and destination is None and origin.on_host)
        )
        taken = ctypes.string_at(source, size) if staged else source
        stream.submit(Copy(self._machine, stream.context, target, taken, size))
        if order == _AT_CALL:
            return not staged
        return order == _IN_STREAM and origin is None and destination is not None and not destination.on_host
