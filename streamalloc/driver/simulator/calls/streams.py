"""Streams, events, host functions."""

from __future__ import annotations

import ctypes
from typing import Any

from streamalloc.driver.bindings import cuda

from .. import arguments
from ..arguments import HostFunctionHandle, HostPointer, Int, UnsignedInt
from ..constants import LEGACY_STREAM, PER_THREAD_STREAM, EventFlag
from ..errors import Fault, Result, check, need, not_modelled
from ..events import Event
from ..timeline import HostFunction, Stream, Until
from .base import Calls

_NON_BLOCKING = 1

# An interprocess event must not keep time (observed on H200: test_events).
_EVENT_FLAGS = {f for f in range(8) if not f & EventFlag.INTERPROCESS or f & EventFlag.DISABLE_TIMING}

_EXTERNAL = 1
"""CU_EVENT_WAIT_EXTERNAL and CU_EVENT_RECORD_EXTERNAL: in a capture, add an event node to the graph."""


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)


class StreamCalls(Calls):
    """cuStream*, cuEvent*, cuLaunchHostFunc."""

    # -- streams ---------------------------------------------------------------------------------------------

    def cuStreamCreate(self, Flags: Any) -> Any:
        return self._create_stream(Flags, 0)

    def cuStreamCreateWithPriority(self, flags: Any, priority: Int) -> Any:
        least, greatest = self._machine.profile.stream_priorities
        return self._create_stream(flags, min(max(priority, greatest), least))

    def _create_stream(self, flags: Any, priority: int) -> Any:
        value = arguments.unsigned_int(flags)
        check(value in (0, _NON_BLOCKING))
        context = self._machine.current()
        return cuda.CUstream(context.create_stream(value != _NON_BLOCKING, priority).handle)

    def cuStreamDestroy(self, hStream: Any) -> None:
        stream = self._stream(hStream)
        check(stream.handle not in (LEGACY_STREAM, PER_THREAD_STREAM), Result.CUDA_ERROR_INVALID_VALUE)
        if stream.capture is not None:
            stream.capture.invalidate()
            stream.capture.leave(stream)
        self._machine.destroy_stream(stream)

    def cuStreamQuery(self, hStream: Any) -> None:
        stream = self._stream(hStream)
        self._spoil([stream.capture])
        self._captured(stream)
        self._unsafe_during_capture()
        if not stream.idle and not self._machine.timeline.seeded:
            self._machine.timeline.pump()
        check(stream.idle, Result.CUDA_ERROR_NOT_READY)
        stream.context.check()

    def cuStreamSynchronize(self, hStream: Any) -> None:
        stream = self._stream(hStream)
        self._spoil([stream.capture])
        self._captured(stream)
        self._unsafe_during_capture()
        clock = stream.done_with()
        goals = [(stream, stream.seq)] + [(peer, peer.seq) for peer in stream.peers or ()]
        told = stream.id in self._machine.timeline.ranks  # pools know the stream (observed on H200: test_placements)
        self._machine.synchronize(clock, lambda: all(s.done >= seq for s, seq in goals), told)
        stream.context.check()

    def _asked(self, hStream: Any) -> Stream:
        """A stream that is asked for something. The legacy stream says nothing while a blocking one is captured
        (observed on H200: test_capture).
        """
        stream = self._stream(hStream)
        self._not_behind_captures(stream)
        return stream

    def cuStreamGetFlags(self, hStream: Any) -> int:
        stream = self._asked(hStream)
        self._spoil([stream.capture])  # observed on H200 (test_capture): asking breaks the capture
        return 0 if stream.blocking else _NON_BLOCKING

    def cuStreamGetPriority(self, hStream: Any) -> int:
        return self._asked(hStream).priority

    def cuStreamGetCtx(self, hStream: Any) -> Any:
        stream = self._asked(hStream)
        # it may be captured, but not in vain (observed on H200: test_capture)
        check(stream.capture is None or stream.capture.valid, Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        return cuda.CUcontext(stream.context.handle)

    def cuStreamGetDevice(self, hStream: Any) -> Any:
        stream = self._asked(hStream)
        self._spoil([stream.capture])  # as cuStreamGetFlags
        return cuda.CUdevice(stream.context.device.ordinal)

    def cuStreamGetId(self, hStream: Any) -> int:
        stream = self._asked(hStream)
        self._spoil([stream.capture])  # as cuStreamGetFlags
        return stream.id

    # -- waiting ---------------------------------------------------------------------------------------------

    def cuStreamWaitEvent(self, hStream: Any, hEvent: Any, Flags: UnsignedInt) -> None:
        stream, event = self._stream(hStream), self._event(hEvent)
        # first of all: also where the event was never recorded (observed on H200: test_capture)
        captured = self._machine.graphs.captures and self._captured(stream)
        check(Flags in (0, _EXTERNAL))
        if event.capture is not None and not event.capture.running:
            self._spoil([stream.capture], Result.CUDA_ERROR_INVALID_VALUE)
            raise Fault(Result.CUDA_ERROR_INVALID_VALUE)
        check(not Flags or captured, Result.CUDA_ERROR_ILLEGAL_STATE)
        if captured and event.flags & EventFlag.INTERPROCESS:
            stream.capture.invalidate()
            raise Fault(Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        if Flags:
            stream.capture.add("WAIT_EVENT", Until(lambda: event.complete), stream, {"event": event})
            return
        if event.capture is not None:
            event.capture.join(stream, event)
            return
        if captured:
            if event.record is not None:
                # a graph cannot wait for work outside it
                stream.capture.invalidate()
                raise Fault(Result.CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
            return
        event.hold(stream)

    def cuLaunchHostFunc(self, hStream: Any, fn: HostFunctionHandle, userData: HostPointer) -> None:
        stream = self._stream(hStream)
        self._submit(stream, self._host_function(fn, userData), "HOST")

    def cuStreamAddCallback(self, hStream: Any, callback: Any, userData: HostPointer, flags: UnsignedInt) -> None:
        stream, address = self._stream(hStream), arguments.stream_callback(callback)
        check(not flags)
        not_modelled(not address, "cuStreamAddCallback without a function: the real driver crashes")
        self._spoil([stream.capture])
        function, handle = _CALLBACK(address), stream.handle
        stream.submit(HostFunction(self._machine.timeline, lambda: function(handle, 0, userData or None)))

    # -- events ----------------------------------------------------------------------------------------------

    def cuEventCreate(self, Flags: UnsignedInt) -> Any:
        context = self._machine.current()
        check(Flags in _EVENT_FLAGS)
        event = Event(context, Flags)
        self._machine.events[event.handle] = event
        return cuda.CUevent(event.handle)

    def cuEventDestroy(self, hEvent: Any) -> None:
        del self._machine.events[self._event(hEvent).handle]

    def cuEventRecord(self, hEvent: Any, hStream: Any) -> None:
        self._record(hEvent, hStream)

    def cuEventRecordWithFlags(self, hEvent: Any, hStream: Any, flags: UnsignedInt) -> None:
        check(flags in (0, _EXTERNAL))
        if not flags:
            self._record(hEvent, hStream)
            return
        event, stream = self._event(hEvent), self._stream(hStream)
        check(stream.capture is not None, Result.CUDA_ERROR_ILLEGAL_STATE)
        check(self._captured(stream))
        stream.capture.add("EVENT_RECORD", None, stream, {"event": event}).enter = event.record_in

    def _record(self, hEvent: Any, hStream: Any) -> None:
        event, stream = self._event(hEvent), self._stream(hStream)
        check(stream.context is event.context, Result.CUDA_ERROR_INVALID_HANDLE)
        if self._machine.graphs.captures and self._captured(stream):
            # unlike waiting for one this does not break the capture (observed on H200: test_capture)
            check(not event.flags & EventFlag.INTERPROCESS, Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
            stream.capture.record(event, stream)
        else:
            event.record_in(stream)

    def _check_captured(self, event: Event) -> None:
        """An event that was recorded in a capture last cannot be asked, not even once that has ended or is invalid."""
        check(event.capture is None or (event.capture.running and event.capture.valid))
        self._spoil([event.capture], Result.CUDA_ERROR_CAPTURED_EVENT)

    def cuEventQuery(self, hEvent: Any) -> None:
        event = self._event(hEvent)
        self._check_captured(event)
        self._unsafe_during_capture()
        if not event.complete and not self._machine.timeline.seeded:
            self._machine.timeline.pump()
        check(event.complete, Result.CUDA_ERROR_NOT_READY)

    def cuEventSynchronize(self, hEvent: Any) -> None:
        event = self._event(hEvent)
        self._check_captured(event)
        self._unsafe_during_capture()
        elsewhere = event.elsewhere
        if elsewhere is not None:
            self._machine.timeline.wait(elsewhere.arrival(), polled=True)
            return
        record = event.record
        if record is not None:
            if event.flags & EventFlag.INTERPROCESS:
                self._machine.timeline.wait(lambda: record.complete)
            else:
                self._machine.synchronize(record.clock, lambda: record.complete)
            record.stream.context.check()

    def cuEventElapsedTime(self, hStart: Any, hEnd: Any) -> float:
        events = (self._event(hStart), self._event(hEnd))
        records = []
        for event in events:
            check(event.capture is None or (event.capture.running and event.capture.valid))
            # the capture stays valid (observed on H200: test_capture)
            check(event.capture is None, Result.CUDA_ERROR_CAPTURED_EVENT)
            check(not event.flags & EventFlag.DISABLE_TIMING, Result.CUDA_ERROR_INVALID_HANDLE)
            records.append(need(event.record, Result.CUDA_ERROR_INVALID_HANDLE))
        check(all(event.complete for event in events), Result.CUDA_ERROR_NOT_READY)
        return (records[1].when - records[0].when) * 1000

    cuEventElapsedTime_v2 = cuEventElapsedTime
