"""Driver calls for streams, events and host functions, and stream memory operations: waits for a value in memory, and
writes of a value to memory.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

from streamalloc.driver.bindings import WAIT_COMPARISONS, cuda, opaque_bytes, opaque_struct
from streamalloc.simulator import arguments, constants, contexts
from streamalloc.simulator.allocations import GraphAllocation, PoolMemory, is_gone
from streamalloc.simulator.arguments import Event, HostPointer, Int, Stream, StreamCallback, UnsignedInt
from streamalloc.simulator.calls.base import GONE, Calls, call
from streamalloc.simulator.constants import HANDLE_BYTES, LEGACY_STREAM, READ_WRITE, EventFlag, device_place
from streamalloc.simulator.contexts import Context
from streamalloc.simulator.errors import DeadlockError, Fault, Result, check, need, not_modelled
from streamalloc.simulator.scheduler import HostFunction, Operation, QueuedCall, Until

_NON_BLOCKING = 1

# Flags that cuEventCreate accepts. An interprocess event must not measure time (observed on H200: test_streams).
_EVENT_FLAGS = {f for f in range(8) if not f & EventFlag.INTERPROCESS or f & EventFlag.DISABLE_TIMING}

_EXTERNAL = 1
"""Value of CU_EVENT_WAIT_EXTERNAL and CU_EVENT_RECORD_EXTERNAL: in a capture, the call adds an event node to the
graph.
"""


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)


# Attributes of a stream that a program can set (CUstreamAttrID).
_WINDOW, _POLICY, _PRIORITY, _DOMAIN_MAP, _DOMAIN = 1, 3, 8, 9, 10
_NUMBER = struct.Struct("=i")
_PAIR = struct.Struct("=BB")
_ACCESS = struct.Struct("=QQfii")
_PERSISTING = 2  # CUaccessProperty
_POLICIES = range(1, 5)  # CUsynchronizationPolicy
_DOMAINS = 4

# Value of each of these attributes for a new stream (observed on H200: test_streams).
_DEFAULTS = {
    _WINDOW: _ACCESS.pack(0, 0, 0.0, 0, 0),
    _POLICY: _NUMBER.pack(-1),
    _DOMAIN_MAP: _PAIR.pack(0, 1),
    _DOMAIN: _NUMBER.pack(0),
}
_FLUSH = 1 << 30
# CUstreamBatchMemOpType
_WAIT_32, _WRITE_32, _FLUSH_REMOTE, _WAIT_64, _WRITE_64, _BARRIER = range(1, 7)
_ENTRY = struct.Struct("=i4xQQI")  # Layout of an entry of CUstreamBatchMemOpParams.
_BARRIER_FLAGS = struct.Struct("=4xI")
_MOST = 255
"""Largest number of operations in a batch (observed on H200: test_stream_words)."""

_WORDS = {32: ctypes.c_uint32, 64: ctypes.c_uint64}


class Batch(Operation):
    """Operation of ``cuStreamBatchMemOp``: several stream memory operations in sequence."""

    def __init__(self, parts: list[Operation]) -> None:
        self._parts = parts
        self._at = 0
        self.polled: bool = any(part.polled for part in parts)

    def is_blocked(self) -> bool:
        return self._at < len(self._parts) and self._parts[self._at].is_blocked()

    def step(self) -> bool:
        while self._at < len(self._parts):
            if self.is_blocked():
                return False
            self._parts[self._at].step()
            self._at += 1
        return True


class StreamCalls(Calls):
    """The calls cuStream* and cuEvent*, except those for captures and managed memory; and cuLaunchHostFunc."""

    # -- streams ---------------------------------------------------------------------------------------------

    def cuStreamCreateWithPriority(self, flags: UnsignedInt, priority: Int) -> Any:
        least, greatest = self.profile.stream_priorities
        return self._create_stream(flags, min(max(priority, greatest), least))

    def _create_stream(self, flags: int, priority: int = 0) -> Any:
        check(flags in (0, _NON_BLOCKING))
        return cuda.CUstream(self.current().create_stream(flags != _NON_BLOCKING, priority).handle)

    cuStreamCreate = call(_create_stream)

    def cuStreamDestroy(self, hStream: Stream) -> None:
        check(hStream.handle not in (LEGACY_STREAM, constants.PER_THREAD_STREAM), Result.CUDA_ERROR_INVALID_VALUE)
        self.destroy_stream(hStream)

    def cuStreamQuery(self, hStream: Stream) -> None:
        self._not_captured(hStream)
        if not hStream.idle and not self.scheduler.seeded:
            self.scheduler.pump()
        check(hStream.idle, Result.CUDA_ERROR_NOT_READY)
        hStream.context.check()

    def cuStreamSynchronize(self, hStream: Stream) -> None:
        self._not_captured(hStream)
        head = hStream.operations[0] if hStream.operations else None
        if isinstance(head, HostFunction) and head.ident == self.scheduler.caller.ident:
            raise DeadlockError("a host function waits for its own stream")  # Observed on H200: test_streams.
        clock = hStream.done_with()
        goals = [(hStream, hStream.seq)] + [(peer, peer.seq) for peer in hStream.peers or ()]
        # Pools learn of the wait only if the stream has a rank, which it gets from work with pools (observed on H200:
        # test_placements).
        told = hStream.id in self.scheduler.ranks
        self.synchronize(clock, lambda: all(s.done >= seq for s, seq in goals), told)
        hStream.context.check()

    def _shown(self, describe: Callable[[Stream], object], breaks: bool, stream: Stream) -> Any:
        """Return a property of a stream, as ``describe`` reads it.

        The call fails for the legacy stream while a blocking stream is being captured. With ``breaks`` it also fails
        for a stream that is being captured. Each failure invalidates the capture (observed on H200: test_capture).
        """
        self._not_behind_captures(stream)
        if breaks:
            self._spoil([stream.capture])
        return describe(stream)

    cuStreamGetFlags = call(_shown, lambda it: 0 if it.blocking else _NON_BLOCKING, True, hStream=Stream)
    cuStreamGetPriority = call(_shown, lambda stream: stream.priority, False, hStream=Stream)
    cuStreamGetDevice = call(_shown, lambda it: cuda.CUdevice(it.context.device.ordinal), True, hStream=Stream)
    cuStreamGetId = call(_shown, lambda stream: stream.id, True, hStream=Stream)

    def cuStreamGetCtx(self, hStream: Stream) -> Any:
        self._not_behind_captures(hStream)
        # The call is allowed during a capture unless the capture is invalid (observed on H200: test_capture).
        check(hStream.capture is None or hStream.capture.valid, Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        return cuda.CUcontext(hStream.context.handle)

    # -- waits and host functions ----------------------------------------------------------------------------

    def cuStreamWaitEvent(self, hStream: Stream, hEvent: Event, Flags: UnsignedInt) -> None:
        # The stream's capture is checked before the event, even if the event was never recorded (observed on H200:
        # test_capture).
        captured = self._captured(hStream)
        check(Flags in (0, _EXTERNAL))
        if hEvent.capture is not None and not hEvent.capture.running:
            self._spoil([hStream.capture], Result.CUDA_ERROR_INVALID_VALUE)
            raise Fault(Result.CUDA_ERROR_INVALID_VALUE)
        check(not Flags or captured, Result.CUDA_ERROR_ILLEGAL_STATE)
        if captured and hEvent.flags & EventFlag.INTERPROCESS:
            hStream.capture.fail(Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        if Flags:
            hStream.capture.add("WAIT_EVENT", None, hStream, {"event": hEvent}).enter = hEvent.make_wait
            return
        if hEvent.capture is not None:
            hEvent.capture.join(hStream, hEvent)
            return
        if captured:
            if hEvent.record is not None:
                # A graph cannot wait for the event's work, which is outside of the graph.
                hStream.capture.fail(Result.CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
            return
        hEvent.make_wait(hStream)

    def cuLaunchHostFunc(self, hStream: Stream, fn: arguments.HostFunctionHandle, userData: HostPointer) -> None:
        operation = self._host_function(fn, userData)
        self._submit(hStream, operation, "HOST", lambda: {"fn": cuda.CUhostFn(fn), "userData": userData})

    def cuStreamAddCallback(
        self, hStream: Stream, callback: StreamCallback, userData: HostPointer, flags: UnsignedInt
    ) -> None:
        check(not flags)
        not_modelled(not callback, "cuStreamAddCallback without a function: the real driver crashes")
        self._spoil([hStream.capture])
        function, handle = _CALLBACK(callback), hStream.handle
        hStream.submit(self._queued_function(lambda: function(handle, 0, userData or None)))

    # -- events ----------------------------------------------------------------------------------------------

    def cuEventCreate(self, Flags: UnsignedInt) -> Any:
        context = self.current()
        check(Flags in _EVENT_FLAGS)
        return cuda.CUevent(self.events.add(contexts.Event(context, Flags)).handle)

    def cuEventDestroy(self, hEvent: Event) -> None:
        del self.events[hEvent.handle]

    def cuEventRecordWithFlags(self, hEvent: Event, hStream: Stream, flags: UnsignedInt) -> None:
        check(flags in (0, _EXTERNAL))
        if not flags:
            self._record(hEvent, hStream)
            return
        check(hStream.capture is not None, Result.CUDA_ERROR_ILLEGAL_STATE)
        check(self._captured(hStream))
        hStream.capture.add("EVENT_RECORD", None, hStream, {"event": hEvent}).enter = hEvent.record_in

    def _record(self, event: Event, stream: Stream) -> None:
        check(stream.context is event.context, Result.CUDA_ERROR_INVALID_HANDLE)
        if self._captured(stream):
            # This refusal leaves the capture valid. A later wait for such an event would invalidate it (observed on
            # H200: test_capture).
            check(not event.flags & EventFlag.INTERPROCESS, Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
            stream.capture.record(event, stream)
        else:
            event.record_in(stream)

    cuEventRecord = call(_record, hStream=Stream)

    def _check_captured(self, event: Event) -> None:
        """Refuse a query of an event whose last record was in a capture, even if this capture has ended or is invalid.

        If the capture is running and valid, it becomes invalid.
        """
        if event.capture is not None:
            check(event.capture.running and event.capture.valid)
            self._spoil([event.capture], Result.CUDA_ERROR_CAPTURED_EVENT)

    def cuEventQuery(self, hEvent: Event) -> None:
        self._check_captured(hEvent)
        self._unsafe_during_capture()
        if not hEvent.complete and not self.scheduler.seeded:
            self.scheduler.pump()
        check(hEvent.complete, Result.CUDA_ERROR_NOT_READY)

    def cuEventSynchronize(self, hEvent: Event) -> None:
        self._check_captured(hEvent)
        self._unsafe_during_capture()
        elsewhere = hEvent.elsewhere
        if elsewhere is not None:
            self.scheduler.wait(elsewhere.arrival(), polled=True)
            return
        record = hEvent.record
        if record is not None:
            if hEvent.flags & EventFlag.INTERPROCESS:
                self.scheduler.wait(lambda: record.complete)
            else:
                self.synchronize(record.clock, lambda: record.complete)
            record.stream.context.check()

    def cuEventElapsedTime(self, hStart: Event, hEnd: Event) -> float:
        records = []
        for event in (hStart, hEnd):
            check(event.capture is None or (event.capture.running and event.capture.valid))
            # This refusal leaves the capture valid, unlike the refusal of cuEventQuery (observed on H200:
            # test_capture).
            check(event.capture is None, Result.CUDA_ERROR_CAPTURED_EVENT)
            check(not event.flags & EventFlag.DISABLE_TIMING, Result.CUDA_ERROR_INVALID_HANDLE)
            records.append(need(event.record, Result.CUDA_ERROR_INVALID_HANDLE))
        check(hStart.complete and hEnd.complete, Result.CUDA_ERROR_NOT_READY)
        return (records[1].when - records[0].when) * 1000

    cuEventElapsedTime_v2 = cuEventElapsedTime

    # -- attributes: they are kept, and change nothing but the priority that a stream says it has --------------

    def cuStreamGetAttribute(self, hStream: Stream, attr: Any) -> Any:
        stream, number = hStream, int(attr)
        check(number in _DEFAULTS or number == _PRIORITY)
        kept = {_PRIORITY: _NUMBER.pack(stream.priority), **_DEFAULTS, **stream.attributes}[number]
        return opaque_struct("CUstreamAttrValue", kept.ljust(HANDLE_BYTES, b"\0"))

    def cuStreamSetAttribute(self, hStream: Stream, attr: Any, value: Any) -> None:
        stream, number = hStream, int(attr)
        not_modelled(value is None, "cuStreamSetAttribute of None: the real driver crashes")
        given = opaque_bytes(value)
        if number == _PRIORITY:
            least, greatest = self.profile.stream_priorities
            stream.priority = min(max(_NUMBER.unpack_from(given)[0], greatest), least)
            return
        check(number in _DEFAULTS)
        self._check(stream, number, given)
        stream.attributes[number] = given[: len(_DEFAULTS[number])]

    @staticmethod
    def _check(stream: Stream, number: int, given: bytes) -> None:
        if number == _POLICY:
            check(_NUMBER.unpack_from(given)[0] in _POLICIES)
        elif number == _DOMAIN:
            check(_NUMBER.unpack_from(given)[0] in (0, 1))
        elif number == _DOMAIN_MAP:
            check(max(_PAIR.unpack_from(given)) < _DOMAINS)
        else:
            _, size, ratio, _, missing = _ACCESS.unpack_from(given)
            check(0 <= ratio <= 1 and missing != _PERSISTING)
            check(size <= stream.context.device.attributes["MAX_ACCESS_POLICY_WINDOW_SIZE"])

    def cuStreamCopyAttributes(self, dst: Stream, src: Stream) -> None:
        check(dst.context is src.context)
        dst.attributes, dst.priority = dict(src.attributes), src.priority

    def _one(self, kind: int, stream: Stream, address: int, value: int, flags: int) -> None:
        operation = self._word_operation(stream.context, kind, address, value, flags, self._captured(stream))
        self._submit(stream, operation, "BATCH_MEM_OP")

    cuStreamWaitValue32 = call(_one, _WAIT_32, value=arguments.Word32)
    cuStreamWaitValue64 = call(_one, _WAIT_64, value=arguments.Word64)
    cuStreamWriteValue32 = call(_one, _WRITE_32, value=arguments.Word32)
    cuStreamWriteValue64 = call(_one, _WRITE_64, value=arguments.Word64)

    def cuStreamBatchMemOp(self, stream: Stream, count: UnsignedInt, paramArray: Any, flags: UnsignedInt) -> None:
        captured = self._captured(stream)
        operation = self._batch(stream.context, paramArray, count, flags, captured)
        if captured or count:
            self._submit(stream, operation, "BATCH_MEM_OP")

    def _batch(self, context: Context, params: Any, count: int, flags: int, in_graph: bool) -> Operation:
        wanted = arguments.structs("paramArray", params, cuda.CUstreamBatchMemOpParams, count)
        check(not flags and count <= _MOST)
        return Batch([self._batched(context, one, in_graph) for one in wanted])

    def _batched(self, context: Context, one: Any, in_graph: bool) -> Operation:
        """Return the operation of one CUstreamBatchMemOpParams.

        The union begins with the kind of the operation. Its structs for waits and writes have the same layout.
        """
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
        missing = in_graph and self.allocations.find(address) is None
        not_modelled(missing, "a word that is not there in a graph: it is the launch that fails")
        self._check_word(context, address, bits, written)
        word = _WORDS[bits]
        if written:
            # The driver refuses the flag CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER too (observed on H200:
            # test_stream_words).
            check(not flags)

            def write() -> None:
                if self.banks.is_mapped(address, bits // 8, write=True):
                    word.from_address(address).value = value
                    self.scheduler.announce()
                else:
                    context.error = Result.CUDA_ERROR_ILLEGAL_ADDRESS

            return QueuedCall(write)
        # The device cannot flush remote writes: CAN_FLUSH_REMOTE_WRITES is 0 (observed on H200: test_stream_words).
        check(not flags & _FLUSH, Result.CUDA_ERROR_NOT_SUPPORTED)
        compare = need(WAIT_COMPARISONS.get(flags))

        def arrived() -> bool:
            if not self.banks.is_mapped(address, bits // 8):
                context.error = Result.CUDA_ERROR_ILLEGAL_ADDRESS
                return True
            return compare(word.from_address(address).value, value, bits)

        return Until(arrived)

    def _check_word(self, context: Context, address: int, bits: int, written: bool) -> None:
        """Check that a stream memory operation can use a word of ``bits`` bits: its address must be in device, pinned,
        registered or mapped memory.

        The driver refuses memory of pools and graphs (observed on H200: test_stream_words).
        """
        allocation = need(self.allocations.find(address))
        check(not isinstance(allocation, (PoolMemory, GraphAllocation)))
        if allocation.mapping is not None:
            not_modelled(allocation.mapping.is_multicast, "waiting for or writing a word of a multicast object")
            right = allocation.mapping.right(device_place(context.device.ordinal))
            # The driver checks the access when the operation is queued, so a later grant has no effect (observed on
            # H200: test_stream_words).
            check(right)
            refused = written and right != READ_WRITE
            not_modelled(refused, "writing a word of memory that may only be read: the context breaks")
        check(address + bits // 8 <= allocation.base + max(allocation.size, 8))
        not_modelled(is_gone(allocation, address, bits // 8), GONE)
