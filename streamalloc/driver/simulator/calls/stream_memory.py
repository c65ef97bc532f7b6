"""Stream memory operations: wait for a value in memory, write a value."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

from streamalloc.driver.bindings import cuda

from .. import arguments
from ..allocations import GraphAllocation, PoolMemory, is_gone
from ..arguments import Stream, UnsignedInt
from ..constants import READ_WRITE, device_place
from ..contexts import Context
from ..errors import Result, check, need, not_modelled
from ..timeline import Call, Operation, Until
from .base import GONE, Calls, call

# Comparisons of the value in memory with the given value, by flag.
_GEQ, _EQ, _AND, _NOR = range(4)
_FLUSH = 1 << 30
# CUstreamBatchMemOpType
_WAIT_32, _WRITE_32, _FLUSH_REMOTE, _WAIT_64, _WRITE_64, _BARRIER = range(1, 7)
_ENTRY = struct.Struct("=i4xQQI")  # of a CUstreamBatchMemOpParams
_BARRIER_FLAGS = struct.Struct("=4xI")
_MOST = 255
"""Operations of a batch (observed on H200: test_stream_words)."""

_WORDS = {32: ctypes.c_uint32, 64: ctypes.c_uint64}


def _comparison(flag: int, bits: int) -> Callable[[int, int], bool]:
    mask = (1 << bits) - 1
    comparisons: dict[int, Callable[[int, int], bool]] = {
        _GEQ: lambda word, value: ((word - value) & mask) < 1 << (bits - 1),  # cyclic
        _EQ: lambda word, value: word == value,
        _AND: lambda word, value: word & value != 0,
        _NOR: lambda word, value: ~(word | value) & mask != 0,
    }
    check(flag in comparisons)
    return comparisons[flag]


class Batch(Operation):
    """Several stream memory operations in sequence."""

    def __init__(self, parts: list[Operation]) -> None:
        self._parts = parts
        self._at = 0
        self.polled: bool = any(part.polled for part in parts)

    def held(self) -> bool:
        return self._at < len(self._parts) and self._parts[self._at].held()

    def step(self) -> bool:
        while self._at < len(self._parts):
            if self.held():
                return False
            self._parts[self._at].step()
            self._at += 1
        return True


class StreamMemoryCalls(Calls):
    """cuStreamWaitValue*, cuStreamWriteValue*, cuStreamBatchMemOp."""

    def _one(self, kind: int, stream: Stream, address: int, value: int, flags: int) -> None:
        captured = self._captured(stream)
        operation = self._word_operation(stream.context, kind, address, value, flags, captured)
        self._submit(stream, operation, "BATCH_MEM_OP")

    cuStreamWaitValue32: Any = call("stream addr value:Word32 flags", _one, _WAIT_32)
    cuStreamWaitValue64: Any = call("stream addr value:Word64 flags", _one, _WAIT_64)
    cuStreamWriteValue32: Any = call("stream addr value:Word32 flags", _one, _WRITE_32)
    cuStreamWriteValue64: Any = call("stream addr value:Word64 flags", _one, _WRITE_64)

    def cuStreamBatchMemOp(self, stream: Stream, count: UnsignedInt, paramArray: Any, flags: UnsignedInt) -> None:
        captured = self._captured(stream)
        operation = self._batch(stream.context, paramArray, count, flags, captured)
        if captured:
            stream.capture.add("BATCH_MEM_OP", operation, stream)
        elif count:
            stream.submit(operation)

    def _batch(self, context: Context, params: Any, count: int, flags: int, in_graph: bool) -> Operation:
        wanted = arguments.structs("paramArray", params, cuda.CUstreamBatchMemOpParams, count)
        check(not flags and count <= _MOST)
        return Batch([self._batched(context, one, in_graph) for one in wanted])

    def _batched(self, context: Context, one: Any, in_graph: bool) -> Operation:
        """The operation of a batch entry. Each entry begins with its kind; waits and writes have one layout."""
        entry = ctypes.string_at(int(one.getPtr()), _ENTRY.size)
        kind, address, value, flags = _ENTRY.unpack(entry)
        check(kind != _FLUSH_REMOTE, Result.CUDA_ERROR_NOT_SUPPORTED)
        if kind == _BARRIER:
            check(_BARRIER_FLAGS.unpack(entry[: _BARRIER_FLAGS.size])[0] in (0, 1))
            return Operation()
        check(kind in (_WAIT_32, _WRITE_32, _WAIT_64, _WRITE_64))
        return self._word_operation(context, kind, address, value, flags, in_graph)

    def _word_operation(
        self, context: Context, kind: int, address: int, value: int, flags: int, in_graph: bool
    ) -> Operation:
        bits = 32 if kind in (_WAIT_32, _WRITE_32) else 64
        written = kind in (_WRITE_32, _WRITE_64)
        check(address % (bits // 8) == 0)
        missing = in_graph and self._machine.allocations.find(address) is None
        not_modelled(missing, "a word that is not there in a graph: it is the launch that fails")
        self._check_word(context, address, bits, written)
        # a queued operation must not keep the driver object alive, whose end closes the machine
        machine, word = self._machine, _WORDS[bits]
        if written:
            # CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER is refused, too (observed on H200: test_mapped_words).
            check(not flags)

            def write() -> None:
                if machine.banks.is_mapped(address, bits // 8, write=True):
                    word.from_address(address).value = value
                    machine.timeline.announce()
                else:
                    context.error = Result.CUDA_ERROR_ILLEGAL_ADDRESS

            return Call(write)
        # observed on H200 (test_mapped_words); CAN_FLUSH_REMOTE_WRITES says so
        check(not flags & _FLUSH, Result.CUDA_ERROR_NOT_SUPPORTED)
        compare = _comparison(flags, bits)

        def arrived() -> bool:
            if not machine.banks.is_mapped(address, bits // 8):
                context.error = Result.CUDA_ERROR_ILLEGAL_ADDRESS
                return True
            return compare(word.from_address(address).value, value)

        return Until(arrived)

    def _check_word(self, context: Context, address: int, bits: int, written: bool) -> None:
        """Check an aligned address in device, pinned, registered or mapped memory. Memory of pools and graphs is
        refused (observed on H200: test_stream_words).
        """
        allocation = need(self._machine.allocations.find(address))
        check(not isinstance(allocation, (PoolMemory, GraphAllocation)))
        if allocation.mapping is not None:
            not_modelled(allocation.mapping.is_multicast, "waiting for or writing a word of a multicast object")
            right = allocation.mapping.right(device_place(context.device.ordinal))
            check(right)  # at the call; a later grant has no effect (observed on H200: test_mapped_words)
            refused = written and right != READ_WRITE
            not_modelled(refused, "writing a word of memory that may only be read: the context breaks")
        check(address + bits // 8 <= allocation.base + max(allocation.size, 8))
        not_modelled(is_gone(allocation, address, bits // 8), GONE)
